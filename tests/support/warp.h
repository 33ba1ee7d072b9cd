// A warp on a CPU: kernels/warp.cuh again, with a value of every lane in each variable. A block's
// warps are threads. A reference for where numbers go, not for how a GPU rounds; what a GPU wants
// aligned must be aligned here too.
#include <array>
#include <atomic>
#include <barrier>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define INSIDE static inline
#define UNROLL
#define ROLLED
#define TWICE
#define KERNEL(warps, blocks) extern "C" void
typedef unsigned short Half;

template <class T> struct Lanes {
    T v[32];
    constexpr Lanes() : v{} {}
    constexpr Lanes(T x) : v{} { for (int i = 0; i < 32; i++) v[i] = x; }
    template <class G> static Lanes each(G f) {
        Lanes y;
        for (int i = 0; i < 32; i++) y.v[i] = f(i);
        return y;
    }
};
struct F : Lanes<float> {
    constexpr F(float x = 0) : Lanes(x) {}
    constexpr F(Lanes<float> x) : Lanes(x) {}
};
struct U : Lanes<uint32_t> {
    constexpr U(uint32_t x = 0) : Lanes(x) {}
    constexpr U(int x) : Lanes((uint32_t)x) {}
    constexpr U(Lanes<uint32_t> x) : Lanes(x) {}
    U operator~() const { return each([&](int i) { return ~v[i]; }); }
};
#define BOTH(T, op)                                              \
    static inline T operator op(const T& a, const T& b) {        \
        return T::each([&](int i) { return a.v[i] op b.v[i]; }); \
    }
BOTH(F, +) BOTH(F, -) BOTH(F, *) BOTH(F, /)
BOTH(U, +) BOTH(U, -) BOTH(U, *) BOTH(U, /)
BOTH(U, &) BOTH(U, |) BOTH(U, ^) BOTH(U, <<) BOTH(U, >>)
static inline U operator==(const U& a, const U& b) {
    return U::each([&](int i) { return a.v[i] == b.v[i]; });
}

// What a block of threads has: shared memory, barriers of all its warps, of groups, and where two
// sides meet; what it was posted, by box.
struct Block {
    std::vector<char> memory;
    std::barrier<> all;
    std::vector<std::unique_ptr<std::barrier<>>> groups;
    std::array<std::barrier<>, 4> places;
    struct Box { int come; std::vector<int> wanted; };  // bytes
    std::map<uint32_t, Box> boxes;
    std::mutex post;
    std::condition_variable came;
    Block(int warps, int bytes, int count)
        : memory(bytes, 0x7e),
          all(warps),
          places{std::barrier<>(warps), std::barrier<>(warps), std::barrier<>(warps),
              std::barrier<>(warps)} {
        for (int g = 0; g < count; g++)
            groups.push_back(std::make_unique<std::barrier<>>(warps / count));
    }  // 0x7e: not numbers, until something is written
};
static thread_local int this_warp, this_x, this_y, this_peer;
static thread_local char* this_memory;
static thread_local Block* this_block;
static thread_local std::vector<std::unique_ptr<Block>>* these_blocks;  // that reach each other
static thread_local std::barrier<>* all_of_them;

INSIDE float of_half(uint32_t x) { uint16_t h = x; _Float16 f; memcpy(&f, &h, 2); return f; }
INSIDE uint32_t to_half(double x) { _Float16 f = x; uint16_t h; memcpy(&h, &f, 2); return h; }
INSIDE float low(uint32_t x) { return of_half(x & 0xffff); }
INSIDE float high(uint32_t x) { return of_half(x >> 16); }
INSIDE uint32_t both(double a, double b) { return to_half(a) | to_half(b) << 16; }

INSIDE int warp() { return this_warp; }
INSIDE U lane() { return U::each([](int i) { return i; }); }
INSIDE int block_x() { return this_x; }
INSIDE int block_y() { return this_y; }
INSIDE void same_moment() {}
INSIDE void together() { this_block->all.arrive_and_wait(); }
template <class... T> void left_out(T...) {}  // a wait that is left out
INSIDE void together(int group, int warps) { this_block->groups[group]->arrive_and_wait(); }
INSIDE void meet(int place, int) { this_block->places.at(place).arrive_and_wait(); }
INSIDE void meet_later(int place, int) { (void)this_block->places.at(place).arrive(); }
INSIDE int cluster_size() { return these_blocks->size(); }
INSIDE int cluster_rank() { return this_peer; }
INSIDE U at_peer(U at, int which) { return at | U((uint32_t)which << 24); }
INSIDE void all_of_cluster() { all_of_them->arrive_and_wait(); }
INSIDE void open_box(U box) { this_block->boxes[box.v[0]] = {}; }
INSIDE void post(U at, const U (&x)[4], U box) {
    Block& to = *(*these_blocks).at(at.v[0] >> 24);
    for (int i = 0; i < 32; i++)
        for (int n = 0; n < 4; n++)
            memcpy(to.memory.data() + (at.v[i] & 0xffffff) + 4 * n, &x[n].v[i], 4);
    std::lock_guard hold(to.post);
    to.boxes.at(box.v[0] & 0xffffff).come += 32 * 16;
    to.came.notify_all();
}
INSIDE void expect(U box, int bytes) {
    std::lock_guard hold(this_block->post);
    this_block->boxes.at(box.v[0]).wanted.push_back(bytes);
    this_block->came.notify_all();
}
INSIDE void wait_for_post(U box, int turn) {
    std::unique_lock hold(this_block->post);
    this_block->came.wait(hold, [&] {
        auto& [come, wanted] = this_block->boxes.at(box.v[0]);
        int all = 0;
        for (int i = 0; i <= turn && i < (int)wanted.size(); i++) all += wanted[i];
        return turn < (int)wanted.size() && come >= all;
    });
}
template <int N> INSIDE void fewer_registers() {}
template <int N> INSIDE void more_registers() {}
INSIDE U choose(U some, U a, U b) {
    return U::each([&](int i) { return some.v[i] ? a.v[i] : b.v[i]; });
}
INSIDE F choose(U some, F a, F b) {
    return F::each([&](int i) { return some.v[i] ? a.v[i] : b.v[i]; });
}
INSIDE U less(U a, U b) { return U::each([&](int i) { return a.v[i] < b.v[i]; }); }
INSIDE F size(F a) { return F::each([&](int i) { return fabsf(a.v[i]); }); }
INSIDE F minus(F a) { return F(0.0f) - a; }
INSIDE U anew(U x) { return x; }
INSIDE F signed_as(F a, F b) { return F::each([&](int i) { return copysignf(a.v[i], b.v[i]); }); }
INSIDE F largest(F a, F b) { return F::each([&](int i) { return fmaxf(a.v[i], b.v[i]); }); }
INSIDE F power(F x) { return F::each([&](int i) { return exp2f(x.v[i]); }); }
INSIDE F logarithm(F x) { return F::each([&](int i) { return log2f(x.v[i]); }); }
INSIDE F inverse(F x) { return F::each([&](int i) { return 1 / x.v[i]; }); }
INSIDE F fused(F a, F b, F c) { return a * b + c; }
INSIDE F root(F x) { return F::each([&](int i) { return sqrtf(x.v[i]); }); }
INSIDE U pack(F a, F b) { return U::each([&](int i) { return both(a.v[i], b.v[i]); }); }
INSIDE U pack_above(F a, F b) { return pack(largest(a, F(0.0f)), largest(b, F(0.0f))); }
INSIDE U above(U x) {
    return U::each([&](int i) {
        return (low(x.v[i]) > 0 ? 0xffffu : 0u) | (high(x.v[i]) > 0 ? 0xffff0000u : 0u);
    });
}
INSIDE F first_of(U x) { return F::each([&](int i) { return low(x.v[i]); }); }
INSIDE F second_of(U x) { return F::each([&](int i) { return high(x.v[i]); }); }
INSIDE U times(U a, U b) {
    return U::each(
        [&](int i) { return both(low(a.v[i]) * low(b.v[i]), high(a.v[i]) * high(b.v[i])); });
}
INSIDE U fused(U a, U b, U c) {
    return U::each([&](int i) {
        return both((double)low(a.v[i]) * low(b.v[i]) + low(c.v[i]),
            (double)high(a.v[i]) * high(b.v[i]) + high(c.v[i]));
    });
}
INSIDE U plus(U a, U b) { return fused(a, U(0x3c003c00u), b); }
INSIDE U opposite(U a) { return a ^ U(0x80008000u); }
INSIDE U fixed(F a, F b) {
    auto step = [](float x) {
        return x != x ? 65535u : (uint32_t)fminf(65535, fmaxf(0, rintf(1024 * (x + 15))));
    };
    return U::each([&](int i) { return step(a.v[i]) | step(b.v[i]) << 16; });
}
INSIDE U highest(U a, U b) {
    return U::each([&](int i) {
        return both(fmaxf(low(a.v[i]), low(b.v[i])), fmaxf(high(a.v[i]), high(b.v[i])));
    });
}
INSIDE U lowest(U a, U b) {
    return U::each([&](int i) {
        return both(fminf(low(a.v[i]), low(b.v[i])), fminf(high(a.v[i]), high(b.v[i])));
    });
}
template <int W> INSIDE U bytes(U a, U b) {
    return U::each([&](int i) {
        uint64_t all = a.v[i] | (uint64_t)b.v[i] << 32;
        uint32_t y = 0;
        for (int k = 0; k < 4; k++) y |= (uint32_t)(all >> 8 * (W >> 4 * k & 7) & 255) << 8 * k;
        return y;
    });
}
template <int M> INSIDE F other(F x) { return F::each([&](int i) { return x.v[i ^ M]; }); }
INSIDE F of_four(F x, int j) { return F::each([&](int i) { return x.v[i / 4 * 4 + j]; }); }
template <int M> INSIDE U other(U x) { return U::each([&](int i) { return x.v[i ^ M]; }); }
INSIDE U turned(U x) {  // row i / 4, columns 2 (i % 4) and the next
    uint32_t y[8][8];
    for (int i = 0; i < 32; i++)
        y[i / 4][i % 4 * 2] = x.v[i] & 0xffff, y[i / 4][i % 4 * 2 + 1] = x.v[i] >> 16;
    return U::each([&](int i) { return y[i % 4 * 2][i / 4] | y[i % 4 * 2 + 1][i / 4] << 16; });
}
template <int K> INSIDE void product(F (&c)[4], const U* a, const U* b) {
    float x[16][K], y[K][8];
    for (int i = 0; i < 32; i++)
        for (int k = 0; k < K / 8; k++) {
            int at = 8 * k + i % 4 * 2;
            for (int r = 0; r < 2; r++)
                x[i / 4 + 8 * r][at] = low(a[2 * k + r].v[i]),
                              x[i / 4 + 8 * r][at + 1] = high(a[2 * k + r].v[i]);
            y[at][i / 4] = low(b[k].v[i]), y[at + 1][i / 4] = high(b[k].v[i]);
        }
    for (int i = 0; i < 32; i++)
        for (int r = 0; r < 4; r++) {
            double sum = c[r].v[i];
            for (int k = 0; k < K; k++)
                sum += (double)x[i / 4 + r / 2 * 8][k] * y[k][i % 4 * 2 + r % 2];
            c[r].v[i] = sum;
        }
}
INSIDE void mma(F (&c)[4], U a0, U a1, U a2, U a3, U b0, U b1) {
    U a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    product<16>(c, a, b);
}
INSIDE void mma(F (&c)[4], U a0, U a1, U b0) { U a[2] = {a0, a1}; product<8>(c, a, &b0); }
INSIDE void mma(F (&y)[4], U a0, U a1, U b0, const F (&c)[4]) {
    for (int i = 0; i < 4; i++) y[i] = c[i];
    mma(y, a0, a1, b0);
}
INSIDE void mma0(F (&c)[4], U a0, U a1, U a2, U a3, U b0, U b1) {
    for (F& x : c) x = 0.0f;
    mma(c, a0, a1, a2, a3, b0, b1);
}
INSIDE void mma0(F (&c)[4], U a0, U a1, U b0) { for (F& x : c) x = 0.0f; mma(c, a0, a1, b0); }

INSIDE U shared() { return U(0u); }
INSIDE void aligned(const void* p, size_t to) {
    if ((uintptr_t)p % to) fprintf(stderr, "%p is no multiple of %zu\n", p, to), abort();
}
INSIDE U view(U at) { return at >> U(4u) | U(0x10000u); }
INSIDE uint32_t seen(U x) { return (x.v[0] & 0xffff) << 4; }
INSIDE float half_at(uint32_t at) {
    Half h;
    memcpy(&h, this_memory + (at ^ (at >> 7 & 7) << 4), 2);
    return of_half(h);
}
// Rows of this warp, of four
template <int TA, int TB, int N> INSIDE void wide(F (&c)[N][4], U a, U b) {
    float x[16][16], y[16][8 * N];
    int first = 16 * (this_warp & 3);
    for (int k = 0; k < 16; k++) {
        for (int i = 0; i < 16; i++)
            x[i][k] =
                half_at(seen(a) + (TA ? 128 * k + 2 * (first + i) : 128 * (first + i) + 2 * k));
        for (int j = 0; j < 8 * N; j++)
            y[k][j] = half_at(seen(b) + (TB ? 128 * k + 2 * j : 128 * j + 2 * k));
    }
    for (int n = 0; n < N; n++)
        for (int i = 0; i < 32; i++)
            for (int r = 0; r < 4; r++) {
                double sum = c[n][r].v[i];
                for (int k = 0; k < 16; k++)
                    sum += (double)x[i / 4 + r / 2 * 8][k] * y[k][8 * n + i % 4 * 2 + r % 2];
                c[n][r].v[i] = sum;
            }
}
template <int TB, int N> INSIDE void wide_from(F (&c)[N][4], const U (&a)[4], U b) {
    for (int n = 0; n < N; n++) {
        U y[2];
        for (int k = 0; k < 2; k++)
            y[k] = U::each([&](int i) {
                int column = 8 * n + i / 4, row = 8 * k + i % 4 * 2;
                uint32_t at = seen(b) + (TB ? 128 * row + 2 * column : 128 * column + 2 * row);
                return both(half_at(at), half_at(at + (TB ? 128 : 2)));
            });
        mma(c[n], a[0], a[1], a[2], a[3], y[0], y[1]);
    }
}
template <int N> INSIDE void wide(F (&c)[N][4], const U (&a)[4], U b) { wide_from<0>(c, a, b); }
INSIDE void wide_turned(F (&c)[8][4], const U (&a)[4], U b) { wide_from<1>(c, a, b); }
INSIDE void nothing(F (&c)[8][4]) { for (auto& row : c) for (F& x : row) x = 0.0f; }
INSIDE void wide0(F (&c)[8][4], const U (&a)[4], U b) { nothing(c), wide(c, a, b); }
template <int TA, int TB> INSIDE void wide0(F (&c)[8][4], U a, U b) {
    nothing(c), wide<TA, TB>(c, a, b);
}
INSIDE void begin() {}
INSIDE void leave() {}
INSIDE void finish() {}
INSIDE void finish_former() {}
template <int N> INSIDE void settle(F (&)[N][4]) {}
template <int N, int M> INSIDE void settle(U (&)[N][M]) {}
INSIDE void visible() {}
INSIDE void keep(U at, U x) {
    for (int i = 0; i < 32; i++) memcpy(this_memory + at.v[i], &x.v[i], 4);
}
INSIDE U find(U at) {
    U x;
    for (int i = 0; i < 32; i++) memcpy(&x.v[i], this_memory + at.v[i], 4);
    return x;
}
template <int T> INSIDE void find4(U (&x)[4], U at) {
    for (uint32_t a : at.v) aligned((char*)0 + a, 16);
    for (int m = 0; m < 4; m++) {
        x[m] = U::each([&](int i) {
            uint32_t y;
            memcpy(&y, this_memory + at.v[8 * m + i / 4] + 4 * (i % 4), 4);
            return y;
        });
        if (T) x[m] = turned(x[m]);
    }
}
INSIDE void keep4(U at, U a, U b, U c, U d) {
    const U* x[4] = {&a, &b, &c, &d};
    for (uint32_t i : at.v) aligned((char*)0 + i, 16);
    for (int m = 0; m < 4; m++)
        for (int i = 0; i < 32; i++)
            memcpy(this_memory + at.v[8 * m + i / 4] + 4 * (i % 4), &x[m]->v[i], 4);
}
template <int T> INSIDE void known4(U (&x)[4], U at) { find4<T>(x, at); }
// Four numbers of 32 bits that lie side by side, of every lane.
template <class P, class L> INSIDE void four(P* place, L (&x)[4], int i, bool out) {
    aligned(place, 16);
    for (int n = 0; n < 4; n++)
        out ? memcpy((char*)place + 4 * n, &x[n].v[i], 4)
            : memcpy((void*)&x[n].v[i], (char*)place + 4 * n, 4);
}
template <class L> INSIDE void find16(L (&x)[4], U at) {
    for (int i = 0; i < 32; i++) four(this_memory + at.v[i], x, i, false);
}
INSIDE void keep16(U at, const F (&x)[4]) {
    for (int i = 0; i < 32; i++) four(this_memory + at.v[i], x, i, true);
}
INSIDE void keep1(U at, F x) {
    for (int i = 0; i < 32; i++) memcpy(this_memory + at.v[i], &x.v[i], 4);
}
INSIDE F find1(U at) {
    F x;
    for (int i = 0; i < 32; i++) memcpy(&x.v[i], this_memory + at.v[i], 4);
    return x;
}
INSIDE void keep2(U at, F a, F b) {
    for (uint32_t i : at.v) aligned(this_memory + i, 8);
    keep1(at, a), keep1(at + 4, b);
}
INSIDE void find2(U at, F& a, F& b) {
    for (uint32_t i : at.v) aligned(this_memory + i, 8);
    a = find1(at), b = find1(at + 4);
}
INSIDE void copy(U at, const void* start, U bytes, int more = 0) {
    const char* from = (const char*)start + more;
    for (int i = 0; i < 32; i++)
        aligned(from + bytes.v[i], 16), aligned((char*)0 + at.v[i], 16),
            memcpy(this_memory + at.v[i], from + bytes.v[i], 16);
}
INSIDE void send() {}
template <int N> INSIDE void arrived() {}
INSIDE F load(const float* p, U j) { return F::each([&](int i) { return p[j.v[i]]; }); }
INSIDE void load2(const float* p, U j, F& a, F& b, int more = 0) {
    for (uint32_t i : j.v) aligned(p + i + more, 8);
    a = load(p + more, j), b = load(p + more, j + 1);
}
INSIDE void known2(const float* p, U j, F& a, F& b, int more) { load2(p, j, a, b, more); }
INSIDE void load4(const float* p, U j, F (&x)[4], int more) {
    for (int i = 0; i < 32; i++) four((float*)p + j.v[i] + more, x, i, false);
}
INSIDE void load8(const Half* p, U j, U (&x)[4], int more) {
    for (int i = 0; i < 32; i++) four((Half*)p + j.v[i] + more, x, i, false);
}
INSIDE void store4(float* p, U j, const F (&x)[4], int more) {
    for (int i = 0; i < 32; i++) four(p + j.v[i] + more, x, i, true);
}
INSIDE void store8(Half* p, U j, const U (&x)[4], int more) {
    for (int i = 0; i < 32; i++) four(p + j.v[i] + more, x, i, true);
}
INSIDE void store(float* p, U j, F x) { for (int i = 0; i < 32; i++) p[j.v[i]] = x.v[i]; }
INSIDE void store2(float* p, U j, F a, F b, int more = 0) {
    for (uint32_t i : j.v) aligned(p + i + more, 8);
    store(p + more, j, a), store(p + more, j + 1, b);
}
INSIDE void store(U some, float* p, U j, F x) {
    for (int i = 0; i < 32; i++)
        if (some.v[i]) p[j.v[i]] = x.v[i];
}
INSIDE void store2(U some, float* p, U j, F a, F b, int more) {
    for (int i = 0; i < 32; i++) if (some.v[i]) aligned(p + j.v[i] + more, 8);
    store(some, p + more, j, a), store(some, p + more, j + 1, b);
}
INSIDE void add(U some, float* p, U j, F x) {
    for (int i = 0; i < 32; i++)
        if (some.v[i]) p[j.v[i]] += x.v[i];
}
INSIDE void add_up(float* p, F x) { for (float y : x.v) std::atomic_ref<float>(*p).fetch_add(y); }
INSIDE void add2(float* p, U j, F a, F b, int more) {
    for (uint32_t i : j.v) aligned(p + i + more, 8);
    add(~U(0u), p + more, j, a), add(~U(0u), p + more, j + 1, b);
}
INSIDE void store2(Half* p, U j, U x) {
    for (int i = 0; i < 32; i++) aligned(p + j.v[i], 4), memcpy(p + j.v[i], &x.v[i], 4);
}

INSIDE void equal(int told, int known) {
    if (told != known) fprintf(stderr, "%d was told, it is %d\n", told, known), abort();
}
template <class G>
void launch(
    int blocks_x, int blocks_y, int warps, int bytes, G kernel, int groups = 1, int together = 1) {
    equal(groups > 15, false);  // barriers that a GPU has for them
    equal(blocks_x % together, 0);
    for (int y = 0; y < blocks_y; y++)
        for (int x = 0; x < blocks_x; x += together) {
            std::vector<std::unique_ptr<Block>> blocks;
            for (int i = 0; i < together; i++)
                blocks.push_back(std::make_unique<Block>(warps, bytes, groups));
            std::barrier<> everybody(warps * together);
            std::vector<std::thread> threads;
            for (int i = 0; i < together; i++)
                for (int w = 0; w < warps; w++)
                    threads.emplace_back([&, i, w] {
                        this_warp = w, this_x = x + i, this_y = y, this_peer = i,
                        this_block = blocks[i].get();
                        this_memory = this_block->memory.data(), these_blocks = &blocks,
                        all_of_them = &everybody;
                        kernel();
                    });
            for (auto& t : threads) t.join();
        }
}

// Memory for a program of its own.
template <class T> T* room(size_t count) {
    T* p = (T*)aligned_alloc(16, (count * sizeof(T) + 15) / 16 * 16);
    memset(p, 0, count * sizeof(T));
    return p;
}
