// Two layers of kernels/decoder_cuda.cu forward and back on a CPU, for a build that finds races
// (emulate.py).
#include "decoder_cuda.cpp"

int main() {
    // Fewer than sequences, and than tiles
    constexpr int M = 1, D = WIDTH, H = HIDDEN, batch = 3, splits = 2;
    const int sizes[12] = {D, D, 3 * D * D, 3 * D, D * D, D, D, D, H * D, H, D * H, D};
    int at[13] = {0};
    for (int i = 0; i < 12; i++) at[i + 1] = at[i] + sizes[i];
    const int P = at[12];
    const size_t T = batch * 16 * BLOCKS, N = batch * TOKENS;
    float *w = room<float>(P), *x = room<float>(N * D), *y = room<float>(N * D),
          *dx = room<float>(N * D), *sums = room<float>(splits * P);
    Half* h = room<Half>(P);
    for (int i = 0; i < P; i++) w[i] = 0.1f * sinf(i), h[i] = to_half(w[i]);
    for (size_t i = 0; i < N * D; i++) x[i] = cosf(i);
    float *x1 = room<float>(T * D), *between = room<float>(T * D), *dx1 = room<float>(T * D),
          *lower = room<float>(T * D);
    float* peaks = room<float>(T * HEADS);
    Half *h2 = room<Half>(T * D), *qkv = room<Half>(3 * T * D), *o = room<Half>(T * D),
         *give = room<Half>(T * D);
    for (int i = 0; i < 2; i++)
        run_forward((batch + GROUPS - 1) / GROUPS, M, GROUPS * BLOCKS, FORWARD, i ? between : x,
            w + at[0], w + at[1], h + at[2], w + at[3], h + at[4], w + at[5], w + at[6], w + at[7],
            h + at[8], w + at[9], h + at[10], w + at[11], x1, h2, i ? y : between, qkv, o, peaks,
            batch, P, 0.5f, i == 0, i == 1);
    for (int i = 1; i >= 0; i--) {
        run_feed_back(splits, M, TEAM, FEED_BACK, i ? y : lower, x1, h2, w + at[6], h + at[8],
            w + at[9], h + at[10], h + at[4], dx1, give, sums + at[6], sums + at[7], sums + at[8],
            sums + at[9], sums + at[10], sums + at[11], sums + at[5], batch, splits, P, P, 1.0f,
            i == 1);
        run_backward(splits, M, BLOCKS, BACKWARD, i ? between : x, w + at[0], w + at[1], h + at[2],
            qkv, o, give, dx1, peaks, i ? lower : dx, sums + at[0], sums + at[1], sums + at[2],
            sums + at[3], sums + at[4], batch, splits, P, P, 0.5f, 1.0f, i == 0);
    }
    float total = 0;
    for (size_t i = 0; i < N * D; i++) total += dx[i];
    printf("%s\n", std::isfinite(total) ? "finite" : "not finite");
}
