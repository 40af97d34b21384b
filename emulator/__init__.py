"""Runs the compiled kernels without a GPU: their PTX, on CPU tensors, one CTA after another.

For correctness only: what a kernel computes, from the instructions that the compiler made of it.
Beyond that a run finds accesses outside of the tensors, deadlocks, and what is read before it has
arrived or overwritten while it is used (with a seed other than 0 asynchronous work completes at
random moments, and warps take turns in random order). It knows the instructions that our templates
use; another one is an error that names it.

    kernel = emulator.emulate(build, plan)  # as sage_cute.compile.kernel.Kernel holds them
    kernel(q_codes, q_scale, ..., seed=1)

    with emulator.emulated_gpu():           # launches and ops on CPU tensors
        sage_cute.attention(q, k, v)
"""

from emulator.device import emulated_gpu
from emulator.kernel import Emulated, EmulatorError, emulate, seeded

__all__ = ["Emulated", "EmulatorError", "emulate", "emulated_gpu", "seeded"]
