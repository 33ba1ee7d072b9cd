// The feed-forward of a post-norm layer of width 64, W_2 relu(W_1 x + b_1): forward, and backward
// with the gradients of its weights.
//
// What lies where. The hidden layer never leaves the registers: what a product over the width gives
// is packed to half and multiplied again as it lies there. Backward hidden units are the rows, and
// only their slopes go through shared memory, where products over hidden units read them the other
// way round. Weights come through shared memory forward, in stages; backward a program's own stay.
//
// Who sums what.
//   column tile     128 hidden units: what a program has backward; forward a program goes through
//                   all of them.
//   token tile      128 tokens, in two halves.
//   token splits    backward, programs among which the tokens of a column tile are split: each
//                   leaves partial sums of the weights' gradients, which it has summed over its
//                   token tiles in registers.
//   cluster of two  backward, two programs with neighbouring column tiles. The input's gradient is
//                   a sum over hidden units; the two add theirs up through each other's shared
//                   memory, each for half of a tile's tokens, and write one partial sum.
//
// Products run while the results of those before them are packed: `finish_former` waits for all but
// the ones begun last. Matrices are half, everything else float; rows of weights, and each
// parameter in them, start at multiples of 16 numbers. Written with the words of warp.cuh, so that
// the tests run the same lines on a CPU.

constexpr int HIDDEN = 128;             // units of a block of threads
constexpr int TOKENS = 128;             // of a tile, in two halves
constexpr int HALF = 64 * ROW;          // bytes of one
constexpr int TILE = 2 * HALF;
// Tiles of x and dz in shared memory: one is worked on, one comes, two are there before and behind
constexpr int AHEAD = 4;
// Bytes of a block's part of W_1, and of the slopes of half a tile
constexpr int MATRIX = HIDDEN * ROW;
constexpr int BACK = AHEAD * 2 * TILE + 4 * MATRIX + MATRIX + 1024 + 2 * POST + 32;
constexpr int STAGE = 2 * MATRIX;       // bytes of both matrices' part of 128 hidden units
constexpr int EACH = 256;               // tokens of a block of threads forward
constexpr int STAGES = 4;               // parts of the weights in shared memory then
constexpr int BIASES = 4 * HIDDEN;      // bytes of theirs
constexpr int FORWARD = STAGES * (STAGE + BIASES) + EACH * ROW;
constexpr int BACK_WARPS = 12;
constexpr int FORWARD_WARPS = 16;

// 64 hidden units of four warps for 64 tokens: weights that lie there, or in registers, times what
// lies there.
INSIDE void project(F (&c)[8][4], U weights, U tokens) {
    wide0<0, 0>(c, weights, tokens);
    UNROLL for (int s = 1; s < 4; s++)
        wide<0, 0>(c, weights + 32 * s / PIECE, tokens + 32 * s / PIECE);
}
INSIDE void project(F (&c)[8][4], const U (&weights)[4][4], U tokens) {
    wide0(c, weights[0], tokens);
    UNROLL for (int s = 1; s < 4; s++) wide(c, weights[s], tokens + 32 * s / PIECE);
}

// On their way to shared memory, by WARPS warps: 64 numbers of each of ROWS rows that lie `apart`
// numbers apart.
template <int ROWS, int WARPS>
INSIDE void bring(U to, const Half* from, int apart, int first_warp) {
    U at = anew(lane()) + 32 * (warp() - first_warp), row = at >> 3, piece = (at & 7) * 16,
      first = to + place(row, piece);
    UNROLL for (int i = 0; i < ROWS; i += 4 * WARPS)
        copy(first + i * ROW, from + i * apart, row * (2 * apart) + piece);
}

// n(s0 u0 + W_2 relu(W_1 x + b_1) + b_2): 64 tokens of each four warps, which are the rows of every
// product; all hidden units. The products of one group of warps run while others pack.
KERNEL(FORWARD_WARPS, 1) feed(const Half* x, const Half* up, const float* bias, const Half* down,
    const float* shift, const float* scale0, const float* u0, const float* scale, float* u, Half* y,
    float* inv, int T, int hidden, int model) {
    long long m = block_y();
    int start = block_x() * EACH;
    x += (m * T + start) * WIDTH, up += m * model, bias += m * model, down += m * model;
    U weights = shared(), tokens = weights + STAGES * STAGE, biases = tokens + EACH * ROW;
    auto next = [&](int f) {  // hidden units f to f + 127
        if (f < hidden) {
            U to = weights + f / HIDDEN % STAGES * STAGE;
            bring<HIDDEN, FORWARD_WARPS>(to, up + f * WIDTH, WIDTH, 0);
            UNROLL for (int i = 0; i < 2; i++)
                bring<WIDTH, FORWARD_WARPS>(to + MATRIX + i * HALF, down + f + 64 * i, hidden, 0);
            if (warp() == 0)
                copy(biases + f / HIDDEN % STAGES * BIASES + lane() * 16, bias + f, lane() * 16);
        }
        send();
    };
    bring<EACH, FORWARD_WARPS>(tokens, x, WIDTH, 0);
    next(0), next(HIDDEN);
    arrived<1>();
    visible();
    together();  // the tokens and a part of the weights are there
    U mine[4][4], active[4][4], at = view(weights);
    UNROLL for (int s = 0; s < 4; s++)
        find4<0>(mine[s], tokens + place((lane() & 15) + 16 * warp(), (lane() >> 4) * 16 + 32 * s));
    F h[8][4], z[8][4];
    zero(h), zero(z);
    settle(h), settle(z), settle(mine);
    begin();
    project(h, mine, at);
    leave(), finish();
    settle(h);
    for (int two = 0; two < hidden; two += 2 * HIDDEN) UNROLL
        for (int quarter = 0; quarter < 4; quarter++) {
            int f = two + 64 * quarter, part = quarter % 2, behind = f + 64 == hidden ? 0 : f + 64;
            U stage = f / HIDDEN % STAGES * (STAGE / PIECE),
              ahead = behind / HIDDEN % STAGES * (STAGE / PIECE) + (1 - part) * (HALF / PIECE);
            if (part == 0) {
                arrived<0>();
                visible();
                // The next part of the weights is there, and everybody has done with the one before
                // the last
                together();
                next(f + 2 * HIDDEN);
            }
            if (quarter) finish(), settle(h), settle(z), settle(active);
            UNROLL for (int s = 0; s < 4; s++) UNROLL
                for (int j = 0; j < 2; j++) {
                    F low, high;
                    find2(biases + (f / HIDDEN % STAGES * BIASES + 256 * part + 32 * (2 * s + j)) +
                              (lane() & 3) * 8,
                        low, high);
                    UNROLL for (int i = 0; i < 2; i++)
                        active[s][2 * j + i] =
                            pack_above(h[2 * s + j][2 * i] + low, h[2 * s + j][2 * i + 1] + high);
                }
            settle(active);
            begin();
            UNROLL for (int s = 0; s < 4; s++)
                wide(z, active[s], at + stage + (MATRIX + part * HALF + 32 * s) / PIECE);
            project(h, mine, at + ahead);  // at the very end of nothing
            leave();
            // The compiler does not let products run into a loop's next turn
            if (quarter == 3) finish(), settle(h), settle(z), settle(active);
        }
    End end = {shift + m * model, scale0 + m * model, u0 + m * T * WIDTH, scale + m * model,
        u + m * T * WIDTH, y + m * T * WIDTH, inv + m * T};
    finish_part(z, (lane() >> 2) + (start + 16 * warp()), end, 1.0f, 1, 0);
}

// The other way round: half a tile's 64 tokens, all hidden units.
INSIDE void through(F (&dx)[8][4], U slopes, U weights) {
    wide0<1, 1>(dx, slopes, weights);
    UNROLL for (int s = 1; s < HIDDEN / 16; s++)
        wide<1, 1>(dx, slopes + 16 * s * ROW / PIECE, weights + 16 * s * ROW / PIECE);
}

// From dz, the gradient of what the output adds to: partial sums of the input's gradient, (model,
// cluster, token, 64), lane by lane as encoder_attention_cuda.cuh has them; and the gradients of
// weights and biases, of all tokens or of one of `token_splits` equal runs of them, (split, model,
// numbers `grad_row` apart), an even number of tiles in each. Their sum before `unscale` is added
// to `total`, one number a model: not finite if one of them is not.
//
// Eight warps have 64 hidden units each four, and go from hidden units and slopes to the gradients
// of weights and biases. Four more bring the tokens, and go from slopes to the gradient of the
// input, a tile behind. The two meet three times a tile: at FULL its slopes are there, and nobody
// reads the tokens of the tile before any more; at HERE, which the eight reach a tile later, the
// tile after the next is there; at FREE, one place for even tiles and one for odd ones, slopes may
// be written over.
constexpr int FULL = 0, HERE = 1, FREE = 2;
KERNEL(BACK_WARPS, 1) feed_back(const Half* x, const Half* dz, const Half* up, const float* bias,
    const Half* down, Half* dx_partials, float* d_up, float* d_bias, float* d_down, float* total,
    int T, int hidden, int model, float unscale, int models, int token_splits, int grad_row) {
    long long m = block_y();
    int tiles_of_columns = hidden / HIDDEN, block = block_x() % tiles_of_columns,
        split = block_x() / tiles_of_columns, count = T / TOKENS / token_splits,
        start = count * split;
    x += (m * T + start * TOKENS) * WIDTH, dz += (m * T + start * TOKENS) * WIDTH;
    int which = cluster_rank();  // they add their dx_partials up, each for half of a tile's tokens
    dx_partials += ((m * (tiles_of_columns / 2) + block / 2) * T + start * TOKENS) * WIDTH;
    long long to = ((long long)split * models + m) * grad_row;
    d_up += to, d_bias += to, d_down += to;
    U tiles = shared(), slopes = tiles + AHEAD * 2 * TILE, weights = slopes + 4 * MATRIX,
      ones = weights + MATRIX, mail = ones + 1024, box = mail + 2 * POST;
    U at = view(tiles), done = view(slopes), by = view(weights);
    if (warp() >= 8) {  // four warps beside the others
        fewer_registers<72>();
        auto next = [&](int tile) {
            if (tile < count) {
                U there = tiles + tile % AHEAD * (2 * TILE);
                bring<TOKENS, 4>(there, x + tile * (TOKENS * WIDTH), WIDTH, 8),
                    bring<TOKENS, 4>(there + TILE, dz + tile * (TOKENS * WIDTH), WIDTH, 8);
            }
            send();
        };
        next(0), next(1), next(2);
        UNROLL for (int i = 0; i < 2; i++)
            keep(ones + (lane() + 32 * (warp() - 8 + 4 * i)) * 4, ONES);
        if (warp() == 8) UNROLL for (int i = 0; i < 2; i++) open_box(box + 16 * i);
        arrived<1>();
        visible();
        all_of_cluster();  // the weights and two tiles are there
        together();  // everybody has taken the second
        F dx[8][4];
        zero(dx);
        for (int tile = 0; tile < count; tile++) {
            meet(FULL, BACK_WARPS);
            if (tile + 1 < count) {
                arrived<0>();
                visible();
                meet_later(HERE, BACK_WARPS);
            }
            next(tile + 3);
            UNROLL for (int turn = 0; turn < 2; turn++) {
                // What goes to the other program of the cluster first
                int part = which ^ (1 - turn);
                U here = done + ((tile & 1) * 2 + part) * (MATRIX / PIECE);
                settle(dx);
                begin();
                through(dx, here, by);
                leave(), finish();
                settle(dx);
                if (turn == 1 && tile + 2 < count) meet_later(FREE + (tile & 1), BACK_WARPS);
                U token =
                    ((lane() >> 2) + (16 * (warp() & 3) + 64 * part)) * WIDTH + (lane() & 3) * 16;
                U letter = mail + (tile & 1) * POST + (lane() + 32 * (warp() & 3)) * 16,
                  now = box + (tile & 1) * 16;
                if (turn == 1) {
                    if (warp() == 8) expect(now, POST);
                    wait_for_post(now, tile >> 1);
                }
                UNROLL for (int i = 0; i < 2; i++) UNROLL for (int n = 0; n < 8; n += 4) {
                    U four[4], theirs[4];
                    int place = (2 * i + n / 4) * (POST / 4);
                    if (turn == 1) {
                        find16(theirs, letter + place);
                        UNROLL for (int j = 0; j < 4; j++)
                            dx[n + j][2 * i] = dx[n + j][2 * i] + first_of(theirs[j]),
                                          dx[n + j][2 * i + 1] =
                                              dx[n + j][2 * i + 1] + second_of(theirs[j]);
                    }
                    UNROLL for (int j = 0; j < 4; j++)
                        four[j] = pack(dx[n + j][2 * i], dx[n + j][2 * i + 1]);
                    if (turn == 0)
                        post(at_peer(letter + place, 1 - which), four, at_peer(now, 1 - which));
                    else
                        store8(dx_partials + tile * (TOKENS * WIDTH), token, four,
                            8 * i * WIDTH + 2 * n);
                }
            }
        }
        return;
    }
    more_registers<216>();
    // Four warps have 64 units, one has 16
    int group = warp() >> 2, own = block * HIDDEN + 16 * warp();
    bring<HIDDEN, 8>(weights, up + m * model + block * HIDDEN * WIDTH, WIDTH, 0);
    UNROLL for (int i = 0; i < 2; i++)
        bring<WIDTH, 8>(slopes + i * HALF, down + m * model + block * HIDDEN + 64 * i, hidden, 0);
    send();
    arrived<0>();
    visible();
    // The weights and two tiles are there, the second matrix where slopes will be
    all_of_cluster();
    U by_down[4][4];  // its transpose as a first operand; both matrices would be too many registers
    UNROLL for (int s = 0; s < 4; s++)
        find4<1>(by_down[s], slopes + group * HALF +
                                 place((lane() & 7) + (lane() >> 4) * 8 + 16 * s,
                                     (lane() >> 3 & 1) * 16 + 32 * (warp() & 3)));
    together();  // everybody has taken it
    F low = load(bias + m * model, (lane() >> 2) + own),
      high = load(bias + m * model, (lane() >> 2) + (own + 8));
    F g_up[8][4], g_down[8][4], sums[1][4], h[8][4], dh[8][4];
    U active[4][4], slope[4][4], ours = by + group * (HALF / PIECE),
                                 mine = place((lane() & 15) + 16 * warp(), (lane() >> 4) * 16);
    zero(g_up), zero(g_down), zero(sums), zero(h), zero(dh);
    settle(g_up), settle(g_down), settle(sums), settle(h), settle(dh), settle(by_down);
    begin();
    project(h, ours, at);
    leave();
    project(dh, by_down, at + TILE / PIECE);
    leave();
    for (int two = 0; two < count; two += 2) UNROLL for (int quarter = 0; quarter < 4; quarter++) {
            int tile = two + quarter / 2, part = quarter % 2,
                behind = part == 0           ? tile
                         : tile + 1 == count ? 0
                                             : tile + 1;
            U here = at + tile % AHEAD * (2 * TILE / PIECE) + part * (HALF / PIECE);
            // At the very end something that nobody reads
            U ahead = at + behind % AHEAD * (2 * TILE / PIECE) + (1 - part) * (HALF / PIECE);
            if (part == 1 && tile > 0) meet(HERE, BACK_WARPS);
            finish_former();
            settle(h);
            UNROLL for (int s = 0; s < 4; s++) UNROLL
                for (int i = 0; i < 4; i++) {
                    F shift = i & 1 ? high : low;
                    active[s][i] = pack_above(h[2 * s + (i >> 1)][2 * (i & 1)] + shift,
                        h[2 * s + (i >> 1)][2 * (i & 1) + 1] + shift);
                }
        settle(active);
        begin();
        UNROLL for (int s = 0; s < 4; s++)
            wide_turned(g_down, active[s], here + (TILE + 16 * s * ROW) / PIECE);
        project(h, ours, ahead);
        leave();
        finish_former();
        settle(dh);
        if (part == 0 && tile > 1) meet(FREE + (tile & 1), BACK_WARPS);
        UNROLL for (int s = 0; s < 4; s++) {
            UNROLL for (int i = 0; i < 4; i++)
                slope[s][i] =
                    pack(dh[2 * s + (i >> 1)][2 * (i & 1)], dh[2 * s + (i >> 1)][2 * (i & 1) + 1]) &
                    above(active[s][i]);
            keep4(slopes + ((tile & 1) * 2 + part) * MATRIX + (mine ^ U(32 * s)), slope[s][0],
                slope[s][1], slope[s][2], slope[s][3]);
        }
        settle(slope);
        begin();
        UNROLL for (int s = 0; s < 4; s++)
            wide_turned(g_up, slope[s], here + 16 * s * ROW / PIECE),
                wide(sums, slope[s], view(ones));
        project(dh, by_down, ahead + TILE / PIECE);
        leave();
        // The compiler does not let products run from one turn of a loop into the next
        if (quarter == 3) {
            finish();
            settle(h), settle(dh), settle(g_up), settle(g_down), settle(sums), settle(active),
                settle(slope);
        }
        if (part == 1) {
            visible();
            meet_later(FULL, BACK_WARPS);
        }
    }
    F all = 0.0f;
    UNROLL for (int r = 0; r < 2; r++) {
        U unit = (lane() >> 2) + (own + 8 * r), pair = (lane() & 3) * 2;
        UNROLL for (int n = 0; n < 8; n++) {
            store2(d_up, unit * WIDTH + pair + 8 * n, g_up[n][2 * r] * unscale,
                g_up[n][2 * r + 1] * unscale);
            UNROLL for (int j = 0; j < 2; j++) {
                store(d_down, (pair + (8 * n + j)) * hidden + unit, g_down[n][2 * r + j] * unscale);
                all = all + (g_up[n][2 * r + j] + g_down[n][2 * r + j]);
            }
        }
        store(d_bias, unit, sums[0][2 * r] * unscale);  // four lanes write the same number
        all = all + sums[0][2 * r];
    }
    add_up(total + m, all);
}
