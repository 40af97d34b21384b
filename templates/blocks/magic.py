"""Integers as floats without I2F, which runs on the MUFU pipe that exp2 already fills.

For |x| < 2^22 the bits of ``MAGIC_BITS + x``, read as float32, are exactly ``MAGIC + x``. Scores
need 127 * 127 * head_dim < 2^22 (head_dim <= 256). Going the other way, ``f + 1024`` in half
precision rounds f < 1024 to nearest even and leaves the integer in the low bits. Integers without a
sign need no magic number (``blocks.fold``).
"""

MAGIC = 12582912.0  # 1.5 * 2^23
MAGIC_BITS = 0x4B400000
HALF_MAGIC = 0x64006400  # 1024 twice
