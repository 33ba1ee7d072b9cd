// A block of a narrow causal decoder, x <- x + A(n(x)), x <- x + W_2 gelu(W_1 n(x)), n a layer
// norm: forward in one kernel, and backward in two, through its feed-forward and through its
// attention part, each with its weights' gradients.
//
// What lies where. A warp has 16 tokens. A product's result lies in a warp as its next operand must
// (encoder_attention_cuda.cuh), so a token's row stays in registers from norm to norm; keys and
// values of other warps are read in shared memory, where the weights lie too. A head need not fill
// tiles of eight columns: of those it shares, the others' columns are zeros in one operand. What
// one kernel leaves for another (Kept, Between in decoder_cuda.py) is in the kernels' own order,
// lane by lane.
//
// Who sums what. A model's batch is split over several programs (token splits), each with rows of
// its own for partial sums of the weights' gradients, `apart` numbers from the next one's. Those of
// the feed-forward stay in registers until the program's last tile; those of the attention part are
// added in its rows, sequence by sequence. A Triton kernel adds the splits up (sum_splits in
// encoder_norm_triton.py).
//
// WIDTH, HIDDEN, TOKENS and R, the rank, are a compilation each. Matrices are half, everything else
// float; rows of weights, and each parameter in them, start at multiples of 16 numbers. Tokens
// beyond the last come in as zeros and change nothing: no earlier token attends to them.

constexpr int TILES = WIDTH / 8, STEPS = WIDTH / 16;
constexpr int HEADS = WIDTH / R;
constexpr int BLOCKS = (TOKENS + 15) / 16;   // of 16 tokens, a warp each
// Bytes of a row in shared memory: eight rows' pieces of 16 lie in different banks
constexpr int ROW = 2 * WIDTH + 16;
constexpr int LONG = 2 * HIDDEN + 16;
constexpr int TALL = 4 * WIDTH;              // of a row of floats
constexpr int MATRIX = 16 * BLOCKS * ROW;    // a row a token
constexpr int FOLDED = 16 * BLOCKS * WIDTH;  // numbers of a sequence in our own order
constexpr int QKV = 3 * WIDTH * ROW;
constexpr int PEAKS = 16 * BLOCKS * HEADS * 4;
// Sequences at once, forward; a GPU has 15 barriers for them
constexpr int GROUPS = BLOCKS > 1 ? 18 / BLOCKS : 15;
constexpr int FORWARD = QKV + WIDTH * ROW + HIDDEN * ROW + WIDTH * LONG + 2 * GROUPS * MATRIX;
constexpr int BACKWARD = QKV + 5 * MATRIX + 16 * BLOCKS * TALL + 2 * PEAKS + BLOCKS * 2 * WIDTH * 4;
constexpr int TEAM = 4 * STEPS;              // warps that go back through the feed-forward together
constexpr int TILE = 16 * TEAM;              // their tokens
constexpr int FEED_BACK =
    HIDDEN * ROW + WIDTH * LONG + WIDTH * ROW + 6 * TILE * ROW + TEAM * 4 * WIDTH * 4;
constexpr float LOG2E = 1.4426950408889634f, EPS = 1e-6f, FAR = -1e30f;
#define ONES U(0x3c003c00u)

// ---- where things lie

// Of eight; a thread has two columns of it and of the one eight below
INSIDE U token() { return lane() >> 2; }
INSIDE U column() { return (lane() & 3) * 2; }   // of eight, the first of the two
// A row of one of four matrices of 8 x 8 halves side by side for `find4`, the second below the
// first or beside it.
template <int STRIDE> INSIDE U rows_first() {
    return ((lane() & 7) + (lane() >> 3 & 1) * 8) * STRIDE + (lane() >> 4) * 16;
}
template <int STRIDE> INSIDE U columns_first() {
    return ((lane() & 7) + (lane() >> 4) * 8) * STRIDE + (lane() >> 3 & 1) * 16;
}
INSIDE U cell(U at, int block, int t, int r) {
    return at + (token() + (16 * block + 8 * r)) * ROW + column() * 2 + 16 * t;
}

// A matrix of half on its way to shared memory.
template <int ROWS, int COLUMNS, int STRIDE>
INSIDE void bring(U to, const Half* from, int warps = BLOCKS) {
    constexpr int pieces = COLUMNS / 8;
    for (int i = warp(); i < ROWS * pieces / 32; i += warps) {
        U at = lane() + 32 * i, row = at / pieces;
        copy(to + row * STRIDE + (at - row * pieces) * 16, from, at * 16);
    }
}

// 16 tokens of a sequence as others have them, zeros beyond the last.
INSIDE U row_of(int block, int r) { return token() + (16 * block + 8 * r); }
INSIDE U there(U row) { return less(row, U(TOKENS)); }
INSIDE void fetch(F (&c)[TILES][4], const float* x, int block) {
    UNROLL for (int r = 0; r < 2; r++) {
        U row = row_of(block, r), some = there(row),
          at = choose(some, row * WIDTH, U(0)) + column();
        UNROLL for (int t = 0; t < TILES; t++) {
            F a, b;
            load2(x, at, a, b, 8 * t);
            c[t][2 * r] = choose(some, a, F(0.0f)), c[t][2 * r + 1] = choose(some, b, F(0.0f));
        }
    }
}
INSIDE void put(float* x, const F (&c)[TILES][4], int block) {
    UNROLL for (int r = 0; r < 2; r++) {
        U row = row_of(block, r), some = there(row), at = row * WIDTH + column();
        UNROLL for (int t = 0; t < TILES; t++)
            store2(some, x, at, c[t][2 * r], c[t][2 * r + 1], 8 * t);
    }
}
// The same in our own order, in which a warp reads and writes whole lines: what a thread has of a
// tile or of two side by side. Tokens beyond the last are there too; what they become is finite,
// and no gradient comes from them.
INSIDE void unfold(F (&c)[TILES][4], const float* x, int block) {
    UNROLL for (int t = 0; t < TILES; t++) load4(x, lane() * 4, c[t], (block * TILES + t) * 128);
}
INSIDE void unfold(U (&a)[STEPS][4], const Half* x, int block) {
    UNROLL for (int k = 0; k < STEPS; k++) load8(x, lane() * 8, a[k], (block * STEPS + k) * 256);
}
INSIDE void fold(float* x, const F (&c)[TILES][4], int block) {
    UNROLL for (int t = 0; t < TILES; t++) store4(x, lane() * 4, c[t], (block * TILES + t) * 128);
}
INSIDE void fold(Half* x, const U (&a)[STEPS][4], int block) {
    UNROLL for (int k = 0; k < STEPS; k++) store8(x, lane() * 8, a[k], (block * STEPS + k) * 256);
}
// Either, by who is on the other side.
INSIDE void read(F (&c)[TILES][4], const float* x, size_t sequence, int block, bool others) {
    if (others) fetch(c, x + sequence * TOKENS * WIDTH, block);
    else unfold(c, x + sequence * FOLDED, block);
}
INSIDE void write(float* x, const F (&c)[TILES][4], size_t sequence, int block, bool others) {
    if (others) put(x + sequence * TOKENS * WIDTH, c, block);
    else fold(x + sequence * FOLDED, c, block);
}
INSIDE void keep(U to, const U (&a)[STEPS][4], int block) {
    UNROLL for (int t = 0; t < TILES; t++) UNROLL
        for (int r = 0; r < 2; r++) keep(cell(to, block, t, r), a[t / 2][2 * (t & 1) + r]);
}

// ---- products and norms of a warp's 16 tokens

template <int N> INSIDE void zero(F (&c)[N][4]) {
    UNROLL for (int n = 0; n < N; n++) UNROLL
        for (int i = 0; i < 4; i++) c[n][i] = 0.0f;
}
template <int N> INSIDE void biased(F (&c)[N][4], const float* b) {
    UNROLL for (int n = 0; n < N; n++) {
        known2(b, column(), c[n][0], c[n][1], 8 * n);
        c[n][2] = c[n][0], c[n][3] = c[n][1];
    }
}
INSIDE void more(F (&c)[TILES][4], const float* b) {
    UNROLL for (int n = 0; n < TILES; n++) {
        F first, second;
        known2(b, column(), first, second, 8 * n);
        UNROLL for (int r = 0; r < 2; r++)
            c[n][2 * r] = c[n][2 * r] + first, c[n][2 * r + 1] = c[n][2 * r + 1] + second;
    }
}
template <int K> INSIDE void packed(U (&a)[K][4], const F (&c)[2 * K][4]) {
    UNROLL for (int k = 0; k < K; k++) UNROLL for (int i = 0; i < 4; i++) {
        const F* x = c[2 * k + i / 2] + 2 * (i & 1);
        a[k][i] = pack(x[0], x[1]);
    }
}
// c += a w^T, w (8 N, 16 K) in rows; and c += a w, w (16 K, 8 N).
template <int STRIDE, int N, int K> INSIDE void by_rows(F (&c)[N][4], const U (&a)[K][4], U w) {
    U at = w + columns_first<STRIDE>();
    UNROLL for (int k = 0; k < K; k++) UNROLL for (int n = 0; n < N; n += 2) {
        U b[4];
        known4<0>(b, at + (8 * n * STRIDE + 32 * k));
        mma(c[n], a[k][0], a[k][1], a[k][2], a[k][3], b[0], b[1]);
        mma(c[n + 1], a[k][0], a[k][1], a[k][2], a[k][3], b[2], b[3]);
    }
}
template <int STRIDE, int N, int K> INSIDE void by_columns(F (&c)[N][4], const U (&a)[K][4], U w) {
    U at = w + rows_first<STRIDE>();
    UNROLL for (int k = 0; k < K; k++) UNROLL for (int n = 0; n < N; n += 2) {
        U b[4];
        known4<1>(b, at + (16 * k * STRIDE + 16 * n));
        mma(c[n], a[k][0], a[k][1], a[k][2], a[k][3], b[0], b[1]);
        mma(c[n + 1], a[k][0], a[k][1], a[k][2], a[k][3], b[2], b[3]);
    }
}

// The sum of a row, which four threads have.
INSIDE F whole(F x) {
    x = x + other<1>(x);
    return x + other<2>(x);
}
// (x - mean)/std of every row in x's place, and 1/std.
INSIDE void standard(F (&x)[TILES][4], F (&over)[2]) {
    UNROLL for (int r = 0; r < 2; r++) {
        F sum = 0.0f;
        UNROLL for (int t = 0; t < TILES; t++) sum = sum + x[t][2 * r] + x[t][2 * r + 1];
        F mean = whole(sum) * (1.0f / WIDTH), square = 0.0f;
        UNROLL for (int t = 0; t < TILES; t++) UNROLL for (int i = 2 * r; i < 2 * r + 2; i++) {
            x[t][i] = x[t][i] - mean;
            square = fused(x[t][i], x[t][i], square);
        }
        over[r] = inverse(root(whole(square) * (1.0f / WIDTH) + EPS));
        UNROLL for (int t = 0; t < TILES; t++) UNROLL
            for (int i = 2 * r; i < 2 * r + 2; i++) x[t][i] = x[t][i] * over[r];
    }
}
INSIDE void varied(
    U (&a)[STEPS][4], const F (&hat)[TILES][4], const float* gain, const float* shift) {
    F y[TILES][4];
    UNROLL for (int t = 0; t < TILES; t++) {
        F g[2], s[2];
        known2(gain, column(), g[0], g[1], 8 * t), known2(shift, column(), s[0], s[1], 8 * t);
        UNROLL for (int i = 0; i < 4; i++) y[t][i] = fused(hat[t][i], g[i & 1], s[i & 1]);
    }
    packed(a, y);
}

// WIDTH sums of every one of WARPS warps, in shared memory and EACH such rows apart, to one row; a
// warp's lanes take them in turn.
template <int WARPS, int EACH> INSIDE void added(float* to, U from, float unscale) {
    for (int i = warp(); i < (WIDTH + 31) / 32; i += WARPS) {
        U all = lane() + 32 * i, some = less(all, U(WIDTH)), at = choose(some, all, U(0u));
        F sum = 0.0f;
        UNROLL for (int n = 0; n < WARPS; n++)
            sum = sum + find1(from + (at + EACH * WIDTH * n) * 4);
        store(some, to, at, sum * unscale);
    }
}

// Phi(-|z|) within 1e-6: a polynomial in |z| for its logarithm in base 2, fitted to the error of
// Phi and of |z| Phi.
INSIDE F tail(F z) {
    F x = size(z), sum = fused(x, F(-5.04430237e-4f), F(7.30864757e-3f));
    sum = fused(fused(fused(sum, x, F(-5.24021864e-2f)), x, F(-0.459357927f)), x, F(-1.15107230f));
    return power(fused(sum, x, F(-1.0f)));
}
INSIDE F gelu(F z) { return fused(minus(size(z)), tail(z), largest(z, F(0.0f))); }
INSIDE F gelu(F z, F& slope) {
    F below = F(0.5f) + signed_as(F(0.5f) - tail(z), z);
    F bell = power(fused(z * z, F(-0.5f * LOG2E), F(-1.3257480647f)));  // exp(-z^2/2)/sqrt(2 pi)
    slope = fused(z, bell, below);
    return z * below;
}

// From the gradient of a norm's output that of its input, in its place.
INSIDE void lowered(
    F (&dh)[TILES][4], const F (&hat)[TILES][4], const F (&over)[2], const float* gain) {
    UNROLL for (int t = 0; t < TILES; t++) {
        F each[2];
        known2(gain, column(), each[0], each[1], 8 * t);
        UNROLL for (int i = 0; i < 4; i++) dh[t][i] = dh[t][i] * each[i & 1];
    }
    UNROLL for (int r = 0; r < 2; r++) {
        F mean = 0.0f, along = 0.0f;
        UNROLL for (int t = 0; t < TILES; t++) UNROLL for (int i = 2 * r; i < 2 * r + 2; i++) {
            mean = mean + dh[t][i];
            along = fused(dh[t][i], hat[t][i], along);
        }
        mean = whole(mean) * (1.0f / WIDTH), along = whole(along) * (1.0f / WIDTH);
        UNROLL for (int t = 0; t < TILES; t++) UNROLL for (int i = 2 * r; i < 2 * r + 2; i++)
            dh[t][i] = (dh[t][i] - mean - hat[t][i] * along) * over[r];
    }
}
// The sums over a warp's tokens of c, or of c times d, written to WIDTH floats in shared memory or,
// with `again`, added to those there.
INSIDE void summed(U to, const F (&c)[TILES][4], bool again) {
    UNROLL for (int t = 0; t < TILES; t++) {
        F sum[2] = {c[t][0] + c[t][2], c[t][1] + c[t][3]}, kept[2] = {0.0f, 0.0f};
        UNROLL for (int i = 0; i < 2; i++) {
            sum[i] = sum[i] + other<4>(sum[i]);
            sum[i] = sum[i] + other<8>(sum[i]);
            sum[i] = sum[i] + other<16>(sum[i]);
        }
        U place = to + column() * 4 + 32 * t;  // eight lanes write the same
        if (again) find2(place, kept[0], kept[1]);
        same_moment();
        keep2(place, sum[0] + kept[0], sum[1] + kept[1]);
    }
}
INSIDE void summed(U to, const F (&c)[TILES][4], const F (&d)[TILES][4], bool again) {
    F both[TILES][4];
    UNROLL for (int t = 0; t < TILES; t++) UNROLL
        for (int i = 0; i < 4; i++) both[t][i] = c[t][i] * d[t][i];
    summed(to, both, again);
}

// ---- heads

INSIDE constexpr int first_tile(int h) { return h * R / 8; }
INSIDE constexpr int end_tile(int h) { return (h * R + R + 7) / 8; }
INSIDE constexpr bool alone(int h, int t) { return 8 * t >= h * R && 8 * t + 8 <= h * R + R; }
// All bits where a column is the head's: of a thread's two columns, and of the one that it has in a
// second operand.
INSIDE U pair_of(int h, int t) {
    if (alone(h, t)) return U(~0u);
    U c = column() + U(8 * t - h * R);
    return choose(less(c, U(R)), U(0xffffu), U(0u)) |
           choose(less(c + 1, U(R)), U(0xffff0000u), U(0u));
}
INSIDE U column_of(int h, int t) {
    return alone(h, t) ? U(~0u) : choose(less(token() + U(8 * t - h * R), U(R)), U(~0u), U(0u));
}

// The first BY of some rows behind the others.
template <int BY, class T, int M> INSIDE void rotate(T (&x)[TILES][M]) {
    T kept[TILES][M];
    UNROLL for (int t = 0; t < TILES; t++) UNROLL
        for (int i = 0; i < M; i++) kept[t][i] = x[(t + BY) % TILES][i];
    UNROLL for (int t = 0; t < TILES; t++) UNROLL for (int i = 0; i < M; i++) x[t][i] = kept[t][i];
}

// Scores of a head, 16 queries and the 16 keys of block j; EDGE: they are the same tokens, and
// later ones are not seen.
template <bool EDGE> INSIDE void score(F (&s)[2][4], const U (*mine)[2], U keys, int h, int j) {
    UNROLL for (int n = 0; n < 2; n++) {
        UNROLL for (int t = first_tile(h); t < end_tile(h); t++) {
            U b = find(cell(keys, j, t, n));
            const U(&a)[2] = mine[t - first_tile(h)];
            if (t == first_tile(h)) mma0(s[n], a[0], a[1], b);
            else mma(s[n], a[0], a[1], b);
        }
        if (EDGE) UNROLL for (int i = 0; i < 4; i++)
                s[n][i] = choose(
                    less(token() + 8 * (i / 2), column() + (8 * n + (i & 1))), F(FAR), s[n][i]);
    }
}
INSIDE void rise(F (&top)[2], const F (&s)[2][4]) {
    UNROLL for (int n = 0; n < 2; n++) UNROLL
        for (int i = 0; i < 4; i++) top[i / 2] = largest(top[i / 2], s[n][i]);
}
// Their weights before they are divided, added up and times values.
INSIDE void mix(F (*mixed)[4], F (&sum)[4], const F (&s)[2][4], const F (&top)[2], U values,
    float factor, int h, int j) {
    U e[4];
    UNROLL for (int i = 0; i < 4; i++) {
        const F* x = s[i / 2] + 2 * (i & 1);
        e[i] = pack(power(fused(x[0], F(factor), minus(top[i & 1]))),
            power(fused(x[1], F(factor), minus(top[i & 1]))));
    }
    mma(sum, e[0], e[1], e[2], e[3], ONES, ONES);
    UNROLL for (int t = first_tile(h); t < end_tile(h); t += 2) {
        U b[4];
        // The second beyond the last column is not used
        find4<1>(b, values + rows_first<ROW>() + 16 * j * ROW + 16 * t);
        mma(mixed[t - first_tile(h)], e[0], e[1], e[2], e[3], b[0], b[1]);
        if (t + 1 < end_tile(h))
            mma(mixed[t + 1 - first_tile(h)], e[0], e[1], e[2], e[3], b[2], b[3]);
    }
}

// The heads of a warp's tokens, and for every token and head the logarithm of the sum of weights,
// in base 2 and of scores times `factor`. Heads lie in tiles the same way again after PERIOD tiles;
// the lines are there once for all such groups, and what they take is rotated.
INSIDE constexpr int common(int a, int b) { return b ? common(b, a % b) : a; }
constexpr int PERIOD = R / common(R, 8), GROUP = 8 * PERIOD / R;
INSIDE void attend(
    F (&o)[TILES][4], U (&q)[TILES][2], U keys, U values, float* peaks, int w, float factor) {
    ROLLED for (int part = 0; part < TILES / PERIOD; part++) {
        UNROLL for (int h = 0; h < GROUP; h++) {
            constexpr int TOUCHED = (R + 14) / 8;
            U mine[TOUCHED][2];
            F s[2][4], top[2] = {FAR, FAR}, mixed[TOUCHED][4], sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            UNROLL for (int t = first_tile(h); t < end_tile(h); t++) UNROLL
                for (int r = 0; r < 2; r++) mine[t - first_tile(h)][r] = q[t][r] & pair_of(h, t);
            ROLLED for (int j = 0; j < w; j++) score<false>(s, mine, keys, h, j), rise(top, s);
            score<true>(s, mine, keys, h, w), rise(top, s);
            UNROLL for (int r = 0; r < 2; r++) {
                top[r] = largest(top[r], other<1>(top[r]));
                top[r] = largest(top[r], other<2>(top[r])) * factor;
            }
            zero(mixed);
            mix(mixed, sum, s, top, values, factor, h, w);
            ROLLED for (int j = 0; j < w; j++) score<false>(s, mine, keys, h, j),
                mix(mixed, sum, s, top, values, factor, h, j);
            F over[2] = {inverse(sum[0]), inverse(sum[2])};
            UNROLL for (int r = 0; r < 2; r++) {
                U row = row_of(w, r);
                store(
                    (lane() & 3) == U(0u), peaks, row * HEADS + h, top[r] + logarithm(sum[2 * r]));
            }
            UNROLL for (int t = first_tile(h); t < end_tile(h); t++) {
                U own = pair_of(h, t);
                UNROLL for (int i = 0; i < 4; i++) {
                    F y = mixed[t - first_tile(h)][i] * over[i / 2];
                    o[t][i] =
                        alone(h, t) ? y : choose(own & (i & 1 ? 0xffff0000u : 0xffffu), y, o[t][i]);
                }
            }
        }
        rotate<PERIOD>(o), rotate<PERIOD>(q);
        keys = keys + 16 * PERIOD, values = values + 16 * PERIOD, peaks += GROUP;
    }
}
