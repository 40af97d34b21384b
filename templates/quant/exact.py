"""Exactly rounded arithmetic in few instructions, on float32 registers.

Division. x / s rounded as IEEE 754 says, without the branchy eight-instruction division: with
y = fl(1/s) and e = fl(y (1 - s y)), y + e is 1/s to 2^-48, so q = fl(x y + fl(x e)) is within one
unit of x / s, the remainder x - q s is exact, and fl(q + remainder y) is the correctly rounded
quotient (Markstein's theorem). That holds while no intermediate is subnormal: rows whose largest
value is below ``TINY`` are multiplied by 2^64 first, which is exact.

Rounding. For |q| < 2^22, q + 1.5 * 2^23 rounds q half-to-even and leaves the integer in the low
byte. F2I runs on a 16-lane pipe.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.math import RoundingMode

from sage_cute.templates.blocks import ptx
from sage_cute.templates.blocks.magic import MAGIC

TINY = 2.0**-64
BOOST = 2.0**64
INVERSE_127 = 1.0 / 127.0


@cute.jit
def scale_of(absmax: Float32):
    """Scale absmax / 127 (NaN where absmax is not finite) and what :func:`round_codes` needs of it.

    Returns (scale, divisor, inverse, error, mask, tiny). The mask is 0 where codes are 0 whatever x
    is: for scales of zero and NaN. Where ``tiny`` holds, the divisor is 2^64 times the scale.
    """
    estimate = ptx.mul(absmax, Float32(INVERSE_127))
    scale = ptx.fma(ptx.fma(Float32(-127.0), estimate, absmax), Float32(INVERSE_127), estimate)
    divisor = scale
    tiny = absmax < TINY
    if tiny:  # rare: subnormal steps, or zero
        scale = cute.math.div(absmax, Float32(127.0), rounding=RoundingMode.NEAREST_EVEN)
        divisor = scale * BOOST
    mask = Int32(-1)
    if scale == 0.0:
        mask = Int32(0)
    if not absmax < Float32.inf:
        scale = Float32(Float32.nan)
        mask = Int32(0)
    inverse = cute.math.rcp(divisor, rounding=RoundingMode.NEAREST_EVEN)
    error = ptx.mul(ptx.fma(-divisor, inverse, Float32(1.0)), inverse)
    return scale, divisor, inverse, error, mask, tiny


@cute.jit
def round_codes(x, divisor: Float32, inverse: Float32, error: Float32):
    """MAGIC + round-half-even(x / divisor), as int32 bits whose low byte is the code."""
    quotient = ptx.fma(x, inverse, ptx.mul(x, error))
    quotient = ptx.fma(ptx.fma(-divisor, quotient, x), inverse, quotient)
    return ptx.as_int(quotient + MAGIC)


@cute.jit
def pack4(a: Int32, b: Int32, c: Int32, d: Int32, mask: Int32):
    """The low bytes of four words as one word."""
    return ptx.prmt(ptx.prmt(a, b, 0x0040), ptx.prmt(c, d, 0x0040), 0x5410) & mask
