// The attention part of a post-norm layer, backward, with the gradients of its weights. The plan
// stands in encoder_attention_cuda.cuh.

// Of a tile: heads o = sum / total, kept for the weights of the output; their gradient g, divided
// by the total; and g o, whose sum over a head's columns is taken off the gradient of its weights.
// A sharp head's gradient is the small difference of the two, so g o has the g that was rounded.
INSIDE void part_of(U (&g)[2], F (&go)[2], U (&o)[2], const F (&sum)[4], const F (&gs)[4],
    const F (&over)[4], float alpha) {
    UNROLL for (int r = 0; r < 2; r++) {
        F o0 = sum[2 * r] * over[2 * r], o1 = sum[2 * r + 1] * over[2 * r + 1];
        o[r] = pack(o0, o1);
        g[r] = pack(gs[2 * r] * (over[2 * r] * alpha), gs[2 * r + 1] * (over[2 * r + 1] * alpha));
        go[r] = go[r] + (first_of(g[r]) * o0 + second_of(g[r]) * o1);
    }
}

// What `part_of` has summed in each thread, summed over a head's columns; and taken off beforehand,
// where the gradient of head h's weights starts.
INSIDE void whole(F (&go)[2]) {
    UNROLL for (int r = 0; r < 2; r++) {
        if (R >= 4) go[r] = go[r] + other<1>(go[r]);
        if (R >= 8) go[r] = go[r] + other<2>(go[r]);
    }
}
INSIDE void start_from(F (&y)[4], const F (&go)[2], int h) {
    UNROLL for (int r = 0; r < 2; r++)
        y[2 * r] = y[2 * r + 1] = F(0.0f) - (R >= 8 ? go[r] : of_four(go[r], h * R / 2));
}

// Of the scores, from that of the weights
INSIDE void slope(U (&ds)[4], const U (&e)[4], const F (&dp)[2][4]) {
    UNROLL for (int j = 0; j < 4; j++)
        ds[j] = times(e[j], pack(dp[j >> 1][2 * (j & 1)], dp[j >> 1][2 * (j & 1) + 1]));
}

INSIDE void turn(U (&y)[4], const U (&x)[4]) {
    y[0] = turned(x[0]), y[1] = turned(x[2]), y[2] = turned(x[1]), y[3] = turned(x[3]);
}

// A product as a sum of two halves, to 2^-25: where heads are sharp differences are small.
INSIDE void twofold(U& high, U& low, U a, U b) {
    high = times(a, b), low = fused(a, b, opposite(high));
}

// Heads of rank 1 need no gradient of single weights. With ds_ij = e_ij (g_i v_j - g_i o_i) all
// sums have e alone:
//   dq_i = g_i sum_j e_ij v_j k_j - g_i o_i sum_j e_ij k_j
//   dk_j = v_j sum_i e_ij g_i q_i - sum_i e_ij g_i o_i q_i
//   dv_j = sum_i e_ij g_i
// and g is divided by the total.
INSIDE void single(F (&dq)[4], F (&dk)[4], F (&dv)[4], const U (&q)[TILES][2],
    const U (&k)[TILES][2], const U (&v)[2], const F (&gs)[4], const Masks& masks, float alpha,
    int t, U (&o)[2]) {
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
        dq[2 * r] = g0 * (both[2 * r] - o0 * keys[2 * r]),
               dq[2 * r + 1] = g1 * (both[2 * r + 1] - o1 * keys[2 * r + 1]);
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
        couple(columns, x[0], y[0][0], y[0][1], masks), couple(more, x[1], y[1][0], y[1][1], masks),
            couple(rest, x[2], U(0u), U(0u), masks);
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
    UNROLL for (int s = 0; s < 4; s++)
        wide<0, 1>(
            g, dz + 32 * s / PIECE, weights + (3 * MATRIX + 16 * s * ROW + 2 * column) / PIECE);
    leave(), finish();
    settle(g);
}

// One unit of columns of a warp's sequence: from queries, keys, values and the gradient of the
// heads (that of a large head is made here) to dq, dk, dv and o, which go to `staged`, a tile
// apart. A lane has the place of one row of what is kept.
INSIDE void unit_back(const U (&q)[TILES][2], const U (&k)[TILES][2], const U (&v)[TILES][2],
    F (&gs)[GIVEN][4], const Masks& masks, float factor, float alpha, float sharp, U staged, int c,
    U dz, U there) {
    // Of a large head: its weights, their gradient, the transposes of both
    U e[4], et[4], ds[4], dst[4], g[TILES][2];
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
            keep4(staged + 3 * TILE + place(row, half * 16 + 2 * (c + 8 * i)), o[0][0], o[0][1],
                o[1][0], o[1][1]);
            UNROLL for (int j = 0; j < 2; j++) {
                U a[4] = {g[i][0], g[i][1], g[i + 1][0], g[i + 1][1]};
                add(dp[j], a, v[i][j], v[i + 1][j], i);
            }
        }
        whole(go);
        UNROLL for (int r = 0; r < 2; r++) go[r] = go[r] * (0.0f - sharp);
        UNROLL for (int j = 0; j < 2; j++) UNROLL
            for (int r = 0; r < 4; r++) dp[j][r] = fused(dp[j][r], sharp, go[r >> 1]);
        slope(ds, e, dp);
        turn(et, e), turn(dst, ds);
    }
    U last[2];
    UNROLL for (int t = 0; t < TILES; t++) {
        F dq[4], dk[4], dv[4];
        U o[2];
        // Never; over a branch nothing is moved, else a tile's numbers wait in memory for the
        // other's
        if ((R == 2 || R == 4) && t && factor < 0.0f) break;
        if (R == 1) {
            single(dq, dk, dv, q, k, v[t], gs[t % GIVEN], masks, alpha, t, o);
        } else if (R <= 8) {
            U all[HEADS][4];
            F sum[4], over[4], go[2] = {0.0f, 0.0f};
            gather(sum, over, all, q, k, v[t], masks, factor, t);
            part_of(g[t], go, o, sum, gs[t % GIVEN], over, alpha);
            whole(go);
            U qt[2] = {turned(q[t][0]), turned(q[t][1])},
              kt[2] = {turned(k[t][0]), turned(k[t][1])};
            U gt[2] = {turned(g[t][0]), turned(g[t][1])};
            UNROLL for (int h = 0; h < HEADS; h++) {
                U one = masks.pairs[h % OWNERS], mine = masks.columns[h % OWNERS];
                F dp[2][4], less[4];
                start_from(less, go, h);
                UNROLL for (int n = 0; n < 2; n++)
                    mma(dp[n], g[t][0], g[t][1], only(v[t][n], one), less);
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
        // Of large heads the slopes have it already
        float rows = R > 8 ? 1.0f : sharp, by = R > 8 ? 1.0f : EARLY ? 1.0f / LOG2E : sharp;
        U at = staged + place(row, U(2 * (c + 8 * t))) + half * TILE, y[3][2];
        UNROLL for (int r = 0; r < 2; r++) {
            y[0][r] = pack(dq[2 * r] * rows, dq[2 * r + 1] * rows);
            y[1][r] = pack(dk[2 * r] * by, dk[2 * r + 1] * by);
            y[2][r] = pack(dv[2 * r], dv[2 * r + 1]);
        }
        keep4(at, y[0][0], y[0][1], y[1][0], y[1][1]);
        if (R <= 8) keep4(at + 2 * TILE, y[2][0], y[2][1], o[0], o[1]);
        else if (t % 2)
            keep4(staged + 2 * TILE + place(row, half * 16 + 2 * (c + 8 * (t - 1))), last[0],
                last[1], y[2][0], y[2][1]);
        else last[0] = y[2][0], last[1] = y[2][1];
    }
}

// From dz, the gradient of what the output adds to, to that of the input and the weights: a column
// tile, all tokens, or one of `token_splits` equal runs of them. Partial sums of the input's
// gradient go to `dx_partials` (model, cluster or column tile, token, 64), lane by lane
// (`_sum_partials` in encoder_norm_triton.py knows the order); `first`: nobody wants it. Partial
// sums of the weights' gradients go to (split, model, numbers `grad_row` apart); their sum before
// `unscale` and `alpha` is added to `total`, one number a model, which is not finite if one of them
// is not.
KERNEL(BACKWARD_WARPS, 1) backward(const Half* x, const Half* dz, const Half* w, const float* b,
    const Half* out, Half* dx_partials, float* dw, float* db, float* dout, float* total, int T,
    int C, int model, float alpha, float sharp, float unscale, int first, int models,
    int token_splits, int grad_row) {
    long long m = block_y();
    int block = block_x() % (C / BLOCK), split = block_x() / (C / BLOCK), c0 = block * BLOCK;
    int start = T / TOKENS / token_splits * split, end = start + T / TOKENS / token_splits;
    // They add their dx_partials up, each for half of a tile's tokens
    int pair = cluster_size() == 2, which = cluster_rank();
    x += m * T * WIDTH, dz += m * T * WIDTH,
        dx_partials += (m * (C / BLOCK >> pair) + (block >> pair)) * T * WIDTH;
    w += m * model, b += m * model, out += m * model;
    long long to = ((long long)split * models + m) * grad_row;
    dw += to, db += to, dout += to;
    U weights = shared(), tiles = weights + WEIGHTS, staged = tiles + 4 * TILE,
      ones = staged + 4 * TILE, mail = ones + 1024, box = mail + 2 * POST;
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
    // A tile's gradient of the input, which the first side takes: 64 columns at once read less of
    // shared memory than 32 twice. In a cluster each has the 64 tokens of one group to the end, and
    // posts the others' to the other.
    U held[8][2];
    bool keeps = side == 0 && !first && (!pair || group == which),
         posts = side == 0 && !first && pair && group != which;
    auto give = [&](int tile) {
        U me = anew(lane()), letter = mail + (me + 32 * (warp() & 3)) * 16,
          at = ((me >> 2) + 16 * (warp() & 7)) * WIDTH + (me & 3) * 16;
        int turn = tile - start;
        if (pair) {
            if (!(warp() & 3)) expect(box + (turn & 1) * 16, POST);
            wait_for_post(box + (turn & 1) * 16, turn >> 1);
        }
        UNROLL for (int i = 0; i < 2; i++) UNROLL
            for (int n = 0; n < 8; n += 4) {
                U four[4] = {held[n][i], held[n + 1][i], held[n + 2][i], held[n + 3][i]}, theirs[4];
                if (pair) {
                    find16(theirs, letter + ((turn & 1) * POST + (2 * i + n / 4) * (POST / 4)));
                    UNROLL for (int j = 0; j < 4; j++)
                        four[j] = plus(four[j], theirs[j]);
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
        // This tile is there, and everybody has done with what lies where the next one goes
        together();
        if (tile + 1 < end) next(tile + 1);
        // Not before: who makes something visible waits for what it has stored
        if (tile > start && keeps) give(tile - 1);
        Tokens all;
        all.view = xs + ours;
#pragma unroll 1
        for (int c = BLOCK / SIDES * side; c < BLOCK / SIDES * (side + 1); c += UNIT) {
            U q[TILES][2], k[TILES][2], v[TILES][2];
            // The gradient of the heads; that of the largest comes 32 columns at a time
            F gs[GIVEN][4];
            UNROLL for (int i = 0; i < TILES; i += 2) {
                F y[6][4];
                if (AT_ONCE)
                    project(y, gs + i % GIVEN, xs + ours, zs + ours, there, weights + 4 * MATRIX,
                        c + 8 * i);
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
            UNROLL for (int s = 0; s < TOKENS / 16; s++)
                wide<1, 1>(gw[i], done + (matrix * TILE + 16 * s * ROW) / PIECE,
                    by + 16 * s * ROW / PIECE);
            // A softmax does not see the keys' biases, and the output's are not these
            if (matrix % 2 == 0) UNROLL
                for (int s = 0; s < TOKENS / 16; s++)
                    wide<1, 0>(gb[i], done + (matrix * TILE + 16 * s * ROW) / PIECE, view(ones));
        }
        if (!first && side == 0)
            UNROLL for (int a = 0; a < 3; a++) UNROLL for (int s = 0; s < 4; s++)
                    wide<0, 1>(dx, done + ours + (a * TILE + 32 * s) / PIECE,
                        there + (16 * a + 48 * s) * ROW / PIECE);
        leave(), finish();
        UNROLL for (int i = 0; i < EACH; i++) settle(gw[i]), settle(gb[i]);
        settle(dx);
        UNROLL for (int n = 0; n < 8; n++) UNROLL
            for (int i = 0; i < 2; i++) held[n][i] = pack(dx[n][2 * i], dx[n][2 * i + 1]);
        if (posts) send_on(tile - start);
    }
    if (keeps) give(end - 1);
    F all = 0.0f;
    UNROLL for (int i = 0; i < EACH; i++) UNROLL for (int r = 0; r < 2; r++) {
        int matrix = (warp() >> 2) * EACH + i;
        U column = (lane() >> 2) + (c0 + 16 * (warp() & 3) + 8 * r), pair = (lane() & 3) * 2;
        if (matrix < 3) {
            UNROLL for (int n = 0; n < 8; n++)
                store2(dw, (column + matrix * C) * WIDTH + pair + 8 * n, gw[i][n][2 * r] * unscale,
                    gw[i][n][2 * r + 1] * unscale);
            store(db, column + matrix * C, gb[i][0][2 * r] * unscale);
        } else {
            UNROLL for (int n = 0; n < 8; n++) UNROLL for (int j = 0; j < 2; j++)
                    store(dout, (pair + (8 * n + j)) * C + column,
                        gw[i][n][2 * r + j] * (unscale * alpha));
        }
        UNROLL for (int n = 0; n < 8; n++) all = all + (gw[i][n][2 * r] + gw[i][n][2 * r + 1]);
        all = all + gb[i][0][2 * r];
    }
    add_up(total + m, all);
}
