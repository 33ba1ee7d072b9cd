// kernels/encoder_mlp_cuda.cu on a CPU, for tests/kernels/test_encoder_mlp_cuda.py.
#include "warp.h"

#include "encoder.cuh"
#include "encoder_mlp_cuda.cu"

extern "C" void run_feed(int blocks, int models, int warps, int bytes, const Half* x,
    const Half* up, const float* bias, const Half* down, const float* shift, const float* scale0,
    const float* u0, const float* scale, float* u, Half* y, float* inv, int T, int hidden,
    int model) {
    equal(warps, FORWARD_WARPS), equal(bytes, FORWARD);
    launch(blocks, models, warps, bytes,
        [&] { feed(x, up, bias, down, shift, scale0, u0, scale, u, y, inv, T, hidden, model); });
}

extern "C" void run_feed_back(int blocks, int models, int warps, int bytes, const Half* x,
    const Half* dz, const Half* up, const float* bias, const Half* down, Half* dx_partials,
    float* d_up, float* d_bias, float* d_down, float* total, int T, int hidden, int model,
    float unscale, int models_, int token_splits, int grad_row) {
    equal(warps, BACK_WARPS), equal(bytes, BACK);
    launch(
        blocks, models, warps, bytes,
        [&] {
            feed_back(x, dz, up, bias, down, dx_partials, d_up, d_bias, d_down, total, T, hidden,
                model, unscale, models_, token_splits, grad_row);
        },
        1, 2);
}
