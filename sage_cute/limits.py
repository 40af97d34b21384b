"""What is supported, said once.

The checks of the ops (``sage_cute.support``) and of the kernels' launchers, the messages that they
raise, ``sage-cute info`` and the table of the README are all made of this. Standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from sage_cute.policies import PRESETS, Policy

Direction = Literal["forward", "backward"]
FORWARD_ONLY: Final[tuple[Direction, ...]] = ("forward",)
BOTH: Final[tuple[Direction, ...]] = ("forward", "backward")
NEITHER: Final[tuple[Direction, ...]] = ()

MASKS: Final = {
    "causal": "causal mask, aligned bottom-right",
    "window": "sliding window",
    "key_lengths": "padding mask (key lengths)",
    "k_mean": "given mean of K (k_mean)",
    "packed": "packed batch of sequences of different lengths",
}
"""What a call may ask for beyond plain attention. Every family attends without."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """The values of a policy's field that there is an implementation for."""

    field: str
    values: tuple[Any, ...]
    # Only of policies in which one of these fields has this value.
    given: tuple[tuple[str, ...], Any] | None = None

    def why_not(self, policy: Policy) -> str | None:
        """The reason why a policy breaks this rule, with the remedy; None if it does not."""
        value, (fields, wanted) = getattr(policy, self.field), self.given or ((), None)
        if value in self.values or (fields and wanted not in (getattr(policy, f) for f in fields)):
            return None
        return f"{self.field}={_shown(value)}{self._where()}: no kernel; set {self._remedy()}"

    def __str__(self) -> str:
        return self._remedy() + self._where()

    def _remedy(self) -> str:
        return f"{self.field}={' or '.join(map(_shown, self.values))}"

    def _where(self) -> str:
        if not self.given:
            return ""
        fields, wanted = self.given
        return f" with {' or '.join(f'{f}={_shown(wanted)}' for f in fields)}"


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """What one kind of device computes."""

    name: str
    how: str
    dtypes: tuple[str, ...]
    head_dims: Sequence[int]  # the same for Q, K and V
    masks: Mapping[str, tuple[Direction, ...]]
    rules: Mapping[Direction, tuple[Rule, ...]]
    capabilities: tuple[tuple[int, int], ...] = ()  # of CUDA devices

    def why_not_dtype(self, dtype: str) -> str | None:
        """The reason why a dtype is not taken, with the remedy; None if it is."""
        if dtype in self.dtypes:
            return None
        return f"dtype {dtype}: {self.name} takes {_list(self.dtypes)}; cast to one of them"

    def why_not_head_dim(self, head_dim: int) -> str | None:
        """The reason why a head_dim is not taken, with the remedy; None if it is."""
        if self._takes_head_dim(head_dim):
            return None
        larger = min((d for d in self.head_dims if d > head_dim), default=None)
        remedy = (
            f"pad q, k and v with zeros to {larger} and give scale, since its default is that of "
            "the padded one"
            if larger
            else "use fewer channels a head"
        )
        return f"head_dim {head_dim}: {self.name} takes {_numbers(self.head_dims)}; {remedy}"

    def why_not_policy(self, direction: Direction, policy: Policy) -> str | None:
        """The reason why a policy's direction is not computed, with the remedy; None if it is."""
        reasons = (rule.why_not(policy) for rule in self.rules[direction])
        return next((reason for reason in reasons if reason), None)

    def why_not(
        self, direction: Direction, policy: Policy, masks: Iterable[str] = ()
    ) -> str | None:
        """The reason why a direction is not computed for a mix and masks, with the remedy."""
        if reason := self.why_not_policy(direction, policy):
            return f"{direction} on {self.name}: {reason}"
        for mask in masks:
            if direction not in self.masks[mask]:
                return (
                    f"{direction} on {self.name}: no kernel for a {MASKS[mask]}; move q, k and v "
                    "to the CPU, or do without it"
                )
        return None

    def _takes_head_dim(self, head_dim: int) -> bool:
        dims = self.head_dims
        if isinstance(dims, range):  # by arithmetic: a symbolic head_dim stays symbolic
            return dims[0] <= head_dim <= dims[-1] and (head_dim - dims[0]) % dims.step == 0
        return head_dim in dims

    def presets(self, direction: Direction) -> tuple[str, ...]:
        """The names of the presets that a direction is computed for."""
        return tuple(n for n, mix in PRESETS.items() if not self.why_not_policy(direction, mix))


CPU: Final = Family(
    name="the CPU",
    how="reference implementation, exact to the code",
    dtypes=("float16", "bfloat16", "float32"),
    head_dims=range(1, 257),
    masks={
        "causal": BOTH,
        "window": BOTH,
        "key_lengths": BOTH,
        "k_mean": BOTH,
        "packed": BOTH,
    },
    rules={"forward": (), "backward": ()},
)
HOPPER: Final = Family(
    name="NVIDIA Hopper",
    how="kernels",
    dtypes=("float16", "bfloat16"),
    head_dims=range(16, 257, 8),
    masks={
        "causal": BOTH,
        "window": BOTH,
        "key_lengths": BOTH,
        "k_mean": BOTH,
        "packed": BOTH,
    },
    rules={
        "forward": (
            Rule("qk", ("int8",)),
            Rule("pv", ("int8",)),
            Rule("smooth_q", (False,)),
            Rule("smooth_v", (False,)),
            Rule("k_scale", ("per_block",)),
            Rule("v_scale", ("per_token", "per_block")),
            Rule("block_k", (128, 64, 32)),
            Rule("block_q", (128, 64, 32, 16, 1), given=(("q_scale",), "per_block")),
        ),
        "backward": (
            Rule("qk", ("int8",)),
            Rule("s", ("int8",)),
            Rule("smooth_q", (False,)),
            Rule("smooth_v", (False,)),
            Rule("v_scale", ("per_token", "per_block")),
            Rule("bwd_block_q", (64, 128), given=(("dv", "dk", "dq"), "int8")),
            Rule("bwd_block_k", (64,), given=(("dv", "dk", "dq"), "int8")),
            Rule("ds_dq_rows", (0, 1, 8), given=(("dq",), "int8")),
            Rule("do_scale", ("per_token",), given=(("dp",), "int8")),
        ),
    },
    capabilities=((9, 0),),
)
FAMILIES: Final = (CPU, HOPPER)

REFUSED: Final = {
    "head_dim of v": "a head_dim of v other than that of q and k: pad the smaller with zeros",
    "attn_mask": "an arbitrary mask (attn_mask): for padding at the end pass key_lengths, for a "
    "band around the diagonal causal and window, and for sequences of different lengths use "
    "attention_varlen",
    "nested": "nested tensors: pass their values() and offsets().int() to attention_varlen",
    "packed DTensor": "DTensor in a packed batch: shard it by head and call attention_varlen on "
    "the local tensors, with torch.distributed.tensor.experimental.local_map",
    "sparse": "sparse tensors: call to_dense() first",
    "dropout": "dropout in attention: use torch's scaled_dot_product_attention where it is needed",
    "double backward": "double backward: there is no gradient of its gradient; use torch's "
    "scaled_dot_product_attention with the math backend where one is needed",
    "forward mode": "forward-mode derivatives: use reverse mode (backward)",
    "functional": "torch.func.grad and its like: use torch.autograd.grad",
}
"""What no family does, and what to do instead."""


def family_of_gpu(capability: tuple[int, int]) -> Family | None:
    """The family of a CUDA device by its compute capability; None if it has no kernels."""
    return next((f for f in FAMILIES if capability in f.capabilities), None)


def supported_devices() -> str:
    """Every family, for messages."""
    return _list([_title(family) for family in FAMILIES])


def unknown_gpu(name: str, capability: tuple[int, int]) -> str:
    """The message for a GPU that there are no kernels for."""
    return (
        f"{name} has compute capability {'.'.join(map(str, capability))}, which there are no "
        f"kernels for; use {supported_devices()}"
    )


def table() -> list[tuple[str, ...]]:
    """Rows of what is supported: (what, one text for each of FAMILIES)."""
    return [
        ("how", *(f.how for f in FAMILIES)),
        ("dtype of q, k and v", *(_list(f.dtypes) for f in FAMILIES)),
        ("head_dim of q, k and v", *(_numbers(f.head_dims) for f in FAMILIES)),
        ("no mask", *(_directions(BOTH) for _ in FAMILIES)),
        *((MASKS[m], *(_directions(f.masks[m]) for f in FAMILIES)) for m in MASKS),
        *((f"presets, {d}", *(", ".join(f.presets(d)) for f in FAMILIES)) for d in BOTH),
        *((f"mixes, {d}", *(_mixes(f, d) for f in FAMILIES)) for d in BOTH),
        ("query heads", *("a multiple of the key heads" for _ in FAMILIES)),
        ("batch, heads, lengths", *("any: 0, 1 and unequal lengths too" for _ in FAMILIES)),
        ("strides, alignment", *("any" for _ in FAMILIES)),
        ("gradients", *("of q, k, v, through the output and the LSE" for _ in FAMILIES)),
    ]


def columns() -> tuple[str, ...]:
    """The heads of :func:`table`."""
    return ("", *(_title(family) for family in FAMILIES))


def markdown() -> str:
    """The table, and what is refused, for the README."""
    lines = ["| " + " | ".join(row) + " |" for row in (columns(), *table())]
    lines.insert(1, "| --- " * len(columns()) + "|")
    refused = "\n".join(f"- {text}" for text in REFUSED.values())
    return "\n".join(lines) + f"\n\nNot supported, and refused with an error:\n\n{refused}"


def _mixes(family: Family, direction: Direction) -> str:
    rules = family.rules[direction]
    if direction == "backward":
        rules = tuple(r for r in rules if r not in family.rules["forward"])
    prefix = "as forward, and " if direction == "backward" else ""
    return prefix + "; ".join(map(str, rules)) if rules else "every one"


def _title(family: Family) -> str:
    if not family.capabilities:
        return family.name.removeprefix("the ")
    versions = _list([f"{major}.{minor}" for major, minor in family.capabilities])
    return f"{family.name} (compute capability {versions})"


def _directions(directions: Sequence[Direction]) -> str:
    return " and ".join(directions) or "no"


def _numbers(numbers: Sequence[int]) -> str:
    if not isinstance(numbers, range):
        return _list(list(map(str, numbers)))
    steps = f" in steps of {numbers.step}" if numbers.step > 1 else ""
    return f"{numbers[0]} to {numbers[-1]}{steps}"


def _list(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
