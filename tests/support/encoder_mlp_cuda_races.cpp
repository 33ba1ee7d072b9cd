// A layer of kernels/encoder_mlp_cuda.cu forward and back on a CPU, for a build that finds races
// (emulate.py).
#include "encoder_mlp_cuda.cpp"

int main() {
    // Four tiles of tokens, six blocks of hidden units: more than lie in shared memory at once
    constexpr int D = 64, T = 512, hidden = 768;
    const int at_bias = hidden * D, at_down = at_bias + hidden, at_shift = at_down + D * hidden,
              at_scale = at_shift + D, P = at_scale + 16;
    float *w = room<float>(P), *u0 = room<float>(T * D), *u = room<float>(T * D),
          *inv = room<float>(T), *sums = room<float>(P), *total = room<float>(1);
    Half *h = room<Half>(P), *x = room<Half>(T * D), *dz = room<Half>(T * D),
         *y = room<Half>(T * D), *dx_partials = room<Half>(hidden / 256 * T * D);
    for (int i = 0; i < P; i++) w[i] = 0.1f * sinf(i), h[i] = to_half(w[i]);
    for (int i = 0; i < T * D; i++)
        x[i] = to_half(cosf(i)), dz[i] = to_half(sinf(3 * i)), u0[i] = cosf(i);
    run_feed(T / EACH, 1, FORWARD_WARPS, FORWARD, x, h, w + at_bias, h + at_down, w + at_shift,
        w + at_scale, u0, w + at_scale + 1, u, y, inv, T, hidden, P);
    run_feed_back(hidden / HIDDEN, 1, BACK_WARPS, BACK, x, dz, h, w + at_bias, h + at_down,
        dx_partials, sums, sums + at_bias, sums + at_down, total, T, hidden, P, 1.0f, 1, 1, P);
    for (int i = 0; i < at_shift; i++) *total += sums[i];
    for (int i = 0; i < T * D; i++) *total += u[i] + of_half(dx_partials[i]);
    printf("%s\n", std::isfinite(*total) ? "finite" : "not finite");
}
