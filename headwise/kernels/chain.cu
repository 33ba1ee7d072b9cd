// The attention part of a post-norm layer for sequences of 16 tokens and width 64, from input to output and back, with every
// intermediate in the registers of one warp.
//
// A tensor core's 16 x 8 result lies in a warp just as its next operand must: projections are packed to half and multiplied
// again as they are, so queries, keys, scores, weights and heads never leave the registers. A warp has one sequence. A head of
// rank 8 is one tile of eight columns; heads of rank 1, 2, 4 share a tile, and zeros in one operand tell them apart. Sums that
// a softmax needs are products too: its denominator with ones beside the values; the mean that its gradient subtracts with the
// columns -g o beside the gradients g; at rank 1 also the largest score.
//
// Names: q, k, v, g (gradient of a head's output), o; `n` after a name: a thread holds two columns of one token (the first
// operand's order); `t`: two tokens of one column (the second operand's). R is the rank, one compilation each. Matrices are
// half, everything else float. What lanes do is written with F, U and the functions of the first section only, so that the
// tests can run the same lines on a CPU, a warp as a vector of 32.

#ifndef ON_CPU
typedef float F;
typedef unsigned U;
typedef unsigned short Half;
#define INSIDE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

INSIDE int warp() { return threadIdx.x >> 5; }
INSIDE U lane() { return threadIdx.x & 31; }
INSIDE int block_x() { return blockIdx.x; }
INSIDE int block_y() { return blockIdx.y; }
INSIDE void together() { __syncthreads(); }
INSIDE U choose(U some, U a, U b) { return some ? a : b; }
INSIDE F largest(F a, F b) { return fmaxf(a, b); }
INSIDE F power(F x) { F y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INSIDE F inverse(F x) { F y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INSIDE F root(F x) { return sqrtf(x); }
INSIDE U pack(F low, F high) { U y; asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(y) : "f"(low), "f"(high)); return y; }
INSIDE F first_of(U x) { F y; asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(y) : "r"(x)); return y; }
INSIDE F second_of(U x) { F y; asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(y) : "r"(x)); return y; }
INSIDE U times(U a, U b) { U y; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b)); return y; }
INSIDE U highest(U a, U b) { U y; asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b)); return y; }
INSIDE U lowest(U a, U b) { U y; asm("min.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b)); return y; }
template <int W> INSIDE U bytes(U a, U b) { return __byte_perm(a, b, W); }
template <int M> INSIDE F other(F x) { return __shfl_xor_sync(~0u, x, M); }
template <int M> INSIDE U other(U x) { return __shfl_xor_sync(~0u, x, M); }
INSIDE U turned(U x) { U y; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x)); return y; }
INSIDE void mma(F (&c)[4], U a0, U a1, U a2, U a3, U b0, U b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
INSIDE void mma(F (&c)[4], U a0, U a1, U b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b0));
}
INSIDE U shared() { extern __shared__ char memory[]; return (U)__cvta_generic_to_shared(memory); }
INSIDE void fetch(U (&r)[4], U at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
INSIDE void fetch_turned(U (&r)[4], U at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
INSIDE void keep(U at, U x) { asm volatile("st.shared.b32 [%0], %1;" :: "r"(at), "r"(x) : "memory"); }
INSIDE void copy(U at, const Half* from, U index) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at), "l"(from + index) : "memory"); }
INSIDE void send() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> INSIDE void arrived() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
INSIDE F load(const float* p, U i) { return p[i]; }
INSIDE U load2(const Half* p, U i) { return *(const U*)(p + i); }
INSIDE void load2(const float* p, U i, F& a, F& b) { float2 x = *(const float2*)(p + i); a = x.x; b = x.y; }
INSIDE void store(float* p, U i, F x) { p[i] = x; }
INSIDE void store2(float* p, U i, F a, F b) { *(float2*)(p + i) = make_float2(a, b); }
INSIDE void store2(Half* p, U i, U x) { *(U*)(p + i) = x; }
INSIDE void store8(Half* p, U i, U a, U b, U c, U d) { *(uint4*)(p + i) = make_uint4(a, b, c, d); }
#define KERNEL(warps, blocks) extern "C" __global__ void __launch_bounds__(32 * warps, blocks)
#endif

// ---- sizes

constexpr int WIDTH = 64;               // of the model
constexpr int BLOCK = 64;               // columns whose weights are in shared memory at once
constexpr int ROW = 2 * WIDTH + 16;     // bytes of a row of 64 halves there; the 16 keep eight rows in different banks
constexpr int MATRIX = 64 * ROW;
constexpr int WARPS = 8;
constexpr int TOKENS = 16 * WARPS;      // of a tile
constexpr int TILE = TOKENS * ROW;
constexpr int UNIT = R < 16 ? 16 : R;   // columns that a warp works on at once
constexpr int TILES = UNIT / 8;
constexpr int HEADS = R < 8 ? 8 / R : 1;  // that share a tile of eight columns
constexpr float LOG2E = 1.4426950408889634f;
constexpr U ONES_ = 0x3c003c00u;

// ---- operands of one warp

INSIDE U cell(int rows) {  // where a lane finds its row of the four 8 x 8 matrices of a 16 x 16 piece: (0, 0), (8, 0), (0, 8), (8, 8)
    U l = lane();
    return ((l & 7) + ((l >> 3) & 1) * 8) * rows + (l >> 4) * 16;
}
INSIDE U cell_turned(int rows) {  // the same in the order (0, 0), (0, 8), (8, 0), (8, 8)
    U l = lane();
    return ((l & 7) + (l >> 4) * 8) * rows + ((l >> 3) & 1) * 16;
}
INSIDE void zero(F (&c)[4]) { UNROLL for (int i = 0; i < 4; i++) c[i] = 0.0f; }

// The four matrices of a block of columns, on their way to shared memory: queries, keys, values as (column, d), output as (d, column).
INSIDE void bring(U to, const Half* w, const Half* out, int c0, int C) {
    UNROLL for (int i = 0; i < 8; i++) {
        U at = lane() + 32 * warp() + (i & 1) * 256;  // of 64 rows x 8 pieces of 16 bytes
        U row = at >> 3, piece = at & 7;
        int matrix = i >> 1;
        U index = matrix < 3 ? (row + (matrix * C + c0)) * WIDTH + piece * 8 : row * C + c0 + piece * 8;
        copy(to + matrix * MATRIX + row * ROW + piece * 16, matrix < 3 ? w : out, index);
    }
}

// 16 tokens x 16 columns of x w^T + b, times a factor: packed, a thread with two columns of one token.
INSIDE void project(U (&y)[2][2], const U (&x)[4][4], U weights, int column, const float* b, float factor) {
    F c[2][4];
    UNROLL for (int t = 0; t < 2; t++) {
        load2(b, (lane() & 3) * 2 + (column + 8 * t), c[t][0], c[t][1]);
        c[t][2] = c[t][0], c[t][3] = c[t][1];
    }
    UNROLL for (int s = 0; s < 4; s++) {
        U w[4];
        fetch(w, weights + (cell(ROW) + (column * ROW + 32 * s)));
        mma(c[0], x[s][0], x[s][1], x[s][2], x[s][3], w[0], w[2]);
        mma(c[1], x[s][0], x[s][1], x[s][2], x[s][3], w[1], w[3]);
    }
    UNROLL for (int t = 0; t < 2; t++) {
        y[t][0] = pack(c[t][0] * factor, c[t][1] * factor);
        y[t][1] = pack(c[t][2] * factor, c[t][3] * factor);
    }
}

// The same, a thread with two tokens of one column.
INSIDE void project_turned(U (&y)[2][2], const U (&x)[4][4], U weights, int column, const float* b) {
    F c[2][4];
    F low = load(b, (lane() >> 2) + column), high = load(b, (lane() >> 2) + (column + 8));
    UNROLL for (int t = 0; t < 2; t++) c[t][0] = low, c[t][1] = low, c[t][2] = high, c[t][3] = high;
    UNROLL for (int s = 0; s < 4; s++) {
        U w[4];
        fetch(w, weights + (cell(ROW) + (column * ROW + 32 * s)));
        mma(c[0], w[0], w[1], w[2], w[3], x[s][0], x[s][2]);
        mma(c[1], w[0], w[1], w[2], w[3], x[s][1], x[s][3]);
    }
    UNROLL for (int t = 0; t < 2; t++) {
        y[0][t] = pack(c[t][0], c[t][1]);
        y[1][t] = pack(c[t][2], c[t][3]);
    }
}

// Which columns of a tile are head h's: for a thread with two columns, and for one with one.
INSIDE U pair_of(int h) {
    U mine = lane() & 3;
    if (R >= 8) return ~U(0u);
    if (R == 4) return choose((mine >> 1) == U(h), ~U(0u), U(0u));
    if (R == 2) return choose(mine == U(h), ~U(0u), U(0u));
    return choose(mine == U(h >> 1), U(h & 1 ? 0xffff0000u : 0x0000ffffu), U(0u));
}
INSIDE U column_of(int h) {
    if (R >= 8) return ~U(0u);
    return choose((lane() >> 2) / R == U(h), ~U(0u), U(0u));
}

// 2^(s - largest of the row), packed: the first operand of a product over keys.
INSIDE void soften(U (&e)[4], F (&s)[2][4]) {
    F top[2];
    UNROLL for (int i = 0; i < 2; i++) {
        top[i] = largest(largest(s[0][2 * i], s[0][2 * i + 1]), largest(s[1][2 * i], s[1][2 * i + 1]));
        top[i] = largest(top[i], other<1>(top[i]));
        top[i] = largest(top[i], other<2>(top[i]));
    }
    UNROLL for (int t = 0; t < 2; t++) UNROLL for (int i = 0; i < 2; i++)
        e[2 * t + i] = pack(power(s[t][2 * i] - top[i]), power(s[t][2 * i + 1] - top[i]));
}

// Scores of rank 1 come out of the product with their row's largest taken off: columns (q, -largest) times (k, 1). The largest is
// q times the largest key or the smallest.
struct Sharp { U q[2][2], k[2][2]; };  // [head's side of its pair][8 tokens]
INSIDE void sharpen(Sharp& y, const U (&q)[2], const U (&k)[2]) {
    U high = highest(k[0], k[1]), low = lowest(k[0], k[1]);
    high = highest(high, other<4>(high)), low = lowest(low, other<4>(low));
    high = highest(high, other<8>(high)), low = lowest(low, other<8>(low));
    high = highest(high, other<16>(high)), low = lowest(low, other<16>(low));
    UNROLL for (int i = 0; i < 2; i++) {
        U top = highest(times(q[i], high), times(q[i], low)) ^ U(0x80008000u);
        y.q[0][i] = bytes<0x5410>(q[i], top), y.q[1][i] = bytes<0x7632>(q[i], top);
        y.k[0][i] = bytes<0x5410>(k[i], U(ONES_)), y.k[1][i] = bytes<0x5432>(k[i], U(ONES_));
    }
}

// Weights before they are divided by their sum, of head h of tile t, or of the one head of a unit.
INSIDE void weigh(U (&e)[4], const U (&q)[TILES][2], const U (&k)[TILES][2], const Sharp& sharp, int t, int h) {
    F s[2][4];
    zero(s[0]), zero(s[1]);
    if (R == 1) {
        U mine = choose((lane() & 3) == U(h >> 1), ~U(0u), U(0u));
        UNROLL for (int j = 0; j < 2; j++) mma(s[j], sharp.q[h & 1][0] & mine, sharp.q[h & 1][1] & mine, sharp.k[h & 1][j]);
        UNROLL for (int j = 0; j < 2; j++) UNROLL for (int i = 0; i < 2; i++)
            e[2 * j + i] = pack(power(s[j][2 * i]), power(s[j][2 * i + 1]));
        return;
    }
    if (R <= 8) {
        U mine = pair_of(h);
        UNROLL for (int j = 0; j < 2; j++) mma(s[j], q[t][0] & mine, q[t][1] & mine, k[t][j]);
    } else {
        UNROLL for (int i = 0; i < TILES; i += 2)
            UNROLL for (int j = 0; j < 2; j++) mma(s[j], q[i][0], q[i][1], q[i + 1][0], q[i + 1][1], k[i][j], k[i + 1][j]);
    }
    soften(e, s);
}

// ---- forward

// n(s0 u0 + alpha W_O concat softmax(sharp q k^T) v + mean of the bias rows): a tile of eight sequences, all columns.
KERNEL(WARPS, 2) forward(
    const Half* x, const Half* w, const float* b, const Half* out, const float* bias, const float* scale0, const float* u0,
    const float* scale, float* u, Half* y, float* inv, int T, int C, int model, float alpha, float sharp, int average, int first
) {
    long long m = block_y();
    x += m * T * WIDTH, u0 += m * T * WIDTH, u += m * T * WIDTH, y += m * T * WIDTH, inv += m * T;
    w += m * model, b += m * model, out += m * model, bias += m * model, scale0 += m * model, scale += m * model;
    U token = (lane() >> 2) + (block_x() * TOKENS + 16 * warp()), pair = (lane() & 3) * 2;
    U memory = shared();
    bring(memory, w, out, 0, C);
    send();
    U xa[4][4];
    UNROLL for (int s = 0; s < 4; s++) UNROLL for (int i = 0; i < 4; i++)
        xa[s][i] = load2(x, (token + (i & 1) * 8) * WIDTH + pair + (16 * s + (i >> 1) * 8));
    F z[8][4];
    UNROLL for (int i = 0; i < 8; i++) zero(z[i]);
    for (int c0 = 0, turn = 0; c0 < C; c0 += BLOCK, turn ^= 1) {
        U here = memory + turn * 4 * MATRIX;
        arrived<0>();
        together();
        if (c0 + BLOCK < C) bring(memory + (turn ^ 1) * 4 * MATRIX, w, out, c0 + BLOCK, C);
        send();
#pragma unroll 1
        for (int c = 0; c < BLOCK; c += UNIT) {
            U q[TILES][2], k[TILES][2], v[TILES][2], o[TILES][2];
            UNROLL for (int i = 0; i < UNIT; i += 16) {
                U part[2][2];
                project(part, xa, here, c + i, b + c0, sharp * LOG2E);
                UNROLL for (int j = 0; j < 4; j++) q[i / 8 + j / 2][j & 1] = part[j / 2][j & 1];
                project(part, xa, here + MATRIX, c + i, b + C + c0, 1.0f);
                UNROLL for (int j = 0; j < 4; j++) k[i / 8 + j / 2][j & 1] = part[j / 2][j & 1];
                project_turned(part, xa, here + 2 * MATRIX, c + i, b + 2 * C + c0);
                UNROLL for (int j = 0; j < 4; j++) v[i / 8 + j / 2][j & 1] = part[j / 2][j & 1];
            }
            if (R <= 8) {
                UNROLL for (int t = 0; t < TILES; t++) {
                    Sharp peaks;
                    if (R == 1) sharpen(peaks, q[t], k[t]);
                    F sum[4], total[4];
                    zero(sum), zero(total);
                    UNROLL for (int h = 0; h < HEADS; h++) {
                        U e[4], mine = column_of(h);
                        weigh(e, q, k, peaks, t, h);
                        mma(sum, e[0], e[1], e[2], e[3], v[t][0] & mine, v[t][1] & mine);
                        mma(total, e[0], e[1], e[2], e[3], mine & U(ONES_), mine & U(ONES_));
                    }
                    o[t][0] = pack(sum[0] * inverse(total[0]), sum[1] * inverse(total[1]));
                    o[t][1] = pack(sum[2] * inverse(total[2]), sum[3] * inverse(total[3]));
                }
            } else {
                Sharp none;
                U e[4];
                weigh(e, q, k, none, 0, 0);
                F total[4];
                zero(total);
                mma(total, e[0], e[1], e[2], e[3], U(ONES_), U(ONES_));
                F low = inverse(total[0]), high = inverse(total[2]);
                UNROLL for (int t = 0; t < TILES; t++) {
                    F sum[4];
                    zero(sum);
                    mma(sum, e[0], e[1], e[2], e[3], v[t][0], v[t][1]);
                    o[t][0] = pack(sum[0] * low, sum[1] * low), o[t][1] = pack(sum[2] * high, sum[3] * high);
                }
            }
            UNROLL for (int i = 0; i < TILES; i += 2)
                UNROLL for (int n = 0; n < 8; n += 2) {
                    U wo[4];
                    fetch(wo, here + (3 * MATRIX + n * 8 * ROW + 2 * c + 16 * i) + cell(ROW));
                    mma(z[n], o[i][0], o[i][1], o[i + 1][0], o[i + 1][1], wo[0], wo[2]);
                    mma(z[n + 1], o[i][0], o[i][1], o[i + 1][0], o[i + 1][1], wo[1], wo[3]);
                }
        }
    }
    F squares[2] = {0.0f, 0.0f}, own = load(scale, U(0u)), before = load(scale0, U(0u));
    if (first) before = 1.0f;
    UNROLL for (int n = 0; n < 8; n++) {
        F shift[2] = {0.0f, 0.0f};
        for (int i = 0; i < average; i++) {
            F a, c;
            load2(bias, pair + (i * WIDTH + 8 * n), a, c);
            shift[0] = shift[0] + a, shift[1] = shift[1] + c;
        }
        UNROLL for (int i = 0; i < 2; i++) {
            F passed[2];
            load2(u0, (token + 8 * i) * WIDTH + pair + 8 * n, passed[0], passed[1]);
            UNROLL for (int j = 0; j < 2; j++) {
                z[n][2 * i + j] = z[n][2 * i + j] * alpha + passed[j] * before + shift[j] * (1.0f / average);
                squares[i] = squares[i] + z[n][2 * i + j] * z[n][2 * i + j];
            }
        }
    }
    UNROLL for (int i = 0; i < 2; i++) {
        squares[i] = squares[i] + other<1>(squares[i]);
        squares[i] = squares[i] + other<2>(squares[i]);
        F over = F(1.0f) / root(squares[i]);
        UNROLL for (int n = 0; n < 8; n++) {
            F low = z[n][2 * i] * over, high = z[n][2 * i + 1] * over;
            U at = (token + 8 * i) * WIDTH + pair + 8 * n;
            store2(u, at, low, high);
            store2(y, at, pack(low * own, high * own));
        }
        store(inv, token + 8 * i, over);  // four lanes write the same number
    }
}

// ---- backward

// 16 tokens x 16 columns of alpha dz W_O: the gradient of the heads.
INSIDE void project_back(F (&g)[2][4], const U (&dz)[4][4], U weights, int column, float alpha) {
    zero(g[0]), zero(g[1]);
    UNROLL for (int s = 0; s < 4; s++) {
        U w[4];
        fetch_turned(w, weights + (cell(ROW) + (16 * s * ROW + 2 * column)));
        mma(g[0], dz[s][0], dz[s][1], dz[s][2], dz[s][3], w[0], w[1]);
        mma(g[1], dz[s][0], dz[s][1], dz[s][2], dz[s][3], w[2], w[3]);
    }
    UNROLL for (int r = 0; r < 4; r++) g[0][r] = g[0][r] * alpha, g[1][r] = g[1][r] * alpha;
}

// Of a tile: heads o = sum / total, kept for the weights of the output; their gradient g, divided by the total; and -g o, whose sum over
// a head's columns the gradient of its weights lacks. A sharp head's gradient is the small difference of the two, so -g o has the g that
// was rounded, and is a sum of two halves.
INSIDE void part_of(U (&g)[2], U (&go)[2][2], const F (&sum)[4], const F (&gs)[4], const F (&over)[4], U at) {
    UNROLL for (int r = 0; r < 2; r++) {
        F o0 = sum[2 * r] * over[2 * r], o1 = sum[2 * r + 1] * over[2 * r + 1];
        keep(at + 8 * r * ROW, pack(o0, o1));
        g[r] = pack(gs[2 * r] * over[2 * r], gs[2 * r + 1] * over[2 * r + 1]);
        F p0 = F(0.0f) - first_of(g[r]) * o0, p1 = F(0.0f) - second_of(g[r]) * o1;
        go[0][r] = pack(p0, p1);
        go[1][r] = pack(p0 - first_of(go[0][r]), p1 - second_of(go[0][r]));
    }
}

INSIDE void slope(U (&ds)[4], const U (&e)[4], const F (&dp)[2][4]) {  // of the scores, from that of the weights
    UNROLL for (int j = 0; j < 4; j++) ds[j] = times(e[j], pack(dp[j >> 1][2 * (j & 1)], dp[j >> 1][2 * (j & 1) + 1]));
}

INSIDE void turn(U (&y)[4], const U (&x)[4]) { y[0] = turned(x[0]), y[1] = turned(x[2]), y[2] = turned(x[1]), y[3] = turned(x[3]); }

// From dz, the gradient of what the output adds to, to that of the input and the weights: a block of columns, all tokens, or one of
// `shares` equal parts of them. The input's gradient is a sum over blocks of columns, whose parts go to `parts` (model, block, token, 64),
// lane by lane (`add_blocks` in layer.py knows the order). The weights' is a sum over the shares, (share, model, numbers `grown` apart).
KERNEL(WARPS, 1) backward(
    const Half* x, const Half* dz, const Half* w, const float* b, const Half* out, Half* parts, float* dw, float* db, float* dout,
    int T, int C, int model, float alpha, float sharp, float undo, int first, int models, int shares, int grown
) {
    long long m = block_y();
    int block = block_x() % (C / BLOCK), share = block_x() / (C / BLOCK), c0 = block * BLOCK;
    int begin = T / TOKENS / shares * share, end = begin + T / TOKENS / shares;
    x += m * T * WIDTH, dz += m * T * WIDTH, parts += (m * (C / BLOCK) + block) * T * WIDTH;
    w += m * model, b += m * model + c0, out += m * model;
    long long to = ((long long)share * models + m) * grown;
    dw += to, db += to, dout += to;
    U pair = (lane() & 3) * 2, token = lane() >> 2;
    U weights = shared(), tiles = weights + 4 * MATRIX, staged = tiles + 4 * TILE;
    bring(weights, w, out, c0, C);
    auto next = [&](int tile) {
        UNROLL for (int i = 0; i < 8; i++) {
            U at = lane() + 32 * warp() + (i & 3) * 256, row = at >> 3, piece = at & 7;
            copy(tiles + ((tile & 1) * 2 + (i >> 2)) * TILE + row * ROW + piece * 16, i < 4 ? x : dz, (row + tile * TOKENS) * WIDTH + piece * 8);
        }
        send();
    };
    next(begin);
    F gw[2][8][4], gb[2][4];
    UNROLL for (int i = 0; i < 2; i++) {
        zero(gb[i]);
        UNROLL for (int n = 0; n < 8; n++) zero(gw[i][n]);
    }
    int matrix = warp() >> 1, half = warp() & 1;
    for (int tile = begin; tile < end; tile++) {
        U xs = tiles + (tile & 1) * 2 * TILE, zs = xs + TILE;
        arrived<0>();
        together();  // this tile is there, and everybody has done with what lies where the next one goes
        if (tile + 1 < end) next(tile + 1);
        U xa[4][4], za[4][4];
        UNROLL for (int s = 0; s < 4; s++) {
            fetch(xa[s], xs + (cell(ROW) + (16 * warp() * ROW + 32 * s)));
            fetch(za[s], zs + (cell(ROW) + (16 * warp() * ROW + 32 * s)));
        }
        F dx[8][4];
        UNROLL for (int n = 0; n < 8; n++) zero(dx[n]);
        U mine_at = staged + (token + 16 * warp()) * ROW + pair * 2;
#pragma unroll 1
        for (int c = 0; c < BLOCK; c += UNIT) {
            U q[TILES][2], k[TILES][2], v[TILES][2];
            UNROLL for (int i = 0; i < UNIT; i += 16) {
                U part[2][2];
                project(part, xa, weights, c + i, b, sharp * LOG2E);
                UNROLL for (int j = 0; j < 4; j++) q[i / 8 + j / 2][j & 1] = part[j / 2][j & 1];
                project(part, xa, weights + MATRIX, c + i, b + C, 1.0f);
                UNROLL for (int j = 0; j < 4; j++) k[i / 8 + j / 2][j & 1] = part[j / 2][j & 1];
                project(part, xa, weights + 2 * MATRIX, c + i, b + 2 * C, 1.0f);
                UNROLL for (int j = 0; j < 4; j++) v[i / 8 + j / 2][j & 1] = part[j / 2][j & 1];
            }
            U e[4], et[4], ds[4], dst[4], g[TILES][2];  // of a large head: its weights, their gradient, the transposes of both
            if (R > 8) {
                Sharp none;
                weigh(e, q, k, none, 0, 0);
                F total[4], dp[2][4];
                zero(total), zero(dp[0]), zero(dp[1]);
                mma(total, e[0], e[1], e[2], e[3], U(ONES_), U(ONES_));
                UNROLL for (int r = 0; r < 4; r++) total[r] = inverse(total[r]);
                UNROLL for (int i = 0; i < TILES; i += 2) {
                    F gs[2][4];
                    U go[2][2][2];
                    project_back(gs, za, weights + 3 * MATRIX, c + 8 * i, alpha);
                    UNROLL for (int j = 0; j < 2; j++) {
                        F sum[4];
                        zero(sum);
                        mma(sum, e[0], e[1], e[2], e[3], turned(v[i + j][0]), turned(v[i + j][1]));
                        part_of(g[i + j], go[j], sum, gs[j], total, mine_at + (3 * TILE + 2 * c + 16 * (i + j)));
                    }
                    UNROLL for (int j = 0; j < 2; j++) {
                        mma(dp[j], g[i][0], g[i][1], g[i + 1][0], g[i + 1][1], v[i][j], v[i + 1][j]);
                        UNROLL for (int r = 0; r < 2; r++) mma(dp[j], go[0][r][0], go[0][r][1], go[1][r][0], go[1][r][1], U(ONES_), U(ONES_));
                    }
                }
                slope(ds, e, dp);
                turn(et, e), turn(dst, ds);
            }
            UNROLL for (int i = 0; i < TILES; i += 2) {
                U d[3][2][2];  // of queries, keys, values
                F gs[2][4];
                if (R <= 8) project_back(gs, za, weights + 3 * MATRIX, c + 8 * i, alpha);
                UNROLL for (int j = 0; j < 2; j++) {
                    int t = i + j;
                    U qt[2] = {turned(q[t][0]), turned(q[t][1])}, kt[2] = {turned(k[t][0]), turned(k[t][1])};
                    F dq[4], dk[4], dv[4];
                    zero(dq), zero(dk), zero(dv);
                    if (R <= 8) {
                        Sharp peaks;
                        if (R == 1) sharpen(peaks, q[t], k[t]);
                        U vt[2] = {turned(v[t][0]), turned(v[t][1])}, all[HEADS][4], go[2][2];
                        F sum[4], total[4];
                        zero(sum), zero(total);
                        UNROLL for (int h = 0; h < HEADS; h++) {
                            U mine = column_of(h);
                            weigh(all[h], q, k, peaks, t, h);
                            mma(sum, all[h][0], all[h][1], all[h][2], all[h][3], vt[0] & mine, vt[1] & mine);
                            mma(total, all[h][0], all[h][1], all[h][2], all[h][3], mine & U(ONES_), mine & U(ONES_));
                        }
                        UNROLL for (int r = 0; r < 4; r++) total[r] = inverse(total[r]);
                        part_of(g[t], go, sum, gs[j], total, mine_at + (3 * TILE + 2 * c + 16 * t));
                        U gt[2] = {turned(g[t][0]), turned(g[t][1])};
                        UNROLL for (int h = 0; h < HEADS; h++) {
                            U pairs = pair_of(h), mine = column_of(h);
                            F dp[2][4];
                            UNROLL for (int n = 0; n < 2; n++) {
                                zero(dp[n]);
                                mma(dp[n], g[t][0] & pairs, g[t][1] & pairs, go[0][0] & pairs, go[0][1] & pairs, v[t][n], U(ONES_));
                                mma(dp[n], go[1][0] & pairs, go[1][1] & pairs, U(ONES_));
                            }
                            slope(ds, all[h], dp);
                            mma(dq, ds[0], ds[1], ds[2], ds[3], kt[0] & mine, kt[1] & mine);
                            turn(et, all[h]), turn(dst, ds);
                            mma(dv, et[0], et[1], et[2], et[3], gt[0] & mine, gt[1] & mine);
                            mma(dk, dst[0], dst[1], dst[2], dst[3], qt[0] & mine, qt[1] & mine);
                        }
                    } else {
                        mma(dq, ds[0], ds[1], ds[2], ds[3], kt[0], kt[1]);
                        mma(dv, et[0], et[1], et[2], et[3], turned(g[t][0]), turned(g[t][1]));
                        mma(dk, dst[0], dst[1], dst[2], dst[3], qt[0], qt[1]);
                    }
                    UNROLL for (int r = 0; r < 2; r++) {
                        d[0][j][r] = pack(dq[2 * r] * sharp, dq[2 * r + 1] * sharp);
                        d[1][j][r] = pack(dk[2 * r] * (1.0f / LOG2E), dk[2 * r + 1] * (1.0f / LOG2E));
                        d[2][j][r] = pack(dv[2 * r], dv[2 * r + 1]);
                        UNROLL for (int n = 0; n < 3; n++) keep(mine_at + (n * TILE + 8 * r * ROW + 2 * c + 16 * t), d[n][j][r]);
                    }
                }
                if (!first) {
                    UNROLL for (int n = 0; n < 8; n += 2) UNROLL for (int a = 0; a < 3; a++) {
                        U wt[4];
                        fetch_turned(wt, weights + (a * MATRIX + (c + 8 * i) * ROW + 16 * n) + cell(ROW));
                        mma(dx[n], d[a][0][0], d[a][0][1], d[a][1][0], d[a][1][1], wt[0], wt[1]);
                        mma(dx[n + 1], d[a][0][0], d[a][0][1], d[a][1][0], d[a][1][1], wt[2], wt[3]);
                    }
                }
            }
        }
        if (!first) {
            UNROLL for (int i = 0; i < 2; i++) {
                U p[8], at = (token + (tile * TOKENS + 16 * warp() + 8 * i)) * WIDTH + pair * 8;
                UNROLL for (int n = 0; n < 8; n++) p[n] = pack(dx[n][2 * i], dx[n][2 * i + 1]);
                store8(parts, at, p[0], p[1], p[2], p[3]);
                store8(parts, at + 8, p[4], p[5], p[6], p[7]);
            }
        }
        together();  // every sequence's dq, dk, dv and o are there
        U of = staged + (matrix * TILE + 64 * half) + cell_turned(ROW), by = (matrix < 3 ? xs : zs) + cell(ROW);
#pragma unroll 2
        for (int s = 0; s < WARPS; s++) {
            U a[2][4];
            UNROLL for (int i = 0; i < 2; i++) {
                fetch_turned(a[i], of + (16 * s * ROW + 32 * i));
                mma(gb[i], a[i][0], a[i][1], a[i][2], a[i][3], U(ONES_), U(ONES_));
            }
            UNROLL for (int n = 0; n < 8; n += 2) {
                U y[4];
                fetch_turned(y, by + (16 * s * ROW + 16 * n));
                UNROLL for (int i = 0; i < 2; i++) {
                    mma(gw[i][n], a[i][0], a[i][1], a[i][2], a[i][3], y[0], y[1]);
                    mma(gw[i][n + 1], a[i][0], a[i][1], a[i][2], a[i][3], y[2], y[3]);
                }
            }
        }
    }
    UNROLL for (int i = 0; i < 2; i++) UNROLL for (int r = 0; r < 2; r++) {
        U column = (lane() >> 2) + (c0 + 32 * half + 16 * i + 8 * r);
        if (matrix < 3) {
            UNROLL for (int n = 0; n < 8; n++)
                store2(dw, (column + matrix * C) * WIDTH + pair + 8 * n, gw[i][n][2 * r] * undo, gw[i][n][2 * r + 1] * undo);
            store(db, column + matrix * C, gb[i][2 * r] * undo);
        } else {
            UNROLL for (int n = 0; n < 8; n++) UNROLL for (int j = 0; j < 2; j++)
                store(dout, (pair + (8 * n + j)) * C + column, gw[i][n][2 * r + j] * (undo * alpha));
        }
    }
}
