"""Ring (context-parallel) attention: every process holds a piece of the sequence.

Queries stay, keys and values go round; each process attends to the piece that it holds and merges.

    torchrun --nproc-per-node 2 examples/ring_attention.py          # gloo on CPUs, NCCL on GPUs
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import sage_cute


class _PassOn(torch.autograd.Function):
    """A tensor to the next process of the ring, for that of the one before; gradients go back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _exchange(x, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _exchange(grad, -1)


class _Unused(torch.autograd.Function):
    """out and lse; the third tensor gets a gradient of zeros, which its sender waits for."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, unused: Tensor) -> tuple[Tensor, Tensor]:
        ctx.unused = unused.new_zeros(()).expand(unused.shape)
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return dout, dlse, ctx.unused


def _exchange(x: Tensor, step: int) -> Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    x, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    operations = [
        dist.P2POp(dist.isend, x, (rank + step) % size),
        dist.P2POp(dist.irecv, received, (rank - step) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, policy: str = "default"
) -> tuple[Tensor, Tensor]:
    """Attention of this process's queries to the keys of all processes.

    Args:
        q: (batch, heads, seqlen / processes, head_dim): piece ``rank`` of the sequence.
        k: (batch, kv_heads, seqlen / processes, head_dim).
        v: like k.
        causal: by positions in the whole sequence.
        policy: policy string. Each piece of K is smoothed by its own mean: the LSE by which pieces
            are merged is that of the original K, so means need not be exchanged.

    Returns:
        out and lse of this process's queries.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    out, lse = sage_cute.attention(q, k, v, causal=causal, policy=policy, return_lse=True)
    kv = torch.stack([k, v])
    for step in range(1, size):
        kv = _PassOn.apply(kv)  # type: ignore[no-untyped-call]
        if causal and step > rank:  # the piece comes later in the sequence than all queries
            out, lse = _Unused.apply(out, lse, kv)  # type: ignore[no-untyped-call]
        else:
            part = sage_cute.attention(q, *kv.unbind(), policy=policy, return_lse=True)
            out, lse = sage_cute.merge_attention(out, lse, *part)
    return out, lse


def main() -> None:
    """Gradients of ring attention against those of one process."""
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    n, worst = 128, 0.0
    for causal in (False, True):
        torch.manual_seed(0)
        shapes = [(1, 4, n * size, 64), *[(1, 2, n * size, 64)] * 2, (1, 4, n * size, 64)]
        whole = [torch.randn(s, dtype=torch.bfloat16).to(device) for s in shapes]
        *qkv, dout = whole
        single = [x.clone().requires_grad_() for x in qkv]
        sage_cute.attention(*single, causal=causal).backward(dout)
        pieces = [x.chunk(size, 2)[rank].clone().requires_grad_() for x in qkv]
        out, _ = ring_attention(*pieces, causal=causal)
        out.backward(dout.chunk(size, 2)[rank])
        for piece, x in zip(pieces, single, strict=True):
            assert piece.grad is not None and x.grad is not None
            expected = x.grad.chunk(size, 2)[rank].float()
            error = (piece.grad.float() - expected).norm() / expected.norm()
            worst = max(worst, error.item())
    # Pieces are smoothed and quantized by themselves: equal up to quantization.
    assert worst < 0.06, worst
    print(f"rank {rank}: gradients differ by {worst:.4f} (relative L2) from one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
