"""The implementation against a second one: loops over rows and tiles, one head, float64 and numpy.

Written from numerics.md and the documentation of the policy's fields alone. The codes and scales
agree bit for bit; the floats as far as a code may flip where the two round differently.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_cute.numerics import rel_l2, sage_forward
from sage_cute.numerics.tolerances import check
from sage_cute.policies import PRESETS, Policy
from sage_cute.testing import INPUT_CLASSES, POLICY_FIELDS, Inputs, make_inputs, run_attention

MANY = settings.get_profile("numerics_many")
Array = np.ndarray
F32 = np.float32


def rounded(x: Array, dtype: torch.dtype) -> Array:
    return torch.from_numpy(np.asarray(x, F32)).to(dtype).double().numpy()


def absmax_scale(x: Array, largest: int) -> np.float32:
    return F32(F32(np.abs(x).max(initial=0.0)) / F32(largest))


def to_codes(x: Array, scale: np.float32, largest: int) -> Array:
    if scale == 0:
        return np.zeros(np.shape(x))
    return np.clip(np.rint(np.asarray(x, F32) / scale), -largest, largest).astype(np.float64)


def quantized(x: Array, block: int, per_channel: bool = False) -> tuple[Array, Array]:
    """Codes of x (tokens, head_dim) and the scale of each element."""
    codes, scales = np.zeros(x.shape), np.zeros(x.shape)
    for start in range(0, len(x), block):
        rows = slice(start, start + block)
        for columns in range(x.shape[1]) if per_channel else [slice(None)]:
            scale = absmax_scale(x[rows, columns], 127)
            codes[rows, columns] = to_codes(x[rows, columns], scale, 127)
            scales[rows, columns] = scale
    return codes, scales


def token_mean(x: Array) -> Array:
    return np.array([math.fsum(column) / max(len(x), 1) for column in x.T]).astype(F32)


@dataclasses.dataclass
class Head:
    """One query head: q, dout (seqlen_q, head_dim), k, v (seqlen_k, head_dim), dlse (seqlen_q).

    Of k and v the first ``length`` count.
    """

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array
    scale: float
    causal: bool
    policy: Policy
    dtype: torch.dtype
    window: tuple[int | None, int | None] = (None, None)
    length: int | None = None
    k_mean: Array | None = None

    def __post_init__(self) -> None:
        self.half = torch.bfloat16 if self.dtype == torch.float32 else self.dtype
        self.offset = len(self.k) - len(self.q)
        self.k, self.v = self.k[: self.length], self.v[: self.length]
        # A query that sees no key counts as zero where it would share a scale or a mean.
        keys = range(len(self.k))
        self.blind = [m for m in range(len(self.q)) if not any(self.sees(m, n) for n in keys)]
        self.dout = self.without_blind(self.dout)
        if self.policy.q_scale == "per_block" or self.policy.smooth_q:
            self.q = self.without_blind(self.q)
        self.prepare()

    def sees(self, m: int, n: int) -> bool:
        left, right = (math.inf if side is None else side for side in self.window)
        p = m + self.offset
        return p - left <= n <= p + (0 if self.causal else right)

    def without_blind(self, x: Array) -> Array:
        x = x.copy()
        x[self.blind] = 0
        return x

    def bounded(self, m: int, start: int) -> bool:
        """Whether p_scale=bounded takes the bound for query m and the keys from ``start`` on.

        The block is whole, the first and the last of m's group of 64 queries see all of it, and
        none of its V scales is below a quarter of its largest; and the softmax scale is not
        negative.
        """
        stop = start + self.policy.block_k
        scales = self.v8[1][start:stop, 0]
        return (
            self.policy.p_scale == "bounded"
            and self.policy.v_scale == "per_token"
            and stop <= len(self.k)
            and all(self.sees(m // 64 * 64 + i, n) for i in (0, 63) for n in (start, stop - 1))
            and self.scale >= 0
            and bool((scales >= scales.max() / 4).all())
        )

    def prepare(self) -> None:
        p = self.policy
        if not p.smooth_k or not len(self.k):
            self.k_mean = np.zeros(self.k.shape[1], F32)
        elif self.k_mean is None:
            self.k_mean = token_mean(self.k)
        self.smooth_k = (self.k - self.k_mean).astype(F32)
        self.q_mean = np.zeros(self.q.shape, F32)
        if p.smooth_q:
            for start in range(0, len(self.q), p.block_q):
                rows = slice(start, start + p.block_q)
                self.q_mean[rows] = token_mean(self.q[rows])
        self.smooth_q = (self.q - self.q_mean).astype(F32)
        self.v_mean = token_mean(self.v) if p.smooth_v else np.zeros(self.v.shape[1], F32)
        self.q8 = quantized(self.smooth_q, 1 if p.q_scale == "per_token" else p.block_q)
        self.k8 = quantized(self.smooth_k, 1 if p.k_scale == "per_token" else p.block_k)
        v_block = 1 if p.v_scale == "per_token" else p.block_k
        smooth_v = (self.v - self.v_mean).astype(F32)
        self.v8 = quantized(smooth_v, v_block, p.v_scale == "per_channel")

    def score(self, m: int, n: int, precision: str, q: Array, k: Array) -> float:
        if precision == "int8":
            exact = self.q8[0][m] @ self.k8[0][n]
            s = exact * float(self.q8[1][m, 0]) * float(self.k8[1][n, 0])
        else:
            s = rounded(q[m], self.half) @ rounded(k[n], self.half)
        return self.scale * (s + self.q_mean[m].astype(float) @ self.smooth_k[n].astype(float))

    def forward(self) -> None:
        p = self.policy
        self.out, self.lse = np.zeros(self.q.shape), np.full(len(self.q), -np.inf)
        for m in range(len(self.q)):
            row_max, row_sum, acc = -math.inf, 0.0, np.zeros(self.v.shape[1])
            for start in range(0, len(self.k), p.block_k):
                stop = min(start + p.block_k, len(self.k))
                keys = [n for n in range(start, stop) if self.sees(m, n)]
                if not keys:
                    continue
                s = [self.score(m, n, p.qk, self.smooth_q, self.smooth_k) for n in keys]
                new_max = max(row_max, *s)
                shrink = math.exp(row_max - new_max)
                row_max = new_max
                unnormalized = np.exp(np.array(s) - max(s))
                grow = math.exp(max(s) - new_max)
                row_sum = row_sum * shrink + grow * unnormalized.sum()
                acc = acc * shrink
                if p.pv == "16bit":
                    acc += rounded(unnormalized * grow, self.half) @ rounded(
                        self.v[keys], self.half
                    )
                    continue
                v_codes, v_scale = self.v8[0][keys], self.v8[1][keys]
                if p.v_scale == "per_token":
                    unnormalized = unnormalized * v_scale[:, 0]
                    v_scale = np.ones(v_scale.shape)
                p_scale = absmax_scale(
                    self.v8[1][keys, 0] if self.bounded(m, start) else unnormalized, p.p_max
                )
                p_codes = to_codes(unnormalized, p_scale, p.p_max)
                acc += (p_codes @ v_codes) * float(p_scale) * grow * v_scale[0]
            if row_sum:
                self.out[m] = acc / row_sum + (self.v_mean if p.pv == "int8" else 0)
                self.lse[m] = row_max + math.log(row_sum)

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        p = self.policy
        for i in range(0, len(self.q), p.bwd_block_q):
            for j in range(0, len(self.k), p.bwd_block_k):
                yield slice(i, i + p.bwd_block_q), slice(j, j + p.bwd_block_k)

    def backward(self) -> None:
        """From out and lse as they were rounded for the user."""
        p = self.policy
        q_hat, k_hat = self.smooth_q, self.smooth_k
        if p.qk == "int8":
            q_hat = (self.q8[0] * self.q8[1]).astype(F32)
            if not p.smooth_q:  # the bias needs the exact K, which is saved instead of its codes
                k_hat = (self.k8[0] * self.k8[1]).astype(F32)

        q_hat = self.without_blind(q_hat)

        dout, shifted = rounded(self.dout, self.half), self.out.copy()
        values = rounded(self.v, self.half)
        if p.dp == "int8" or (p.dp_v == "dequantized" and p.pv == "int8"):
            shifted = shifted - self.v_mean
            values = self.v8[0] * self.v8[1]
            if p.dp == "int8":
                do8 = quantized(self.dout, 1 if p.do_scale == "per_token" else p.bwd_block_q)
                dout = do8[0] * do8[1]
            else:
                values = rounded(values.astype(F32), self.half)
        delta = (dout * shifted).sum(1) - self.dlse

        probs, ds = (np.zeros((len(self.q), len(self.k))) for _ in "ps")
        for m in range(len(self.q)):
            for n in range(len(self.k)):
                if self.sees(m, n):
                    score = self.score(m, n, p.s, q_hat, k_hat)
                    probs[m, n] = math.exp(min(score - self.lse[m], 0.0))
                    ds[m, n] = probs[m, n] * (dout[m] @ values[n] - delta[m])

        channels = p.transposed_scale == "per_channel"
        do_t = quantized(self.dout, p.bwd_block_q, channels)
        q_t = quantized(q_hat, p.bwd_block_q, channels)
        k_t = quantized(k_hat, p.bwd_block_k, channels)
        self.dq, self.dk, self.dv = (np.zeros(x.shape) for x in (self.q, self.k, self.v))
        for queries, keys in self.tiles():
            tile = probs[queries, keys]
            if p.dv == "int8":
                tile = self.per_key(tile, p.p_bwd_scale == "per_key")
                self.dv[keys] += tile.T @ (do_t[0] * do_t[1])[queries]
            else:
                self.dv[keys] += rounded(tile, self.half).T @ rounded(self.dout[queries], self.half)

            tile = ds[queries, keys]
            if p.dk == "int8":
                tile = self.per_key(tile, p.ds_dk_scale == "per_key")
                self.dk[keys] += tile.T @ (q_t[0] * q_t[1])[queries]
            else:
                tile = rounded(tile, torch.bfloat16)
                self.dk[keys] += tile.T @ rounded(q_hat[queries], torch.bfloat16)
            self.dk[keys] += tile.T @ self.q_mean[queries]

            tile = ds[queries, keys]
            if p.dq == "int8":
                rows = p.ds_dq_rows or p.bwd_block_q
                for i in range(0, len(tile), rows):
                    scale = absmax_scale(tile[i : i + rows], 127)
                    codes = to_codes(tile[i : i + rows], scale, 127)
                    first = queries.start + i
                    self.dq[first : first + len(codes)] += (
                        codes @ (k_t[0] * k_t[1])[keys] * float(scale)
                    )
            else:
                self.dq[queries] += rounded(tile, torch.bfloat16) @ rounded(
                    k_hat[keys], torch.bfloat16
                )
        self.dq *= self.scale
        self.dk *= self.scale

    @staticmethod
    def per_key(tile: Array, per_key: bool) -> Array:
        """A tile that has been through INT8, one scale a column or one in all."""
        result = np.zeros(tile.shape)
        for columns in range(tile.shape[1]) if per_key else [slice(None)]:
            scale = absmax_scale(tile[:, columns], 127)
            result[:, columns] = to_codes(tile[:, columns], scale, 127) * float(scale)
        return result


def emulate(
    x: Inputs,
    dlse: torch.Tensor,
    scale: float,
    causal: bool,
    policy: Policy,
    window: tuple[int | None, int | None] = (None, None),
    key_lengths: torch.Tensor | None = None,
    k_mean: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """All heads; the LSE is that of the original K."""
    heads, group = x.q.shape[1], x.q.shape[1] // x.k.shape[1]
    result = {name: torch.zeros(t.shape) for name, t in zip(("dq", "dk", "dv"), x, strict=False)}
    result |= {"out": torch.zeros(x.q.shape), "lse": torch.zeros(x.q.shape[:3])}
    for b in range(x.q.shape[0]):
        for h in range(heads):
            q, dout = (t[b, h].float().numpy() for t in (x.q, x.dout))
            k, v = (t[b, h // group].float().numpy() for t in (x.k, x.v))
            head = Head(
                *(q, k, v, dout, dlse[b, h].numpy(), scale, causal, policy, x.q.dtype, window),
                length=None if key_lengths is None else int(key_lengths[b]),
                k_mean=None if k_mean is None else k_mean[b, h // group].float().numpy(),
            )
            head.forward()
            head.out = rounded(head.out, x.q.dtype)
            result["lse"][b, h] = torch.from_numpy(head.lse + scale * (q @ head.k_mean))
            head.backward()
            result["out"][b, h] = torch.from_numpy(head.out)
            bias = np.where(np.isinf(head.lse), 0.0, scale * head.dlse)  # no key: no gradient
            bias = rounded(np.outer(bias, head.k_mean), x.q.dtype)
            dq = rounded(head.dq, x.q.dtype) + bias
            result["dq"][b, h] = torch.from_numpy(dq)
            result["dk"][b, h // group, : len(head.k)] += torch.from_numpy(head.dk)
            result["dv"][b, h // group, : len(head.k)] += torch.from_numpy(head.dv)
    return {name: t if name == "lse" else t.to(x.q.dtype) for name, t in result.items()}


def spec(policy: Policy) -> str:
    """The string for a mix."""
    return "sagebwd:" + ",".join(f"{name}={value}" for name, value in policy.asdict().items())


@st.composite
def mixes(draw: st.DrawFn, **fields: tuple[object, ...]) -> Policy:
    """Any valid policy."""
    choices = {**POLICY_FIELDS, **fields}
    values = draw(st.fixed_dictionaries({k: st.sampled_from(v) for k, v in choices.items()}))
    # The combinations that a policy refuses.
    values["smooth_q"] &= values["qk"] == "int8"
    values["smooth_v"] &= values["pv"] == "int8"
    if values["v_scale"] == "per_channel":
        values["dp"] = "16bit"
    return Policy(**values)


WINDOWS = st.one_of(
    st.just((None, None)), st.tuples(*[st.sampled_from([None, 0, 1, 5, 16, 31, 33, 60])] * 2)
)

SMALL = {
    "block_q": (32, 16, 7),
    "block_k": (16, 32, 9),
    "bwd_block_q": (16, 32),
    "bwd_block_k": (16, 32, 5),
    "ds_dq_rows": (0, 1, 8),
}


@MANY
@given(
    policy=st.one_of(mixes(**SMALL), mixes(**SMALL), st.sampled_from(list(PRESETS.values()))),
    kind=st.sampled_from(list(INPUT_CLASSES)),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]),
    seqlen_q=st.sampled_from([1, 2, 9, 17, 32, 33, 40, 48]),
    seqlen_k=st.sampled_from([1, 2, 9, 17, 32, 33, 40, 48]),
    head_dim=st.sampled_from([1, 7, 8, 16]),
    causal=st.booleans(),
    window=WINDOWS,
    padded=st.sampled_from([None, 0, 1, 7, 16, 40]),
    given_mean=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 999),
)
def test_every_mix_equals_the_loops(
    policy: Policy,
    kind: str,
    heads: tuple[int, int],
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    causal: bool,
    window: tuple[int | None, int | None],
    padded: int | None,
    given_mean: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    x = make_inputs(
        kind,
        (1, heads[0], seqlen_q, head_dim),
        kv_heads=heads[1],
        seqlen_k=seqlen_k,
        dtype=dtype,
        seed=seed,
    )
    dlse = torch.randn(x.q.shape[:3], generator=torch.Generator().manual_seed(seed))
    scale = head_dim**-0.5
    masks = {
        "window": window,
        "key_lengths": None if padded is None else torch.tensor([max(0, seqlen_k - padded)]),
        "k_mean": 2 * x.k[:, :, 0] if given_mean and policy.smooth_k else None,
    }
    got = run_attention(x, policy=spec(policy), causal=causal, dlse=dlse, **masks)
    want = emulate(x, dlse, scale, causal, policy, **masks)
    assert torch.equal(got.lse.isinf(), want["lse"].isinf())
    ulp = (want["lse"].abs() / 16).clamp_min(1)  # float32 has 1e-6 steps up to 16
    check("emulation_lse", "any", ((got.lse - want["lse"]) / ulp).nan_to_num().abs().max())
    for name in ("out", "dq", "dk", "dv"):
        size = "emulation" if want[name].numel() >= 256 else "emulation_tiny"
        check(size, "any", rel_l2(getattr(got, name), want[name]))


@pytest.mark.parametrize("scale", [0.25, -0.25])
@pytest.mark.parametrize(
    ("causal", "window"),
    [(False, (None, None)), (True, (None, None)), (False, (130, 40)), (True, (150, None))],
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(150, 150), (90, 170), (290, 160)])
def test_bounded_scales_of_p_equal_the_loops(
    seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int | None, int | None], scale: float
) -> None:
    """Several groups of queries, and blocks of keys that are flat and that are not."""
    policy = PRESETS["int8"].replace(block_k=32, p_max=127)
    x = make_inputs("g1", (1, 1, seqlen_q, 16), seqlen_k=seqlen_k, dtype=torch.float32, seed=1)
    x.v[:, :, 32:64] *= torch.linspace(0.3, 3, 32)[:, None]
    x.v[:, :, 70] = 0
    head = Head(
        *(t[0, 0].numpy() for t in x), dlse=np.zeros(seqlen_q), scale=scale, causal=causal,
        policy=policy, dtype=torch.float32, window=window,
    )  # fmt: skip
    head.forward()
    static = {"scale": scale, "causal": causal, "window": window}
    got = sage_forward(x.q, x.k, x.v, **static, policy=policy)
    flipped = (got.out[0, 0] - torch.from_numpy(head.out)).abs().amax(-1) > 1e-5
    assert flipped.sum() <= 2  # a code that lies within rounding of a half: none as it stands
    exact = sage_forward(x.q, x.k, x.v, **static, policy=policy.replace(p_scale="per_block"))
    differ = (got.out != exact.out)[0, 0].any(-1)
    bounded = [
        any(head.bounded(m, start) for start in range(0, seqlen_k, 32)) for m in range(seqlen_q)
    ]
    assert not differ[~torch.tensor(bounded)].any()
    assert differ.sum() >= 0.9 * sum(bounded)
    assert any(bounded) == (scale > 0)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_scales_bitwise(name: str, dtype: torch.dtype) -> None:
    """Two blocks of queries, three of keys (two of 128), the last of both short."""
    policy = PRESETS[name]
    x = make_inputs("kb", (1, 2, 150, 6), kv_heads=1, seqlen_k=140, dtype=dtype, seed=1)
    saved = sage_forward(x.q, x.k, x.v, scale=0.5, causal=True, policy=policy).saved
    for h in range(2):
        head = Head(
            *(t[0, min(h, t.shape[1] - 1)].float().numpy() for t in x),
            dlse=np.zeros(150),
            scale=0.5,
            causal=True,
            policy=policy,
            dtype=dtype,
        )
        for mine, codes, scales, granularity, block in (
            (head.q8, saved.q_codes[0, h], saved.q_scale[0, h], policy.q_scale, policy.block_q),
            (head.k8, saved.k_codes[0, 0], saved.k_scale[0, 0], policy.k_scale, policy.block_k),
        ):
            block = 1 if granularity == "per_token" else block
            assert np.array_equal(mine[0], codes.double().numpy())
            assert np.array_equal(mine[1][::block, 0].astype(F32), scales.numpy())
        assert np.array_equal(head.k_mean, saved.k_mean[0, 0].numpy())
