"""Finds the attention calls of a model, whatever calls them, and waits for their gradients."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sage_cute.numerics.reference import visible
from sage_cute.support import extras, is_supported
from sage_cute.testing import Inputs

_SDPA = F.scaled_dot_product_attention


@dataclasses.dataclass(frozen=True)
class Call:
    """One attention call with the gradient that reached it; tensors as the call saw them."""

    name: str  # of the module that called, its second call in a step with "#2" behind
    function: str  # "sage::attn" or "SDPA"
    policy: str | None  # of sage::attn
    x: Inputs
    dlse: Tensor | None
    causal: bool
    scale: float | None

    def without_tensors(self) -> Call:
        """What describes the call, its tensors on the meta device: for what outlives the step."""
        return dataclasses.replace(self, x=self.x.to("meta"), dlse=None)


class Recorder(TorchFunctionMode):
    """While active, hands every attention call to ``on_call`` once its gradient is there.

    Works above autograd, on the functions that models call, so that masks, scales and grouped heads
    are seen as the model meant them. The calls themselves run unchanged.

    Args:
        model: names its modules.
        on_call: called in the backward, with the last layer first.
    """

    def __init__(self, model: nn.Module, on_call: Callable[[Call], None]) -> None:
        super().__init__()
        self.on_call = on_call
        self.skipped: dict[str, str] = {}  # name: reason
        self._modules = _ModuleStack(model)
        self._calls: Counter[str] = Counter()
        self._order: dict[str, None] = {}
        self._paused = False

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around the forward and backward of one step."""

        def sdpa(*args: Any, **kwargs: Any) -> Tensor:
            # Functions of torch that call SDPA themselves (multi_head_attention_forward) run with
            # this mode off.
            with self:
                return _SDPA(*args, **kwargs)

        self._calls.clear()
        F.scaled_dot_product_attention = sdpa
        try:
            with self._modules, self:
                yield
        finally:
            F.scaled_dot_product_attention = _SDPA

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Names of calls in the order in which the forward made them."""
        return sorted(names, key=list(self._order).index)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        describe = _CALLS.get(func)
        if self._paused or describe is None:
            return func(*args, **kwargs)
        with self._pause():
            result = func(*args, **kwargs)
        outputs = result if isinstance(result, tuple) else (result,)
        if outputs[0].requires_grad:  # else no gradient will come: inference, or a recomputation's
            self._watch(outputs, *describe(*args, **kwargs))
        return result

    def _watch(self, outputs: tuple[Tensor, ...], call: Call, refusal: str) -> None:
        name = self._modules.current()
        self._calls[name] += 1
        if self._calls[name] > 1:
            name += f"#{self._calls[name]}"
        self._order.setdefault(name)
        if refusal:
            self.skipped[name] = refusal
            return

        def with_gradients(grads: Sequence[Tensor | None]) -> None:
            dout, dlse = (*grads, None)[:2]
            dout = torch.zeros_like(call.x.q) if dout is None else dout
            x = call.x._replace(dout=dout.detach().to(call.x.q.dtype))
            with self._pause():
                self.on_call(dataclasses.replace(call, name=name, x=x, dlse=dlse))

        torch.autograd.graph.register_multi_grad_hook(outputs, with_gradients)

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


def _sage_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None = None,
    k_mean: Tensor | None = None,
    *,
    is_causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    scale: float | None = None,
    policy: str = "default",
) -> tuple[Call, str]:
    call, refusal = _call("sage::attn", q, k, v, is_causal, scale, policy)
    more = extras(window_left, window_right, key_lengths=key_lengths, k_mean=k_mean)
    if more:
        refusal = f"{more[0]}: a diagnosis examines plain and causal attention; leave it out"
    return call, refusal


def _sdpa_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Call, str]:
    lengths = query.shape[-2], key.shape[-2]
    refusal = ""
    if attn_mask is not None:
        kind = _kind_of(attn_mask, *lengths)
        is_causal = kind == "causal"
        if kind == "other":
            refusal = "its mask is not causal, and others are not examined; batch without padding"
    elif is_causal and lengths[0] != lengths[1]:
        refusal = (
            f"SDPA aligns a causal mask over {lengths[0]} queries and {lengths[1]} keys top-left, "
            "sage::attn bottom-right"
        )
    if dropout_p:
        refusal = f"dropout of {dropout_p}: sage::attn has none; set it to 0"
    call, unsupported = _call("SDPA", query, key, value, is_causal, scale, None)
    return call, refusal or unsupported


def _varlen_call(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Call, str]:
    call = Call("", "sage::attn_varlen", None, Inputs(q, k, v, q), None, False, None)
    return call, "packed sequences: a diagnosis examines batches of one length; give it one"


_CALLS: dict[Any, Callable[..., tuple[Call, str]]] = {_SDPA: _sdpa_call}
for _name, _describe in (("attn", _sage_call), ("attn_varlen", _varlen_call)):
    for _packet in (getattr(torch.ops.sage, _name), getattr(torch.ops.sage, f"{_name}_with_lse")):
        _CALLS[_packet] = _CALLS[_packet.default] = _describe


def _call(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    policy: str | None,
) -> tuple[Call, str]:
    """The call, its gradient not known yet, and why it cannot be examined (or "")."""
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(dtype) for x in (q, k, v))
    q, k, v = (x.detach() for x in (q, k, v))
    refusal = ""
    if any(type(x) not in (Tensor, nn.Parameter) for x in (q, k, v)):
        refusal = f"{type(q).__name__} instead of plain tensors: examine an unsharded model"
    elif 0 in (*q.shape, *k.shape):
        refusal = "an empty tensor"
    else:  # where the policies run may be another device: the reference takes what the CPU does
        refusal = is_supported(*(x.to("meta") for x in (q, k, v)), scale=scale).reason
    return Call("", function, policy, Inputs(q, k, v, q), None, causal, scale), refusal


def _kind_of(mask: Tensor, seqlen_q: int, seqlen_k: int) -> str:
    """What a mask that broadcasts to (..., seqlen_q, seqlen_k) is: "none", "causal" or "other"."""
    shown = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not (shown | (mask <= torch.finfo(mask.dtype).min)).all():
        return "other"  # a bias
    if shown.all():
        return "none"
    if mask.shape[-2:] == (seqlen_q, seqlen_k):
        causal = visible(seqlen_q, seqlen_k, True, mask.device)
        return "causal" if (shown == causal).all() else "other"
    return "other"


class _ModuleStack:
    """The name of the module whose forward is running, by hooks on every module."""

    def __init__(self, model: nn.Module) -> None:
        compiled = "_orig_mod."  # what torch.compile puts in front
        self.names = {m: name.replace(compiled, "") for name, m in model.named_modules()}
        self.stack: list[str] = []
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []

    def current(self) -> str:
        return (self.stack[-1] if self.stack else "") or "model"

    def __enter__(self) -> None:
        for module in self.names:
            self.hooks.append(module.register_forward_pre_hook(self._enter))
            self.hooks.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.stack.append(self.names[module])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.stack.clear()
