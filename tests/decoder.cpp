// kernels/decoder.cu on a CPU, for tests/test_gpu_decoder.py.
#include "warp.h"

#include "decoder.cu"

extern "C" void run_forward(
    int pieces_, int models, const float* x, const float* gain1, const float* shift1, const Half* w, const float* b, const Half* out,
    const float* out_bias, const float* gain2, const float* shift2, const Half* up, const float* up_bias, const Half* down_,
    const float* down_bias, float* x1, Half* h2, float* x2, Half* qkv, Half* o, float* peaks, int batch, int pieces, int model, float sharp,
    int first, int last
) {
    launch(pieces_, models, GROUPS * BLOCKS, FORWARD, [&] {
        forward(x, gain1, shift1, w, b, out, out_bias, gain2, shift2, up, up_bias, down_, down_bias, x1, h2, x2, qkv, o, peaks, batch, pieces, model, sharp, first, last);
    }, GROUPS);
}

extern "C" void run_feed_back(
    int pieces_, int models, const float* dx2, const float* x1, const Half* h2, const float* gain, const Half* up, const float* up_bias,
    const Half* down_, const Half* out, float* dx1, Half* give, float* dgain, float* dshift, float* dup, float* dup_bias, float* ddown,
    float* ddown_bias, float* dout_bias, int batch, int pieces, int model, int copy_, float undo, int highest
) {
    launch(pieces_, models, TEAM, FEED_BACK, [&] {
        feed_back(dx2, x1, h2, gain, up, up_bias, down_, out, dx1, give, dgain, dshift, dup, dup_bias, ddown, ddown_bias, dout_bias, batch, pieces, model, copy_, undo, highest);
    });
}

extern "C" void run_backward(
    int pieces_, int models, const float* x, const float* gain, const float* shift, const Half* w, const Half* qkv, const Half* o,
    const Half* give, const float* dx1, const float* peaks, float* dx, float* dgain, float* dshift, float* dw, float* db, float* dout,
    int batch, int pieces, int model, int copy_, float sharp, float undo, int lowest
) {
    launch(pieces_, models, BLOCKS, BACKWARD, [&] {
        backward(x, gain, shift, w, qkv, o, give, dx1, peaks, dx, dgain, dshift, dw, db, dout, batch, pieces, model, copy_, sharp, undo, lowest);
    });
}
