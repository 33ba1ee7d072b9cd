// A layer of kernels/encoder_attention_cuda*.cu forward and back on a CPU, for a build that finds
// races (emulate.py).
#include "encoder_attention_cuda.cpp"

int main() {
    // Two tiles of tokens, two column tiles
    constexpr int D = 64, T = 256, C = 128, average = 2, token_splits = 1, splits = 1;
    const int at_b = 3 * C * D, at_out = at_b + 3 * C, at_bias = at_out + C * D,
              at_scale = at_bias + average * D, P = at_scale + 16;
    float *w = room<float>(P), *u0 = room<float>(T * D), *u = room<float>(T * D),
          *inv = room<float>(T), *partial = room<float>(T * D);
    float *sums = room<float>(token_splits * P), *total = room<float>(1);
    Half *h = room<Half>(P), *x = room<Half>(T * D), *dz = room<Half>(T * D),
         *y = room<Half>(T * D), *dx_partials = room<Half>(C / 64 * T * D);
    for (int i = 0; i < P; i++) w[i] = 0.1f * sinf(i), h[i] = to_half(w[i]);
    for (int i = 0; i < T * D; i++) x[i] = to_half(cosf(i)), dz[i] = to_half(sinf(3 * i));
    run_forward(T / 128 * splits, 1, FORWARD_WARPS, 2 * WEIGHTS + TILE, x, h, w + at_b, h + at_out,
        w + at_bias, w + at_scale, u0, w + at_scale + 1, u, y, inv, T, C, P, 0.5f, 0.5f, average, 0,
        partial, splits);
    run_backward(C / 64 * token_splits, 1, BACKWARD_WARPS, BACKWARD, x, dz, h, w + at_b, h + at_out,
        dx_partials, sums, sums + at_b, sums + at_out, total, T, C, P, 0.5f, 0.5f, 1.0f, 0, 1,
        token_splits, P);
    for (int i = 0; i < at_bias; i++) *total += sums[i];
    for (int i = 0; i < T * D; i++) *total += u[i];
    printf("%s\n", std::isfinite(*total) ? "finite" : "not finite");
}
