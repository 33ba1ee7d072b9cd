// What one warp does on a Hopper GPU, under short names. F is a float of a lane, U 32 bits, often
// two halves; tests/support/warp.h has the same names for a CPU. It is put before a source when
// that is compiled (encoder_attention_cuda.py, encoder_mlp_cuda.py, decoder_cuda.py).

typedef float F;
typedef unsigned U;
typedef unsigned short Half;
#define INSIDE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#define TWICE _Pragma("unroll 2")
#define KERNEL(warps, blocks) extern "C" __global__ void __launch_bounds__(32 * warps, blocks)

INSIDE int warp() { return __shfl_sync(~0u, threadIdx.x >> 5, 0); }  // known to be one number
INSIDE U lane() { return threadIdx.x & 31; }
INSIDE int block_x() { return blockIdx.x; }
INSIDE int block_y() { return blockIdx.y; }
INSIDE void same_moment() { __syncwarp(); }  // the lanes of a warp
INSIDE void together() { __syncthreads(); }
// The same of one group of warps, of at most 15.
INSIDE void together(int group, int warps) {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(32 * warps) : "memory");
}
// Two sides that meet, of so many warps in all: who comes first may wait for the other, or go on.
INSIDE void meet(int place, int warps) {
    asm volatile("bar.sync %0, %1;" ::"r"(place + 1), "r"(32 * warps) : "memory");
}
INSIDE void meet_later(int place, int warps) {
    asm volatile("bar.arrive %0, %1;" ::"r"(place + 1), "r"(32 * warps) : "memory");
}
// A cluster: blocks of threads (programs) that run at the same time and reach each other's shared
// memory. How many, which this is, and where a place is in another's, the peer's. What is posted to
// a box comes on its own; who wants it says once a turn how many bytes, and waits for the turn,
// from 0 on.
INSIDE int cluster_size() { int n; asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(n)); return n; }
INSIDE int cluster_rank() { int n; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(n)); return n; }
INSIDE U at_peer(U at, int which) {
    U y;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(y) : "r"(at), "r"(which));
    return y;
}
INSIDE void all_of_cluster() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}
INSIDE void open_box(U box) {  // by one warp, before all meet
    if (lane() == 0)
        asm volatile(
            "mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(
                box)
            : "memory");
}
INSIDE void post(U at, const U (&x)[4], U box) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, "
        "[%5];" ::"r"(at),
        "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(box)
        : "memory");
}
INSIDE void expect(U box, int bytes) {  // by one warp
    if (lane() == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(box), "r"(bytes)
            : "memory");
}
// What comes lies in this block's own shared memory, so an acquire of its own threads suffices
INSIDE void wait_for_post(U box, int turn) {
    U there;
    do
        asm volatile(
            "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, "
            "0, p;}"
            : "=r"(there)
            : "r"(box), "r"(turn & 1)
            : "memory");
    while (!there);
}
// Registers of a thread, from some warps to others; for four of them at a time.
template <int N> INSIDE void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> INSIDE void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
// Kept, not made again
INSIDE U choose(U some, U a, U b) { U y = some ? a : b; asm volatile("" : "+r"(y)); return y; }
INSIDE F choose(U some, F a, F b) { return some ? a : b; }
INSIDE U less(U a, U b) { return a < b; }
INSIDE F size(F a) { return fabsf(a); }
INSIDE F minus(F a) { return -a; }
// A number that the compiler does not know: what is read there is not kept from before.
INSIDE U anew(U x) { asm volatile("" : "+r"(x)); return x; }
INSIDE F signed_as(F a, F b) { return copysignf(a, b); }
INSIDE F largest(F a, F b) { return fmaxf(a, b); }
INSIDE F power(F x) { F y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INSIDE F logarithm(F x) { F y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INSIDE F inverse(F x) { F y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INSIDE F root(F x) { return sqrtf(x); }
INSIDE F fused(F a, F b, F c) { return fmaf(a, b, c); }
INSIDE U pack(F low, F high) {
    U y;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(y) : "f"(low), "f"(high));
    return y;
}
// The same of what is above zero, and zero for the rest; and all bits where a half is above zero.
INSIDE U pack_above(F low, F high) {
    U y;
    asm("cvt.rn.relu.f16x2.f32 %0, %2, %1;" : "=r"(y) : "f"(low), "f"(high));
    return y;
}
INSIDE U above(U x) {
    U y;
    asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(0));
    return y;
}
INSIDE F first_of(U x) {
    F y;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(y) : "r"(x));
    return y;
}
INSIDE F second_of(U x) {
    F y;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(y) : "r"(x));
    return y;
}
INSIDE U times(U a, U b) {
    U y;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
INSIDE U plus(U a, U b) {
    U y;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
INSIDE U fused(U a, U b, U c) {
    U y;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}
INSIDE U opposite(U a) { U y; asm("neg.f16x2 %0, %1;" : "=r"(y) : "r"(a)); return y; }
INSIDE U highest(U a, U b) {
    U y;
    asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
INSIDE U lowest(U a, U b) {
    U y;
    asm("min.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
// 15 + a and 15 + b in 1024ths, not below 0, as two numbers of 16 bits. A tiny float's bits count
// such steps.
INSIDE U fixed(F a, F b) {
    U y;
    asm("{.reg .f32 a, b; .reg .b32 x, y; fma.rn.f32 a, %1, %3, %4; fma.rn.f32 b, %2, %3, %4; "
        "mov.b32 x, a; mov.b32 y, b; cvt.pack.sat.u16.s32 %0, y, x;}"
        : "=r"(y)
        : "f"(a), "f"(b), "f"(__int_as_float(1 << 10)), "f"(__int_as_float(15 << 10)));
    return y;
}
template <int W> INSIDE U bytes(U a, U b) { return __byte_perm(a, b, W); }
template <int M> INSIDE F other(F x) { return __shfl_xor_sync(~0u, x, M); }
// What lane i of the same four has
INSIDE F of_four(F x, int i) { return __shfl_sync(~0u, x, i, 4); }
template <int M> INSIDE U other(U x) { return __shfl_xor_sync(~0u, x, M); }
INSIDE U turned(U x) {
    U y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// Products of one warp: 16 x 8 += 16 x 16 times 16 x 8, 16 x 8 += 16 x 8 times 8 x 8, and the same
// without what was there.
INSIDE void mma(F (&c)[4], U a0, U a1, U a2, U a3, U b0, U b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
INSIDE void mma(F (&c)[4], U a0, U a1, U b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
}
INSIDE void mma(F (&y)[4], U a0, U a1, U b0, const F (&c)[4]) {  // y = c + a b
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%7,%8,%9,%10};"
        : "=f"(y[0]), "=f"(y[1]), "=f"(y[2]), "=f"(y[3])
        : "r"(a0), "r"(a1), "r"(b0), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
INSIDE void mma0(F (&c)[4], U a0, U a1, U a2, U a3, U b0, U b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}
INSIDE void mma0(F (&c)[4], U a0, U a1, U b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%7,%7,%7,%7};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a0), "r"(a1), "r"(b0), "f"(0.0f));
}

#define ALL(kind, x) kind(x[0]), kind(x[1]), kind(x[2]), kind(x[3])

// Products of four warps, 64 rows, from shared memory or with the first operand in registers. They
// run on their own from `begin` and `leave` to `finish`; `settle` tells the compiler that a result
// is there only then, and that an operand in registers is read until then. A tile has rows of 128
// bytes whose pieces of 16 are swapped by the row's number; TA, TB: it is read the other way round.
// How such a product names a place in shared memory; from there on in pieces of 16 bytes
INSIDE U view(U at) { return at >> 4 | 0x10000; }
INSIDE unsigned long long tile(U at) {
    unsigned long long y;
    asm("mov.b64 %0, {%1, %2};" : "=l"(y) : "r"(at), "r"(0x40000040));
    return y;
}
INSIDE void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INSIDE void leave() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
INSIDE void finish() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// All but those that were left last
INSIDE void finish_former() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }
template <int N> INSIDE void settle(F (&c)[N][4]) {
    UNROLL for (int n = 0; n < N; n++)
        asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
}
template <int N> INSIDE void settle(U (&x)[N][2]) {
    UNROLL for (int n = 0; n < N; n++)
        asm volatile("" : "+r"(x[n][0]), "+r"(x[n][1])::"memory");
}
template <int N> INSIDE void settle(U (&x)[N][4]) {
    UNROLL for (int n = 0; n < N; n++)
        asm volatile("" : ALL("+r", x[n])::"memory");
}
#define FOUR(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define WGMMA_(N, D, A, B, add) \
    "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" D "}, " A ", " B ", " add ", 1, 1"
#define WGMMA(N, D, A, B) WGMMA_(N, D, A, B, "1")
#define D8 "%0,%1,%2,%3"
#define D16 D8 ",%4,%5,%6,%7"
#define D32 D16 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define D48 D32 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define D64 D48 ",%24,%25,%26,%27,%28,%29,%30,%31"
template <int TA, int TB> INSIDE void wide(F (&c)[1][4], U a, U b) {
    asm volatile(WGMMA(8, D8, "%4", "%5") ", %6, %7;"
        : FOUR(0)
        : "l"(tile(a)), "l"(tile(b)), "n"(TA), "n"(TB));
}
template <int TA, int TB> INSIDE void wide(F (&c)[2][4], U a, U b) {
    asm volatile(WGMMA(16, D16, "%8", "%9") ", %10, %11;"
        : FOUR(0), FOUR(1)
        : "l"(tile(a)), "l"(tile(b)), "n"(TA), "n"(TB));
}
template <int TA, int TB> INSIDE void wide(F (&c)[4][4], U a, U b) {
    asm volatile(WGMMA(32, D32, "%16", "%17") ", %18, %19;"
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3) : "l"(tile(a)), "l"(tile(b)), "n"(TA), "n"(TB));
}
template <int TA, int TB> INSIDE void wide(F (&c)[6][4], U a, U b) {
    asm volatile(WGMMA(48, D48, "%24", "%25") ", %26, %27;"
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5)
        : "l"(tile(a)), "l"(tile(b)), "n"(TA), "n"(TB));
}
template <int TA, int TB> INSIDE void wide(F (&c)[8][4], U a, U b) {
    asm volatile(WGMMA(64, D64, "%32", "%33") ", %34, %35;"
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)
        : "l"(tile(a)), "l"(tile(b)), "n"(TA), "n"(TB));
}
INSIDE void wide(F (&c)[1][4], const U (&a)[4], U b) {
    asm volatile(WGMMA(8, D8, "{%4,%5,%6,%7}", "%8") ", 0;"
        : FOUR(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile(b)));
}
INSIDE void wide(F (&c)[6][4], const U (&a)[4], U b) {
    asm volatile(WGMMA(48, D48, "{%24,%25,%26,%27}", "%28") ", 0;"
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile(b)));
}
INSIDE void wide(F (&c)[8][4], const U (&a)[4], U b) {
    asm volatile(WGMMA(64, D64, "{%32,%33,%34,%35}", "%36") ", 0;"
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile(b)));
}
// The second operand read the other way round
INSIDE void wide_turned(F (&c)[8][4], const U (&a)[4], U b) {
    asm volatile(WGMMA(64, D64, "{%32,%33,%34,%35}", "%36") ", 1;"
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile(b)));
}
// Without what was there: zeros written by other instructions would have to wait for the products
// before.
INSIDE void wide0(F (&c)[8][4], const U (&a)[4], U b) {
    asm volatile(WGMMA_(64, D64, "{%32,%33,%34,%35}", "%36", "0") ", 0;"
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile(b)));
}
template <int TA, int TB> INSIDE void wide0(F (&c)[8][4], U a, U b) {
    asm volatile(WGMMA_(64, D64, "%32", "%33", "0") ", %34, %35;"
        : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)
        : "l"(tile(a)), "l"(tile(b)), "n"(TA), "n"(TB));
}

INSIDE U shared() {
    extern __shared__ __align__(1024) char memory[];
    return (U)__cvta_generic_to_shared(memory);
}
// What was written here, to products of four warps
INSIDE void visible() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
INSIDE void keep(U at, U x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}
INSIDE U find(U at) {
    U x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}
// Four matrices of 8 x 8 halves, a row's place in every lane
INSIDE void keep4(U at, U a, U b, U c, U d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a),
        "r"(b), "r"(c), "r"(d)
        : "memory");
}
// Four matrices of 8 x 8 halves, a row's place in every lane; T: turned. `known4`: of what is not
// written any more.
#define LDMATRIX(turned) "ldmatrix.sync.aligned.m8n8.x4" turned ".shared.b16 {%0,%1,%2,%3}, [%4];"
template <int T> INSIDE void known4(U (&x)[4], U at) {
    if (T) asm(LDMATRIX(".trans") : ALL("=r", x) : "r"(at));
    else asm(LDMATRIX("") : ALL("=r", x) : "r"(at));
}
template <int T> INSIDE void find4(U (&x)[4], U at) {
    if (T) asm volatile(LDMATRIX(".trans") : ALL("=r", x) : "r"(at) : "memory");
    else asm volatile(LDMATRIX("") : ALL("=r", x) : "r"(at) : "memory");
}
INSIDE void find16(U (&x)[4], U at) {
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : ALL("=r", x) : "r"(at) : "memory");
}
INSIDE void find16(F (&x)[4], U at) {
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : ALL("=f", x) : "r"(at) : "memory");
}
INSIDE void keep16(U at, const F (&x)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), ALL("f", x) : "memory");
}
INSIDE void keep1(U at, F x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}
INSIDE F find1(U at) {
    F x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
}
INSIDE void keep2(U at, F a, F b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(a), "f"(b) : "memory");
}
INSIDE void find2(U at, F& a, F& b) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"(at) : "memory");
}
INSIDE void copy(U at, const void* from, U bytes_, int more = 0) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at),
        "l"((const char*)from + bytes_ + more)
        : "memory");
}
INSIDE void send() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> INSIDE void arrived() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
INSIDE F load(const float* p, U i) { return p[i]; }
INSIDE void load2(const float* p, U i, F& a, F& b, int more = 0) {
    float2 x = *(const float2*)(p + i + more);
    a = x.x;
    b = x.y;
}
INSIDE void known2(const float* p, U i, F& a, F& b, int more) {
    float2 x = __ldg((const float2*)(p + i + more));
    a = x.x;
    b = x.y;
}
INSIDE void load4(const float* p, U i, F (&x)[4], int more) {
    float4 y = *(const float4*)(p + i + more);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}
INSIDE void load8(const Half* p, U i, U (&x)[4], int more) {
    uint4 y = *(const uint4*)(p + i + more);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}
INSIDE void store4(float* p, U i, const F (&x)[4], int more) {
    *(float4*)(p + i + more) = make_float4(x[0], x[1], x[2], x[3]);
}
INSIDE void store8(Half* p, U i, const U (&x)[4], int more) {
    *(uint4*)(p + i + more) = make_uint4(x[0], x[1], x[2], x[3]);
}
INSIDE void store(float* p, U i, F x) { p[i] = x; }
INSIDE void store2(float* p, U i, F a, F b, int more = 0) {
    *(float2*)(p + i + more) = make_float2(a, b);
}
INSIDE void store(U some, float* p, U i, F x) { if (some) p[i] = x; }
INSIDE void store2(U some, float* p, U i, F a, F b, int more) {
    if (some) *(float2*)(p + i + more) = make_float2(a, b);
}
// Nobody waits; one thread's own are added in its order
INSIDE void add(U some, float* p, U i, F x) { if (some) atomicAdd(p + i, x); }
INSIDE void add_up(float* p, F x) {  // what all lanes have, to one number
    UNROLL for (int i = 16; i; i >>= 1) x += __shfl_xor_sync(~0u, x, i);
    if (lane() == 0) atomicAdd(p, x);
}
INSIDE void add2(float* p, U i, F a, F b, int more) {
    atomicAdd((float2*)(p + i + more), make_float2(a, b));
}
INSIDE void store2(Half* p, U i, U x) { *(U*)(p + i) = x; }
