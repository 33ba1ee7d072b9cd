// The attention part of a post-norm layer for sequences of 16 tokens and width 64: forward, and backward with the weights'
// gradients.
//
// What lies where. A warp has one sequence, and everything between input and output stays in its registers: a tensor core's
// 16 x 8 result lies in a warp just as its next operand must, so projections are packed to half and multiplied again as they
// are. Queries, keys, scores, softmax weights and heads never go to memory. Shared memory holds a column tile's weights and a
// token tile of inputs.
//
// How heads share products. A head of rank 8 is one tile of eight columns; heads of rank 1, 2, 4 share a tile, and zeros in
// one operand tell them apart. Sums that a softmax needs are products too: its denominator with ones beside the values, at
// rank 1 also the largest score. What its gradient takes off, the sum of g o over a head, is a sum of floats.
//
// Who sums what.
//   column tile    64 columns of heads x rank: what a program's weights are at a time.
//   token tile     128 tokens, eight sequences.
//   column splits  forward, programs among which the columns of a token tile are split. With more than one each leaves a
//                  partial sum of the output; a Triton kernel adds them and takes the norm (encoder_norm_triton.py).
//   token splits   backward, programs among which the tokens of a column tile are split: each leaves partial sums of the
//                  weights' gradients, which it has summed over its token tiles in registers.
//   cluster of two backward, two programs with neighbouring column tiles. The input's gradient is a sum over column tiles; the
//                  two add theirs up through each other's shared memory, each for half of a tile's tokens, and write one
//                  partial sum. Where the number of column tiles is odd, every program writes its own.
//
// Names: q, k, v, g (gradient of a head's output), o: a thread holds two columns of one token, as in a product's first operand;
// with `t` behind the name two tokens of one column, as in its second. R is the rank, WARPS how many go backward together; a
// compilation each. Matrices are half, everything else float; rows of weights, and each parameter in them, start at multiples of
// 16 numbers. What lanes do is written with F, U and the functions of warp.cuh only, so that the tests can run the same lines
// on a CPU, a warp as a vector of 32.

// ---- sizes

constexpr int BLOCK = 64;               // columns whose weights are in shared memory at once
constexpr int MATRIX = 64 * ROW;
constexpr int WEIGHTS = 4 * MATRIX + 1024;  // queries, keys, values, 16 columns of each in turn; output; the biases of the first three
constexpr int UNIT = R < 16 ? 16 : R;   // columns that a warp works on at once
constexpr int TILES = UNIT / 8;
constexpr int HEADS = R < 8 ? 8 / R : 1;  // that share a tile of eight columns
constexpr bool AT_ONCE = R <= 32;       // backward, all projections of 16 columns together
constexpr int GIVEN = AT_ONCE ? TILES : 4;
constexpr int TOKENS = 128;             // of a tile
constexpr int TILE = TOKENS * ROW;
constexpr int FORWARD_WARPS = 8;
constexpr int BACKWARD_WARPS = WARPS;   // 8; or 16 that share a block's columns out, of which a head of rank 64 has all
constexpr int SIDES = WARPS / 8;
constexpr int BACKWARD = WEIGHTS + 8 * TILE + 1024 + 2 * POST + 32;
constexpr float LOG2E = 1.4426950408889634f;
constexpr bool EARLY = R < 8;           // the scores' factor goes to the queries, else into the exponent

// ---- operands

// On their way to shared memory: the weights of a block of columns, queries, keys, values as (column, d), output as (d, column). What a
// thread brings lies the same number of rows apart, so that it needs one address.
template <int OF> INSIDE void bring(U to, const Half* w, const float* b, const Half* out, int c0, int C) {
    constexpr int STEP = 4 * OF;  // rows that OF warps bring at once, of 64 with 8 pieces of 16 bytes
    U at = anew(lane()) + 32 * warp(), row = at >> 3, piece = (at & 7) * 16;  // anew: registers are scarcer than instructions
    U threes = to + place((row >> 4) * 48 + (row & 15), piece), ones = to + 3 * MATRIX + place(row, piece);
    UNROLL for (int matrix = 0; matrix < 3; matrix++) UNROLL for (int i = 0; i < 64; i += STEP)
        copy(threes + (3 * i + 16 * matrix) * ROW, w + (matrix * C + c0) * WIDTH, at * 16, i * ROW);
    UNROLL for (int i = 0; i < 64; i += STEP) copy(ones + i * ROW, out + i * C + c0, row * (2 * C) + piece);
    if (warp() < 3) copy(to + 4 * MATRIX + 256 * warp() + (lane() & 15) * 16, b, (lane() & 15) * 16 + 4 * (warp() * C + c0));
}

// The same: a tile of tokens.
template <int OF> INSIDE void bring_tile(U to, const Half* x, int tile) {
    U at = anew(lane()) + 32 * warp(), first = to + place(at >> 3, (at & 7) * 16);
    UNROLL for (int i = 0; i < TOKENS; i += 4 * OF) copy(first + i * ROW, x + tile * (TOKENS * WIDTH), at * 16, i * ROW);
}

// The biases of 16 columns of queries, keys and values, where their products are to be added.
INSIDE void biased(F (&c)[6][4], U biases, int column) {
    UNROLL for (int t = 0; t < 6; t++) {
        find2(biases + (256 * (t / 2) + 4 * column + 32 * (t & 1)) + (lane() & 3) * 8, c[t][0], c[t][1]);
        c[t][2] = c[t][0], c[t][3] = c[t][1];
    }
}

// A warp's 16 tokens as the first operand of products: in registers where there is room, else a view of the 64 of four warps.
constexpr bool ROOM = R <= 16 && R != 2;
struct Tokens { U held[4][4], view; };  // [16 of the 64 numbers]
INSIDE void take(Tokens& y, U tile) {
    U row = (lane() >> 2) + 16 * warp();
    if (ROOM) UNROLL for (int s = 0; s < 4; s++) UNROLL for (int i = 0; i < 4; i++)
        y.held[s][i] = find(tile + place(row + 8 * (i & 1), (lane() & 3) * 4 + (32 * s + 16 * (i >> 1))));
}

// They times 16 columns of queries, keys and values, which are there after `finish`. `weights` is a view of a block's, `biases` a place.
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
        wide<0, 1>(g, dz + 32 * s / PIECE, weights + (3 * MATRIX + 16 * s * ROW + 2 * column) / PIECE);
    }
    leave(), finish();
    settle(c), settle(g);
}

// Packed: a thread has two columns of one token.
INSIDE void packed(U (*y)[2], const F (*c)[4], float factor = 1.0f) {
    UNROLL for (int t = 0; t < 2; t++) UNROLL for (int r = 0; r < 2; r++) y[t][r] = pack(c[t][2 * r] * factor, c[t][2 * r + 1] * factor);
}
INSIDE void packed(U (*q)[2], U (*k)[2], U (*v)[2], const F (&c)[6][4], float factor) {
    packed(q, c, EARLY ? factor : 1.0f), packed(k, c + 2), packed(v, c + 4);
}

// Which columns of a tile are head h's, for a thread with two columns of a token and for one with one: 1 there, 0 elsewhere. Heads are
// told apart by products, since a GPU multiplies twice as fast as it masks.
constexpr int OWNERS = R == 1 ? 4 : HEADS;  // at rank 1 two heads at a time, an even and an odd one: a thread's two columns
struct Masks { U pairs[OWNERS], columns[OWNERS], even; };
INSIDE void mask(Masks& y) {
    U mine = lane() & 3, column = lane() >> 2;
    UNROLL for (int h = 0; h < OWNERS; h++) y.pairs[h] = R >= 8 ? ONES : choose(mine / (4 / OWNERS) == U(h), ONES, U(0u));
    UNROLL for (int h = 0; h < OWNERS; h++) y.columns[h] = R >= 8 ? ONES : choose(column / (8 / OWNERS) == U(h), ONES, U(0u));
    if (R == 1) y.even = choose(column & 1, U(0u), ~U(0u));  // all bits
}
INSIDE U only(U x, U mask) { return R >= 8 ? x : times(x, mask); }

// 2^(s - largest of the row), packed: the first operand of a product over keys.
INSIDE void soften(U (&e)[4], F (&s)[2][4], float factor) {
    F top[2];
    UNROLL for (int i = 0; i < 2; i++) top[i] = largest(largest(s[0][2 * i], s[0][2 * i + 1]), largest(s[1][2 * i], s[1][2 * i + 1]));
    U both = pack(top[0], top[1]);  // what is taken off must be one for a row, and near its largest: within 1 below 2^12, 8 below 2^15; 2^16 is too much
    both = highest(both, other<1>(both));
    both = highest(both, other<2>(both));
    top[0] = first_of(both), top[1] = second_of(both);
    if (!EARLY) top[0] = top[0] * factor, top[1] = top[1] * factor;
    UNROLL for (int t = 0; t < 2; t++) UNROLL for (int i = 0; i < 2; i++) {
        if (EARLY) e[2 * t + i] = pack(power(s[t][2 * i] - top[i]), power(s[t][2 * i + 1] - top[i]));
        else e[2 * t + i] = pack(power(fused(s[t][2 * i], factor, F(0.0f) - top[i])), power(fused(s[t][2 * i + 1], factor, F(0.0f) - top[i])));
    }
}

// 16 columns' part of the scores of a head that has more than one tile; `i`: 0 for the first.
INSIDE void score(F (&s)[2][4], const U (*q)[2], const U (*k)[2], int i) {
    UNROLL for (int j = 0; j < 2; j++) {
        if (i == 0) mma0(s[j], q[0][0], q[0][1], q[1][0], q[1][1], k[0][j], k[1][j]);
        else mma(s[j], q[0][0], q[0][1], q[1][0], q[1][1], k[0][j], k[1][j]);
    }
}

// 2^a and 2^b, packed, by products: the unit for exponentials makes four a cycle, and heads of rank 1 keep it waited for. Read as halves,
// the numbers of `fixed` are 2^n (1 + f) for 2^(n + f); 2^f / (1 + f) = 1 - f (1 - f) (0.302 - 0.188 f + 0.083 f^2) within 1.5e-4. In all
// within 1e-3; from 2^-14 down within 3e-5 of the largest weight, and 0 below 2^-15.
INSIDE U raised(F a, F b) {
    U x = fixed(a, b), m = (x & U(0x03ff03ffu)) | ONES, f = plus(m, U(0xbc00bc00u));
    U part = fused(fused(U(0x2d532d53u), f, U(0xb204b204u)), f, U(0x34d434d4u));
    return fused(times(times(f, plus(m, U(0xc000c000u))), part), x, x);
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
        U top = opposite(highest(times(q[i], high), times(q[i], low)));
        y.q[0][i] = bytes<0x5410>(q[i], top), y.q[1][i] = bytes<0x7632>(q[i], top);
        y.k[0][i] = bytes<0x5410>(k[i], ONES), y.k[1][i] = bytes<0x5432>(k[i], ONES);
    }
}

// Weights before they are divided by their sum, of head h of tile t; `quarter`: of those of rank 1 a quarter by products, which
// pays forward only.
INSIDE void weigh(U (&e)[4], const U (&q)[TILES][2], const U (&k)[TILES][2], const Sharp& sharp, const Masks& masks, float factor, int t, int h, bool quarter = false) {
    F s[2][4];
    if (R == 1) {
        UNROLL for (int j = 0; j < 2; j++) {
            mma0(s[j], sharp.q[h & 1][0], sharp.q[h & 1][1], only(sharp.k[h & 1][j], masks.pairs[h / 2]));
            UNROLL for (int i = 0; i < 2; i++)
                e[2 * j + i] = quarter && i + j == 0 ? raised(s[j][2 * i], s[j][2 * i + 1]) : pack(power(s[j][2 * i]), power(s[j][2 * i + 1]));
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

// A head of rank 1 fills one column of a product. Its neighbour's takes another sum of the same head: for even heads y[0], for odd ones
// y[1], where `beside` lies in the neighbour's column already.
INSIDE void couple(U (&y)[2], U own, U beside, const Masks& masks) {
    y[0] = (own & masks.even) | (beside & ~masks.even), y[1] = (own & ~masks.even) | (beside & masks.even);
}
INSIDE void couple(U (&y)[2][2], const U (&own)[2], U beside0, U beside1, const Masks& masks) {
    couple(y[0], own[0], beside0, masks), couple(y[1], own[1], beside1, masks);
}
INSIDE void add_couple(F (&c)[2][4], const U (&a)[4], const U (&b)[2][2], const Masks& masks, int h, bool more = false) {
    U mine = masks.columns[h / 2];
    add(c[h & 1], a, only(b[0][h & 1], mine), only(b[1][h & 1], mine), h / 2 + more);
}
INSIDE void own(F (&y)[4], const F (&c)[2][4]) { UNROLL for (int r = 0; r < 4; r++) y[r] = c[r & 1][r]; }
INSIDE void beside(F (&y)[4], const F (&c)[2][4]) { UNROLL for (int r = 0; r < 4; r++) y[r] = c[r & 1][r ^ 1]; }

// 1 / x of a row's sums; from rank 2 on both columns of a thread are one head's.
INSIDE void invert(F (&x)[4]) {
    UNROLL for (int r = 0; r < 4; r++) x[r] = R > 1 && r % 2 ? x[r - 1] : inverse(x[r]);
}

// The heads of tile t before they are divided, and what to divide them by; weights stay in e where they are wanted again.
INSIDE void gather(
    F (&sum)[4], F (&total)[4], U (*e)[4], const U (&q)[TILES][2], const U (&k)[TILES][2], const U (&v)[2], const Masks& masks, float factor, int t
) {
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

// ---- forward

// A unit's heads.
INSIDE void heads_forward(
    U (&o)[TILES][2], F (&scores)[2][4], const U (&q)[TILES][2], const U (&k)[TILES][2], const U (&v)[TILES][2], const Masks& masks, float factor
) {
    if (R <= 8) {
        UNROLL for (int t = 0; t < TILES; t++) {
            F sum[4], over[4];
            U e[HEADS][4];
            gather(sum, over, e, q, k, v[t], masks, factor, t);
            UNROLL for (int r = 0; r < 2; r++) o[t][r] = pack(sum[2 * r] * over[2 * r], sum[2 * r + 1] * over[2 * r + 1]);
        }
        return;
    }
    U e[4];
    soften(e, scores, factor);
    F total[4];
    mma0(total, e[0], e[1], e[2], e[3], ONES, ONES);
    F low = inverse(total[0]), high = inverse(total[2]);
    UNROLL for (int t = 0; t < TILES; t++) {
        F sum[4];
        mma0(sum, e[0], e[1], e[2], e[3], turned(v[t][0]), turned(v[t][1]));
        o[t][0] = pack(sum[0] * low, sum[1] * low), o[t][1] = pack(sum[2] * high, sum[3] * high);
    }
}

// n(s0 u0 + alpha W_O concat softmax(sharp q k^T) v + mean of the bias rows): a token tile, all columns; or one of `splits` equal
// runs of them, whose partial sum of the output goes to `partial` (model, split, token, 64) as it is.
KERNEL(FORWARD_WARPS, 2) forward(
    const Half* x, const Half* w, const float* b, const Half* out, const float* bias, const float* scale0, const float* u0,
    const float* scale, float* u, Half* y, float* inv, int T, int C, int model, float alpha, float sharp, int average, int first,
    float* partial, int splits
) {
    long long m = block_y();
    int tile = block_x() / splits, split = block_x() % splits, start = C / splits * split, end = start + C / splits;
    x += m * T * WIDTH, w += m * model, b += m * model, out += m * model;
    U memory = shared(), xs = memory + 2 * WEIGHTS;
    float factor = sharp * LOG2E;
    bring<FORWARD_WARPS>(memory, w, b, out, start, C);
    bring_tile<FORWARD_WARPS>(xs, x, tile);
    send();
    Masks masks;
    mask(masks);
    F z[8][4];
    zero(z);
    Tokens mine;
    mine.view = view(xs) + (warp() >> 2) * (64 * ROW / PIECE);
    for (int c0 = start, turn = 0; c0 < end; c0 += BLOCK, turn ^= 1) {
        U here = memory + turn * WEIGHTS, there = view(here);
        arrived<0>();
        visible();
        together();  // this block is there, and everybody has done with the one before
        if (c0 == start) take(mine, xs);
        if (c0 + BLOCK < end) bring<FORWARD_WARPS>(memory + (turn ^ 1) * WEIGHTS, w, b, out, c0 + BLOCK, C);
        send();
        F y[6][4];
        U o[TILES][2] = {};
        project(y, mine, there, here + 4 * MATRIX, 0);
        UNROLL for (int c = 0; c < BLOCK; c += UNIT) {
            U q[TILES][2], k[TILES][2], v[TILES][2];
            F scores[2][4];
            UNROLL for (int i = 0; i < TILES; i += 2) {
                finish();
                settle(y), settle(z), settle(o);  // products read the last until now
                packed(q + i, k + i, v + i, y, factor);
                if (c + 8 * i + 16 < BLOCK)  // the next ones beside the heads, where there are registers enough (not at rank 64)
                    project(y, mine, there, here + 4 * MATRIX, c + 8 * i + 16);
                if (R > 8) score(scores, q + i, k + i, i);
            }
            heads_forward(o, scores, q, k, v, masks, factor);
            settle(o), settle(z);
            begin();
            UNROLL for (int i = 0; i < TILES; i += 2) {
                U operand[4] = {o[i][0], o[i][1], o[i + 1][0], o[i + 1][1]};
                wide(z, operand, there + (3 * MATRIX + 2 * (c + 8 * i)) / PIECE);
            }
            leave();
        }
        finish();
        settle(z), settle(o);
    }
    U token = (lane() >> 2) + (tile * TOKENS + 16 * warp()), pair = (lane() & 3) * 2;
    if (splits > 1) {
        partial += (m * splits + split) * T * WIDTH;
        UNROLL for (int n = 0; n < 8; n++) UNROLL for (int i = 0; i < 2; i++)
            store2(partial, (token + 8 * i) * WIDTH + pair + 8 * n, z[n][2 * i], z[n][2 * i + 1]);
        return;
    }
    End norm = {bias + m * model, scale0 + m * model, u0 + m * T * WIDTH, scale + m * model, u + m * T * WIDTH, y + m * T * WIDTH, inv + m * T};
    finish_part(z, token, norm, alpha, average, first);
}

// ---- backward

// Of a tile: heads o = sum / total, kept for the weights of the output; their gradient g, divided by the total; and g o, whose sum over
// a head's columns is taken off the gradient of its weights. A sharp head's gradient is the small difference of the two, so g o has the g
// that was rounded.
INSIDE void part_of(U (&g)[2], F (&go)[2], U (&o)[2], const F (&sum)[4], const F (&gs)[4], const F (&over)[4], float alpha) {
    UNROLL for (int r = 0; r < 2; r++) {
        F o0 = sum[2 * r] * over[2 * r], o1 = sum[2 * r + 1] * over[2 * r + 1];
        o[r] = pack(o0, o1);
        g[r] = pack(gs[2 * r] * (over[2 * r] * alpha), gs[2 * r + 1] * (over[2 * r + 1] * alpha));
        go[r] = go[r] + (first_of(g[r]) * o0 + second_of(g[r]) * o1);
    }
}

// What `part_of` has summed in each thread, summed over a head's columns; and taken off beforehand, where the gradient of head h's weights
// starts.
INSIDE void whole(F (&go)[2]) {
    UNROLL for (int r = 0; r < 2; r++) {
        if (R >= 4) go[r] = go[r] + other<1>(go[r]);
        if (R >= 8) go[r] = go[r] + other<2>(go[r]);
    }
}
INSIDE void start_from(F (&y)[4], const F (&go)[2], int h) {
    UNROLL for (int r = 0; r < 2; r++) y[2 * r] = y[2 * r + 1] = F(0.0f) - (R >= 8 ? go[r] : of_four(go[r], h * R / 2));
}

INSIDE void slope(U (&ds)[4], const U (&e)[4], const F (&dp)[2][4]) {  // of the scores, from that of the weights
    UNROLL for (int j = 0; j < 4; j++) ds[j] = times(e[j], pack(dp[j >> 1][2 * (j & 1)], dp[j >> 1][2 * (j & 1) + 1]));
}

INSIDE void turn(U (&y)[4], const U (&x)[4]) { y[0] = turned(x[0]), y[1] = turned(x[2]), y[2] = turned(x[1]), y[3] = turned(x[3]); }

// A product as a sum of two halves, to 2^-25: where heads are sharp differences are small.
INSIDE void twofold(U& high, U& low, U a, U b) { high = times(a, b), low = fused(a, b, opposite(high)); }

// Heads of rank 1 need no gradient of single weights. With ds_ij = e_ij (g_i v_j - g_i o_i) all sums have e alone:
//   dq_i = g_i sum_j e_ij v_j k_j - g_i o_i sum_j e_ij k_j,   dk_j = v_j sum_i e_ij g_i q_i - sum_i e_ij g_i o_i q_i,   dv_j = sum_i e_ij g_i
// and g is divided by the total.
INSIDE void single(F (&dq)[4], F (&dk)[4], F (&dv)[4], const U (&q)[TILES][2], const U (&k)[TILES][2], const U (&v)[2], const F (&gs)[4], const Masks& masks, float alpha, int t, U (&o)[2]) {
    U vt[2] = {turned(v[0]), turned(v[1])}, kt[2] = {turned(k[t][0]), turned(k[t][1])}, e[HEADS][4];
    U values[2][2], products[2][2], rests[2][2];
    {
        U high[2], low[2];
        UNROLL for (int i = 0; i < 2; i++) twofold(high[i], low[i], vt[i], kt[i]);
        couple(values, vt, ONES, ONES, masks);
        couple(products, high, other<4>(kt[0]), other<4>(kt[1]), masks);
        couple(rests, low, U(0u), U(0u), masks);
    }
    Sharp peaks;
    sharpen(peaks, q[t], k[t]);
    F sum[4], total[4], both[4], keys[4];
    {
        F heads[2][4], slopes[2][4];
        UNROLL for (int h = 0; h < HEADS; h++) {
            weigh(e[h], q, k, peaks, masks, 0.0f, t, h);
            add_couple(heads, e[h], values, masks, h);
            add_couple(slopes, e[h], products, masks, h);
            add_couple(slopes, e[h], rests, masks, h, true);
        }
        own(sum, heads), beside(total, heads), own(both, slopes), beside(keys, slopes);
    }
    U g[2], gq[2][2], oq[2][2];  // [half][8 tokens]
    UNROLL for (int r = 0; r < 4; r++) total[r] = inverse(total[r]);
    UNROLL for (int r = 0; r < 2; r++) {
        F o0 = sum[2 * r] * total[2 * r], o1 = sum[2 * r + 1] * total[2 * r + 1];
        F g0 = gs[2 * r] * (total[2 * r] * alpha), g1 = gs[2 * r + 1] * (total[2 * r + 1] * alpha);
        dq[2 * r] = g0 * (both[2 * r] - o0 * keys[2 * r]), dq[2 * r + 1] = g1 * (both[2 * r + 1] - o1 * keys[2 * r + 1]);
        U halves[2];
        split(halves, o0, o1);
        o[r] = halves[0];
        g[r] = pack(g0, g1);
        twofold(gq[0][r], gq[1][r], g[r], q[t][r]), twofold(oq[0][r], oq[1][r], gq[0][r], o[r]);
        oq[1][r] = fused(gq[1][r], o[r], fused(gq[0][r], halves[1], oq[1][r]));
    }
    U columns[2][2], more[2][2], rest[2][2];
    {
        U x[3][2], y[2][2];
        UNROLL for (int i = 0; i < 2; i++) {
            x[0][i] = turned(gq[0][i]), x[1][i] = turned(oq[0][i]), x[2][i] = turned(oq[1][i]);
            y[0][i] = other<4>(turned(g[i])), y[1][i] = other<4>(turned(gq[1][i]));
        }
        couple(columns, x[0], y[0][0], y[0][1], masks), couple(more, x[1], y[1][0], y[1][1], masks), couple(rest, x[2], U(0u), U(0u), masks);
    }
    F first[2][4], second[2][4];
    UNROLL for (int h = 0; h < HEADS; h++) {
        U et[4];
        turn(et, e[h]);
        add_couple(first, et, columns, masks, h);
        add_couple(second, et, more, masks, h);
        add_couple(second, et, rest, masks, h, true);
    }
    F lost[4], little[4];
    own(dk, first), beside(dv, first), own(lost, second), beside(little, second);
    UNROLL for (int r = 0; r < 2; r++) {
        dk[2 * r] = (dk[2 * r] + little[2 * r]) * first_of(v[r]) - lost[2 * r];
        dk[2 * r + 1] = (dk[2 * r + 1] + little[2 * r + 1]) * second_of(v[r]) - lost[2 * r + 1];
    }
}

// 32 columns of dz W_O, the gradient of the heads.
INSIDE void project_back(F (&g)[4][4], U dz, U weights, int column) {
    zero(g), settle(g);
    begin();
    UNROLL for (int s = 0; s < 4; s++) wide<0, 1>(g, dz + 32 * s / PIECE, weights + (3 * MATRIX + 16 * s * ROW + 2 * column) / PIECE);
    leave(), finish();
    settle(g);
}

// One unit of columns of a warp's sequence: from queries, keys, values and the gradient of the heads (that of a large head is made here)
// to dq, dk, dv and o, which go to `staged`, a tile apart. A lane has the place of one row of what is kept.
INSIDE void unit_back(
    const U (&q)[TILES][2], const U (&k)[TILES][2], const U (&v)[TILES][2], F (&gs)[GIVEN][4], const Masks& masks, float factor,
    float alpha, float sharp, U staged, int c, U dz, U there
) {
    U e[4], et[4], ds[4], dst[4], g[TILES][2];  // of a large head: its weights, their gradient, the transposes of both
    U row = (lane() & 15) + 16 * (warp() & 7), half = lane() >> 4;
    if (R > 8) {
        F scores[2][4], total[4], dp[2][4], go[2] = {0.0f, 0.0f};
        UNROLL for (int i = 0; i < TILES; i += 2) score(scores, q + i, k + i, i);
        soften(e, scores, factor);
        mma0(total, e[0], e[1], e[2], e[3], ONES, ONES);
        invert(total);
        UNROLL for (int i = 0; i < TILES; i += 2) {
            U o[2][2];
            if (!AT_ONCE && i % GIVEN == 0) project_back(*(F(*)[4][4])gs, dz, there, c + 8 * i);
            UNROLL for (int j = 0; j < 2; j++) {
                F sum[4];
                mma0(sum, e[0], e[1], e[2], e[3], turned(v[i + j][0]), turned(v[i + j][1]));
                part_of(g[i + j], go, o[j], sum, gs[(i + j) % GIVEN], total, alpha);
            }
            keep4(staged + 3 * TILE + place(row, half * 16 + 2 * (c + 8 * i)), o[0][0], o[0][1], o[1][0], o[1][1]);
            UNROLL for (int j = 0; j < 2; j++) {
                U a[4] = {g[i][0], g[i][1], g[i + 1][0], g[i + 1][1]};
                add(dp[j], a, v[i][j], v[i + 1][j], i);
            }
        }
        whole(go);
        UNROLL for (int r = 0; r < 2; r++) go[r] = go[r] * (0.0f - sharp);
        UNROLL for (int j = 0; j < 2; j++) UNROLL for (int r = 0; r < 4; r++) dp[j][r] = fused(dp[j][r], sharp, go[r >> 1]);
        slope(ds, e, dp);
        turn(et, e), turn(dst, ds);
    }
    U last[2];
    UNROLL for (int t = 0; t < TILES; t++) {
        F dq[4], dk[4], dv[4];
        U o[2];
        if ((R == 2 || R == 4) && t && factor < 0.0f) break;  // never; over a branch nothing is moved, else a tile's numbers wait in memory for the other's
        if (R == 1) {
            single(dq, dk, dv, q, k, v[t], gs[t % GIVEN], masks, alpha, t, o);
        } else if (R <= 8) {
            U all[HEADS][4];
            F sum[4], over[4], go[2] = {0.0f, 0.0f};
            gather(sum, over, all, q, k, v[t], masks, factor, t);
            part_of(g[t], go, o, sum, gs[t % GIVEN], over, alpha);
            whole(go);
            U qt[2] = {turned(q[t][0]), turned(q[t][1])}, kt[2] = {turned(k[t][0]), turned(k[t][1])};
            U gt[2] = {turned(g[t][0]), turned(g[t][1])};
            UNROLL for (int h = 0; h < HEADS; h++) {
                U one = masks.pairs[h % OWNERS], mine = masks.columns[h % OWNERS];
                F dp[2][4], less[4];
                start_from(less, go, h);
                UNROLL for (int n = 0; n < 2; n++) mma(dp[n], g[t][0], g[t][1], only(v[t][n], one), less);
                slope(ds, all[h], dp);
                add(dq, ds, only(kt[0], mine), only(kt[1], mine), h);
                turn(et, all[h]), turn(dst, ds);
                add(dv, et, only(gt[0], mine), only(gt[1], mine), h);
                add(dk, dst, only(qt[0], mine), only(qt[1], mine), h);
            }
        } else {
            add(dq, ds, turned(k[t][0]), turned(k[t][1]), 0);
            add(dv, et, turned(g[t][0]), turned(g[t][1]), 0);
            add(dk, dst, turned(q[t][0]), turned(q[t][1]), 0);
        }
        float rows = R > 8 ? 1.0f : sharp, by = R > 8 ? 1.0f : EARLY ? 1.0f / LOG2E : sharp;  // of large heads the slopes have it already
        U at = staged + place(row, U(2 * (c + 8 * t))) + half * TILE, y[3][2];
        UNROLL for (int r = 0; r < 2; r++) {
            y[0][r] = pack(dq[2 * r] * rows, dq[2 * r + 1] * rows);
            y[1][r] = pack(dk[2 * r] * by, dk[2 * r + 1] * by);
            y[2][r] = pack(dv[2 * r], dv[2 * r + 1]);
        }
        keep4(at, y[0][0], y[0][1], y[1][0], y[1][1]);
        if (R <= 8) keep4(at + 2 * TILE, y[2][0], y[2][1], o[0], o[1]);
        else if (t % 2) keep4(staged + 2 * TILE + place(row, half * 16 + 2 * (c + 8 * (t - 1))), last[0], last[1], y[2][0], y[2][1]);
        else last[0] = y[2][0], last[1] = y[2][1];
    }
}

// From dz, the gradient of what the output adds to, to that of the input and the weights: a column tile, all tokens, or one of
// `token_splits` equal runs of them. Partial sums of the input's gradient go to `dx_partials` (model, cluster or column tile, token,
// 64), lane by lane (`_sum_partials` in encoder_norm_triton.py knows the order); `first`: nobody wants it. Partial sums of the
// weights' gradients go to (split, model, numbers `grad_row` apart); their sum before `unscale` and `alpha` is added to `total`, one
// number a model, which is not finite if one of them is not.
KERNEL(BACKWARD_WARPS, 1) backward(
    const Half* x, const Half* dz, const Half* w, const float* b, const Half* out, Half* dx_partials, float* dw, float* db, float* dout,
    float* total, int T, int C, int model, float alpha, float sharp, float unscale, int first, int models, int token_splits, int grad_row
) {
    long long m = block_y();
    int block = block_x() % (C / BLOCK), split = block_x() / (C / BLOCK), c0 = block * BLOCK;
    int start = T / TOKENS / token_splits * split, end = start + T / TOKENS / token_splits;
    int pair = cluster_size() == 2, which = cluster_rank();  // they add their dx_partials up, each for half of a tile's tokens
    x += m * T * WIDTH, dz += m * T * WIDTH, dx_partials += (m * (C / BLOCK >> pair) + (block >> pair)) * T * WIDTH;
    w += m * model, b += m * model, out += m * model;
    long long to = ((long long)split * models + m) * grad_row;
    dw += to, db += to, dout += to;
    U weights = shared(), tiles = weights + WEIGHTS, staged = tiles + 4 * TILE, ones = staged + 4 * TILE, mail = ones + 1024, box = mail + 2 * POST;
    int side = warp() >> 3, group = warp() >> 2 & 1;  // which columns, and which 64 tokens
    float factor = sharp * LOG2E;
    bring<WARPS>(weights, w, b, out, c0, C);
    auto next = [&](int tile) {
        bring_tile<WARPS>(tiles + (tile & 1) * 2 * TILE, x, tile);
        bring_tile<WARPS>(tiles + ((tile & 1) * 2 + 1) * TILE, dz, tile);
        send();
    };
    next(start);
    if (warp() < 8) keep(ones + (lane() + 32 * warp()) * 4, ONES);
    if (warp() == 0) UNROLL for (int i = 0; i < 2; i++) open_box(box + 16 * i);
    all_of_cluster();  // boxes are open
    Masks masks;
    mask(masks);
    constexpr int EACH = 16 / WARPS;  // matrices whose gradients four warps sum up
    F gw[EACH][8][4], gb[EACH][1][4];
    UNROLL for (int i = 0; i < EACH; i++) zero(gw[i]), zero(gb[i]);
    // A tile's gradient of the input, which the first side takes: 64 columns at once read less of shared memory than 32 twice. In a cluster each
    // has the 64 tokens of one group to the end, and posts the others' to the other.
    U held[8][2];
    bool keeps = side == 0 && !first && (!pair || group == which), posts = side == 0 && !first && pair && group != which;
    auto give = [&](int tile) {
        U me = anew(lane()), letter = mail + (me + 32 * (warp() & 3)) * 16, at = ((me >> 2) + 16 * (warp() & 7)) * WIDTH + (me & 3) * 16;
        int turn = tile - start;
        if (pair) {
            if (!(warp() & 3)) expect(box + (turn & 1) * 16, POST);
            wait_for_post(box + (turn & 1) * 16, turn >> 1);
        }
        UNROLL for (int i = 0; i < 2; i++) UNROLL for (int n = 0; n < 8; n += 4) {
            U four[4] = {held[n][i], held[n + 1][i], held[n + 2][i], held[n + 3][i]}, theirs[4];
            if (pair) {
                find16(theirs, letter + ((turn & 1) * POST + (2 * i + n / 4) * (POST / 4)));
                UNROLL for (int j = 0; j < 4; j++) four[j] = plus(four[j], theirs[j]);
            }
            store8(dx_partials + tile * (TOKENS * WIDTH), at, four, 8 * i * WIDTH + 2 * n);
        }
    };
    auto send_on = [&](int turn) {
        U letter = mail + (anew(lane()) + 32 * (warp() & 3)) * 16;
        UNROLL for (int i = 0; i < 2; i++) UNROLL for (int n = 0; n < 8; n += 4) {
            U four[4] = {held[n][i], held[n + 1][i], held[n + 2][i], held[n + 3][i]};
            U to = letter + ((turn & 1) * POST + (2 * i + n / 4) * (POST / 4));
            post(at_peer(to, 1 - which), four, at_peer(box + (turn & 1) * 16, 1 - which));
        }
    };
    for (int tile = start; tile < end; tile++) {
        U xs = view(tiles) + (tile & 1) * (2 * TILE / PIECE), zs = xs + TILE / PIECE;
        U ours = group * (64 * ROW / PIECE), there = view(weights), done = view(staged);
        arrived<0>();
        visible();
        together();  // this tile is there, and everybody has done with what lies where the next one goes
        if (tile + 1 < end) next(tile + 1);
        if (tile > start && keeps) give(tile - 1);  // not before: who makes something visible waits for what it has stored
        Tokens all;
        all.view = xs + ours;
#pragma unroll 1
        for (int c = BLOCK / SIDES * side; c < BLOCK / SIDES * (side + 1); c += UNIT) {
            U q[TILES][2], k[TILES][2], v[TILES][2];
            F gs[GIVEN][4];  // the gradient of the heads; that of the largest comes 32 columns at a time
            UNROLL for (int i = 0; i < TILES; i += 2) {
                F y[6][4];
                if (AT_ONCE) project(y, gs + i % GIVEN, xs + ours, zs + ours, there, weights + 4 * MATRIX, c + 8 * i);
                else project(y, all, there, weights + 4 * MATRIX, c + 8 * i), finish(), settle(y);
                packed(q + i, k + i, v + i, y, factor);
            }
            unit_back(q, k, v, gs, masks, factor, alpha, sharp, staged, c, zs + ours, there);
        }
        visible();
        together();  // every sequence's dq, dk, dv and o are there
        F dx[8][4];
        zero(dx), settle(dx);
        UNROLL for (int i = 0; i < EACH; i++) settle(gw[i]), settle(gb[i]);
        begin();
        UNROLL for (int i = 0; i < EACH; i++) {
            int matrix = (warp() >> 2) * EACH + i;
            U by = matrix < 3 ? xs : zs;
            UNROLL for (int s = 0; s < TOKENS / 16; s++) wide<1, 1>(gw[i], done + (matrix * TILE + 16 * s * ROW) / PIECE, by + 16 * s * ROW / PIECE);
            if (matrix % 2 == 0)  // a softmax does not see the keys' biases, and the output's are not these
                UNROLL for (int s = 0; s < TOKENS / 16; s++) wide<1, 0>(gb[i], done + (matrix * TILE + 16 * s * ROW) / PIECE, view(ones));
        }
        if (!first && side == 0)
            UNROLL for (int a = 0; a < 3; a++) UNROLL for (int s = 0; s < 4; s++)
                wide<0, 1>(dx, done + ours + (a * TILE + 32 * s) / PIECE, there + (16 * a + 48 * s) * ROW / PIECE);
        leave(), finish();
        UNROLL for (int i = 0; i < EACH; i++) settle(gw[i]), settle(gb[i]);
        settle(dx);
        UNROLL for (int n = 0; n < 8; n++) UNROLL for (int i = 0; i < 2; i++) held[n][i] = pack(dx[n][2 * i], dx[n][2 * i + 1]);
        if (posts) send_on(tile - start);
    }
    if (keeps) give(end - 1);
    F all = 0.0f;
    UNROLL for (int i = 0; i < EACH; i++) UNROLL for (int r = 0; r < 2; r++) {
        int matrix = (warp() >> 2) * EACH + i;
        U column = (lane() >> 2) + (c0 + 16 * (warp() & 3) + 8 * r), pair = (lane() & 3) * 2;
        if (matrix < 3) {
            UNROLL for (int n = 0; n < 8; n++)
                store2(dw, (column + matrix * C) * WIDTH + pair + 8 * n, gw[i][n][2 * r] * unscale, gw[i][n][2 * r + 1] * unscale);
            store(db, column + matrix * C, gb[i][0][2 * r] * unscale);
        } else {
            UNROLL for (int n = 0; n < 8; n++) UNROLL for (int j = 0; j < 2; j++)
                store(dout, (pair + (8 * n + j)) * C + column, gw[i][n][2 * r + j] * (unscale * alpha));
        }
        UNROLL for (int n = 0; n < 8; n++) all = all + (gw[i][n][2 * r] + gw[i][n][2 * r + 1]);
        all = all + gb[i][0][2 * r];
    }
    add_up(total + m, all);
}
