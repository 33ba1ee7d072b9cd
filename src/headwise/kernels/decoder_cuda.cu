// The three kernels of the block of a narrow causal decoder. The plan, and what the kernels share,
// stand in decoder_cuda.cuh.

// ---- forward

// x1 = x + W_O heads(n(x)) + bias, x2 = x1 + W_2 gelu(W_1 n(x1) + bias) + bias; n(x1), queries,
// keys, values, heads and `peaks` are kept.
KERNEL(GROUPS* BLOCKS, 1) forward(const float* x, const float* gain1, const float* shift1,
    const Half* w, const float* b, const Half* out, const float* out_bias, const float* gain2,
    const float* shift2, const Half* up, const float* up_bias, const Half* down,
    const float* down_bias, float* x1, Half* h2, float* x2, Half* qkv, Half* o, float* peaks,
    int batch, int model, float sharp, int lowest_layer, int highest_layer) {
    const int m = block_y(), me = warp() % BLOCKS, group = warp() / BLOCKS,
              s = block_x() * GROUPS + group;
    const size_t row = (size_t)m * model, sequence = (size_t)m * batch + s, at = sequence * FOLDED;
    constexpr int WARPS = GROUPS * BLOCKS, WEIGHTS = QKV + WIDTH * ROW + HIDDEN * ROW;
    const U keys = shared() + WEIGHTS + WIDTH * LONG + 2 * group * MATRIX, values = keys + MATRIX;
    bring<3 * WIDTH, WIDTH, ROW>(shared(), w + row, WARPS),
        bring<WIDTH, WIDTH, ROW>(shared() + QKV, out + row, WARPS);
    bring<HIDDEN, WIDTH, ROW>(shared() + QKV + WIDTH * ROW, up + row, WARPS),
        bring<WIDTH, HIDDEN, LONG>(shared() + WEIGHTS, down + row, WARPS);
    send(), arrived<0>();
    together();
    if (s >= batch) return;
    const U at_w = anew(shared()), at_out = at_w + QKV, at_up = at_out + WIDTH * ROW,
            at_down = at_up + HIDDEN * ROW;
    F now[TILES][4], c[TILES][4], over[2];
    U a[STEPS][4], q[STEPS][4];
    read(c, x, sequence, me, lowest_layer), standard(c, over),
        varied(a, c, gain1 + row, shift1 + row);
    UNROLL for (int i = 2; i >= 0; i--) {
        biased(c, b + row + i * WIDTH), by_rows<ROW>(c, a, at_w + i * WIDTH * ROW), packed(q, c);
        fold(qkv + 3 * at + i * FOLDED, q, me);
        if (i) keep(i == 1 ? keys : values, q, me);
    }
    together(group, BLOCKS);
    U queries[TILES][2];
    UNROLL for (int t = 0; t < TILES; t++) UNROLL
        for (int r = 0; r < 2; r++) queries[t][r] = q[t / 2][2 * (t & 1) + r];
    zero(c),
        attend(c, queries, keys, values, peaks + sequence * 16 * BLOCKS * HEADS, me, sharp * LOG2E);
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
        UNROLL for (int n = 0; n < 2; n++) UNROLL
            for (int i = 0; i < 4; i++) z[n][i] = gelu(z[n][i]);
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
                sum =
                    sum + (alone(h, t) ? x : choose(own & (i ? 0xffff0000u : 0xffffu), x, F(0.0f)));
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

// The heads' gradients for the keys of block j and the queries of block i; those of queries and
// keys lack the scores' factor.
INSIDE void attend_back(F (&dq)[TILES][4], F (&dk)[TILES][4], F (&dv)[TILES][4],
    const U (&q)[TILES][2], const U (&g)[TILES][2], const U (&k)[TILES][2], const U (&v)[TILES][2],
    U peaks, U sums, int i, bool edge, float factor) {
    U seen[4];  // all bits, but for later tokens where queries and keys are the same ones
    UNROLL for (int n = 0; n < 4; n++) {
        U query = token() + 8 * (n & 1), key = column() + 8 * (n / 2);
        seen[n] = edge ? choose(less(query, key), U(0u), U(0xffffu)) |
                             choose(less(query, key + 1), U(0u), U(0xffff0000u))
                       : U(~0u);
    }
    UNROLL for (int h = 0; h < HEADS; h++) {
        F s[2][4], ds[2][4], peak[2], mean[2];
        UNROLL for (int t = first_tile(h); t < end_tile(h); t++) {
            U own = pair_of(h, t), q0 = q[t][0] & own, q1 = q[t][1] & own, g0 = g[t][0] & own,
              g1 = g[t][1] & own;
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
        UNROLL for (int n = 0; n < 4; n++)
            p[0][n] = turned(p[0][n] & seen[n]), d[0][n] = d[0][n] & seen[n];
        U dt[4] = {turned(d[0][0]), turned(d[0][1]), turned(d[0][2]), turned(d[0][3])};
        UNROLL for (int t = first_tile(h); t < end_tile(h); t++) {
            U own = column_of(h, t);
            mma(dq[t], d[0][0], d[0][1], d[0][2], d[0][3], turned(k[t][0]) & own,
                turned(k[t][1]) & own);
            mma(dk[t], dt[0], dt[2], dt[1], dt[3], turned(q[t][0]) & own, turned(q[t][1]) & own);
            mma(dv[t], p[0][0], p[0][2], p[0][1], p[0][3], turned(g[t][0]) & own,
                turned(g[t][1]) & own);
        }
    }
}

// dx = dx1 + dn(W dqkv), and the gradients of the norm and of both maps, rows of its own for every
// split of the sequences, `apart` numbers from one to the next.
KERNEL(BLOCKS, 2) backward(const float* x, const float* gain, const float* shift, const Half* w,
    const Half* qkv, const Half* o, const Half* give, const float* dx1, const float* peaks,
    float* dx, float* dgain, float* dshift, float* dw, float* db, float* dout, int batch,
    int splits, int model, int apart, float sharp, float unscale, int lowest_layer) {
    const int m = block_y(), me = warp();
    const size_t row = (size_t)m * model, to = (size_t)block_x() * apart + row;
    U at_w = shared();
    // Queries, keys, values; gradients of the heads, later of x1; heads
    const U parts = at_w + QKV;
    const U at_give = parts + 3 * MATRIX, at_o = at_give + MATRIX, at_dq = at_o + MATRIX;
    const U at_peaks = at_dq + 16 * BLOCKS * TALL, at_sums = at_peaks + PEAKS,
            at_norm = at_sums + PEAKS;
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
                    attend_back(
                        dq, dk, dv, q, g, k, v, at_peaks, at_sums, i, step == 0, sharp * LOG2E);
                    UNROLL for (int t = 0; t < TILES; t++) {
                        U place = at_dq + lane() * 16 + (i * TILES + t) * 512;
                        F kept[4];
                        if (step) find16(kept, place);
                        UNROLL for (int c = 0; c < 4; c++)
                            dq[t][c] = step ? dq[t][c] + kept[c] : dq[t][c];
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
        packed(a, dv), keep(parts + 2 * MATRIX, a, me),
            by_columns<ROW>(dh, a, at_w + 2 * WIDTH * ROW);
        UNROLL for (int t = 0; t < TILES; t++) UNROLL
            for (int i = 0; i < 4; i++) dk[t][i] = dk[t][i] * sharp;
        packed(a, dk), keep(parts + MATRIX, a, me), by_columns<ROW>(dh, a, at_w + WIDTH * ROW);
        UNROLL for (int t = 0; t < TILES; t++)
            find16(dk[t], at_dq + lane() * 16 + (me * TILES + t) * 512);
        UNROLL for (int t = 0; t < TILES; t++) UNROLL
            for (int i = 0; i < 4; i++) dk[t][i] = dk[t][i] * sharp;
        packed(a, dk), keep(parts, a, me), by_columns<ROW>(dh, a, at_w);
        F hat[TILES][4], over[2];
        read(hat, x, sequence, me, lowest_layer), standard(hat, over);
        // Where the warp's own dq was
        varied(a, hat, gain + row, shift + row), keep(at_dq + 16 * me * (TALL - ROW), a, me);
        const bool first = s == block_x();
        summed(at_norm + 8 * WIDTH * me, dh, hat, !first),
            summed(at_norm + 8 * WIDTH * me + 4 * WIDTH, dh, !first);
        lowered(dh, hat, over, gain + row);
        unfold(hat, dx1 + at, me), packed(a, hat), keep(at_give, a, me);
        UNROLL for (int t = 0; t < TILES; t++) UNROLL
            for (int i = 0; i < 4; i++) dh[t][i] = dh[t][i] + hat[t][i];
        write(dx, dh, sequence, me, lowest_layer);
        together();
        for (int i = me; i < 4 * STEPS; i += BLOCKS) {  // 16 rows of dW_Q, dW_K, dW_V or dW_O
            int part = i / STEPS, within = i % STEPS;
            U rows = parts + part * MATRIX + columns_first<ROW>() + 32 * within;
            U by = (part < 3 ? at_dq : at_o) + rows_first<ROW>(),
              next = U(16 * (part < 3 ? TALL : ROW));
            F c[TILES][4], bias[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            zero(c);
            UNROLL for (int k = 0; k < BLOCKS; k++) {
                U d[4];
                find4<1>(d, rows + 16 * k * ROW);
                UNROLL for (int n = 0; n < TILES; n += 2) {
                    U y[4];
                    find4<1>(y, by + next * k + 16 * n);
                    mma(c[n], d[0], d[1], d[2], d[3], y[0], y[1]),
                        mma(c[n + 1], d[0], d[1], d[2], d[3], y[2], y[3]);
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
    added<BLOCKS, 2>(dgain + to, at_norm, unscale),
        added<BLOCKS, 2>(dshift + to, at_norm + 4 * WIDTH, unscale);
}

// ---- back through the feed-forward, for tiles of TEAM blocks that need not be whole sequences

// Of the hidden units as many as the model is wide are taken at once, forward again and back, and
// left in shared memory; then every warp adds up its 16 rows and half the columns of one of the two
// matrices' gradients for them.
INSIDE void half_product(F (&c)[TILES / 2][4], F (&sum)[4], U rows, U by, bool bias) {
    U at = rows + columns_first<ROW>(), to = by + rows_first<ROW>();
    UNROLL for (int k = 0; k < TEAM; k++) {
        U d[4], y[4];
        find4<1>(d, at + 16 * k * ROW);
        UNROLL for (int n = 0; n < TILES / 2; n++) {
            // The second beyond the last column is not used
            if (n % 2 == 0) find4<1>(y, to + (16 * k * ROW + 16 * n));
            mma(c[n], d[0], d[1], d[2], d[3], y[n % 2 * 2], y[n % 2 * 2 + 1]);
        }
        if (bias) mma(sum, d[0], d[1], d[2], d[3], ONES, ONES);
    }
}

// dx1 = dx2 + dn(W_1 dz), give = W_O dx1; gradients of both matrices, of their biases, of the norm
// and of the bias before it.
KERNEL(TEAM, 1) feed_back(const float* dx2, const float* x1, const Half* h2, const float* gain,
    const Half* up, const float* up_bias, const Half* down, const Half* out, float* dx1, Half* give,
    float* dgain, float* dshift, float* dup, float* dup_bias, float* ddown, float* ddown_bias,
    float* dout_bias, int batch, int splits, int model, int apart, float unscale,
    int highest_layer) {
    const int m = block_y(), me = warp(), matrix = me / (2 * STEPS), within = me / 2 % STEPS,
              side = me % 2;
    const size_t row = (size_t)m * model, to = (size_t)block_x() * apart + row;
    U at_up = shared(), at_down = at_up + HIDDEN * ROW, at_out = at_down + WIDTH * LONG;
    const U at_h = at_out + WIDTH * ROW, at_g = at_h + TILE * ROW, hidden = at_g + TILE * ROW;
    const U sums = hidden + 4 * TILE * ROW, at_sums = sums + 16 * WIDTH * me;
    bring<HIDDEN, WIDTH, ROW>(at_up, up + row, TEAM),
        bring<WIDTH, HIDDEN, LONG>(at_down, down + row, TEAM);
    bring<WIDTH, WIDTH, ROW>(at_out, out + row, TEAM);
    send(), arrived<0>();
    constexpr int PARTS = HIDDEN / WIDTH;
    F grad[PARTS][TILES / 2][4], bias[PARTS][2];
    UNROLL for (int p = 0; p < PARTS; p++) zero(grad[p]), bias[p][0] = 0.0f, bias[p][1] = 0.0f;
    bool again = false;
    const int blocks = batch * BLOCKS;
    for (int first = block_x() * TEAM; first < blocks; first += splits * TEAM, again = true) {
        const bool idle = first + me >= blocks;
        // Of all sequences; a warp without one takes the last, and no gradient
        const int block = idle ? blocks - 1 : first + me;
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
                biased(z, up_bias + row + p * WIDTH + f),
                    by_rows<ROW>(z, h, at_up + (p * WIDTH + f) * ROW);
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
            half_product(grad[p], sum, (matrix ? at_g : at_z) + 32 * within,
                (matrix ? at_a : at_h) + side * WIDTH, matrix + side == 0);
            bias[p][0] = bias[p][0] + sum[0], bias[p][1] = bias[p][1] + sum[2];
        }
        F hat[TILES][4], over[2];
        unfold(hat, x1 + at, block), standard(hat, over);
        summed(at_sums, dh, hat, again), summed(at_sums + 4 * WIDTH, dh, again);
        lowered(dh, hat, over, gain + row);
        if (!idle) {
            read(hat, dx2, sequence, block % BLOCKS, highest_layer);
            UNROLL for (int t = 0; t < TILES; t++) UNROLL
                for (int i = 0; i < 4; i++) dh[t][i] = dh[t][i] + hat[t][i];
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
            if (matrix + side == 0)
                store((lane() & 3) == U(0u), dup_bias + to, line + p * WIDTH, bias[p][r] * unscale);
        }
    }
    together();
    added<TEAM, 4>(dgain + to, sums, unscale),
        added<TEAM, 4>(dshift + to, sums + 4 * WIDTH, unscale);
    added<TEAM, 4>(ddown_bias + to, sums + 8 * WIDTH, unscale),
        added<TEAM, 4>(dout_bias + to, sums + 12 * WIDTH, unscale);
}
