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
def thread_index(*, loc=None, ip=None):
    """threadIdx.x read again, rather than kept in a register since the last time."""
    return _ints("mov.u32 $0, %tid.x;", "=r", loc=loc, ip=ip, volatile=True)


@dsl_user_op
def block_index(*, loc=None, ip=None):
    """blockIdx.x read again."""
    return _ints("mov.u32 $0, %ctaid.x;", "=r", loc=loc, ip=ip, volatile=True)


@dsl_user_op
def arrive(barrier, *, loc=None, ip=None):
    """One arrival of the warp on an mbarrier."""
    text = (
        "{ .reg .pred p; elect.sync _|p, 0xffffffff; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }"
    )
    address = barrier.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)
    llvm.inline_asm(
        None,
        [address],
        text,
        "r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def prmt(a, b, selector, *, loc=None, ip=None):
    """Four bytes picked out of a (0-3) and b (4-7)."""
    return _ints("prmt.b32 $0, $1, $2, $3;", "=r,r,r,n", a, b, selector, loc=loc, ip=ip)


@dsl_user_op
def opaque(x, *, loc=None, ip=None):
    """X, of which the compiler knows nothing."""
    return _ints("mov.b32 $0, $1;", "=r,r", x, loc=loc, ip=ip, volatile=True)


@dsl_user_op
def imad(a, b, c, *, loc=None, ip=None):
    """A * b + c on the FMA pipe."""
    return _ints("mad.lo.s32 $0, $1, $2, $3;", "=r,r,r,r", a, b, c, loc=loc, ip=ip)


@dsl_user_op
def add_bytes(word, c, *, loc=None, ip=None):
    """The four unsigned bytes of a word, plus c: one IDP.4A."""
    return _ints("dp4a.u32.u32 $0, $1, 0x01010101, $2;", "=r,r,r", word, c, loc=loc, ip=ip)


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
def pack_halves(low, high, *, loc=None, ip=None):
    """Two floats as half2: one F2FP."""
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (high, low)]
    text = "cvt.rn.f16x2.f32 $0, $1, $2;"
    return Int32(_asm(T.i32(), text, "=r,f,f", values, loc, ip))


@dsl_user_op
def pack_bfloats(low, high, *, loc=None, ip=None):
    """Two floats as bfloat16 in one word."""
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (low, high)]
    text = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return Int32(_asm(T.i32(), text, "=r,f,f", values, loc, ip))


@dsl_user_op
def bfloat2_mul(a, b, *, loc=None, ip=None):
    """A * b, two bfloat16 at once."""
    return _ints("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", a, b, loc=loc, ip=ip)


@dsl_user_op
def low_half(x, *, loc=None, ip=None):
    """The low half of a half2 as a float."""
    text = "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }"
    return Float32(_asm(T.f32(), text, "=f,r", [Int32(x).ir_value(loc=loc, ip=ip)], loc, ip))


@dsl_user_op
def half2_mul(a, b, *, loc=None, ip=None):
    """A * b, two halves at once."""
    return _ints("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", a, b, loc=loc, ip=ip)


@dsl_user_op
def half2_fma(a, b, c, *, loc=None, ip=None):
    """A * b + c, two halves at once."""
    return _ints("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", a, b, c, loc=loc, ip=ip)


@dsl_user_op
def half2_max3(a, b, c, *, loc=None, ip=None):
    """Largest of three, for two halves that are not negative (NaN above all): one VIMNMX3."""
    text = "{ .reg .b32 t; max.u16x2 t, $1, $2; max.u16x2 $0, t, $3; }"
    return _ints(text, "=r,r,r,r", a, b, c, loc=loc, ip=ip)


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
