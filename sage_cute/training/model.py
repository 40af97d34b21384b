"""A small decoder: RMSNorm, RoPE, grouped-query attention with optional QK-norm, SwiGLU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sage_cute.nn import SageAttention
from sage_cute.training.data import VOCABULARY
from sage_cute.training.errors import SetupError


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder."""

    dim: int = 192
    layers: int = 3
    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 64
    qk_norm: bool = True
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise SetupError(
                f"--heads {self.heads} is no multiple of --kv-heads {self.kv_heads}: each key head "
                "serves the same number of query heads"
            )
        if self.head_dim % 2 or self.head_dim > 256:
            raise SetupError(f"--head-dim {self.head_dim}: an even number up to 256 (RoPE: pairs)")

    @property
    def hidden(self) -> int:
        """Width of SwiGLU: 8/3 of ``dim`` (three matrices for the usual two), a multiple of 64."""
        return -(-8 * self.dim // (3 * 64)) * 64


AttentionFactory = Callable[[ModelConfig], nn.Module]
"""Makes a module that is called as ``attend(q, k, v, rotary=rotary)``, on (b, h, s, d)."""


def sage(policy: str) -> AttentionFactory:
    """Attention by ``sage::attn`` under ``policy``."""
    return lambda c: SageAttention(c.head_dim, qk_norm=c.qk_norm, causal=True, policy=policy)


def sdpa(config: ModelConfig) -> nn.Module:
    """Attention by ``F.scaled_dot_product_attention``."""
    return SdpaAttention(config.head_dim, qk_norm=config.qk_norm)


class SdpaAttention(nn.Module):
    """The counterpart of :class:`~sage_cute.nn.SageAttention`: the same parameters, by SDPA."""

    def __init__(self, head_dim: int, *, qk_norm: bool) -> None:
        super().__init__()
        self.q_norm = nn.RMSNorm(head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim, eps=1e-6) if qk_norm else nn.Identity()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, rotary: Rotary) -> Tensor:
        """Causal attention in (batch, heads, seqlen, head_dim); ``rotary`` turns q and k."""
        q, k = rotary(self.q_norm(q)).to(v.dtype), rotary(self.k_norm(k)).to(v.dtype)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Rotary(nn.Module):
    """Rotary position embedding of (..., seqlen, head_dim), the halves of head_dim as pairs."""

    cos: Tensor
    sin: Tensor

    def __init__(self, seqlen: int, head_dim: int, base: float) -> None:
        super().__init__()
        frequency = base ** (-torch.arange(0, head_dim, 2) / head_dim)
        angle = torch.arange(seqlen)[:, None] * frequency  # (seqlen, head_dim / 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` turned by its position, in its dtype."""
        a, b = x.float().chunk(2, dim=-1)
        turned = torch.cat((a * self.cos - b * self.sin, a * self.sin + b * self.cos), dim=-1)
        return turned.type_as(x)


class Attention(nn.Module):
    """Projections around an ``attend`` module."""

    def __init__(self, config: ModelConfig, attend: nn.Module) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.split = (config.heads, config.kv_heads, config.kv_heads)
        self.qkv = nn.Linear(config.dim, sum(self.split) * config.head_dim, bias=False)
        self.attend = attend
        self.out = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """(batch, seqlen, dim) to (batch, seqlen, dim)."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (b, h, s, d)
        q, k, v = heads.split(self.split, dim=1)
        o = self.attend(q, k, v, rotary=rotary)
        return self.out(o.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """silu(gate) * up, projected down."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) to (..., dim)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm attention and SwiGLU, each added to the residual stream."""

    def __init__(self, config: ModelConfig, attend: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.attention = Attention(config, attend)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """(batch, seqlen, dim) to (batch, seqlen, dim)."""
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Predicts the next byte; called on tokens, it returns the loss.

    Input and output embeddings are two matrices: with 256 rows, tying them saves nothing.

    Args:
        config: Sizes.
        seqlen: Longest sequence, for RoPE's table.
        attention: ``sdpa``, or ``sage(policy)``.
    """

    def __init__(self, config: ModelConfig, *, seqlen: int, attention: AttentionFactory) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, config.dim)
        self.rotary = Rotary(seqlen, config.head_dim, config.rope_base)
        self.blocks = nn.ModuleList(Block(config, attention(config)) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.head = nn.Linear(config.dim, VOCABULARY, bias=False)
        self._initialize(config.layers)

    def _initialize(self, layers: int) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # Two branches a layer add up in the residual stream: keep its variance of order 1.
                residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy in nats a byte, of tokens (sequences, seqlen + 1) int64."""
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, self.rotary)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def build_pair(
    config: ModelConfig, *, seqlen: int, policy: str, seed: int
) -> tuple[Decoder, Decoder]:
    """Two decoders with the same weights: by ``sage::attn`` under ``policy``, and by SDPA.

    Raises:
        PolicyError: ``policy`` is not valid.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        by_sdpa = Decoder(config, seqlen=seqlen, attention=sdpa)
        by_sage = Decoder(config, seqlen=seqlen, attention=sage(policy))
    by_sage.load_state_dict(by_sdpa.state_dict())
    return by_sage, by_sdpa
