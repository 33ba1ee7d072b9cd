// A block of a narrow causal decoder, x <- x + A(n(x)), x <- x + W_2 gelu(W_1 n(x)), n a layer norm: forward in one kernel, and backward in
// two, through its feed-forward and through its attention part, each with its weights' gradients.
//
// What lies where. A warp has 16 tokens. A product's result lies in a warp as its next operand must (encoder_attention_cuda.cu), so a
// token's row stays in registers from norm to norm; keys and values of other warps are read in shared memory, where the weights lie too. A
// head need not fill tiles of eight columns: of those it shares, the others' columns are zeros in one operand. What one kernel leaves for
// another (Kept, Between in decoder_cuda.py) is in the kernels' own order, lane by lane.
//
// Who sums what. A model's batch is split over several programs (token splits), each with rows of its own for partial sums of the weights'
// gradients, `apart` numbers from the next one's. Those of the feed-forward stay in registers until the program's last tile; those of the
// attention part are added in its rows, sequence by sequence. A Triton kernel adds the splits up (sum_splits in encoder_norm_triton.py).
//
// WIDTH, HIDDEN, TOKENS and R, the rank, are a compilation each. Matrices are half, everything else float; rows of weights, and each
// parameter in them, start at multiples of 16 numbers. Tokens beyond the last come in as zeros and change nothing: no earlier token attends to them.

constexpr int TILES = WIDTH / 8, STEPS = WIDTH / 16;
constexpr int HEADS = WIDTH / R;
constexpr int BLOCKS = (TOKENS + 15) / 16;   // of 16 tokens, a warp each
constexpr int ROW = 2 * WIDTH + 16;          // bytes of a row in shared memory: eight rows' pieces of 16 lie in different banks
constexpr int LONG = 2 * HIDDEN + 16;
constexpr int TALL = 4 * WIDTH;              // of a row of floats
constexpr int MATRIX = 16 * BLOCKS * ROW;    // a row a token
constexpr int FOLDED = 16 * BLOCKS * WIDTH;  // numbers of a sequence in our own order
constexpr int QKV = 3 * WIDTH * ROW;
constexpr int PEAKS = 16 * BLOCKS * HEADS * 4;
constexpr int GROUPS = BLOCKS > 1 ? 18 / BLOCKS : 15;  // sequences at once, forward; a GPU has 15 barriers for them
constexpr int FORWARD = QKV + WIDTH * ROW + HIDDEN * ROW + WIDTH * LONG + 2 * GROUPS * MATRIX;
constexpr int BACKWARD = QKV + 5 * MATRIX + 16 * BLOCKS * TALL + 2 * PEAKS + BLOCKS * 2 * WIDTH * 4;
constexpr int TEAM = 4 * STEPS;              // warps that go back through the feed-forward together
constexpr int TILE = 16 * TEAM;              // their tokens
constexpr int FEED_BACK = HIDDEN * ROW + WIDTH * LONG + WIDTH * ROW + 6 * TILE * ROW + TEAM * 4 * WIDTH * 4;
constexpr float LOG2E = 1.4426950408889634f, EPS = 1e-6f, FAR = -1e30f;
#define ONES U(0x3c003c00u)

// ---- where things lie

INSIDE U token() { return lane() >> 2; }         // of eight; a thread has two columns of it and of the one eight below
INSIDE U column() { return (lane() & 3) * 2; }   // of eight, the first of the two
// A row of one of four matrices of 8 x 8 halves side by side for `find4`, the second below the first or beside it.
template <int STRIDE> INSIDE U rows_first() { return ((lane() & 7) + (lane() >> 3 & 1) * 8) * STRIDE + (lane() >> 4) * 16; }
template <int STRIDE> INSIDE U columns_first() { return ((lane() & 7) + (lane() >> 4) * 8) * STRIDE + (lane() >> 3 & 1) * 16; }
INSIDE U cell(U at, int block, int t, int r) { return at + (token() + (16 * block + 8 * r)) * ROW + column() * 2 + 16 * t; }

// A matrix of half on its way to shared memory.
template <int ROWS, int COLUMNS, int STRIDE> INSIDE void bring(U to, const Half* from, int warps = BLOCKS) {
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
        U row = row_of(block, r), some = there(row), at = choose(some, row * WIDTH, U(0)) + column();
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
        UNROLL for (int t = 0; t < TILES; t++) store2(some, x, at, c[t][2 * r], c[t][2 * r + 1], 8 * t);
    }
}
// The same in our own order, in which a warp reads and writes whole lines: what a thread has of a tile or of two side by side. Tokens
// beyond the last are there too; what they become is finite, and no gradient comes from them.
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
    UNROLL for (int t = 0; t < TILES; t++) UNROLL for (int r = 0; r < 2; r++) keep(cell(to, block, t, r), a[t / 2][2 * (t & 1) + r]);
}

// ---- products and norms of a warp's 16 tokens

template <int N> INSIDE void zero(F (&c)[N][4]) { UNROLL for (int n = 0; n < N; n++) UNROLL for (int i = 0; i < 4; i++) c[n][i] = 0.0f; }
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
        UNROLL for (int r = 0; r < 2; r++) c[n][2 * r] = c[n][2 * r] + first, c[n][2 * r + 1] = c[n][2 * r + 1] + second;
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
        UNROLL for (int t = 0; t < TILES; t++) UNROLL for (int i = 2 * r; i < 2 * r + 2; i++) x[t][i] = x[t][i] * over[r];
    }
}
INSIDE void varied(U (&a)[STEPS][4], const F (&hat)[TILES][4], const float* gain, const float* shift) {
    F y[TILES][4];
    UNROLL for (int t = 0; t < TILES; t++) {
        F g[2], s[2];
        known2(gain, column(), g[0], g[1], 8 * t), known2(shift, column(), s[0], s[1], 8 * t);
        UNROLL for (int i = 0; i < 4; i++) y[t][i] = fused(hat[t][i], g[i & 1], s[i & 1]);
    }
    packed(a, y);
}

// WIDTH sums of every one of WARPS warps, in shared memory and EACH such rows apart, to one row; a warp's lanes take them in turn.
template <int WARPS, int EACH> INSIDE void added(float* to, U from, float unscale) {
    for (int i = warp(); i < (WIDTH + 31) / 32; i += WARPS) {
        U all = lane() + 32 * i, some = less(all, U(WIDTH)), at = choose(some, all, U(0u));
        F sum = 0.0f;
        UNROLL for (int n = 0; n < WARPS; n++) sum = sum + find1(from + (at + EACH * WIDTH * n) * 4);
        store(some, to, at, sum * unscale);
    }
}

// Phi(-|z|) within 1e-6: a polynomial in |z| for its logarithm in base 2, fitted to the error of Phi and of |z| Phi.
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
INSIDE void lowered(F (&dh)[TILES][4], const F (&hat)[TILES][4], const F (&over)[2], const float* gain) {
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
// The sums over a warp's tokens of c, or of c times d, written to WIDTH floats in shared memory or, with `again`, added to those there.
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
    UNROLL for (int t = 0; t < TILES; t++) UNROLL for (int i = 0; i < 4; i++) both[t][i] = c[t][i] * d[t][i];
    summed(to, both, again);
}

// ---- heads

INSIDE constexpr int first_tile(int h) { return h * R / 8; }
INSIDE constexpr int end_tile(int h) { return (h * R + R + 7) / 8; }
INSIDE constexpr bool alone(int h, int t) { return 8 * t >= h * R && 8 * t + 8 <= h * R + R; }
// All bits where a column is the head's: of a thread's two columns, and of the one that it has in a second operand.
INSIDE U pair_of(int h, int t) {
    if (alone(h, t)) return U(~0u);
    U c = column() + U(8 * t - h * R);
    return choose(less(c, U(R)), U(0xffffu), U(0u)) | choose(less(c + 1, U(R)), U(0xffff0000u), U(0u));
}
INSIDE U column_of(int h, int t) { return alone(h, t) ? U(~0u) : choose(less(token() + U(8 * t - h * R), U(R)), U(~0u), U(0u)); }

// The first BY of some rows behind the others.
template <int BY, class T, int M> INSIDE void rotate(T (&x)[TILES][M]) {
    T kept[TILES][M];
    UNROLL for (int t = 0; t < TILES; t++) UNROLL for (int i = 0; i < M; i++) kept[t][i] = x[(t + BY) % TILES][i];
    UNROLL for (int t = 0; t < TILES; t++) UNROLL for (int i = 0; i < M; i++) x[t][i] = kept[t][i];
}

// Scores of a head, 16 queries and the 16 keys of block j; EDGE: they are the same tokens, and later ones are not seen.
template <bool EDGE> INSIDE void score(F (&s)[2][4], const U (*mine)[2], U keys, int h, int j) {
    UNROLL for (int n = 0; n < 2; n++) {
        UNROLL for (int t = first_tile(h); t < end_tile(h); t++) {
            U b = find(cell(keys, j, t, n));
            const U(&a)[2] = mine[t - first_tile(h)];
            if (t == first_tile(h)) mma0(s[n], a[0], a[1], b);
            else mma(s[n], a[0], a[1], b);
        }
        if (EDGE) UNROLL for (int i = 0; i < 4; i++)
            s[n][i] = choose(less(token() + 8 * (i / 2), column() + (8 * n + (i & 1))), F(FAR), s[n][i]);
    }
}
INSIDE void rise(F (&top)[2], const F (&s)[2][4]) {
    UNROLL for (int n = 0; n < 2; n++) UNROLL for (int i = 0; i < 4; i++) top[i / 2] = largest(top[i / 2], s[n][i]);
}
// Their weights before they are divided, added up and times values.
INSIDE void mix(F (*mixed)[4], F (&sum)[4], const F (&s)[2][4], const F (&top)[2], U values, float factor, int h, int j) {
    U e[4];
    UNROLL for (int i = 0; i < 4; i++) {
        const F* x = s[i / 2] + 2 * (i & 1);
        e[i] = pack(power(fused(x[0], F(factor), minus(top[i & 1]))), power(fused(x[1], F(factor), minus(top[i & 1]))));
    }
    mma(sum, e[0], e[1], e[2], e[3], ONES, ONES);
    UNROLL for (int t = first_tile(h); t < end_tile(h); t += 2) {
        U b[4];
        find4<1>(b, values + rows_first<ROW>() + 16 * j * ROW + 16 * t);  // the second beyond the last column is not used
        mma(mixed[t - first_tile(h)], e[0], e[1], e[2], e[3], b[0], b[1]);
        if (t + 1 < end_tile(h)) mma(mixed[t + 1 - first_tile(h)], e[0], e[1], e[2], e[3], b[2], b[3]);
    }
}

// The heads of a warp's tokens, and for every token and head the logarithm of the sum of weights, in base 2 and of scores times `factor`.
// Heads lie in tiles the same way again after PERIOD tiles; the lines are there once for all such groups, and what they take is rotated.
INSIDE constexpr int common(int a, int b) { return b ? common(b, a % b) : a; }
constexpr int PERIOD = R / common(R, 8), GROUP = 8 * PERIOD / R;
INSIDE void attend(F (&o)[TILES][4], U (&q)[TILES][2], U keys, U values, float* peaks, int w, float factor) {
    ROLLED for (int part = 0; part < TILES / PERIOD; part++) {
        UNROLL for (int h = 0; h < GROUP; h++) {
            constexpr int TOUCHED = (R + 14) / 8;
            U mine[TOUCHED][2];
            F s[2][4], top[2] = {FAR, FAR}, mixed[TOUCHED][4], sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            UNROLL for (int t = first_tile(h); t < end_tile(h); t++) UNROLL for (int r = 0; r < 2; r++)
                mine[t - first_tile(h)][r] = q[t][r] & pair_of(h, t);
            ROLLED for (int j = 0; j < w; j++) score<false>(s, mine, keys, h, j), rise(top, s);
            score<true>(s, mine, keys, h, w), rise(top, s);
            UNROLL for (int r = 0; r < 2; r++) {
                top[r] = largest(top[r], other<1>(top[r]));
                top[r] = largest(top[r], other<2>(top[r])) * factor;
            }
            zero(mixed);
            mix(mixed, sum, s, top, values, factor, h, w);
            ROLLED for (int j = 0; j < w; j++) score<false>(s, mine, keys, h, j), mix(mixed, sum, s, top, values, factor, h, j);
            F over[2] = {inverse(sum[0]), inverse(sum[2])};
            UNROLL for (int r = 0; r < 2; r++) {
                U row = row_of(w, r);
                store((lane() & 3) == U(0u), peaks, row * HEADS + h, top[r] + logarithm(sum[2 * r]));
            }
            UNROLL for (int t = first_tile(h); t < end_tile(h); t++) {
                U own = pair_of(h, t);
                UNROLL for (int i = 0; i < 4; i++) {
                    F y = mixed[t - first_tile(h)][i] * over[i / 2];
                    o[t][i] = alone(h, t) ? y : choose(own & (i & 1 ? 0xffff0000u : 0xffffu), y, o[t][i]);
                }
            }
        }
        rotate<PERIOD>(o), rotate<PERIOD>(q);
        keys = keys + 16 * PERIOD, values = values + 16 * PERIOD, peaks += GROUP;
    }
}

// ---- forward

// x1 = x + W_O heads(n(x)) + bias, x2 = x1 + W_2 gelu(W_1 n(x1) + bias) + bias; n(x1), queries, keys, values, heads and `peaks` are kept.
KERNEL(GROUPS * BLOCKS, 1) forward(
    const float* x, const float* gain1, const float* shift1, const Half* w, const float* b, const Half* out, const float* out_bias,
    const float* gain2, const float* shift2, const Half* up, const float* up_bias, const Half* down, const float* down_bias,
    float* x1, Half* h2, float* x2, Half* qkv, Half* o, float* peaks, int batch, int model, float sharp, int lowest_layer, int highest_layer
) {
    const int m = block_y(), me = warp() % BLOCKS, group = warp() / BLOCKS, s = block_x() * GROUPS + group;
    const size_t row = (size_t)m * model, sequence = (size_t)m * batch + s, at = sequence * FOLDED;
    constexpr int WARPS = GROUPS * BLOCKS, WEIGHTS = QKV + WIDTH * ROW + HIDDEN * ROW;
    const U keys = shared() + WEIGHTS + WIDTH * LONG + 2 * group * MATRIX, values = keys + MATRIX;
    bring<3 * WIDTH, WIDTH, ROW>(shared(), w + row, WARPS), bring<WIDTH, WIDTH, ROW>(shared() + QKV, out + row, WARPS);
    bring<HIDDEN, WIDTH, ROW>(shared() + QKV + WIDTH * ROW, up + row, WARPS), bring<WIDTH, HIDDEN, LONG>(shared() + WEIGHTS, down + row, WARPS);
    send(), arrived<0>();
    together();
    if (s >= batch) return;
    const U at_w = anew(shared()), at_out = at_w + QKV, at_up = at_out + WIDTH * ROW, at_down = at_up + HIDDEN * ROW;
    F now[TILES][4], c[TILES][4], over[2];
    U a[STEPS][4], q[STEPS][4];
    read(c, x, sequence, me, lowest_layer), standard(c, over), varied(a, c, gain1 + row, shift1 + row);
    UNROLL for (int i = 2; i >= 0; i--) {
        biased(c, b + row + i * WIDTH), by_rows<ROW>(c, a, at_w + i * WIDTH * ROW), packed(q, c);
        fold(qkv + 3 * at + i * FOLDED, q, me);
        if (i) keep(i == 1 ? keys : values, q, me);
    }
    together(group, BLOCKS);
    U queries[TILES][2];
    UNROLL for (int t = 0; t < TILES; t++) UNROLL for (int r = 0; r < 2; r++) queries[t][r] = q[t / 2][2 * (t & 1) + r];
    zero(c), attend(c, queries, keys, values, peaks + sequence * 16 * BLOCKS * HEADS, me, sharp * LOG2E);
    packed(a, c), fold(o + at, a, me);
    read(now, x, sequence, me, lowest_layer);
    more(now, out_bias + row), by_rows<ROW>(now, a, at_out), fold(x1 + at, now, me);
    UNROLL for (int t = 0; t < TILES; t++) UNROLL for (int i = 0; i < 4; i++) c[t][i] = now[t][i];
    standard(c, over), varied(a, c, gain2 + row, shift2 + row), fold(h2 + at, a, me);
    more(now, down_bias + row);
    TWICE for (int f = 0; f < HIDDEN; f += 16) {
        F z[2][4];
        U y[1][4];
        biased(z, up_bias + row + f), by_rows<ROW>(z, a, at_up + f * ROW);
        UNROLL for (int n = 0; n < 2; n++) UNROLL for (int i = 0; i < 4; i++) z[n][i] = gelu(z[n][i]);
        packed(y, z), by_rows<LONG>(now, y, at_down + 2 * f);
    }
    write(x2, now, sequence, me, highest_layer);
}

// ---- backward, from the gradients of x1 and of the heads

// The sum of g o over a head's columns, of every token of block w and head.
INSIDE void weigh(U to, const U (&g)[STEPS][4], const U (&o)[STEPS][4], int w) {
    F p[TILES][4];
    UNROLL for (int t = 0; t < TILES; t++) UNROLL for (int r = 0; r < 2; r++) {
        U a = g[t / 2][2 * (t & 1) + r], b = o[t / 2][2 * (t & 1) + r];
        p[t][2 * r] = first_of(a) * first_of(b), p[t][2 * r + 1] = second_of(a) * second_of(b);
    }
    UNROLL for (int h = 0; h < HEADS; h++) UNROLL for (int r = 0; r < 2; r++) {
        F sum = 0.0f;
        UNROLL for (int t = first_tile(h); t < end_tile(h); t++) {
            U own = pair_of(h, t);
            UNROLL for (int i = 0; i < 2; i++) {
                F x = p[t][2 * r + i];
                sum = sum + (alone(h, t) ? x : choose(own & (i ? 0xffff0000u : 0xffffu), x, F(0.0f)));
            }
        }
        keep1(to + (row_of(w, r) * HEADS + h) * 4, whole(sum));  // four lanes write the same
    }
}

// 16 tokens' halves of one matrix as first operands of products over 8 columns, [tile][8 tokens].
INSIDE void take(U (&y)[TILES][2], U from, int block) {
    UNROLL for (int k = 0; k < STEPS; k++) {
        U x[4];
        find16(x, from + lane() * 16 + (block * STEPS + k) * 512);
        UNROLL for (int i = 0; i < 4; i++) y[2 * k + i / 2][i & 1] = x[i];
    }
}

// The heads' gradients for the keys of block j and the queries of block i; those of queries and keys lack the scores' factor.
INSIDE void attend_back(
    F (&dq)[TILES][4], F (&dk)[TILES][4], F (&dv)[TILES][4], const U (&q)[TILES][2], const U (&g)[TILES][2], const U (&k)[TILES][2],
    const U (&v)[TILES][2], U peaks, U sums, int i, bool edge, float factor
) {
    U seen[4];  // all bits, but for later tokens where queries and keys are the same ones
    UNROLL for (int n = 0; n < 4; n++) {
        U query = token() + 8 * (n & 1), key = column() + 8 * (n / 2);
        seen[n] = edge ? choose(less(query, key), U(0u), U(0xffffu)) | choose(less(query, key + 1), U(0u), U(0xffff0000u)) : U(~0u);
    }
    UNROLL for (int h = 0; h < HEADS; h++) {
        F s[2][4], ds[2][4], peak[2], mean[2];
        UNROLL for (int t = first_tile(h); t < end_tile(h); t++) {
            U own = pair_of(h, t), q0 = q[t][0] & own, q1 = q[t][1] & own, g0 = g[t][0] & own, g1 = g[t][1] & own;
            UNROLL for (int n = 0; n < 2; n++) {
                if (t == first_tile(h)) mma0(s[n], q0, q1, k[t][n]), mma0(ds[n], g0, g1, v[t][n]);
                else mma(s[n], q0, q1, k[t][n]), mma(ds[n], g0, g1, v[t][n]);
            }
        }
        UNROLL for (int r = 0; r < 2; r++) {
            U at = (row_of(i, r) * HEADS + h) * 4;
            peak[r] = find1(peaks + at), mean[r] = find1(sums + at);
        }
        UNROLL for (int n = 0; n < 2; n++) UNROLL for (int c = 0; c < 4; c++) {
            s[n][c] = power(fused(s[n][c], F(factor), minus(peak[c / 2])));
            ds[n][c] = s[n][c] * (ds[n][c] - mean[c / 2]);
        }
        U p[1][4], d[1][4];
        packed(p, s), packed(d, ds);
        UNROLL for (int n = 0; n < 4; n++) p[0][n] = turned(p[0][n] & seen[n]), d[0][n] = d[0][n] & seen[n];
        U dt[4] = {turned(d[0][0]), turned(d[0][1]), turned(d[0][2]), turned(d[0][3])};
        UNROLL for (int t = first_tile(h); t < end_tile(h); t++) {
            U own = column_of(h, t);
            mma(dq[t], d[0][0], d[0][1], d[0][2], d[0][3], turned(k[t][0]) & own, turned(k[t][1]) & own);
            mma(dk[t], dt[0], dt[2], dt[1], dt[3], turned(q[t][0]) & own, turned(q[t][1]) & own);
            mma(dv[t], p[0][0], p[0][2], p[0][1], p[0][3], turned(g[t][0]) & own, turned(g[t][1]) & own);
        }
    }
}

// dx = dx1 + dn(W dqkv), and the gradients of the norm and of both maps, rows of its own for every split of the sequences, `apart` numbers from one
// to the next.
KERNEL(BLOCKS, 2) backward(
    const float* x, const float* gain, const float* shift, const Half* w, const Half* qkv, const Half* o, const Half* give,
    const float* dx1, const float* peaks, float* dx, float* dgain, float* dshift, float* dw, float* db, float* dout,
    int batch, int splits, int model, int apart, float sharp, float unscale, int lowest_layer
) {
    const int m = block_y(), me = warp();
    const size_t row = (size_t)m * model, to = (size_t)block_x() * apart + row;
    U at_w = shared();
    const U parts = at_w + QKV;  // queries, keys, values; gradients of the heads, later of x1; heads
    const U at_give = parts + 3 * MATRIX, at_o = at_give + MATRIX, at_dq = at_o + MATRIX;
    const U at_peaks = at_dq + 16 * BLOCKS * TALL, at_sums = at_peaks + PEAKS, at_norm = at_sums + PEAKS;
    bring<3 * WIDTH, WIDTH, ROW>(at_w, w + row);
    for (int s = block_x(); s < batch; s += splits) {
        const size_t sequence = (size_t)m * batch + s, at = sequence * FOLDED;
        UNROLL for (int i = 0; i < 4; i++) {
            const Half* from = i < 3 ? qkv + 3 * at + i * FOLDED : give + at;
            for (int n = me; n < BLOCKS * STEPS; n += BLOCKS) {
                U byte = (lane() + 32 * n) * 16;
                copy(parts + i * MATRIX + byte, from, byte);
            }
        }
        send();
        {
            U g[STEPS][4], heads[STEPS][4];
            unfold(g, give + at, me), unfold(heads, o + at, me);
            keep(at_o, heads, me), weigh(at_sums, g, heads, me);
            UNROLL for (int i = 0; i < (HEADS + 1) / 2; i++) {
                U n = (HEADS == 1 ? lane() & 15 : lane() + 32 * i) + 16 * HEADS * me;
                keep1(at_peaks + n * 4, load(peaks + sequence * 16 * BLOCKS * HEADS, n));
            }
        }
        arrived<0>();
        together();
        F dk[TILES][4], dv[TILES][4];
        zero(dk), zero(dv);
        {
            U k[TILES][2], v[TILES][2];
            take(k, parts + MATRIX, me), take(v, parts + 2 * MATRIX, me);
            for (int step = 0; step < BLOCKS; step++) {
                int i = me + step;
                if (i < BLOCKS) {
                    U q[TILES][2], g[TILES][2];
                    F dq[TILES][4];
                    zero(dq);
                    take(q, parts, i), take(g, at_give, i);
                    attend_back(dq, dk, dv, q, g, k, v, at_peaks, at_sums, i, step == 0, sharp * LOG2E);
                    UNROLL for (int t = 0; t < TILES; t++) {
                        U place = at_dq + lane() * 16 + (i * TILES + t) * 512;
                        F kept[4];
                        if (step) find16(kept, place);
                        UNROLL for (int c = 0; c < 4; c++) dq[t][c] = step ? dq[t][c] + kept[c] : dq[t][c];
                        keep16(place, dq[t]);
                    }
                }
                together();
            }
        }
        F dh[TILES][4];
        zero(dh);
        U a[STEPS][4];
        at_w = anew(at_w);
        packed(a, dv), keep(parts + 2 * MATRIX, a, me), by_columns<ROW>(dh, a, at_w + 2 * WIDTH * ROW);
        UNROLL for (int t = 0; t < TILES; t++) UNROLL for (int i = 0; i < 4; i++) dk[t][i] = dk[t][i] * sharp;
        packed(a, dk), keep(parts + MATRIX, a, me), by_columns<ROW>(dh, a, at_w + WIDTH * ROW);
        UNROLL for (int t = 0; t < TILES; t++) find16(dk[t], at_dq + lane() * 16 + (me * TILES + t) * 512);
        UNROLL for (int t = 0; t < TILES; t++) UNROLL for (int i = 0; i < 4; i++) dk[t][i] = dk[t][i] * sharp;
        packed(a, dk), keep(parts, a, me), by_columns<ROW>(dh, a, at_w);
        F hat[TILES][4], over[2];
        read(hat, x, sequence, me, lowest_layer), standard(hat, over);
        varied(a, hat, gain + row, shift + row), keep(at_dq + 16 * me * (TALL - ROW), a, me);  // where the warp's own dq was
        const bool first = s == block_x();
        summed(at_norm + 8 * WIDTH * me, dh, hat, !first), summed(at_norm + 8 * WIDTH * me + 4 * WIDTH, dh, !first);
        lowered(dh, hat, over, gain + row);
        unfold(hat, dx1 + at, me), packed(a, hat), keep(at_give, a, me);
        UNROLL for (int t = 0; t < TILES; t++) UNROLL for (int i = 0; i < 4; i++) dh[t][i] = dh[t][i] + hat[t][i];
        write(dx, dh, sequence, me, lowest_layer);
        together();
        for (int i = me; i < 4 * STEPS; i += BLOCKS) {  // 16 rows of dW_Q, dW_K, dW_V or dW_O
            int part = i / STEPS, within = i % STEPS;
            U rows = parts + part * MATRIX + columns_first<ROW>() + 32 * within;
            U by = (part < 3 ? at_dq : at_o) + rows_first<ROW>(), next = U(16 * (part < 3 ? TALL : ROW));
            F c[TILES][4], bias[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            zero(c);
            UNROLL for (int k = 0; k < BLOCKS; k++) {
                U d[4];
                find4<1>(d, rows + 16 * k * ROW);
                UNROLL for (int n = 0; n < TILES; n += 2) {
                    U y[4];
                    find4<1>(y, by + next * k + 16 * n);
                    mma(c[n], d[0], d[1], d[2], d[3], y[0], y[1]), mma(c[n + 1], d[0], d[1], d[2], d[3], y[2], y[3]);
                }
                mma(bias, d[0], d[1], d[2], d[3], ONES, ONES);
            }
            float* grad = (part < 3 ? dw + part * WIDTH * WIDTH : dout) + to;
            UNROLL for (int r = 0; r < 2; r++) {
                U line = token() + (16 * within + 8 * r), place = line * WIDTH + column();
                UNROLL for (int t = 0; t < TILES; t++) {
                    F left = c[t][2 * r] * unscale, right = c[t][2 * r + 1] * unscale;
                    if (first) store2(grad, place, left, right, 8 * t);
                    else add2(grad, place, left, right, 8 * t);
                }
                if (part < 3) {
                    U mine = (lane() & 3) == U(0u);
                    if (first) store(mine, db + to + part * WIDTH, line, bias[2 * r] * unscale);
                    else add(mine, db + to + part * WIDTH, line, bias[2 * r] * unscale);
                }
            }
        }
        together();
    }
    added<BLOCKS, 2>(dgain + to, at_norm, unscale), added<BLOCKS, 2>(dshift + to, at_norm + 4 * WIDTH, unscale);
}

// ---- back through the feed-forward, for tiles of TEAM blocks that need not be whole sequences

// Of the hidden units as many as the model is wide are taken at once, forward again and back, and left in shared memory; then every warp
// adds up its 16 rows and half the columns of one of the two matrices' gradients for them.
INSIDE void half_product(F (&c)[TILES / 2][4], F (&sum)[4], U rows, U by, bool bias) {
    U at = rows + columns_first<ROW>(), to = by + rows_first<ROW>();
    UNROLL for (int k = 0; k < TEAM; k++) {
        U d[4], y[4];
        find4<1>(d, at + 16 * k * ROW);
        UNROLL for (int n = 0; n < TILES / 2; n++) {
            if (n % 2 == 0) find4<1>(y, to + (16 * k * ROW + 16 * n));  // the second beyond the last column is not used
            mma(c[n], d[0], d[1], d[2], d[3], y[n % 2 * 2], y[n % 2 * 2 + 1]);
        }
        if (bias) mma(sum, d[0], d[1], d[2], d[3], ONES, ONES);
    }
}

// dx1 = dx2 + dn(W_1 dz), give = W_O dx1; gradients of both matrices, of their biases, of the norm and of the bias before it.
KERNEL(TEAM, 1) feed_back(
    const float* dx2, const float* x1, const Half* h2, const float* gain, const Half* up, const float* up_bias, const Half* down,
    const Half* out, float* dx1, Half* give, float* dgain, float* dshift, float* dup, float* dup_bias, float* ddown, float* ddown_bias,
    float* dout_bias,
    int batch, int splits, int model, int apart, float unscale, int highest_layer
) {
    const int m = block_y(), me = warp(), matrix = me / (2 * STEPS), within = me / 2 % STEPS, side = me % 2;
    const size_t row = (size_t)m * model, to = (size_t)block_x() * apart + row;
    U at_up = shared(), at_down = at_up + HIDDEN * ROW, at_out = at_down + WIDTH * LONG;
    const U at_h = at_out + WIDTH * ROW, at_g = at_h + TILE * ROW, hidden = at_g + TILE * ROW;
    const U sums = hidden + 4 * TILE * ROW, at_sums = sums + 16 * WIDTH * me;
    bring<HIDDEN, WIDTH, ROW>(at_up, up + row, TEAM), bring<WIDTH, HIDDEN, LONG>(at_down, down + row, TEAM);
    bring<WIDTH, WIDTH, ROW>(at_out, out + row, TEAM);
    send(), arrived<0>();
    constexpr int PARTS = HIDDEN / WIDTH;
    F grad[PARTS][TILES / 2][4], bias[PARTS][2];
    UNROLL for (int p = 0; p < PARTS; p++) zero(grad[p]), bias[p][0] = 0.0f, bias[p][1] = 0.0f;
    bool again = false;
    const int blocks = batch * BLOCKS;
    for (int first = block_x() * TEAM; first < blocks; first += splits * TEAM, again = true) {
        const bool idle = first + me >= blocks;
        const int block = idle ? blocks - 1 : first + me;  // of all sequences; a warp without one takes the last, and no gradient
        const size_t at = (size_t)m * batch * FOLDED, sequence = (size_t)m * batch + block / BLOCKS;
        F dh[TILES][4];
        U h[STEPS][4], g[STEPS][4];
        together();
        at_up = anew(at_up), at_down = at_up + HIDDEN * ROW, at_out = at_down + WIDTH * LONG;
        read(dh, dx2, sequence, block % BLOCKS, highest_layer);
        if (idle) zero(dh);
        packed(g, dh), keep(at_g, g, me), summed(at_sums + 8 * WIDTH, dh, again);
        unfold(h, h2 + at, block);
        keep(at_h, h, me);
        zero(dh);
        UNROLL for (int p = 0; p < PARTS; p++) {
            const U at_z = hidden + 2 * TILE * ROW * (p & 1), at_a = at_z + TILE * ROW;
            for (int f = 0; f < WIDTH; f += 16) {
                F z[2][4], dz[2][4];
                U a[1][4], d[1][4];
                biased(z, up_bias + row + p * WIDTH + f), by_rows<ROW>(z, h, at_up + (p * WIDTH + f) * ROW);
                zero(dz), by_columns<LONG>(dz, g, at_down + 2 * (p * WIDTH + f));
                UNROLL for (int n = 0; n < 2; n++) UNROLL for (int i = 0; i < 4; i++) {
                    F slope;
                    z[n][i] = gelu(z[n][i], slope), dz[n][i] = dz[n][i] * slope;
                }
                packed(a, z), packed(d, dz);
                UNROLL for (int i = 0; i < 4; i++) {
                    U place = cell(U(2 * f), me, i / 2, i & 1);
                    keep(at_a + place, a[0][i]), keep(at_z + place, d[0][i]);
                }
                by_columns<ROW>(dh, d, at_up + (p * WIDTH + f) * ROW);
            }
            together();
            F sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            half_product(grad[p], sum, (matrix ? at_g : at_z) + 32 * within, (matrix ? at_a : at_h) + side * WIDTH, matrix + side == 0);
            bias[p][0] = bias[p][0] + sum[0], bias[p][1] = bias[p][1] + sum[2];
        }
        F hat[TILES][4], over[2];
        unfold(hat, x1 + at, block), standard(hat, over);
        summed(at_sums, dh, hat, again), summed(at_sums + 4 * WIDTH, dh, again);
        lowered(dh, hat, over, gain + row);
        if (!idle) {
            read(hat, dx2, sequence, block % BLOCKS, highest_layer);
            UNROLL for (int t = 0; t < TILES; t++) UNROLL for (int i = 0; i < 4; i++) dh[t][i] = dh[t][i] + hat[t][i];
            fold(dx1 + at, dh, block);
        }
        summed(at_sums + 12 * WIDTH, dh, again);
        packed(g, dh), zero(dh), by_columns<ROW>(dh, g, at_out);
        if (!idle) packed(g, dh), fold(give + at, g, block);
    }
    UNROLL for (int p = 0; p < PARTS; p++) {
        UNROLL for (int r = 0; r < 2; r++) {
            U line = token() + (16 * within + 8 * r);
            UNROLL for (int n = 0; n < TILES / 2; n++) {
                F a = grad[p][n][2 * r] * unscale, b = grad[p][n][2 * r + 1] * unscale;
                U place = column() + (side * WIDTH / 2 + 8 * n);
                if (matrix) store2(ddown + to, line * HIDDEN + p * WIDTH + place, a, b);
                else store2(dup + to, (line + p * WIDTH) * WIDTH + place, a, b);
            }
            if (matrix + side == 0) store((lane() & 3) == U(0u), dup_bias + to, line + p * WIDTH, bias[p][r] * unscale);
        }
    }
    together();
    added<TEAM, 4>(dgain + to, sums, unscale), added<TEAM, 4>(dshift + to, sums + 4 * WIDTH, unscale);
    added<TEAM, 4>(ddown_bias + to, sums + 8 * WIDTH, unscale), added<TEAM, 4>(dout_bias + to, sums + 12 * WIDTH, unscale);
}
