// kernels/decoder_cuda.cu on a CPU, for tests/kernels/test_decoder_cuda.py.
#include "warp.h"

#include "decoder_cuda.cuh"
#include "decoder_cuda.cu"

extern "C" void run_forward(int blocks, int models, int warps, int bytes, const float* x,
    const float* gain1, const float* shift1, const Half* w, const float* b, const Half* out,
    const float* out_bias, const float* gain2, const float* shift2, const Half* up,
    const float* up_bias, const Half* down, const float* down_bias, float* x1, Half* h2, float* x2,
    Half* qkv, Half* o, float* peaks, int batch, int model, float sharp, int lowest_layer,
    int highest_layer) {
    equal(warps, GROUPS * BLOCKS), equal(bytes, FORWARD);
    launch(
        blocks, models, warps, bytes,
        [&] {
            forward(x, gain1, shift1, w, b, out, out_bias, gain2, shift2, up, up_bias, down,
                down_bias, x1, h2, x2, qkv, o, peaks, batch, model, sharp, lowest_layer,
                highest_layer);
        },
        GROUPS);
}

extern "C" void run_feed_back(int blocks, int models, int warps, int bytes, const float* dx2,
    const float* x1, const Half* h2, const float* gain, const Half* up, const float* up_bias,
    const Half* down, const Half* out, float* dx1, Half* give, float* dgain, float* dshift,
    float* dup, float* dup_bias, float* ddown, float* ddown_bias, float* dout_bias, int batch,
    int splits, int model, int apart, float unscale, int highest_layer) {
    equal(warps, TEAM), equal(bytes, FEED_BACK);
    launch(blocks, models, warps, bytes, [&] {
        feed_back(dx2, x1, h2, gain, up, up_bias, down, out, dx1, give, dgain, dshift, dup,
            dup_bias, ddown, ddown_bias, dout_bias, batch, splits, model, apart, unscale,
            highest_layer);
    });
}

extern "C" void run_backward(int blocks, int models, int warps, int bytes, const float* x,
    const float* gain, const float* shift, const Half* w, const Half* qkv, const Half* o,
    const Half* give, const float* dx1, const float* peaks, float* dx, float* dgain, float* dshift,
    float* dw, float* db, float* dout, int batch, int splits, int model, int apart, float sharp,
    float unscale, int lowest_layer) {
    equal(warps, BLOCKS), equal(bytes, BACKWARD);
    launch(blocks, models, warps, bytes, [&] {
        backward(x, gain, shift, w, qkv, o, give, dx1, peaks, dx, dgain, dshift, dw, db, dout,
            batch, splits, model, apart, sharp, unscale, lowest_layer);
    });
}
