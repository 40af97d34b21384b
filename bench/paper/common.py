"""What the figures share: sizes, the command line, result files, plots."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.result_files import RESULTS, meta, save
from sage_cute.policies import PRODUCTS
from sage_cute.support import is_supported
from sage_cute.testing import Inputs, Result, run_attention

POLICIES = ("sagebwd", "fast", "accurate", "int8")
SIXTEEN_BIT = "16-bit"
"""In figures: all seven products with operands in 16 bits."""
ALL_16_BIT = "sagebwd:smooth_k=false," + ",".join(f"{product}=16bit" for product in PRODUCTS)
NAMES = {"out": "O", "dv": "dV", "dq": "dQ", "dk": "dK"}


class Size(NamedTuple):
    """The problem of a figure: tensors (1, heads, seqlen, head_dim), and seeds to average."""

    heads: int
    seqlen: int
    head_dim: int
    seeds: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, seqlen, head_dim)."""
        return 1, self.heads, self.seqlen, self.head_dim


SIZES = {"small": Size(1, 1024, 128, 2), "full": Size(8, 4096, 128, 3)}
"""Small has the length and head_dim of the study that the project's numerics rest on."""


def evaluate(x: Inputs, name: str, *, causal: bool = False) -> Result:
    """Attention by a policy of a figure, on x's device if :func:`evaluated_on` says so."""
    spec, device = spec_of(name), x.q.device
    if _runs_on(device, x.q.shape[-1], causal, spec):
        return run_attention(x, policy=spec, causal=causal)
    result = run_attention(x.to("cpu"), policy=spec, causal=causal)
    return Result(*(t.to(device) for t in result))


def evaluated_on(names: Sequence[str], device: str, head_dim: int) -> dict[str, str]:
    """Where each policy runs: a GPU if it has kernels for it and its gradients, else the CPU.

    There the reference stands in for the kernels, which compute the same to rounding.
    """
    where = torch.device(device)
    return {
        name: str(where) if _runs_on(where, head_dim, False, spec_of(name)) else "cpu"
        for name in names
    }


def _runs_on(device: torch.device, head_dim: int, causal: bool, spec: str) -> bool:
    q, k, v = (
        torch.empty(1, 1, 1, head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    return bool(is_supported(q, k, v, causal=causal, policy=spec))


Measure = Callable[[Size, argparse.Namespace], dict[str, Any]]


def spec_of(policy: str) -> str:
    """The policy string behind a name in a figure."""
    return ALL_16_BIT if policy == SIXTEEN_BIT else policy


def main(
    name: str,
    description: str,
    measure: Measure,
    table: Callable[[dict[str, Any]], str],
    plot: Callable[[dict[str, Any], Path], None],
    argv: Sequence[str] | None = None,
    *,
    cpu_only: bool = False,
    small: Size | None = None,
) -> None:
    """The command line of a figure: measures, prints a table, writes JSON and PNG.

    ``cpu_only``: it needs the reference, which no kernel can stand in for. ``small``: the small
    size of this figure, if another than that of :data:`SIZES`.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.paper.{name}", description=description.splitlines()[0]
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", help="default: cpu for the small size, cuda for the full one")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--seqlen", type=int, help="instead of the size's")
    parser.add_argument("--seeds", type=int, help="instead of the size's")
    parser.add_argument("--out", type=Path, default=RESULTS / "paper", help="folder")
    args = parser.parse_args(argv)
    args.device = args.device or ("cuda" if args.size == "full" and not cpu_only else "cpu")
    if cpu_only and args.device != "cpu":
        parser.error(f"{name} needs the reference implementation: --device cpu")
    size = small if small is not None and args.size == "small" else SIZES[args.size]
    size = size._replace(seqlen=args.seqlen or size.seqlen, seeds=args.seeds or size.seeds)
    found = measure(size, args)
    document = {
        "meta": {
            **meta(f"bench.paper.{name}", args.device, args.policies),
            "size": size._asdict(),
            "evaluated_on": evaluated_on([SIXTEEN_BIT, *args.policies], args.device, size.head_dim),
        },
        **found,
    }
    path = save(name, document, args.device, args.out)
    plot(document, path.with_suffix(".png"))
    print(table(document))


def figure(value: float) -> str:
    """An error in a table."""
    return f"{value:.4f}".removeprefix("0") if value < 1 else f"{value:.2f}"
