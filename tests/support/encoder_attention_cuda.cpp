// kernels/encoder_attention_cuda*.cu on a CPU, for tests/kernels/test_encoder_attention_cuda.py.
#include "warp.h"

#include "encoder.cuh"
#include "encoder_attention_cuda.cuh"
#include "encoder_attention_cuda_forward.cu"
#include "encoder_attention_cuda_backward.cu"

extern "C" void run_forward(int blocks, int models, int warps, int bytes, const Half* x,
    const Half* w, const float* b, const Half* out, const float* bias, const float* scale0,
    const float* u0, const float* scale, float* u, Half* y, float* inv, int T, int C, int model,
    float alpha, float sharp, int average, int first, float* partial, int splits) {
    equal(warps, FORWARD_WARPS), equal(bytes, 2 * WEIGHTS + TILE);
    launch(blocks, models, warps, bytes, [&] {
        forward(x, w, b, out, bias, scale0, u0, scale, u, y, inv, T, C, model, alpha, sharp,
            average, first, partial, splits);
    });
}

extern "C" void run_backward(int blocks, int models, int warps, int bytes, const Half* x,
    const Half* dz, const Half* w, const float* b, const Half* out, Half* dx_partials, float* dw,
    float* db, float* dout, float* total, int T, int C, int model, float alpha, float sharp,
    float unscale, int first, int models_, int token_splits, int grad_row) {
    equal(warps, BACKWARD_WARPS), equal(bytes, BACKWARD);
    launch(
        blocks, models, warps, bytes,
        [&] {
            backward(x, dz, w, b, out, dx_partials, dw, db, dout, total, T, C, model, alpha, sharp,
                unscale, first, models_, token_splits, grad_row);
        },
        1, C / BLOCK % 2 ? 1 : 2);
}
