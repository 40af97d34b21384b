"""Breaks the package on purpose, one line at a time, and shows that the tests turn red.

    python tests/mutations.py [--jobs 2] [--only WORD] [--tests FILE ...] [--matrix]

Each mutation is applied to a temporary copy of the package, never to the checkout, and the tests of
the numerics (of the ops, for what is theirs) run against that copy until one fails. The unchanged
copy must pass them all first. Prints a Markdown table: the test that each mutation died of or, with
``--matrix``, every file of tests that it dies in, each run alone. Exits with 1 if a mutation
survives.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Cheap ones first: a mutation dies at the first red test.
TESTS = (
    "tests/core/policies",
    "tests/core/numerics/test_reference.py",
    "tests/core/numerics/test_extremes.py",
    "tests/core/numerics/test_shapes.py",
    "tests/core/numerics/test_masks.py",
    "tests/core/numerics/test_packed.py",
    "tests/core/numerics/test_invariants.py",
    "tests/core/numerics/test_accuracy.py",
    "tests/core/numerics/test_emulation.py",
)
FORWARD, BACKWARD = "sage_cute/numerics/forward.py", "sage_cute/numerics/backward.py"
PACKED = "sage_cute/numerics/packed.py"
VISIBILITY = "sage_cute/numerics/visibility.py"
QUANTIZE, REFERENCE = "sage_cute/numerics/quantize.py", "sage_cute/numerics/reference.py"
AUTOGRAD = "compile_integration/autograd.py"
POLICY, REGISTRY = "sage_cute/policies/policy.py", "sage_cute/policies/registry.py"


@dataclasses.dataclass(frozen=True)
class Mutation:
    """What is broken, and the text, found exactly once in ``path``, that becomes another."""

    what: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...] = ()  # instead of the numerics' tests


MUTATIONS = (
    # The quantizer.
    Mutation("floor instead of round", QUANTIZE, ".round_().clamp_(", ".floor_().clamp_("),
    Mutation("scale = absmax / 128", QUANTIZE, "absmax / largest,", "absmax / (largest + 1),"),
    Mutation(
        "0 / 0 where a scale is zero",
        QUANTIZE,
        "torch.where(scale > 0, x / scale, 0.0)",
        "(x / scale)",
    ),
    Mutation(
        "NaN becomes a finite number",
        QUANTIZE,
        "absmax / largest, torch.nan)",
        "absmax / largest, 0.0)",
    ),
    Mutation(
        "padding counted in the mean",
        QUANTIZE,
        "counts[-1:] -= groups * block - tokens",
        "counts[-1:] -= 0",
    ),
    # The forward.
    Mutation(
        "causal mask off by one",
        VISIBILITY,
        "mask &= distance <= self.right",
        "mask &= distance < self.right",
    ),
    Mutation(
        "causal mask aligned top-left",
        VISIBILITY,
        "return cls(seqlen_q, seqlen_k, seqlen_k - seqlen_q, left,",
        "return cls(seqlen_q, seqlen_k, 0, left,",
    ),
    Mutation("P's scale dropped", FORWARD, "pv *= p_scale * grow", "pv *= grow"),
    Mutation("V's token scale not folded into P", FORWARD, "p = p * per_key.mT", "p = p * 1.0"),
    Mutation("older blocks not rescaled", FORWARD, "o.mul_(shrink).add_(pv)", "o.add_(pv)"),
    Mutation(
        "block sum not moved to the running maximum",
        FORWARD,
        "l.mul_(shrink).add_(grow * p.sum(-1, keepdim=True))",
        "l.mul_(shrink).add_(p.sum(-1, keepdim=True))",
    ),
    Mutation(
        "V's mean not put back",
        FORWARD,
        "torch.where(seen, out + v_mean[:, :, None, None], 0.0)",
        "torch.where(seen, out, 0.0)",
    ),
    Mutation(
        "Q's mean not put back into S",
        FORWARD,
        "s += token_rows(bias, self.block, self.seqlen_q)[..., queries, :]",
        "pass",
    ),
    Mutation(
        "LSE in log2",
        FORWARD,
        "(row_max + alike(Tensor.log2_, row_sum)) / LOG2_E",
        "(row_max + alike(Tensor.log2_, row_sum))",
    ),
    Mutation(
        "rows without keys not zeroed",
        FORWARD,
        "out = torch.where(seen, acc / row_sum, 0.0)",
        "out = acc / row_sum",
    ),
    Mutation(
        "query heads grouped in the wrong order",
        FORWARD,
        "return x.unflatten(1, (kv_heads, -1))",
        "return x.unflatten(1, (-1, kv_heads)).transpose(1, 2)",
    ),
    Mutation(
        "Q scaled as K is",
        FORWARD,
        'return 1 if policy.q_scale == "per_token" else policy.block_q',
        'return 1 if policy.k_scale == "per_token" else policy.block_q',
    ),
    Mutation(
        "bound of P where V's scales differ much",
        FORWARD,
        "(v_scale >= largest / 4).all(",
        "(v_scale >= largest / 400).all(",
    ),
    Mutation(
        "bound of P in a block that is not full",
        VISIBILITY,
        "if keys.stop - keys.start < block:",
        "if keys.stop == keys.start:",
    ),
    Mutation(
        "bound of P of queries that see half of a block",
        VISIBILITY,
        "rows = unending.seeing_all(keys)",
        "rows = unending.seeing(keys)",
    ),
    Mutation(
        "bound of P for groups of 32 queries", VISIBILITY, "QUERY_TILE = 64", "QUERY_TILE = 32"
    ),
    Mutation(
        "bound of P under a negative softmax scale",
        FORWARD,
        'policy.p_scale == "bounded" and scale >= 0:',
        'policy.p_scale == "bounded":',
    ),
    Mutation(
        "scores times one scale after the other",
        FORWARD,
        "s.mul_(self.q_scale[..., queries, :] * self.k_scale[..., keys])",
        "s.mul_(self.q_scale[..., queries, :]).mul_(self.k_scale[..., keys])",
    ),
    # The backward.
    Mutation(
        "sign of delta",
        BACKWARD,
        "ds = p * (dpj - delta[..., queries, :])",
        "ds = p * (dpj + delta[..., queries, :])",
    ),
    Mutation(
        "exact dO in delta beside an INT8 dP",
        BACKWARD,
        "delta = (dp.dout * group_heads(shifted_out, kv_heads))",
        "delta = (group_heads(dout.float(), kv_heads) * group_heads(shifted_out, kv_heads))",
    ),
    Mutation(
        "gradient of the LSE dropped",
        BACKWARD,
        "delta -= group_heads(dlse.float(), kv_heads).unsqueeze(-1)",
        "delta -= 0 * group_heads(dlse.float(), kv_heads).unsqueeze(-1)",
    ),
    Mutation(
        "dQ of the K that is not smoothed",
        BACKWARD,
        "dq_operand = _transposed(k_hat, k8,",
        "dq_operand = _transposed("
        "k_hat + (saved.k_mean.unsqueeze(-2) if policy.smooth_k else 0), None,",
    ),
    Mutation("dK without the softmax scale", BACKWARD, "(dk * scale).to(dtype)", "dk.to(dtype)"),
    Mutation(
        "dK without the mean of Q", BACKWARD, "(ds_hat.mT @ q_rows[..., queries, :]).sum(2)", "0"
    ),
    Mutation("hidden keys not masked in P", BACKWARD, "p.masked_fill_(~mask, 0.0)", "pass"),
    Mutation("hidden keys not masked in dS", BACKWARD, "ds.masked_fill_(~mask, 0.0)", "pass"),
    Mutation(
        "query tiles that start at the mask",
        BACKWARD,
        "sight.blocks(policy.bwd_block_k, policy.bwd_block_q)",
        "sight.blocks(policy.bwd_block_k)",
    ),
    Mutation(
        "V's scale missing in an INT8 dP",
        BACKWARD,
        "dp.mul_(self.a_scale[..., queries, :] * self.v_scale[..., keys])",
        "dp.mul_(self.a_scale[..., queries, :])",
    ),
    Mutation(
        "V's mean kept in delta, not in dP",
        BACKWARD,
        "shifted_out = shifted_out - v_mean",
        "shifted_out = shifted_out - 0 * v_mean",
    ),
    Mutation(
        "exact V in dP where the policy says dequantized",
        BACKWARD,
        "values = v8.dequantize() if v8 is not None else v",
        "values = v",
    ),
    Mutation(
        "dS^T scaled as P^T is",
        BACKWARD,
        'per_key = policy.ds_dk_scale == "per_key"',
        'per_key = policy.p_bwd_scale == "per_key"',
    ),
    Mutation(
        "dS for dQ always one scale a tile",
        BACKWARD,
        "rows, queries = policy.ds_dq_rows or policy.bwd_block_q, ds.shape[-2]",
        "rows, queries = policy.bwd_block_q, ds.shape[-2]",
    ),
    Mutation(
        "one head of a group too many in dK and dV",
        BACKWARD,
        "return partial.sum((2, 3)), (x * scale)",
        "return partial.sum((2, 3)) + partial[:, :, 0].sum(2), (x * scale)",
    ),
    Mutation(
        "dS of a 16-bit dQ in float16",
        BACKWARD,
        "return round16(ds, torch.bfloat16) @ operand",
        "return round16(ds, torch.float16) @ operand",
    ),
    # Around the kernels.
    Mutation(
        "LSE of the smoothed K",
        AUTOGRAD,
        "return lse + bias * scale",
        "return lse + 0 * bias * scale",
    ),
    Mutation(
        "bias of the LSE with the wrong head's mean",
        AUTOGRAD,
        "means = mean.unsqueeze(2)",
        "means = mean.flip(1).unsqueeze(2)",
    ),
    Mutation(
        "gradient of a bias that is not there",
        AUTOGRAD,
        "bias = torch.where(lse == -torch.inf, 0.0, bias)",
        "bias = torch.where(lse == -torch.inf, 1 * bias, bias)",
    ),
    # The truth and the policies.
    Mutation(
        "truth: causal mask aligned top-left",
        REFERENCE,
        "position = torch.arange(seqlen_q, device=device).unsqueeze(-1) + seqlen_k - seqlen_q",
        "position = torch.arange(seqlen_q, device=device).unsqueeze(-1)",
    ),
    Mutation(
        "truth: sign of the LSE's gradient",
        REFERENCE,
        "delta = delta - dlse.double()",
        "delta = delta + dlse.double()",
    ),
    Mutation(
        "truth: mean over a group instead of the sum",
        REFERENCE,
        "grad.unflatten(1, (k.shape[1], -1)).sum(2)",
        "grad.unflatten(1, (k.shape[1], -1)).mean(2)",
    ),
    Mutation(
        "policy: rows of dS that do not divide a tile",
        POLICY,
        "self.bwd_block_q % self.ds_dq_rows",
        "self.bwd_block_q % 1",
    ),
    Mutation(
        "policy string: a change lost",
        REGISTRY,
        "for k, v in policy.asdict().items() if v != base[k]]",
        'for k, v in policy.asdict().items() if v != base[k] and k != "smooth_v"]',
    ),
    # Masks.
    Mutation(
        "left side of a window off by one",
        VISIBILITY,
        "mask &= distance >= -self.left",
        "mask &= distance > -self.left",
    ),
    Mutation(
        "blocks left of a window not visited",
        VISIBILITY,
        "stop = min(stop, last - self.offset + self.left + 1)",
        "stop = min(stop, last - self.offset + self.left)",
    ),
    Mutation(
        "bound of P of a group whose last query no longer sees the block",
        VISIBILITY,
        "stop = min(rows.stop // QUERY_TILE * QUERY_TILE, self.seqlen_q)",
        "stop = min(rows.stop, self.seqlen_q)",
    ),
    Mutation(
        "padding that moves the diagonal",
        VISIBILITY,
        "return self._replace(seqlen_k=length)",
        "return self._replace(seqlen_k=length, offset=length - self.seqlen_q)",
    ),
    Mutation(
        "a given mean of K not taken",
        FORWARD,
        "token_mean(k) if k_mean is None else k_mean.float()",
        "token_mean(k)",
    ),
    Mutation(
        "packed scales of a sequence over those of the one before",
        PACKED,
        "tokens.start // block + self.number",
        "tokens.start // block",
    ),
    Mutation(
        "packed scales without room for blocks that are not full",
        PACKED,
        "tokens // block + sequences",
        "-(-tokens // block)",
    ),
    Mutation(
        "packed means of K all that of the first sequence",
        PACKED,
        "k_mean[None, sequence.number]",
        "k_mean[None, 0]",
    ),
    Mutation(
        "results that depend on where a thread's share ends",
        FORWARD,
        "if short := -flat.numel() % 64:",
        "if short := 0:",
    ),
)


OPS = "tests/compile_integration"
MUTATIONS += (
    Mutation(
        "ops: LSE of a packed batch with the mean of the next sequence",
        AUTOGRAD,
        "tokens, right=True)",
        "tokens + 1, right=True)",
        (f"{OPS}/test_varlen.py",),
    ),
    Mutation(
        "ops: the longest packed sequence not checked",
        "sage_cute/support.py",
        "if max_seqlen is not None and longest > max_seqlen:",
        "if max_seqlen is not None and longest < 0:",
        (f"{OPS}/test_varlen.py",),
    ),
    Mutation(
        "ops: key lengths lost in the backward",
        "compile_integration/ops.py",
        "            key_lengths=self.key_lengths,\n        )\n",
        "        )\n",
        (f"{OPS}/test_masks.py",),
    ),
    Mutation(
        "ops: the window's sides swapped",
        "compile_integration/ops.py",
        "return (None if left == -1 else left), (None if right == -1 else right)",
        "return (None if right == -1 else right), (None if left == -1 else left)",
        (f"{OPS}/test_masks.py",),
    ),
    Mutation(
        "ops: fake output in another memory order",
        "compile_integration/ops.py",
        "    outputs = infer_fake(*inputs)\n",
        "    outputs = infer_fake(inputs[0].contiguous(), *inputs[1:])\n",
        (f"{OPS}/test_ops.py",),
    ),
    Mutation(
        "ops: inputs not checked",
        "compile_integration/ops.py",
        "        check_inputs(self.q, self.k, self.v, self.scale)\n",
        "",
        (f"{OPS}/test_errors.py",),
    ),
    Mutation(
        "ops: K changed in place",
        "sage_cute/numerics/forward.py",
        "return k.float() - k_mean.unsqueeze(-2) if policy.smooth_k else k.float()",
        "return k.sub_(k_mean.unsqueeze(-2)).float() if policy.smooth_k else k.float()",
        (f"{OPS}/test_ops.py",),
    ),
    Mutation(
        "autograd: q saved beside its codes",
        AUTOGRAD,
        "None if policy.saves_q_codes else q,",
        "q,",
        (f"{OPS}/test_autograd.py",),
    ),
    Mutation(
        "rows without keys: their dO kept",
        BACKWARD,
        "dout, q = only(dout, seeing), only(q, seeing)",
        "q = only(q, seeing)",
        (f"{OPS}/test_autograd.py",),
    ),
    Mutation(
        "rows without keys: their codes of Q kept",
        BACKWARD,
        "only(q_hat, seeing)",
        "q_hat",
        (f"{OPS}/test_autograd.py",),
    ),
    Mutation(
        "rows without keys: their Q in a block's scale",
        FORWARD,
        "q = only(q, sight.seeing())",
        "pass",
        (f"{OPS}/test_autograd.py",),
    ),
    Mutation(
        "autograd: no error for a second derivative",
        AUTOGRAD,
        "if torch.is_grad_enabled():  # create_graph: through the formula that raises",
        "if False:",
        (f"{OPS}/test_autograd.py",),
    ),
    Mutation(
        "autocast of the op with LSE not registered",
        "compile_integration/autocast.py",
        'in ("attn", "attn_with_lse", ',
        'in ("attn", ',
        (f"{OPS}/test_composition.py",),
    ),
    Mutation(
        "vmap over the batch's neighbour",
        "compile_integration/batching.py",
        "x.movedim(dim, 0)",
        "x.movedim(dim, 1)",
        (f"{OPS}/test_composition.py",),
    ),
    Mutation(
        "FLOPs of four products in the backward",
        "compile_integration/flops.py",
        "return _flops(x.out, x.v, 5,",
        "return _flops(x.out, x.v, 4,",
        (f"{OPS}/test_composition.py",),
    ),
    Mutation(
        "DTensor: heads sharded inside a group",
        "compile_integration/sharding.py",
        "whole = all(kv_heads % size == 0 for size in mesh_sizes)",
        "whole = True",
        (f"{OPS}/test_composition.py",),
    ),
    Mutation(
        "Inductor's cache key without our version",
        "compile_integration/__init__.py",
        "\nextend_cache_key()\n",
        "\n",
        (f"{OPS}/test_compile.py",),
    ),
)


def copy_package(to: Path) -> None:
    """The package as a wheel lays it out, and its tests."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(ROOT / "sage_cute", to / "sage_cute", ignore=ignore)
    for folder in ("compile_integration", "templates"):
        shutil.copytree(ROOT / folder, to / "sage_cute" / folder, ignore=ignore)
    for folder in ("numerics", "policies"):
        shutil.copytree(ROOT / "tests/core" / folder, to / "tests/core" / folder, ignore=ignore)
    shutil.copytree(ROOT / OPS, to / OPS, ignore=ignore)
    shutil.copy(ROOT / "tests/conftest.py", to / "tests/conftest.py")
    shutil.copy(ROOT / "pyproject.toml", to / "pyproject.toml")


def place(path: str, root: Path) -> Path:
    """Where a file of the repository lies in a copy."""
    return root / path if path.startswith("sage_cute/") else root / "sage_cute" / path


def apply(mutation: Mutation, root: Path) -> None:
    """Breaks the copy. The text must be there, once: else the mutation needs an update."""
    path = place(mutation.path, root)
    text = path.read_text()
    found = text.count(mutation.old)
    if found != 1:
        raise SystemExit(
            f"{mutation.what}: {mutation.path} has the text {found} times, not once; update "
            f"tests/mutations.py:\n    {mutation.old}"
        )
    path.write_text(text.replace(mutation.old, mutation.new))


def environment(root: Path) -> dict[str, str]:
    """The copy comes before an installed package; the same examples every time."""
    return {
        **os.environ,
        "PYTHONPATH": str(root),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CI": "1",
        "SAGE_HYPOTHESIS_PROFILE": "mutation",
        "OMP_NUM_THREADS": "1",
    }


def run_tests(root: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """pytest's exit status and output."""
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", *tests
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=root, env=environment(root), capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def imported_from(root: Path) -> Path:
    """Where the package comes from that the tests of a copy import."""
    code = "import sage_cute.compile_integration.autograd as m; print(m.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment(root), capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return Path(done.stdout.strip())


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Which tests a mutation died of (none: it survived), and after how many seconds."""

    mutation: Mutation
    killers: tuple[str, ...]
    seconds: float


def first_failure(what: str, root: Path, tests: tuple[str, ...]) -> str | None:
    """``file::test``, or None if all pass."""
    status, output = run_tests(root, tests)
    if status == 0:
        return None
    failed = re.search(r"^FAILED \S*?([\w.]+\.py)::(\w+)", output, re.MULTILINE)
    if status != 1 or failed is None:
        raise SystemExit(f"{what}: pytest stopped with {status}\n{output[-3000:]}")
    return f"{failed[1]}::{failed[2]}"


def judge(mutation: Mutation, runs: list[tuple[str, ...]]) -> Verdict:
    """Runs the tests against a broken copy."""
    with tempfile.TemporaryDirectory(prefix="sage-cute-mutation-") as folder:
        root, start = Path(folder), time.monotonic()
        copy_package(root)
        apply(mutation, root)
        runs = [mutation.tests] if mutation.tests else runs
        failures = [first_failure(mutation.what, root, tests) for tests in runs]
        killers = tuple(failure for failure in failures if failure)
        return Verdict(mutation, killers, time.monotonic() - start)


def check_baseline(mutations: tuple[Mutation, ...], tests: tuple[str, ...]) -> None:
    """Every mutation applies, the copy is what is imported, and unchanged it passes."""
    with tempfile.TemporaryDirectory(prefix="sage-cute-mutation-") as folder:
        root = Path(folder).resolve()
        copy_package(root)
        for mutation in mutations:
            path = place(mutation.path, root)
            text = path.read_text()
            apply(mutation, root)
            path.write_text(text)
        source = imported_from(root).resolve()
        if not source.is_relative_to(root):
            raise SystemExit(f"tests of a copy would import {source}, outside of it")
        status, output = run_tests(root, tests)
    if status != 0:
        raise SystemExit(f"the unchanged package fails its tests:\n{output[-3000:]}")


def main() -> int:
    """Runs all and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--only", default="", help="mutations whose description has this word")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="test files, in this order")
    parser.add_argument("--matrix", action="store_true", help="run each of them alone")
    options = parser.parse_args()
    tests = tuple(options.tests)
    runs = [(test,) for test in tests] if options.matrix else [tests]
    mutations = tuple(m for m in MUTATIONS if options.only in m.what)
    others = tuple(sorted({test for m in mutations for test in m.tests}))
    needed = tests if any(not m.tests for m in mutations) else ()
    check_baseline(mutations, needed + others)
    print("unchanged: all tests pass", file=sys.stderr)
    verdicts = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for verdict in pool.map(lambda m: judge(m, runs), mutations):
            killers = ", ".join(verdict.killers) or "SURVIVED"
            print(f"{verdict.seconds:5.0f} s  {verdict.mutation.what}: {killers}", file=sys.stderr)
            verdicts.append(verdict)
    print("| broken on purpose | where | killed by |\n| --- | --- | --- |")
    for verdict in verdicts:
        file = verdict.mutation.path.rpartition("/")[2]
        killers = [k.partition(".py")[0] if options.matrix else k for k in verdict.killers]
        cell = ", ".join(f"`{killer}`" for killer in killers) or "**survived**"
        print(f"| {verdict.mutation.what} | `{file}` | {cell} |")
    survivors = sum(not verdict.killers for verdict in verdicts)
    print(f"\n{len(verdicts) - survivors} of {len(verdicts)} killed.")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
