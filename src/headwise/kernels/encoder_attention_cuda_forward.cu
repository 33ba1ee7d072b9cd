// The attention part of a post-norm layer, forward. The plan stands in encoder_attention_cuda.cuh.

// A unit's heads.
INSIDE void heads_forward(U (&o)[TILES][2], F (&scores)[2][4], const U (&q)[TILES][2],
    const U (&k)[TILES][2], const U (&v)[TILES][2], const Masks& masks, float factor) {
    if (R <= 8) {
        UNROLL for (int t = 0; t < TILES; t++) {
            F sum[4], over[4];
            U e[HEADS][4];
            gather(sum, over, e, q, k, v[t], masks, factor, t);
            UNROLL for (int r = 0; r < 2; r++)
                o[t][r] = pack(sum[2 * r] * over[2 * r], sum[2 * r + 1] * over[2 * r + 1]);
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

// n(s0 u0 + alpha W_O concat softmax(sharp q k^T) v + mean of the bias rows): a token tile, all
// columns; or one of `splits` equal runs of them, whose partial sum of the output goes to `partial`
// (model, split, token, 64) as it is.
KERNEL(FORWARD_WARPS, 2) forward(const Half* x, const Half* w, const float* b, const Half* out,
    const float* bias, const float* scale0, const float* u0, const float* scale, float* u, Half* y,
    float* inv, int T, int C, int model, float alpha, float sharp, int average, int first,
    float* partial, int splits) {
    long long m = block_y();
    int tile = block_x() / splits, split = block_x() % splits, start = C / splits * split,
        end = start + C / splits;
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
        if (c0 + BLOCK < end)
            bring<FORWARD_WARPS>(memory + (turn ^ 1) * WEIGHTS, w, b, out, c0 + BLOCK, C);
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
                // The next ones beside the heads, where there are registers enough (not at rank 64)
                if (c + 8 * i + 16 < BLOCK)
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
    End norm = {bias + m * model, scale0 + m * model, u0 + m * T * WIDTH, scale + m * model,
        u + m * T * WIDTH, y + m * T * WIDTH, inv + m * T};
    finish_part(z, token, norm, alpha, average, first);
}
