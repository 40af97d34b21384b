"""Single instructions that the DSL has no word for, or not in the exact form that is needed."""

from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op, select_


def _asm(result, text, constraints, values, loc, ip, volatile=False):
    return llvm.inline_asm(
        result,
        values,
        text,
        constraints,
        has_side_effects=volatile,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def _ints(text, constraints, *args, loc, ip, volatile=False):
    values = [Int32(a).ir_value(loc=loc, ip=ip) for a in args]
    return Int32(_asm(T.i32(), text, constraints, values, loc, ip, volatile))


def _floats(text, constraints, *args, loc, ip):
    values = [Float32(a).ir_value(loc=loc, ip=ip) for a in args]
    return Float32(_asm(T.f32(), text, constraints, values, loc, ip))


@dsl_user_op
def opaque(x, *, loc=None, ip=None):
    """x, which the compiler cannot recognize as such."""
    return _ints("mov.b32 $0, $1;", "=r,r", x, loc=loc, ip=ip, volatile=True)


@dsl_user_op
def trap(*, loc=None, ip=None):
    """Stops the kernel with an error."""
    _ints("trap; mov.b32 $0, 0;", "=r", loc=loc, ip=ip, volatile=True)


@dsl_user_op
def thread_index(*, loc=None, ip=None):
    """threadIdx.x read again, rather than kept in a register since the last time."""
    return _ints("mov.u32 $0, %tid.x;", "=r", loc=loc, ip=ip, volatile=True)


@dsl_user_op
def block_index(*, loc=None, ip=None):
    """blockIdx.x read again."""
    return _ints("mov.u32 $0, %ctaid.x;", "=r", loc=loc, ip=ip, volatile=True)


@dsl_user_op
def prmt(a, b, selector, *, loc=None, ip=None):
    """Four bytes picked out of a (0-3) and b (4-7)."""
    return _ints("prmt.b32 $0, $1, $2, $3;", "=r,r,r,n", a, b, selector, loc=loc, ip=ip)


@dsl_user_op
def dp4a(a, b, c, *, loc=None, ip=None):
    """C plus the sum of the products of four signed bytes."""
    return _ints("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", a, b, c, loc=loc, ip=ip)


@dsl_user_op
def sign_bytes(x, *, loc=None, ip=None):
    """For each signed byte of x: -1 if it is negative, else 1."""
    text = (
        "{ .reg .b32 t; shr.u32 t, $1, 7; and.b32 t, t, 0x01010101; mul.lo.u32 t, t, 0xFE;"
        " xor.b32 $0, t, 0x01010101; }"
    )
    return _ints(text, "=r,r", x, loc=loc, ip=ip)


@dsl_user_op
def imad(a, b, c, *, loc=None, ip=None):
    """A * b + c on the FMA pipe."""
    return _ints("mad.lo.s32 $0, $1, $2, $3;", "=r,r,r,r", a, b, c, loc=loc, ip=ip)


@dsl_user_op
def max3(a, b, c, *, loc=None, ip=None):
    """Largest of three signed integers: one VIMNMX3."""
    text = "{ .reg .s32 t; max.s32 t, $1, $2; max.s32 $0, t, $3; }"
    return _ints(text, "=r,r,r,r", a, b, c, loc=loc, ip=ip)


@dsl_user_op
def fma(a, b, c, *, loc=None, ip=None):
    """A * b + c, rounded once whatever the compiler thinks of contraction."""
    return _floats("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", a, b, c, loc=loc, ip=ip)


@dsl_user_op
def mul(a, b, *, loc=None, ip=None):
    """A * b, never contracted into an fma."""
    return _floats("mul.rn.f32 $0, $1, $2;", "=f,f,f", a, b, loc=loc, ip=ip)


@dsl_user_op
def max_nan(a, b, *, loc=None, ip=None):
    """The larger one; NaN if either is NaN."""
    return _floats("max.NaN.f32 $0, $1, $2;", "=f,f,f", a, b, loc=loc, ip=ip)


@dsl_user_op
def exp2(x, *, loc=None, ip=None):
    """MUFU.EX2: relative error 2^-22, results below 2^-126 are 0."""
    return _floats("ex2.approx.ftz.f32 $0, $1;", "=f,f", x, loc=loc, ip=ip)


@dsl_user_op
def rcp(x, *, loc=None, ip=None):
    """MUFU.RCP: 1 / x to one unit in the last place."""
    return _floats("rcp.approx.ftz.f32 $0, $1;", "=f,f", x, loc=loc, ip=ip)


@dsl_user_op
def log2(x, *, loc=None, ip=None):
    """MUFU.LG2."""
    return _floats("lg2.approx.ftz.f32 $0, $1;", "=f,f", x, loc=loc, ip=ip)


@dsl_user_op
def round22(x, *, loc=None, ip=None):
    """X to the nearest number of 22 significant bits, so that 3 * 2^n * x is exact; keeps NaN."""
    text = (
        "{ .reg .f32 t, u; mul.rn.f32 t, $1, 0f40A00000; sub.rn.f32 u, t, $1;"
        " sub.rn.f32 $0, t, u; }"
    )
    return _floats(text, "=f,f", x, loc=loc, ip=ip)


@dsl_user_op
def as_float(x, *, loc=None, ip=None):
    """The bits of an int32 read as float32."""
    return Float32(llvm.bitcast(T.f32(), Int32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def as_int(x, *, loc=None, ip=None):
    """The bits of a float32 read as int32."""
    return Int32(llvm.bitcast(T.i32(), Float32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


def select(condition, a, b):
    """A where the condition holds, else b; both of a's type."""
    return type(a)(select_(condition, a, b))
