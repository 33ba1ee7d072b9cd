// What the two parts of a post-norm layer of width 64 share (encoder_attention_cuda.cuh,
// encoder_mlp_cuda.cu): tiles in shared memory, and the norm at their end. encoder.py names the
// same tensors for Python.

constexpr int WIDTH = 64;               // of the model
constexpr int ROW = 2 * WIDTH;          // bytes of a row of 64 halves in shared memory
constexpr int PIECE = 16;               // bytes that products of four warps count in
// Bytes of the gradient of 64 tokens, as the programs of a cluster send it to each other
constexpr int POST = 64 * ROW;
#define ONES U(0x3c003c00u)

INSIDE U place(U row, U byte) { return row * ROW + (byte ^ (row & 7) << 4); }  // in a tile
INSIDE void zero(F (&c)[4]) { UNROLL for (int i = 0; i < 4; i++) c[i] = 0.0f; }
template <int N> INSIDE void zero(F (&c)[N][4]) { UNROLL for (int i = 0; i < N; i++) zero(c[i]); }

// What a part adds to and writes, of one model.
struct End { const float *bias, *scale0, *u0, *scale; float* u; Half* y; float* inv; };

// n(s0 u0 + alpha z + mean of the bias rows) of a warp's 16 tokens, of which `token` is a lane's
// first.
INSIDE void finish_part(
    F (&z)[8][4], U token, const End& end, float alpha, int average, int first) {
    U pair = (lane() & 3) * 2;
    F squares[2] = {0.0f, 0.0f}, own = load(end.scale, U(0u)), before = load(end.scale0, U(0u));
    if (first) before = 1.0f;
    UNROLL for (int n = 0; n < 8; n++) {
        F shift[2] = {0.0f, 0.0f};
        for (int i = 0; i < average; i++) {
            F a, c;
            load2(end.bias, pair + (i * WIDTH + 8 * n), a, c);
            shift[0] = shift[0] + a, shift[1] = shift[1] + c;
        }
        UNROLL for (int i = 0; i < 2; i++) {
            F passed[2];
            load2(end.u0, (token + 8 * i) * WIDTH + pair + 8 * n, passed[0], passed[1]);
            UNROLL for (int j = 0; j < 2; j++) {
                z[n][2 * i + j] =
                    z[n][2 * i + j] * alpha + passed[j] * before + shift[j] * (1.0f / average);
                squares[i] = squares[i] + z[n][2 * i + j] * z[n][2 * i + j];
            }
        }
    }
    UNROLL for (int i = 0; i < 2; i++) {
        squares[i] = squares[i] + other<1>(squares[i]);
        squares[i] = squares[i] + other<2>(squares[i]);
        F over = F(1.0f) / root(squares[i]);
        UNROLL for (int n = 0; n < 8; n++) {
            F low = z[n][2 * i] * over, high = z[n][2 * i + 1] * over;
            U at = (token + 8 * i) * WIDTH + pair + 8 * n;
            store2(end.u, at, low, high);
            store2(end.y, at, pack(low * own, high * own));
        }
        store(end.inv, token + 8 * i, over);  // four lanes write the same number
    }
}
