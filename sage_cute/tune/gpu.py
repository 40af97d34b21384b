"""What the tuner measures on: a direction's kernels on a GPU, on scratch tensors of random numbers.

Kernels are launched as the ops launch them, but not through the ops: no autograd, no dispatch mode
sees them. Nothing is communicated between processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from sage_cute.compile import launch, quant_launch
from sage_cute.compile.build import build_all
from sage_cute.compile.cache import kernel_cache
from sage_cute.compile.catalog import DIRECTIONS, DTYPES, Call
from sage_cute.compile.kernel import Kernel
from sage_cute.compile.tensors import new_tensors
from sage_cute.errors import TuningError
from sage_cute.numerics import attention_reference, attention_reference_backward, rel_l2
from sage_cute.numerics.tolerances import BOUNDS
from sage_cute.policies import resolve
from sage_cute.tune.key import Shape
from sage_cute.tune.timing import interleaved_ms

_SMALL = 384  # tokens of the problem that is compared with float64


class KernelBench:
    """Base of the two directions: compiles, launches and times configurations of one call."""

    direction: ClassVar[str]
    bounds: ClassVar[Mapping[str, str]]  # invariants of numerics.tolerances, by result

    def __init__(
        self, call: Call, shape: Shape, device: torch.device, *, workers: int | None = None
    ) -> None:
        """Makes the scratch tensors.

        Args:
            call: policy, head_dim, dtype, mask.
            shape: sizes of the problem that is timed.
            device: where.
            workers: compiling processes.

        Raises:
            TuningError: more than half of the free memory would be needed.
        """
        self.call, self.device, self.workers = call, device, workers
        self.policy = resolve(call.policy)
        self.scale = call.head_dim**-0.5
        need = (
            16
            * call.head_dim
            * shape.batch
            * (shape.heads * shape.seqlen_q + 2 * shape.kv_heads * shape.seqlen_k)
        )
        if device.type == "cuda" and need > torch.cuda.mem_get_info(device)[0] // 2:
            raise TuningError(f"tuning needs {need / 1e9:.1f} GB, more than half of what is free")
        ratio = shape.heads // shape.kv_heads
        small = Shape(1, ratio, 1, min(_SMALL, shape.seqlen_q), min(_SMALL, shape.seqlen_k))
        with self._scratch():
            self.problems = {"": self.make(shape), "small ": self.make(small)}

    def make(self, shape: Shape) -> dict[str, Any]:
        """Inputs of a launch, by name."""
        rng = torch.Generator(self.device).manual_seed(0)
        dtype = DTYPES[self.call.dtype]

        def draw(heads: int, tokens: int) -> Tensor:
            size = (shape.batch, heads, tokens, self.call.head_dim)
            return torch.randn(size, generator=rng, device=self.device).to(dtype)

        q = draw(shape.heads, shape.seqlen_q)
        k, v = (draw(shape.kv_heads, shape.seqlen_k) for _ in range(2))
        spec = quant_launch.quant_spec(self.policy, dtype, self.call.head_dim, launch.V_SCALE_FORM)
        codes = new_tensors(q, quant_launch.output_shapes(spec, q.shape, k.shape))
        quant_launch.quantize(
            q, k, v, policy=self.policy, v_scale_form=launch.V_SCALE_FORM, **codes
        )
        return {"q": q, "k": k, "v": v, "dout": torch.randn_like(q), **codes}

    def results(self, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors for the results of a launch, poisoned."""
        raise NotImplementedError

    def launch(self, x: Mapping[str, Tensor], results: Mapping[str, Tensor], config: Any) -> None:
        """Launches one configuration."""
        raise NotImplementedError

    def truth(self, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The results in float64, of those that have a bound."""
        raise NotImplementedError

    def prepare(self, configs: Sequence[Any]) -> dict[Any, str]:
        """Compiles in parallel processes what the cache does not have."""
        by_kernel: dict[Kernel, list[Any]] = {}
        for config in configs:
            for kernel in DIRECTIONS[self.direction](self.call, config):
                by_kernel.setdefault(kernel, []).append(config)
        cache = kernel_cache()
        if cache is None:
            return {}  # each is compiled at its first launch
        new = [k for k in by_kernel if not cache.path(k).exists()]
        reasons: dict[Any, str] = {}
        for built in build_all(new, cache.make(), workers=self.workers):
            if built.error:
                reasons |= dict.fromkeys(by_kernel[built.kernel], built.error)
        cache.evict()
        return reasons

    def outputs(self, config: Any) -> dict[str, Tensor]:
        """Results of the timed problem and of the small one."""
        found: dict[str, Tensor] = {}
        with self._scratch():
            for prefix, x in self.problems.items():
                results = self.results(x)
                self.launch(x, results, config)
                found |= {prefix + name: value for name, value in results.items()}
        return found

    def why_wrong(self, outputs: Mapping[str, Tensor]) -> str:
        """Compares the small problem's results with float64 by the bounds of the numerics."""
        preset = self.call.policy.partition(":")[0]
        for name, truth in self.truth(self.problems["small "]).items():
            bounds = [b.limit for (i, p), b in BOUNDS.items() if i == self.bounds[name]]
            own = BOUNDS.get((self.bounds[name], preset)) if ":" not in self.call.policy else None
            limit = own.limit if own else max(bounds)  # a mix of one's own: as the coarsest preset
            error = float(rel_l2(outputs["small " + name], truth))
            if not error <= limit:
                return f"{name} is off by {error:.3g}, {limit:.3g} is allowed"
        return ""

    def times(self, configs: Sequence[Any], rounds: int) -> dict[Any, list[float]]:
        """Interleaved, with a cold L2 cache."""
        with self._scratch():
            x = self.problems[""]
            results = self.results(x)
            calls = {c: lambda c=c: self.launch(x, results, c) for c in configs}
            return interleaved_ms(calls, rounds=rounds, device=self.device)

    def _scratch(self) -> Any:
        """No autograd, a stream of our own behind the current one, and the device made current."""
        return _OwnStream(self.device)


class _OwnStream:
    """Work on a stream of its own, which waits for the current one and is waited for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.no_grad = torch.no_grad()
        self.no_grad.__enter__()
        self.stream: Any = None
        if self.device.type == "cuda":
            stream = torch.cuda.Stream(self.device)
            stream.wait_stream(torch.cuda.current_stream(self.device))
            self.stream = torch.cuda.stream(stream)
            self.stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(self.device).synchronize()
            self.stream.__exit__(*error)
        self.no_grad.__exit__(*error)


class ForwardBench(KernelBench):
    """The forward kernel on codes that the quantization kernels made."""

    direction = "fwd"
    bounds = {"out": "truth_out"}

    def results(self, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Output and LSE."""
        lse = torch.full(x["q"].shape[:3], math.nan, device=self.device)
        return {"out": torch.full_like(x["q"], math.nan), "lse": lse}

    def launch(self, x: Mapping[str, Tensor], results: Mapping[str, Tensor], config: Any) -> None:
        """Attention alone: quantization is the same for all."""
        names = ("q_codes", "q_scale", "k_codes", "k_scale", "v_t", "v_scale")
        operands: dict[str, Any] = {name: x[name] for name in names}
        launch.forward(
            **operands,
            out=results["out"],
            lse=results["lse"],
            scale=self.scale,
            is_causal=self.call.is_causal,
            policy=self.policy,
            config=config,
        )

    def truth(self, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The output."""
        truth = attention_reference(
            x["q"], x["k"], x["v"], scale=self.scale, causal=self.call.is_causal
        )
        return {"out": truth.out}


class BackwardBench(KernelBench):
    """The backward's kernels on what the forward has saved."""

    direction = "bwd"
    bounds = {"dv": "truth_dv", "dq": "truth_dq", "dk": "truth_dk"}

    def make(self, shape: Shape) -> dict[str, Any]:
        """Adds the forward's results."""
        x = super().make(shape)
        forward = ForwardBench.results(self, x)  # type: ignore[arg-type]
        ForwardBench.launch(self, x, forward, None)  # type: ignore[arg-type]
        return {**x, **forward}

    def results(self, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The three gradients."""
        return {f"d{name}": torch.full_like(x[name], math.nan) for name in "qkv"}

    def launch(self, x: Mapping[str, Tensor], results: Mapping[str, Tensor], config: Any) -> None:
        """The whole backward."""
        from sage_cute.compile.bwd_launch import backward

        backward(
            x["dout"],
            None,
            x["v"],
            x["out"],
            x["lse"],
            x["q_codes"],
            x["k_codes"],
            x["q_scale"],
            x["k_scale"],
            results["dq"],
            results["dk"],
            results["dv"],
            scale=self.scale,
            is_causal=self.call.is_causal,
            policy=self.policy,
            config=config,
        )

    def truth(self, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradients."""
        grads, _ = attention_reference_backward(
            x["dout"], x["q"], x["k"], x["v"], scale=self.scale, causal=self.call.is_causal
        )
        return {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}


BENCHES: dict[str, type[KernelBench]] = {"fwd": ForwardBench, "bwd": BackwardBench}
"""By direction."""
