// Runs decoded PTX programs of sm_90a on the CPU, one CTA after another, 32 lanes of a warp at a time.
//
// What is asynchronous on the GPU is so here: TMA copies and wgmma groups complete at random moments
// between their issue and the wait that covers them (seed 0: at once), and warps take turns in random
// order. Shared memory starts as 0xFF (NaN), every global access must lie in a registered range.
// Not modelled: time, caches, memory order beyond that of barriers, registers per thread.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

namespace {

using std::string;
typedef uint8_t u8;
typedef int8_t s8;
typedef uint16_t u16;
typedef int16_t s16;
typedef uint32_t u32;
typedef int32_t s32;
typedef uint64_t u64;
typedef int64_t s64;

constexpr u32 kShared = 1024;  // where shared memory starts, so that 0 is no address

// As ptx.py packs it.
struct Ins {
    s32 op, guard, negated;  // guard: slot of a predicate, -1 none
    s32 o[8];                       // slots of operands, -1 none
    s32 list, list_count;           // further operands in Program::lists
    s32 target, line;               // branch target (index), line of the PTX text
    s64 imm[2];
};
struct Value {  // a slot that holds the same for all lanes of a warp
    s32 slot, width, kind, unused;
    u64 bits;
};
enum Kind { kConstant, kParamAddress, kSharedAddress, kTid, kCtaid, kNctaid, kNtid, kLane, kWarp };

struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};

[[noreturn]] void fault(const char* text) { throw Fault(text); }
template <class... T>
[[noreturn]] void fault(const char* format, T... values) {
    char text[512];
    snprintf(text, sizeof text, format, values...);
    throw Fault(text);
}

struct Cta;
struct Warp;
typedef void (*Handler)(Cta&, Warp&, const Ins&, u32 mask);

struct Program {
    string name;
    std::vector<Ins> ins;
    std::vector<s32> lists;
    std::vector<Value> values;
    std::vector<s32> param_offset, param_size;
    s32 units;  // size of a warp's register file, 32 bytes each
};

struct Product {  // one wgmma of one warp
    const Ins* ins;
    u64 a, b;  // descriptors
    bool accumulate;
};

struct Warp {
    int id;
    u32 pc = 0, mask = ~0u;                   // the lanes that run
    std::vector<std::pair<u32, u32>> others;  // (pc, lanes) that wait for these to catch up
    std::vector<u8> regs;
    bool done = false, stopped = false;  // stopped: at a barrier, which says when it goes on
    u64 wait_address = 0;
    u32 wait_parity = 0;
    std::vector<Product> open;
    std::deque<std::vector<Product>> groups;

    template <class T>
    T* r(s32 slot) {
        return reinterpret_cast<T*>(regs.data() + size_t(slot) * 32);
    }
};

struct Barrier {
    u32 expected = 0;
    s64 arrivals = 0, bytes = 0;
    u64 phase = 0;
};

struct TensorMap {  // as the host code packs it: address, strides / 16, sizes - 1, boxes - 1
    u64 address;
    u32 flags, stride[4], high, size[5], boxes[2];
};

struct Copy {
    const TensorMap* map;
    s32 at[5];
    int rank;
    u32 target, barrier;
    const Ins* ins;
};

struct Machine {
    std::vector<std::pair<u64, u64>> ranges;  // sorted [first, last) of global memory
    string error;
    u32 seed = 0;
};
Machine machine;

struct Cta {
    const Program& program;
    std::vector<u8> shared;
    std::vector<Warp> warps;
    std::vector<u8> params;
    std::map<u32, Barrier> barriers;
    std::map<u32, std::pair<u32, std::vector<Warp*>>> named;  // arrived threads, who waits
    std::vector<Copy> copies;
    std::mt19937 random;
    bool eager;

    bool chance(int percent) { return int(random() % 100) < percent; }

    u8* smem(u32 address, u32 bytes, u32 align) {
        if (address < kShared || address + u64(bytes) > kShared + shared.size())
            fault("shared address %u (+%u) is outside %zu bytes", address - kShared, bytes, shared.size());
        if (address % align) fault("shared address %u is not on %u bytes", address - kShared, align);
        return shared.data() + (address - kShared);
    }
    static u8* gmem(u64 address, u64 bytes, u32 align) {
        auto& ranges = machine.ranges;
        auto it = std::upper_bound(ranges.begin(), ranges.end(), std::make_pair(address, ~u64(0)));
        if (it == ranges.begin() || (--it)->second < address + bytes)
            fault("global address %#llx (+%llu) is in no tensor%s", (unsigned long long)address,
                  (unsigned long long)bytes,
                  it == ranges.begin() ? "" : (" (" + std::to_string(address - it->first) + " of " +
                                               std::to_string(it->second - it->first) + " bytes)").c_str());
        if (address % align) fault("global address %#llx is not on %u bytes", (unsigned long long)address, align);
        return reinterpret_cast<u8*>(address);
    }
    Barrier& barrier(u32 address) {
        auto it = barriers.find(address);
        if (it == barriers.end()) fault("no mbarrier at %u: not initialized", address - kShared);
        return it->second;
    }
    void settle(Barrier& b) {
        if (b.arrivals < 0) fault("more arrivals on an mbarrier than its %u", b.expected);
        if (b.arrivals == 0 && b.bytes == 0) {
            ++b.phase;
            b.arrivals = b.expected;
        }
    }
    void copy(const Copy& c);
    void multiply(Warp& w, const Product& p);
    void finish_one(Warp& w) {
        for (auto& p : w.groups.front()) multiply(w, p);
        w.groups.pop_front();
    }
    bool ready(Warp& w) {
        if (w.done || w.stopped) return false;
        if (w.wait_address && (barrier(u32(w.wait_address)).phase & 1) == w.wait_parity) return false;
        return true;
    }
    void step(Warp& w, int quantum);
    void run();
};

// ---------------------------------------------------------------- numbers

float half_to_float(u16 x) {
    _Float16 h;
    memcpy(&h, &x, 2);
    return float(h);
}
template <class T>
u16 to_half(T x) {
    _Float16 h = _Float16(x);
    u16 bits;
    memcpy(&bits, &h, 2);
    return bits;
}
float bf16_to_float(u16 x) {
    u32 bits = u32(x) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
u16 to_bf16(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fff;
    return u16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
float flush(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }
template <class T>
T shift_left(T x, u32 n) {
    return n >= sizeof(T) * 8 ? T(0) : T(x << n);
}
template <class T>
T shift_right(T x, u32 n) {
    if (n >= sizeof(T) * 8) return std::is_signed_v<T> && x < 0 ? T(-1) : T(0);
    return T(x >> n);
}
template <class T>
T largest(T a, T b) {  // a NaN loses
    return a != a ? b : b != b ? a : std::max(a, b);
}
template <class T>
T smallest(T a, T b) {
    return a != a ? b : b != b ? a : std::min(a, b);
}
u32 permute(u32 a, u32 b, u32 selector) {
    u64 bytes = u64(b) << 32 | a;
    u32 result = 0;
    for (int i = 0; i < 4; ++i) {
        u32 pick = selector >> (4 * i) & 15;
        u32 byte = u32(bytes >> (8 * (pick & 7))) & 255;
        if (pick & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << (8 * i);
    }
    return result;
}
template <class F>
u32 on_halves(F f, u32 a, u32 b, u32 c = 0) {
    return f(u16(a), u16(b), u16(c)) | u32(f(u16(a >> 16), u16(b >> 16), u16(c >> 16))) << 16;
}

// ---------------------------------------------------------------- handlers

template <class F>
void each(u32 mask, F f) {
    if (mask == ~0u)
        for (int l = 0; l < 32; ++l) f(l);
    else
        for (; mask; mask &= mask - 1) f(__builtin_ctz(mask));
}
template <class D, class A, class F>
void unary(Cta&, Warp& w, const Ins& i, u32 mask) {
    D* d = w.r<D>(i.o[0]);
    A* a = w.r<A>(i.o[1]);
    each(mask, [&](int l) { d[l] = F()(a[l]); });
}
template <class D, class A, class B, class F>
void binary(Cta&, Warp& w, const Ins& i, u32 mask) {
    D* d = w.r<D>(i.o[0]);
    A* a = w.r<A>(i.o[1]);
    B* b = w.r<B>(i.o[2]);
    each(mask, [&](int l) { d[l] = F()(a[l], b[l]); });
}
template <class D, class A, class B, class C, class F>
void ternary(Cta&, Warp& w, const Ins& i, u32 mask) {
    D* d = w.r<D>(i.o[0]);
    A* a = w.r<A>(i.o[1]);
    B* b = w.r<B>(i.o[2]);
    C* c = w.r<C>(i.o[3]);
    each(mask, [&](int l) { d[l] = F()(a[l], b[l], c[l]); });
}
std::map<string, Handler> handlers;

template <class D, class A, class F>
void def1(const string& name, F) {
    handlers[name] = unary<D, A, F>;
}
template <class D, class A, class B, class F>
void def2(const string& name, F) {
    handlers[name] = binary<D, A, B, F>;
}
template <class D, class A, class B, class C, class F>
void def3(const string& name, F) {
    handlers[name] = ternary<D, A, B, C, F>;
}

template <class T>
void arithmetic(const string& t) {
    def2<T, T, T>("add." + t, [](T a, T b) { return T(a + b); });
    def2<T, T, T>("sub." + t, [](T a, T b) { return T(a - b); });
    def1<T, T>("neg." + t, [](T a) { return T(-a); });
    def1<T, T>("abs." + t, [](T a) { return a < 0 ? T(-a) : a; });
    def2<T, T, T>("max." + t, [](T a, T b) { return largest(a, b); });
    def2<T, T, T>("min." + t, [](T a, T b) { return smallest(a, b); });
}
template <class T>
void compare(const string& t) {
    def2<u8, T, T>("setp.eq." + t, [](T a, T b) -> u8 { return a == b; });
    def2<u8, T, T>("setp.ne." + t, [](T a, T b) -> u8 { return a == a && b == b && a != b; });
    def2<u8, T, T>("setp.lt." + t, [](T a, T b) -> u8 { return a < b; });
    def2<u8, T, T>("setp.le." + t, [](T a, T b) -> u8 { return a <= b; });
    def2<u8, T, T>("setp.gt." + t, [](T a, T b) -> u8 { return a > b; });
    def2<u8, T, T>("setp.ge." + t, [](T a, T b) -> u8 { return a >= b; });
    if constexpr (std::is_floating_point_v<T>) {
        def2<u8, T, T>("setp.equ." + t, [](T a, T b) -> u8 { return !(a < b || a > b); });
        def2<u8, T, T>("setp.neu." + t, [](T a, T b) -> u8 { return !(a == b); });
        def2<u8, T, T>("setp.ltu." + t, [](T a, T b) -> u8 { return !(a >= b); });
        def2<u8, T, T>("setp.leu." + t, [](T a, T b) -> u8 { return !(a > b); });
        def2<u8, T, T>("setp.gtu." + t, [](T a, T b) -> u8 { return !(a <= b); });
        def2<u8, T, T>("setp.geu." + t, [](T a, T b) -> u8 { return !(a < b); });
        def2<u8, T, T>("setp.nan." + t, [](T a, T b) -> u8 { return a != a || b != b; });
        def2<u8, T, T>("setp.num." + t, [](T a, T b) -> u8 { return a == a && b == b; });
    }
}
template <class T, class W>
void integers(const string& t) {
    arithmetic<T>(t);
    compare<T>(t);
    typedef std::make_unsigned_t<T> U;
    def2<T, T, T>("mul.lo." + t, [](T a, T b) { return T(U(a) * U(b)); });
    def2<T, T, T>("mul.hi." + t, [](T a, T b) { return T((W(a) * W(b)) >> (8 * sizeof(T))); });
    def3<T, T, T, T>("mad.lo." + t, [](T a, T b, T c) { return T(U(a) * U(b) + U(c)); });
    if constexpr (sizeof(T) < 8) {
        def2<W, T, T>("mul.wide." + t, [](T a, T b) { return W(W(a) * W(b)); });
        def3<W, T, T, W>("mad.wide." + t, [](T a, T b, W c) { return W(W(a) * W(b) + c); });
    }
    def2<T, T, T>("div." + t, [](T a, T b) { return b ? T(a / b) : T(-1); });
    def2<T, T, T>("rem." + t, [](T a, T b) { return b ? T(a % b) : a; });
    def2<T, T, u32>("shr." + t, [](T a, u32 n) { return shift_right(a, n); });
    def2<T, T, T>("max.relu." + t, [](T a, T b) { return std::max(std::max(a, b), T(0)); });
    def2<T, T, T>("min.relu." + t, [](T a, T b) { return std::max(std::min(a, b), T(0)); });
}
template <class T>
void bits(const string& t) {
    compare<T>(t);
    def2<T, T, T>("and." + t, [](T a, T b) { return T(a & b); });
    def2<T, T, T>("or." + t, [](T a, T b) { return T(a | b); });
    def2<T, T, T>("xor." + t, [](T a, T b) { return T(a ^ b); });
    def1<T, T>("not." + t, [](T a) { return T(~a); });
    def2<T, T, u32>("shl." + t, [](T a, u32 n) { return shift_left(a, n); });
    def2<T, T, u32>("shr." + t, [](T a, u32 n) { return shift_right(a, n); });
}
template <class T>
void moves(std::initializer_list<const char*> names) {
    for (string t : names) {
        def1<T, T>("mov." + t, [](T a) { return a; });
        def3<T, T, T, u8>("selp." + t, [](T a, T b, u8 p) { return p ? a : b; });
    }
}
template <class A>
void casts(const string& from) {  // between integers: the source's sign counts
    def1<s32, A>("cvt.s32." + from, [](A a) { return s32(a); });
    def1<u32, A>("cvt.u32." + from, [](A a) { return u32(a); });
    def1<s64, A>("cvt.s64." + from, [](A a) { return s64(a); });
    def1<u64, A>("cvt.u64." + from, [](A a) { return u64(a); });
    def1<u16, A>("cvt.u16." + from, [](A a) { return u16(a); });
    def1<s16, A>("cvt.s16." + from, [](A a) { return s16(a); });
    def1<s16, A>("cvt.s8." + from, [](A a) { return s16(s8(a)); });
    def1<u16, A>("cvt.u8." + from, [](A a) { return u16(u8(a)); });
    def1<float, A>("cvt.rn.f32." + from, [](A a) { return float(a); });
    def1<double, A>("cvt.rn.f64." + from, [](A a) { return double(a); });
}
template <class T>
void floats(const string& t) {
    arithmetic<T>(t);
    compare<T>(t);
    for (string r : {"", "rn."}) {
        def2<T, T, T>("add." + r + t, [](T a, T b) { return a + b; });
        def2<T, T, T>("sub." + r + t, [](T a, T b) { return a - b; });
        def2<T, T, T>("mul." + r + t, [](T a, T b) { return a * b; });
        def2<T, T, T>("div." + r + t, [](T a, T b) { return a / b; });
    }
    def3<T, T, T, T>("fma.rn." + t, [](T a, T b, T c) { return std::fma(a, b, c); });
    def1<T, T>("rcp.rn." + t, [](T a) { return T(1) / a; });
    def1<T, T>("sqrt.rn." + t, [](T a) { return std::sqrt(a); });
    def1<T, T>("abs." + t, [](T a) { return std::fabs(a); });
    def2<T, T, T>("max.NaN." + t, [](T a, T b) { return a != a ? a : b != b ? b : std::max(a, b); });
    def2<T, T, T>("min.NaN." + t, [](T a, T b) { return a != a ? a : b != b ? b : std::min(a, b); });
}

// ------------------------------------------------ memory: o[0] address, imm[0] offset, list: values

template <class T, bool kGlobal>
void load(Cta& c, Warp& w, const Ins& i, u32 mask) {
    each(mask, [&](int l) {
        u32 bytes = sizeof(T) * i.list_count;
        u8* from = kGlobal ? Cta::gmem(w.r<u64>(i.o[0])[l] + i.imm[0], bytes, bytes)
                           : c.smem(u32(w.r<u32>(i.o[0])[l] + i.imm[0]), bytes, bytes);
        for (int n = 0; n < i.list_count; ++n)
            memcpy(&w.r<T>(c.program.lists[i.list + n])[l], from + n * sizeof(T), sizeof(T));
    });
}
template <class T, bool kGlobal>
void store(Cta& c, Warp& w, const Ins& i, u32 mask) {
    each(mask, [&](int l) {
        u32 bytes = sizeof(T) * i.list_count;
        u8* to = kGlobal ? Cta::gmem(w.r<u64>(i.o[0])[l] + i.imm[0], bytes, bytes)
                         : c.smem(u32(w.r<u32>(i.o[0])[l] + i.imm[0]), bytes, bytes);
        for (int n = 0; n < i.list_count; ++n)
            memcpy(to + n * sizeof(T), &w.r<T>(c.program.lists[i.list + n])[l], sizeof(T));
    });
}
template <class T>  // imm[0]: offset in the parameters
void load_param(Cta& c, Warp& w, const Ins& i, u32 mask) {
    each(mask, [&](int l) {
        for (int n = 0; n < i.list_count; ++n)
            memcpy(&w.r<T>(c.program.lists[i.list + n])[l], c.params.data() + i.imm[0] + n * sizeof(T), sizeof(T));
    });
}

// Operations that need their whole warp. Lanes that have returned do not count, as on the GPU.
void converged(const Warp& w, const char* what) {
    if (!w.others.empty()) fault("%s in a diverged warp", what);
}

void elect(Cta&, Warp& w, const Ins& i, u32 mask) {
    converged(w, "elect.sync");
    int leader = __builtin_ctz(mask);
    each(mask, [&](int l) {
        if (i.o[0] >= 0) w.r<u32>(i.o[0])[l] = leader;
        w.r<u8>(i.o[1])[l] = l == leader;
    });
}
template <bool kAll>
void vote(Cta&, Warp& w, const Ins& i, u32 mask) {
    converged(w, "vote.sync");
    bool all = true, any = false;
    each(mask, [&](int l) {
        bool p = w.r<u8>(i.o[1])[l];
        all &= p, any |= p;
    });
    each(mask, [&](int l) { w.r<u8>(i.o[0])[l] = kAll ? all : any; });
}
void ballot(Cta&, Warp& w, const Ins& i, u32 mask) {
    converged(w, "vote.sync");
    u32 votes = 0;
    each(mask, [&](int l) { votes |= u32(w.r<u8>(i.o[1])[l] != 0) << l; });
    each(mask, [&](int l) { w.r<u32>(i.o[0])[l] = votes; });
}
template <char kMode>
void shuffle(Cta&, Warp& w, const Ins& i, u32 mask) {
    converged(w, "shfl.sync");
    u32 *d = w.r<u32>(i.o[0]), *a = w.r<u32>(i.o[1]), *b = w.r<u32>(i.o[2]), *c = w.r<u32>(i.o[3]);
    u32 result[32];
    each(mask, [&](int l) {
        u32 segment = c[l] >> 8 & 31, clamp = c[l] & 31, lane = l;
        u32 high = (lane & segment) | (clamp & ~segment), low = lane & segment, from;
        bool inside;
        if (kMode == 'b') from = lane ^ (b[l] & 31), inside = from <= high;
        else if (kMode == 'i') from = low | (b[l] & 31 & ~segment), inside = from <= high;
        else if (kMode == 'd') from = lane + (b[l] & 31), inside = from <= high;
        else from = lane - (b[l] & 31), inside = s32(from) >= s32(high);
        result[l] = a[inside ? from : lane];
    });
    each(mask, [&](int l) { d[l] = result[l]; });
}

// ------------------------------------------------ barriers

void mbarrier_init(Cta& c, Warp& w, const Ins& i, u32 mask) {
    each(mask, [&](int l) {
        u32 address = w.r<u32>(i.o[0])[l] + i.imm[0], count = w.r<u32>(i.o[1])[l];
        c.smem(address, 8, 8);
        c.barriers[address] = Barrier{count, count, 0, 0};
    });
}
void mbarrier_arrive(Cta& c, Warp& w, const Ins& i, u32 mask) {
    each(mask, [&](int l) {
        Barrier& b = c.barrier(w.r<u32>(i.o[0])[l] + i.imm[0]);
        b.arrivals -= i.o[1] < 0 ? 1 : w.r<u32>(i.o[1])[l];
        c.settle(b);
    });
}
void mbarrier_arrive_expect(Cta& c, Warp& w, const Ins& i, u32 mask) {
    each(mask, [&](int l) {
        Barrier& b = c.barrier(w.r<u32>(i.o[0])[l] + i.imm[0]);
        b.bytes += w.r<u32>(i.o[1])[l];
        --b.arrivals;
        c.settle(b);
    });
}
void mbarrier_expect(Cta& c, Warp& w, const Ins& i, u32 mask) {
    each(mask, [&](int l) {
        c.barrier(w.r<u32>(i.o[0])[l] + i.imm[0]).bytes += w.r<u32>(i.o[1])[l];
    });
}
// o[0] predicate, o[1] address, o[2] parity. With a time hint (imm[1]) it is the body of a loop:
// the warp sleeps until it holds.
void mbarrier_try_wait(Cta& c, Warp& w, const Ins& i, u32 mask) {
    int first = __builtin_ctz(mask);
    u32 address = w.r<u32>(i.o[1])[first] + i.imm[0], parity = w.r<u32>(i.o[2])[first] & 1;
    each(mask, [&](int l) {
        if (u32(w.r<u32>(i.o[1])[l] + i.imm[0]) != address || (w.r<u32>(i.o[2])[l] & 1) != parity)
            fault("lanes of a warp wait for different mbarriers");
    });
    bool over = (c.barrier(address).phase & 1) != parity;
    if (!over && i.imm[1]) w.wait_address = address, w.wait_parity = parity;
    if (over && !i.imm[1] && !c.eager && c.chance(30)) over = false;  // it may also not know yet
    each(mask, [&](int l) { w.r<u8>(i.o[0])[l] = over; });
}
// o[0] barrier, o[1] threads (-1: all of the CTA); imm[0]: 1 waits
void named_barrier(Cta& c, Warp& w, const Ins& i, u32 mask) {
    converged(w, "bar");
    int l = __builtin_ctz(mask);
    u32 id = w.r<u32>(i.o[0])[l];
    u32 threads = i.o[1] < 0 ? u32(c.warps.size() * 32) : w.r<u32>(i.o[1])[l];
    auto& [arrived, waiting] = c.named[id];
    arrived += 32;
    if (i.imm[0]) waiting.push_back(&w), w.stopped = true;
    if (arrived > threads) fault("named barrier %u: %u threads, more than its %u", id, arrived, threads);
    if (arrived == threads) {
        for (Warp* other : waiting) other->stopped = false;
        arrived = 0;
        waiting.clear();
    }
}

// ------------------------------------------------ asynchronous work

// o[0] target, o[1] address of the tensor map, o[2] mbarrier; list: coordinates
void tensor_copy(Cta& c, Warp& w, const Ins& i, u32 mask) {
    each(mask, [&](int l) {
        Copy copy;
        copy.map = reinterpret_cast<const TensorMap*>(w.r<u64>(i.o[1])[l]);
        copy.rank = i.list_count;
        for (int n = 0; n < i.list_count; ++n) copy.at[n] = w.r<s32>(c.program.lists[i.list + n])[l];
        copy.target = w.r<u32>(i.o[0])[l] + i.imm[0];
        copy.barrier = w.r<u32>(i.o[2])[l] + i.imm[1];
        copy.ins = &i;
        if (c.eager) c.copy(copy);
        else c.copies.push_back(copy);
    });
}

int element_size(u32 flags) {  // of the types seen: int8, float16, float32, bfloat16
    int type = flags >> 7 & 15;
    if (type != 0 && type != 6 && type != 7 && type != 10) fault("a tensor map of unknown element type %d (flags %#x)", type, flags);
    return type == 7 ? 4 : type ? 2 : 1;
}

void Cta::copy(const Copy& c) {
    const TensorMap& map = *c.map;
    if (map.address % 16) fault("a tensor map's address %#llx is not on 16 bytes", (unsigned long long)map.address);
    int size = element_size(map.flags), swizzle = map.flags >> 13 & 3;
    u32 box[5] = {u32(map.boxes[0] >> 24), u32(map.boxes[1] & 255), u32(map.boxes[1] >> 8 & 255),
                  u32(map.boxes[1] >> 16 & 255), u32(map.boxes[1] >> 24)};
    u64 strides[5] = {u64(size)};
    for (int d = 1; d < 5; ++d) strides[d] = (u64(map.stride[d - 1]) | u64(map.high >> (4 * (d - 1)) & 15) << 32) * 16;
    u64 total = size;
    for (int d = 0; d < c.rank; ++d) total *= box[d] + 1;
    if (box[0] * size + size > (swizzle == 3 ? 128u : swizzle == 2 ? 64u : swizzle == 1 ? 32u : 4096u))
        fault("TMA box of %u elements of %d bytes in swizzle mode %d (flags %#x)", box[0] + 1, size, swizzle, map.flags);
    smem(c.target, total, 128);
    u32 at[5] = {};
    for (u64 n = 0; n < total; n += size) {
        u64 address = map.address;
        bool inside = true;
        for (int d = 0; d < c.rank; ++d) {
            s64 index = s64(c.at[d]) + at[d];
            inside &= index >= 0 && index <= s64(map.size[d]);
            address += index * strides[d];
        }
        u32 to = c.target + n;
        to ^= swizzle == 3 ? (to >> 3 & 0x70) : swizzle == 2 ? (to >> 3 & 0x30) : swizzle == 1 ? (to >> 3 & 0x10) : 0;
        u8* target = smem(to, size, 1);
        if (inside) memcpy(target, gmem(address, size, 1), size);
        else memset(target, 0, size);
        for (int d = 0; d < c.rank; ++d) {
            if (++at[d] <= box[d]) break;
            at[d] = 0;
        }
    }
    Barrier& b = barrier(c.barrier);
    b.bytes -= total;
    settle(b);
}

struct Operand {  // a matrix in shared memory as a wgmma descriptor tells it
    u32 start, leading, stride, width, mask;
    explicit Operand(u64 d) {
        start = u32(d & 0x3fff) << 4;
        leading = u32(d >> 16 & 0x3fff) << 4;
        stride = u32(d >> 32 & 0x3fff) << 4;
        if (d >> 49 & 7) fault("wgmma descriptor with base offset %u", unsigned(d >> 49 & 7));
        int mode = d >> 62;
        width = mode == 1 ? 128 : mode == 2 ? 64 : mode == 3 ? 32 : 16;
        mask = mode == 1 ? 0x70 : mode == 2 ? 0x30 : mode == 3 ? 0x10 : 0;
    }
    u32 swizzled(u32 address) const { return address ^ (address >> 3 & mask); }
    // Byte `b` (of 32) of row `r`, with the K dimension contiguous.
    u32 k_major(u32 r, u32 b) const {
        if (width == 16) return start + r / 8 * stride + r % 8 * 16 + b / 16 * leading + b % 16;
        return swizzled(start + r / 8 * stride + r % 8 * width + b);
    }
    // 16-bit element (r, k) with rows contiguous.
    u32 mn_major(u32 r, u32 k) const {
        u32 per = width / 2;
        return swizzled(start + r / per * leading + k / 8 * stride + k % 8 * width + r % per * 2);
    }
};

// imm[0]: N | kinds << 16 (A s8 0, u8 1, f16 2, bf16 3; B likewise << 4) | A in registers << 8 |
// A transposed << 9 | B transposed << 10; list: accumulators, then A's registers
void Cta::multiply(Warp& w, const Product& p) {
    const Ins& i = *p.ins;
    const s32* lists = program.lists.data() + i.list;
    int n = i.imm[0] & 0xffff, kinds = i.imm[0] >> 16, kind_a = kinds & 15, kind_b = kinds >> 4 & 15;
    bool registers = kinds >> 8 & 1, transposed_a = kinds >> 9 & 1, transposed_b = kinds >> 10 & 1;
    int row0 = 16 * (w.id % 4);
    Operand a_matrix(registers ? 0 : p.a), b_matrix(p.b);
    if (kind_a < 2) {
        static thread_local s32 a[16][32], b[32][256];
        if (registers)
            for (int l = 0; l < 32; ++l)
                for (int q = 0; q < 4; ++q) {
                    u32 word = w.r<u32>(lists[n / 2 + q])[l];
                    for (int e = 0; e < 4; ++e) {
                        u8 byte = word >> (8 * e);
                        a[l / 4 + 8 * (q & 1)][4 * (l % 4) + 16 * (q >> 1) + e] = kind_a ? s32(byte) : s32(s8(byte));
                    }
                }
        else
            for (int r = 0; r < 16; ++r)
                for (int k = 0; k < 32; k += 16) {
                    u8* from = smem(a_matrix.k_major(row0 + r, k), 16, 16);
                    for (int e = 0; e < 16; ++e) a[r][k + e] = kind_a ? s32(from[e]) : s32(s8(from[e]));
                }
        for (int r = 0; r < n; ++r)
            for (int k = 0; k < 32; k += 16) {
                u8* from = smem(b_matrix.k_major(r, k), 16, 16);
                for (int e = 0; e < 16; ++e) b[k + e][r] = kind_b ? s32(from[e]) : s32(s8(from[e]));
            }
        for (int r = 0; r < 16; ++r) {
            s32 sum[256] = {};
            for (int k = 0; k < 32; ++k) {
                s32 x = a[r][k];
                for (int c = 0; c < n; ++c) sum[c] += x * b[k][c];
            }
            for (int c = 0; c < n; ++c) {
                s32& d = w.r<s32>(lists[c / 8 * 4 + 2 * (r / 8) + c % 2])[4 * (r % 8) + c % 8 / 2];
                s64 total = s64(p.accumulate ? d : 0) + sum[c];
                d = s32(std::max<s64>(INT32_MIN, std::min<s64>(INT32_MAX, total)));
            }
        }
        return;
    }
    static thread_local float a[16][16], b[16][256];
    auto number = [](int kind, u16 x) { return kind == 2 ? half_to_float(x) : bf16_to_float(x); };
    if (registers)
        for (int l = 0; l < 32; ++l)
            for (int q = 0; q < 4; ++q) {
                u32 word = w.r<u32>(lists[n / 2 + q])[l];
                for (int e = 0; e < 2; ++e)
                    a[l / 4 + 8 * (q & 1)][2 * (l % 4) + 8 * (q >> 1) + e] = number(kind_a, u16(word >> (16 * e)));
            }
    else
        for (int r = 0; r < 16; ++r)
            for (int k = 0; k < 16; ++k) {
                u32 at = transposed_a ? a_matrix.mn_major(row0 + r, k) : a_matrix.k_major(row0 + r, 2 * k);
                u16 x;
                memcpy(&x, smem(at, 2, 2), 2);
                a[r][k] = number(kind_a, x);
            }
    for (int r = 0; r < n; ++r)
        for (int k = 0; k < 16; ++k) {
            u32 at = transposed_b ? b_matrix.mn_major(r, k) : b_matrix.k_major(r, 2 * k);
            u16 x;
            memcpy(&x, smem(at, 2, 2), 2);
            b[k][r] = number(kind_b, x);
        }
    for (int r = 0; r < 16; ++r) {
        double sum[256] = {};
        for (int k = 0; k < 16; ++k) {
            double x = a[r][k];
            for (int c = 0; c < n; ++c) sum[c] += x * b[k][c];
        }
        for (int c = 0; c < n; ++c) {
            float& d = w.r<float>(lists[c / 8 * 4 + 2 * (r / 8) + c % 2])[4 * (r % 8) + c % 8 / 2];
            d = float((p.accumulate ? double(d) : 0.0) + sum[c]);
        }
    }
}

// o[0] descriptor of A (-1: registers), o[1] descriptor of B, o[2] predicate: add to D
void wgmma(Cta& c, Warp& w, const Ins& i, u32 mask) {
    if (mask != ~0u) fault("wgmma with lanes %#x", mask);
    Product p{&i, i.o[0] < 0 ? 0 : w.r<u64>(i.o[0])[0], w.r<u64>(i.o[1])[0], w.r<u8>(i.o[2])[0] != 0};
    if (c.eager) c.multiply(w, p);
    else w.open.push_back(p);
}
void wgmma_commit(Cta&, Warp& w, const Ins&, u32) {
    w.groups.push_back(std::move(w.open));
    w.open.clear();
}
void wgmma_wait(Cta& c, Warp& w, const Ins& i, u32) {
    while (s64(w.groups.size()) > i.imm[0]) c.finish_one(w);
}
void nothing(Cta&, Warp&, const Ins&, u32) {}
void split(Cta&, Warp& w, const Ins& i, u32 mask) {  // mov.b32 {l, h}, x
    u32* a = w.r<u32>(i.o[2]);
    each(mask, [&](int l) {
        u32 x = a[l];
        w.r<u16>(i.o[0])[l] = u16(x), w.r<u16>(i.o[1])[l] = u16(x >> 16);
    });
}
void join(Cta&, Warp& w, const Ins& i, u32 mask) {  // mov.b32 x, {l, h}
    each(mask, [&](int l) { w.r<u32>(i.o[0])[l] = w.r<u16>(i.o[1])[l] | u32(w.r<u16>(i.o[2])[l]) << 16; });
}
void split64(Cta&, Warp& w, const Ins& i, u32 mask) {
    each(mask, [&](int l) {
        u64 x = w.r<u64>(i.o[2])[l];
        w.r<u32>(i.o[0])[l] = u32(x), w.r<u32>(i.o[1])[l] = u32(x >> 32);
    });
}
void join64(Cta&, Warp& w, const Ins& i, u32 mask) {
    each(mask, [&](int l) { w.r<u64>(i.o[0])[l] = w.r<u32>(i.o[1])[l] | u64(w.r<u32>(i.o[2])[l]) << 32; });
}
void trap(Cta&, Warp&, const Ins&, u32) { fault("trap"); }

void branch(Cta&, Warp&, const Ins&, u32) {}
void ret(Cta&, Warp&, const Ins&, u32) {}

template <class T>
void memory(const string& t) {
    handlers["ld.global." + t] = load<T, true>;
    handlers["st.global." + t] = store<T, true>;
    handlers["ld.shared." + t] = load<T, false>;
    handlers["st.shared." + t] = store<T, false>;
    handlers["ld.param." + t] = load_param<T>;
}

void define() {
    integers<s16, s32>("s16"), integers<u16, u32>("u16");
    integers<s32, s64>("s32"), integers<u32, u64>("u32");
    integers<s64, __int128>("s64"), integers<u64, unsigned __int128>("u64");
    bits<u16>("b16"), bits<u32>("b32"), bits<u64>("b64");
    floats<float>("f32"), floats<double>("f64");
    moves<u8>({"pred"});
    moves<u16>({"b16", "u16", "s16"});
    moves<u32>({"b32", "u32", "s32", "f32"});
    moves<u64>({"b64", "u64", "s64", "f64"});
    memory<u16>("b16"), memory<u32>("b32"), memory<u64>("b64");
    memory<u32>("f32"), memory<u64>("f64"), memory<u32>("u32"), memory<u64>("u64");
    def1<u64, u64>("cvta.param.u64", [](u64 a) { return a; });
    def1<u64, u64>("cvta.to.global.u64", [](u64 a) { return a; });
    def1<u8, u8>("not.pred", [](u8 a) -> u8 { return !a; });
    def2<u8, u8, u8>("and.pred", [](u8 a, u8 b) -> u8 { return a && b; });
    def2<u8, u8, u8>("or.pred", [](u8 a, u8 b) -> u8 { return a || b; });
    def2<u8, u8, u8>("xor.pred", [](u8 a, u8 b) -> u8 { return !a != !b; });

    casts<s16>("s16"), casts<u16>("u16"), casts<s32>("s32"), casts<u32>("u32");
    casts<s64>("s64"), casts<u64>("u64");
    def1<s16, s16>("cvt.s16.s8", [](s16 a) { return s16(s8(a)); });
    def1<s32, s16>("cvt.s32.s8", [](s16 a) { return s32(s8(a)); });
    def1<s32, s32>("cvt.s32.s8@4", [](s32 a) { return s32(s8(a)); });  // of a wider register
    def1<u32, u32>("cvt.u32.u8@4", [](u32 a) { return u32(u8(a)); });
    def2<u32, u32, u32>("max.u16x2", [](u32 a, u32 b) {
        return on_halves([](u16 x, u16 y, u16) { return std::max(x, y); }, a, b);
    });
    def2<u32, u32, u32>("min.u16x2", [](u32 a, u32 b) {
        return on_halves([](u16 x, u16 y, u16) { return std::min(x, y); }, a, b);
    });
    def1<u16, u16>("cvt.u16.u8", [](u16 a) { return u16(u8(a)); });
    def1<u32, u16>("cvt.u32.u8", [](u16 a) { return u32(u8(a)); });
    def1<float, s16>("cvt.rn.f32.s8", [](s16 a) { return float(s8(a)); });
    def1<float, double>("cvt.rn.f32.f64", [](double a) { return float(a); });
    def1<double, float>("cvt.f64.f32", [](float a) { return double(a); });
    def1<float, u16>("cvt.f32.bf16", [](u16 a) { return bf16_to_float(a); });
    def1<float, u16>("cvt.f32.f16", [](u16 a) { return half_to_float(a); });
    def1<u16, float>("cvt.rn.bf16.f32", [](float a) { return to_bf16(a); });
    def1<u16, float>("cvt.rn.f16.f32", [](float a) { return to_half(a); });
    def1<s32, float>("cvt.rni.s32.f32", [](float a) { return s32(std::nearbyint(std::fmax(-2147483648.0, std::fmin(2147483647.0, double(a == a ? a : 0.0f))))); });
    def1<float, float>("cvt.rni.f32.f32", [](float a) { return std::nearbyint(a); });
    def2<u32, float, float>("cvt.rn.bf16x2.f32", [](float a, float b) { return u32(to_bf16(a)) << 16 | to_bf16(b); });
    def2<u32, float, float>("cvt.rn.f16x2.f32", [](float a, float b) { return u32(to_half(a)) << 16 | to_half(b); });

    def3<u32, u32, u32, u32>("fma.rn.f16x2", [](u32 a, u32 b, u32 c) {
        return on_halves([](u16 x, u16 y, u16 z) { return to_half(double(half_to_float(x)) * half_to_float(y) + half_to_float(z)); }, a, b, c);
    });
    def2<u32, u32, u32>("mul.rn.f16x2", [](u32 a, u32 b) {
        return on_halves([](u16 x, u16 y, u16) { return to_half(double(half_to_float(x)) * half_to_float(y)); }, a, b);
    });
    def2<u32, u32, u32>("add.rn.f16x2", [](u32 a, u32 b) {
        return on_halves([](u16 x, u16 y, u16) { return to_half(double(half_to_float(x)) + half_to_float(y)); }, a, b);
    });
    def3<u32, u32, u32, u32>("fma.rn.bf16x2", [](u32 a, u32 b, u32 c) {
        return on_halves([](u16 x, u16 y, u16 z) { return to_bf16(float(double(bf16_to_float(x)) * bf16_to_float(y) + bf16_to_float(z))); }, a, b, c);
    });
    def2<u32, u32, u32>("mul.rn.bf16x2", [](u32 a, u32 b) {
        return on_halves([](u16 x, u16 y, u16) { return to_bf16(bf16_to_float(x) * bf16_to_float(y)); }, a, b);
    });
    def1<float, float>("ex2.approx.ftz.f32", [](float a) { return flush(float(std::exp2(double(flush(a))))); });
    def1<float, float>("ex2.approx.f32", [](float a) { return float(std::exp2(double(a))); });
    def1<float, float>("lg2.approx.ftz.f32", [](float a) { return float(std::log2(double(flush(a)))); });
    def1<float, float>("lg2.approx.f32", [](float a) { return float(std::log2(double(a))); });
    def1<float, float>("rcp.approx.ftz.f32", [](float a) { return flush(float(1.0 / double(flush(a)))); });
    def3<u32, u32, u32, u32>("dp4a.u32.u32", [](u32 a, u32 b, u32 c) {
        for (int byte = 0; byte < 32; byte += 8) c += (a >> byte & 255) * (b >> byte & 255);
        return c;
    });
    def3<u32, u32, u32, u32>("prmt.b32", [](u32 a, u32 b, u32 c) { return permute(a, b, c); });

    handlers["elect.sync"] = elect;
    handlers["vote.sync.all.pred"] = vote<true>;
    handlers["vote.sync.any.pred"] = vote<false>;
    handlers["vote.sync.ballot.b32"] = ballot;
    handlers["shfl.sync.bfly.b32"] = shuffle<'b'>;
    handlers["shfl.sync.idx.b32"] = shuffle<'i'>;
    handlers["shfl.sync.down.b32"] = shuffle<'d'>;
    handlers["shfl.sync.up.b32"] = shuffle<'u'>;
    handlers["mbarrier.init"] = mbarrier_init;
    handlers["mbarrier.arrive"] = mbarrier_arrive;
    handlers["mbarrier.arrive.expect_tx"] = mbarrier_arrive_expect;
    handlers["mbarrier.expect_tx"] = mbarrier_expect;
    handlers["mbarrier.try_wait"] = mbarrier_try_wait;
    handlers["bar"] = named_barrier;
    handlers["tensor_copy"] = tensor_copy;
    handlers["wgmma"] = wgmma;
    handlers["wgmma.commit"] = wgmma_commit;
    handlers["wgmma.wait"] = wgmma_wait;
    handlers["split"] = split, handlers["join"] = join;
    handlers["split64"] = split64, handlers["join64"] = join64;
    handlers["nothing"] = nothing;
    handlers["trap"] = trap;
    handlers["bra"] = branch;
    handlers["ret"] = ret;
}

// ---------------------------------------------------------------- execution

std::vector<std::pair<string, Handler>> table;


// The lanes that are furthest behind run, and those that they reach join them: code of compilers
// lies so that lanes meet again at the end of what they did apart.
void regroup(Warp& w) {
    if (w.others.empty()) return;
    auto behind = std::min_element(w.others.begin(), w.others.end());
    if (!w.mask) {
        std::tie(w.pc, w.mask) = *behind;
        w.others.erase(behind);
    } else if (behind->first < w.pc) {
        std::pair<u32, u32> now(w.pc, w.mask);
        std::tie(w.pc, w.mask) = *behind;
        *behind = now;
    }
    for (size_t n = 0; n < w.others.size();)
        if (w.others[n].first == w.pc) {
            w.mask |= w.others[n].second;
            w.others.erase(w.others.begin() + n);
        } else
            ++n;
}

void Cta::step(Warp& w, int quantum) {
    while (quantum-- > 0) {
        const Ins& i = program.ins[w.pc];
        u32 mask = w.mask;
        if (i.guard >= 0) {
            u8* p = w.r<u8>(i.guard);
            each(w.mask, [&](int l) {
                if (!p[l] != bool(i.negated)) mask &= ~(1u << l);
            });
        }
        Handler h = table[i.op].second;
        if (h == branch) {
            if (mask == w.mask) w.pc = i.target;
            else {
                if (mask) w.others.emplace_back(i.target, mask);
                w.mask &= ~mask;
                ++w.pc;
            }
        } else if (h == ret) {
            w.mask &= ~mask;
            ++w.pc;
            if (!w.mask && w.others.empty()) {
                if (!w.groups.empty() || !w.open.empty()) fault("a warp ends with wgmma in flight");
                w.done = true;
                return;
            }
        } else {
            w.wait_address = 0;
            if (mask) try {
                h(*this, w, i, mask);
            } catch (Fault& error) {
                fault("line %d, warp %d: %s", i.line, w.id, error.what());
            }
            if (w.wait_address) return;  // again when its barrier is over
            ++w.pc;
            if (w.stopped) return;
        }
        regroup(w);
    }
}

void Cta::run() {
    for (;;) {
        std::vector<Warp*> ready_warps;
        bool all = true;
        for (Warp& w : warps) {
            all &= w.done;
            if (ready(w)) ready_warps.push_back(&w);
        }
        if (all) {
            if (!copies.empty()) fault("the CTA ends with %zu copies in flight", copies.size());
            return;
        }
        while (!copies.empty() && (ready_warps.empty() || chance(20))) {
            size_t n = random() % copies.size();
            Copy c = copies[n];
            copies.erase(copies.begin() + n);
            try {
                copy(c);
            } catch (Fault& error) {
                fault("line %d: %s", c.ins->line, error.what());
            }
            if (ready_warps.empty()) break;
        }
        for (Warp& w : warps)
            if (!w.groups.empty() && chance(10)) finish_one(w);
        if (ready_warps.empty()) {
            bool any = false;
            for (Warp& w : warps) any |= ready(w);
            if (any || !copies.empty()) continue;
            string text = "deadlock:";
            for (Warp& w : warps)
                if (!w.done) text += " warp " + std::to_string(w.id) + " at line " + std::to_string(program.ins[w.pc].line) + (w.stopped ? " (barrier);" : " (mbarrier " + std::to_string(s64(w.wait_address) - kShared) + ");");
            throw Fault(text);
        }
        if (eager)
            for (Warp* w : ready_warps) step(*w, 1 << 20);
        else
            step(*ready_warps[random() % ready_warps.size()], 1 + random() % 2000);
    }
}

std::map<std::pair<int, string>, Program> programs;

struct Config {  // cudaLaunchConfig_t
    u32 grid[3], block[3];
    size_t smem;
    void *stream, *attributes;
    u32 num_attributes;
};

void execute(const Program& program, const Config& config, void** args) {
    if (config.block[1] != 1 || config.block[2] != 1 || config.block[0] % 32) fault("block of %u x %u x %u threads", config.block[0], config.block[1], config.block[2]);
    std::vector<u8> params;
    for (size_t n = 0; n < program.param_offset.size(); ++n) {
        params.resize(std::max(params.size(), size_t(program.param_offset[n] + program.param_size[n])));
        memcpy(params.data() + program.param_offset[n], args[n], program.param_size[n]);
    }
    params.resize(params.size() + 64);
    for (u32 z = 0; z < config.grid[2]; ++z)
        for (u32 y = 0; y < config.grid[1]; ++y)
            for (u32 x = 0; x < config.grid[0]; ++x) {
                Cta cta{program, std::vector<u8>(config.smem, 0xff)};
                cta.params = params;
                cta.eager = machine.seed == 0;
                cta.random.seed(machine.seed + x * 7919 + y * 104729);
                cta.warps.resize(config.block[0] / 32);
                for (size_t n = 0; n < cta.warps.size(); ++n) {
                    Warp& w = cta.warps[n];
                    w.id = int(n);
                    w.regs.assign(size_t(program.units) * 32, 0xcd);
                    for (const Value& v : program.values)
                        for (int l = 0; l < 32; ++l) {
                            u64 bits = v.bits;
                            u32 ctaid[3] = {x, y, z};
                            if (v.kind == kParamAddress) bits += reinterpret_cast<u64>(cta.params.data());
                            if (v.kind == kSharedAddress) bits += kShared;
                            if (v.kind == kTid) bits = v.bits ? 0 : n * 32 + l;
                            if (v.kind == kCtaid) bits = ctaid[v.bits];
                            if (v.kind == kNctaid) bits = config.grid[v.bits];
                            if (v.kind == kNtid) bits = config.block[v.bits];
                            if (v.kind == kLane) bits = l;
                            if (v.kind == kWarp) bits = n;
                            memcpy(w.regs.data() + size_t(v.slot) * 32 + l * v.width, &bits, v.width);
                        }
                }
                try {
                    cta.run();
                } catch (Fault& error) {
                    fault("CTA (%u, %u, %u): %s", x, y, z, error.what());
                }
            }
}

}  // namespace

extern "C" {
int emulator_op(const char* name) {
    if (table.empty()) {
        define();
        for (auto& [key, handler] : handlers) table.emplace_back(key, handler);
    }
    for (size_t n = 0; n < table.size(); ++n)
        if (table[n].first == name) return int(n);
    return -1;
}
void emulator_program(int module, const char* name, const Ins* ins, s64 num_ins, const s32* lists, s64 num_lists,
                      const Value* values, s64 num_values, const s32* params, s64 num_params, s32 units) {
    Program p;
    p.name = name;
    p.ins.assign(ins, ins + num_ins);
    p.lists.assign(lists, lists + num_lists);
    p.values.assign(values, values + num_values);
    for (s64 n = 0; n < num_params; ++n) p.param_offset.push_back(params[2 * n]), p.param_size.push_back(params[2 * n + 1]);
    p.units = units;
    programs[{module, name}] = std::move(p);
}
// Where global memory may be accessed: pairs (first, last), sorted.
void emulator_ranges(const u64* bounds, s64 count) {
    machine.ranges.clear();
    for (s64 n = 0; n < count; ++n) machine.ranges.emplace_back(bounds[2 * n], bounds[2 * n + 1]);
}
void emulator_start(u32 seed) {
    machine.seed = seed;
    machine.error.clear();
}
const char* emulator_error() { return machine.error.c_str(); }
int emulator_launch(int module, const char* name, const void* config, void** args) {
    if (!machine.error.empty()) return 1;
    try {
        auto it = programs.find({module, name});
        if (it == programs.end()) fault("no program %s", name);
        execute(it->second, *static_cast<const Config*>(config), args);
    } catch (std::exception& error) {
        machine.error = error.what();
        return 719;  // cudaErrorLaunchFailure
    }
    return 0;
}
}
