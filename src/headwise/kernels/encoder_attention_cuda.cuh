// The attention part of a post-norm layer for sequences of 16 tokens and width 64: forward, and
// backward with the weights' gradients.
//
// What lies where. A warp has one sequence, and everything between input and output stays in its
// registers: a tensor core's 16 x 8 result lies in a warp just as its next operand must, so
// projections are packed to half and multiplied again as they are. Queries, keys, scores, softmax
// weights and heads never go to memory. Shared memory holds a column tile's weights and a token
// tile of inputs.
//
// How heads share products. A head of rank 8 is one tile of eight columns; heads of rank 1, 2, 4
// share a tile, and zeros in one operand tell them apart. Sums that a softmax needs are products
// too: its denominator with ones beside the values, at rank 1 also the largest score. What its
// gradient takes off, the sum of g o over a head, is a sum of floats.
//
// Who sums what.
//   column tile     64 columns of heads x rank: what a program's weights are at a time.
//   token tile      128 tokens, eight sequences.
//   column splits   forward, programs among which the columns of a token tile are split. With more
//                   than one each leaves a partial sum of the output; a Triton kernel adds them and
//                   takes the norm (encoder_norm_triton.py).
//   token splits    backward, programs among which the tokens of a column tile are split: each
//                   leaves partial sums of the weights' gradients, which it has summed over its
//                   token tiles in registers.
//   cluster of two  backward, two programs with neighbouring column tiles. The input's gradient is
//                   a sum over column tiles; the two add theirs up through each other's shared
//                   memory, each for half of a tile's tokens, and write one partial sum. Where the
//                   number of column tiles is odd, every program writes its own.
//
// Names: q, k, v, g (gradient of a head's output), o: a thread holds two columns of one token, as
// in a product's first operand; with `t` behind the name two tokens of one column, as in its
// second. R is the rank, WARPS how many go backward together; a compilation each. Matrices are
// half, everything else float; rows of weights, and each parameter in them, start at multiples of
// 16 numbers. What lanes do is written with F, U and the functions of warp.cuh only, so that the
// tests can run the same lines on a CPU, a warp as a vector of 32.

// ---- sizes

constexpr int BLOCK = 64;               // columns whose weights are in shared memory at once
constexpr int MATRIX = 64 * ROW;
// Queries, keys, values, 16 columns of each in turn; output; the biases of the first three
constexpr int WEIGHTS = 4 * MATRIX + 1024;
constexpr int UNIT = R < 16 ? 16 : R;   // columns that a warp works on at once
constexpr int TILES = UNIT / 8;
constexpr int HEADS = R < 8 ? 8 / R : 1;  // that share a tile of eight columns
constexpr bool AT_ONCE = R <= 32;       // backward, all projections of 16 columns together
constexpr int GIVEN = AT_ONCE ? TILES : 4;
constexpr int TOKENS = 128;             // of a tile
constexpr int TILE = TOKENS * ROW;
constexpr int FORWARD_WARPS = 8;
// 8; or 16 that share a block's columns out, of which a head of rank 64 has all
constexpr int BACKWARD_WARPS = WARPS;
constexpr int SIDES = WARPS / 8;
constexpr int BACKWARD = WEIGHTS + 8 * TILE + 1024 + 2 * POST + 32;
constexpr float LOG2E = 1.4426950408889634f;
// The scores' factor goes to the queries, else into the exponent
constexpr bool EARLY = R < 8;

// ---- operands

// On their way to shared memory: the weights of a block of columns, queries, keys, values as
// (column, d), output as (d, column). What a thread brings lies the same number of rows apart, so
// that it needs one address.
template <int OF>
INSIDE void bring(U to, const Half* w, const float* b, const Half* out, int c0, int C) {
    // Rows that OF warps bring at once, of 64 with 8 pieces of 16 bytes
    constexpr int STEP = 4 * OF;
    // anew: registers are scarcer than instructions
    U at = anew(lane()) + 32 * warp(), row = at >> 3, piece = (at & 7) * 16;
    U threes = to + place((row >> 4) * 48 + (row & 15), piece),
      ones = to + 3 * MATRIX + place(row, piece);
    UNROLL for (int matrix = 0; matrix < 3; matrix++) UNROLL for (int i = 0; i < 64; i += STEP)
        copy(threes + (3 * i + 16 * matrix) * ROW, w + (matrix * C + c0) * WIDTH, at * 16, i * ROW);
    UNROLL for (int i = 0; i < 64; i += STEP)
        copy(ones + i * ROW, out + i * C + c0, row * (2 * C) + piece);
    if (warp() < 3)
        copy(to + 4 * MATRIX + 256 * warp() + (lane() & 15) * 16, b,
            (lane() & 15) * 16 + 4 * (warp() * C + c0));
}

// The same: a tile of tokens.
template <int OF> INSIDE void bring_tile(U to, const Half* x, int tile) {
    U at = anew(lane()) + 32 * warp(), first = to + place(at >> 3, (at & 7) * 16);
    UNROLL for (int i = 0; i < TOKENS; i += 4 * OF)
        copy(first + i * ROW, x + tile * (TOKENS * WIDTH), at * 16, i * ROW);
}

// The biases of 16 columns of queries, keys and values, where their products are to be added.
INSIDE void biased(F (&c)[6][4], U biases, int column) {
    UNROLL for (int t = 0; t < 6; t++) {
        find2(biases + (256 * (t / 2) + 4 * column + 32 * (t & 1)) + (lane() & 3) * 8, c[t][0],
            c[t][1]);
        c[t][2] = c[t][0], c[t][3] = c[t][1];
    }
}

// A warp's 16 tokens as the first operand of products: in registers where there is room, else a
// view of the 64 of four warps.
constexpr bool ROOM = R <= 16 && R != 2;
struct Tokens { U held[4][4], view; };  // [16 of the 64 numbers]
INSIDE void take(Tokens& y, U tile) {
    U row = (lane() >> 2) + 16 * warp();
    if (ROOM) UNROLL for (int s = 0; s < 4; s++) UNROLL for (int i = 0; i < 4; i++)
                y.held[s][i] = find(
                    tile + place(row + 8 * (i & 1), (lane() & 3) * 4 + (32 * s + 16 * (i >> 1))));
}

// They times 16 columns of queries, keys and values, which are there after `finish`. `weights` is a
// view of a block's, `biases` a place.
INSIDE void project(F (&c)[6][4], const Tokens& x, U weights, U biases, int column) {
    biased(c, biases, column);
    settle(c);
    begin();
    UNROLL for (int s = 0; s < 4; s++) {
        U by = weights + (3 * column * ROW + 32 * s) / PIECE;
        if (ROOM) wide(c, x.held[s], by);
        else wide<0, 0>(c, x.view + 32 * s / PIECE, by);
    }
    leave();
}

// The same of a view of 64 tokens, and 16 columns of dz W_O, the gradient of the heads, in one go.
INSIDE void project(F (&c)[6][4], F (*given)[4], U x, U dz, U weights, U biases, int column) {
    biased(c, biases, column);
    F(&g)[2][4] = *(F(*)[2][4])given;
    zero(g), settle(g), settle(c);
    begin();
    UNROLL for (int s = 0; s < 4; s++) {
        wide<0, 0>(c, x + 32 * s / PIECE, weights + (3 * column * ROW + 32 * s) / PIECE);
        wide<0, 1>(
            g, dz + 32 * s / PIECE, weights + (3 * MATRIX + 16 * s * ROW + 2 * column) / PIECE);
    }
    leave(), finish();
    settle(c), settle(g);
}

// Packed: a thread has two columns of one token.
INSIDE void packed(U (*y)[2], const F (*c)[4], float factor = 1.0f) {
    UNROLL for (int t = 0; t < 2; t++) UNROLL
        for (int r = 0; r < 2; r++) y[t][r] = pack(c[t][2 * r] * factor, c[t][2 * r + 1] * factor);
}
INSIDE void packed(U (*q)[2], U (*k)[2], U (*v)[2], const F (&c)[6][4], float factor) {
    packed(q, c, EARLY ? factor : 1.0f), packed(k, c + 2), packed(v, c + 4);
}

// Which columns of a tile are head h's, for a thread with two columns of a token and for one with
// one: 1 there, 0 elsewhere. Heads are told apart by products, since a GPU multiplies twice as fast
// as it masks. At rank 1 two heads at a time, an even and an odd one: a thread's two columns
constexpr int OWNERS = R == 1 ? 4 : HEADS;
struct Masks { U pairs[OWNERS], columns[OWNERS], even; };
INSIDE void mask(Masks& y) {
    U mine = lane() & 3, column = lane() >> 2;
    UNROLL for (int h = 0; h < OWNERS; h++)
        y.pairs[h] = R >= 8 ? ONES : choose(mine / (4 / OWNERS) == U(h), ONES, U(0u));
    UNROLL for (int h = 0; h < OWNERS; h++)
        y.columns[h] = R >= 8 ? ONES : choose(column / (8 / OWNERS) == U(h), ONES, U(0u));
    if (R == 1) y.even = choose(column & 1, U(0u), ~U(0u));  // all bits
}
INSIDE U only(U x, U mask) { return R >= 8 ? x : times(x, mask); }

// 2^(s - largest of the row), packed: the first operand of a product over keys.
INSIDE void soften(U (&e)[4], F (&s)[2][4], float factor) {
    F top[2];
    UNROLL for (int i = 0; i < 2; i++)
        top[i] =
            largest(largest(s[0][2 * i], s[0][2 * i + 1]), largest(s[1][2 * i], s[1][2 * i + 1]));
    // What is taken off must be one for a row, and near its largest: within 1 below 2^12, 8 below
    // 2^15; 2^16 is too much
    U both = pack(top[0], top[1]);
    both = highest(both, other<1>(both));
    both = highest(both, other<2>(both));
    top[0] = first_of(both), top[1] = second_of(both);
    if (!EARLY) top[0] = top[0] * factor, top[1] = top[1] * factor;
    UNROLL for (int t = 0; t < 2; t++) UNROLL for (int i = 0; i < 2; i++) {
            if (EARLY)
                e[2 * t + i] = pack(power(s[t][2 * i] - top[i]), power(s[t][2 * i + 1] - top[i]));
            else
                e[2 * t + i] = pack(power(fused(s[t][2 * i], factor, F(0.0f) - top[i])),
                    power(fused(s[t][2 * i + 1], factor, F(0.0f) - top[i])));
    }
}

// 16 columns' part of the scores of a head that has more than one tile; `i`: 0 for the first.
INSIDE void score(F (&s)[2][4], const U (*q)[2], const U (*k)[2], int i) {
    UNROLL for (int j = 0; j < 2; j++) {
        if (i == 0) mma0(s[j], q[0][0], q[0][1], q[1][0], q[1][1], k[0][j], k[1][j]);
        else mma(s[j], q[0][0], q[0][1], q[1][0], q[1][1], k[0][j], k[1][j]);
    }
}

// 2^a and 2^b, packed, by products: the unit for exponentials makes four a cycle, and heads of rank
// 1 keep it waited for. Read as halves, the numbers of `fixed` are 2^n (1 + f) for 2^(n + f); 2^f /
// (1 + f) = 1 - f (1 - f) (0.302 - 0.188 f + 0.083 f^2) within 1.5e-4. In all within 1e-3; from
// 2^-14 down within 3e-5 of the largest weight, and 0 below 2^-15.
INSIDE U raised(F a, F b) {
    U x = fixed(a, b), m = (x & U(0x03ff03ffu)) | ONES, f = plus(m, U(0xbc00bc00u));
    U part = fused(fused(U(0x2d532d53u), f, U(0xb204b204u)), f, U(0x34d434d4u));
    return fused(times(times(f, plus(m, U(0xc000c000u))), part), x, x);
}

// Scores of rank 1 come out of the product with their row's largest taken off: columns (q,
// -largest) times (k, 1). The largest is q times the largest key or the smallest.
struct Sharp { U q[2][2], k[2][2]; };  // [head's side of its pair][8 tokens]
INSIDE void sharpen(Sharp& y, const U (&q)[2], const U (&k)[2]) {
    U high = highest(k[0], k[1]), low = lowest(k[0], k[1]);
    high = highest(high, other<4>(high)), low = lowest(low, other<4>(low));
    high = highest(high, other<8>(high)), low = lowest(low, other<8>(low));
    high = highest(high, other<16>(high)), low = lowest(low, other<16>(low));
    UNROLL for (int i = 0; i < 2; i++) {
        U top = opposite(highest(times(q[i], high), times(q[i], low)));
        y.q[0][i] = bytes<0x5410>(q[i], top), y.q[1][i] = bytes<0x7632>(q[i], top);
        y.k[0][i] = bytes<0x5410>(k[i], ONES), y.k[1][i] = bytes<0x5432>(k[i], ONES);
    }
}

// Weights before they are divided by their sum, of head h of tile t; `quarter`: of those of rank 1
// a quarter by products, which pays forward only.
INSIDE void weigh(U (&e)[4], const U (&q)[TILES][2], const U (&k)[TILES][2], const Sharp& sharp,
    const Masks& masks, float factor, int t, int h, bool quarter = false) {
    F s[2][4];
    if (R == 1) {
        UNROLL for (int j = 0; j < 2; j++) {
            mma0(s[j], sharp.q[h & 1][0], sharp.q[h & 1][1],
                only(sharp.k[h & 1][j], masks.pairs[h / 2]));
            UNROLL for (int i = 0; i < 2; i++)
                e[2 * j + i] = quarter && i + j == 0
                                   ? raised(s[j][2 * i], s[j][2 * i + 1])
                                   : pack(power(s[j][2 * i]), power(s[j][2 * i + 1]));
        }
        return;
    }
    UNROLL for (int j = 0; j < 2; j++) mma0(s[j], q[t][0], q[t][1], only(k[t][j], masks.pairs[h]));
    soften(e, s, factor);
}

// c = a b for the first of several heads, c += a b for the others.
INSIDE void add(F (&c)[4], const U (&a)[4], U b0, U b1, int h) {
    if (h == 0) mma0(c, a[0], a[1], a[2], a[3], b0, b1);
    else mma(c, a[0], a[1], a[2], a[3], b0, b1);
}

// Two packed numbers whose sums are a and b more exactly than one.
INSIDE void split(U (&y)[2], F a, F b) {
    y[0] = pack(a, b);
    y[1] = pack(a - first_of(y[0]), b - second_of(y[0]));
}

// A head of rank 1 fills one column of a product. Its neighbour's takes another sum of the same
// head: for even heads y[0], for odd ones y[1], where `beside` lies in the neighbour's column
// already.
INSIDE void couple(U (&y)[2], U own, U beside, const Masks& masks) {
    y[0] = (own & masks.even) | (beside & ~masks.even),
    y[1] = (own & ~masks.even) | (beside & masks.even);
}
INSIDE void couple(U (&y)[2][2], const U (&own)[2], U beside0, U beside1, const Masks& masks) {
    couple(y[0], own[0], beside0, masks), couple(y[1], own[1], beside1, masks);
}
INSIDE void add_couple(F (&c)[2][4], const U (&a)[4], const U (&b)[2][2], const Masks& masks, int h,
    bool more = false) {
    U mine = masks.columns[h / 2];
    add(c[h & 1], a, only(b[0][h & 1], mine), only(b[1][h & 1], mine), h / 2 + more);
}
INSIDE void own(F (&y)[4], const F (&c)[2][4]) {
    UNROLL for (int r = 0; r < 4; r++)
        y[r] = c[r & 1][r];
}
INSIDE void beside(F (&y)[4], const F (&c)[2][4]) {
    UNROLL for (int r = 0; r < 4; r++)
        y[r] = c[r & 1][r ^ 1];
}

// 1 / x of a row's sums; from rank 2 on both columns of a thread are one head's.
INSIDE void invert(F (&x)[4]) {
    UNROLL for (int r = 0; r < 4; r++) x[r] = R > 1 && r % 2 ? x[r - 1] : inverse(x[r]);
}

// The heads of tile t before they are divided, and what to divide them by; weights stay in e where
// they are wanted again.
INSIDE void gather(F (&sum)[4], F (&total)[4], U (*e)[4], const U (&q)[TILES][2],
    const U (&k)[TILES][2], const U (&v)[2], const Masks& masks, float factor, int t) {
    U vt[2] = {turned(v[0]), turned(v[1])};
    Sharp peaks;
    if (R == 1) {
        sharpen(peaks, q[t], k[t]);
        U values[2][2];
        couple(values, vt, ONES, ONES, masks);
        F c[2][4];
        UNROLL for (int h = 0; h < HEADS; h++) {
            weigh(e[h], q, k, peaks, masks, factor, t, h, true);
            add_couple(c, e[h], values, masks, h);
        }
        own(sum, c), beside(total, c);
    } else {
        UNROLL for (int h = 0; h < HEADS; h++) {
            U mine = masks.columns[h % OWNERS];
            weigh(e[h], q, k, peaks, masks, factor, t, h);
            add(sum, e[h], only(vt[0], mine), only(vt[1], mine), h);
            add(total, e[h], mine, mine, h);
        }
    }
    invert(total);
}
