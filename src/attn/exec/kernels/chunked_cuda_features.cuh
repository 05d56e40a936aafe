// Monomials as left factors, and what a warp does with a tile of sixteen of them: sums over tokens,
// asking a state, and the gradient of what asks.
#pragma once

#include "attn/exec/kernels/chunked_cuda.h"
#include "attn/exec/kernels/fused_cuda_tiles.cuh"

namespace horner::attn::kernels::cuda {

template <int n>
HORNER_HD Lanes<n> weights_of(const Quadratic& w, const Lanes<n>& x) {
  return lanes<n>([&](int i) { return (w.c[2] * x[i] + w.c[1]) * x[i] + w.c[0]; });
}
template <int n>
HORNER_HD Slope<Lanes<n>> slopes_of(const Quadratic& w, const Lanes<n>& x) {
  return {weights_of(w, x), lanes<n>([&](int i) { return 2 * w.c[2] * x[i] + w.c[1]; })};
}

// Which monomials: x_j of a block, times x_i unless that is negative.
struct Monomials {
  int i, block;
};
HORNER_HD Monomials monomials(int tile, int blocks) {
  if (tile < blocks) return {-1, tile};
  int rest = tile - blocks, first = 0;
  for (; rest >= 16 * (blocks - first); ++first) rest -= 16 * (blocks - first);
  return {16 * first + rest % 16, first + rest / 16};
}
// A product of two blocks stands for both orders of them.
HORNER_HD float coefficient(const Quadratic& w, float scale, const Monomials& m) {
  if (m.i < 0) return w.c[1] * scale;
  return w.c[2] * scale * scale * (m.i / 16 == m.block ? 1 : 2);
}

__device__ inline uint32_t times(bf16, uint32_t a, uint32_t b) {
  const auto y = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                         *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&y);
}
__device__ inline uint32_t twice(bf16, uint32_t at) {  // a number, in both halves
  uint16_t x;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(x) : "r"(at) : "memory");
  return uint32_t(x) * 0x10001u;
}
__device__ inline float2 floats(uint32_t two) {  // of two bf16
  return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)};
}
__device__ inline float load_number(bf16, uint32_t at) {
  return floats(twice(bf16(), at)).x;
}
__device__ inline float load_number(float, uint32_t at) {
  return __uint_as_float(load_word(at));
}
__device__ inline float2 load_pair(bf16, uint32_t at) {
  return floats(load_word(at));
}
__device__ inline float2 load_pair(float, uint32_t at) {
  return {__uint_as_float(load_word(at)), __uint_as_float(load_word(at + 4))};
}

// What depends on the dtype. Tokens and features inside a step are in the order of mma.cuh.
template <class T>
struct Factors;
template <>
struct Factors<bf16> {
  using M = Mma<bf16>;
  // Of sixteen tokens, rows of x from `row` on, as left factor; step 0 of 1.
  static __device__ M::A rows(Tile<bf16, 64> x, int row, const Monomials& m, int) {
    M::A a;
    load_matrices(a.x, x.chunk(row + a_row(), 2 * m.block + a_chunk()));
    if (m.i < 0) return a;
    const uint32_t upper = twice(bf16(), x.number(row + lane() / 4, m.i));
    const uint32_t lower = twice(bf16(), x.number(row + 8 + lane() / 4, m.i));
#pragma unroll
    for (int j = 0; j < 4; ++j) a.x[j] = times(bf16(), a.x[j], j % 2 ? lower : upper);
    return a;
  }
  // Transposed: monomials by sixteen tokens.
  static __device__ M::A columns(Tile<bf16, 64> x, int row, const Monomials& m) {
    const auto block = [&](int b) {
      M::A a;
      load_transposed(a.x, x.chunk(row + b_row(), 2 * b + b_chunk()));
      return a;
    };
    M::A a = block(m.block);
    if (m.i < 0) return a;
    const M::A other = block(m.i / 16);
    const bool low = m.i % 16 < 8;
    const int from = m.i % 8 * 4 + lane() % 4;
    const uint32_t first = __shfl_sync(~0u, low ? other.x[0] : other.x[1], from);
    const uint32_t second = __shfl_sync(~0u, low ? other.x[2] : other.x[3], from);
#pragma unroll
    for (int j = 0; j < 4; ++j) a.x[j] = times(bf16(), a.x[j], j < 2 ? first : second);
    return a;
  }
  static __device__ M::A constant() {  // 1, and fifteen of 0
    const uint32_t ones = lane() < 4 ? 0x3f803f80u : 0;
    return {{ones, 0, ones, 0}};
  }
  // A right factor of one column (and, beside it, what rounding took from it).
  static __device__ M::B column(const float* of) {
    const float* at = of + lane() % 4 * 2;
    const auto word = [&](float a, float b) {
      const uint32_t high = pair(bf16(), a, b);
      const float2 h = floats(high);
      return lane() < 4 ? high : lane() < 8 ? pair(bf16(), a - h.x, b - h.y) : 0;
    };
    return {{word(at[0], at[1]), word(at[8], at[9]), 0, 0}};
  }
  static __device__ M::B stored_column(uint32_t z, int) {
    if (lane() >= 8) return {};
    const uint32_t at = z + uint32_t(lane() / 4 * 32 + lane() % 4 * 4);
    return {{load_word(at), load_word(at + 16), 0, 0}};
  }
  static __device__ void add_column(float (&c)[4], const M::A& a, const M::B& b) {
    M::multiply(c, a, b.x[0], b.x[1], c);
  }
  static __device__ float2 stored_pair(uint32_t z, int feature) {
    const float2 high = load_pair(bf16(), z + 2 * feature);
    const float2 low = load_pair(bf16(), z + 32 + 2 * feature);
    return {high.x + low.x, high.y + low.y};
  }
  static __device__ void store_column(uint32_t* z, int feature, float a, float b) {
    const uint32_t high = pair(bf16(), a, b);
    z[feature / 2] = high;
    z[8 + feature / 2] = pair(bf16(), a - floats(high).x, b - floats(high).y);
  }
};
template <>
struct Factors<float> {
  using M = Mma<float>;
  static __device__ float number(Tile<float, 64> x, int row, int column) {
    return __uint_as_float(load_word(x.number(row, column)));
  }
  static __device__ M::A split(float a, float b, float c, float d) {
    const uint32_t x[4] = {__float_as_uint(a), __float_as_uint(b), __float_as_uint(c),
                           __float_as_uint(d)};
    return M::split<M::A>(x);
  }
  static __device__ M::A rows(Tile<float, 64> x, int row, const Monomials& m, int step) {
    const int t = row + lane() / 4, j = 16 * m.block + 8 * step + lane() % 4 * 2;
    const float upper = m.i < 0 ? 1 : number(x, t, m.i);
    const float lower = m.i < 0 ? 1 : number(x, t + 8, m.i);
    return split(number(x, t, j) * upper, number(x, t + 8, j) * lower, number(x, t, j + 1) * upper,
                 number(x, t + 8, j + 1) * lower);
  }
  static __device__ M::A columns(Tile<float, 64> x, int row, const Monomials& m) {
    const int t = row + lane() % 4 * 2, j = 16 * m.block + lane() / 4;
    const float even = m.i < 0 ? 1 : number(x, t, m.i), odd = m.i < 0 ? 1 : number(x, t + 1, m.i);
    return split(number(x, t, j) * even, number(x, t, j + 8) * even, number(x, t + 1, j) * odd,
                 number(x, t + 1, j + 8) * odd);
  }
  static __device__ M::A constant() {
    const float one = lane() < 4 ? 1 : 0;
    return split(one, 0, one, 0);
  }
  static __device__ M::B of_column(float even, float odd) {
    const bool there = lane() < 4;
    const uint32_t x[4] = {__float_as_uint(there ? even : 0), __float_as_uint(there ? odd : 0), 0,
                           0};
    return M::split<M::B>(x);
  }
  static __device__ M::B column(const float* of) {
    return of_column(of[lane() % 4 * 2], of[lane() % 4 * 2 + 1]);
  }
  static __device__ M::B stored_column(uint32_t z, int step) {
    const float2 y = load_pair(0.f, z + uint32_t(32 * step + lane() % 4 * 8));
    return of_column(y.x, y.y);
  }
  static __device__ void add_column(float (&c)[4], const M::A& a, const M::B& b) {
    M::multiply<true>(c, a, b, 0);
  }
  static __device__ float2 stored_pair(uint32_t z, int feature) {
    return load_pair(0.f, z + 4 * feature);
  }
  static __device__ void store_column(uint32_t* z, int feature, float a, float b) {
    z[feature] = __float_as_uint(a), z[feature + 1] = __float_as_uint(b);
  }
};

// A tile of a state in shared memory: rows of S from `row` on, and its z.
template <class T>
struct StateTile {
  Tile<T, 64> S;
  int row;
  uint32_t z;
};

// N += phi(x) S and, with a sum, W += phi(x) z; rows of x from `row` on.
template <bool with_sum, class T, int atoms>
__device__ inline void ask(float (&N)[atoms][8][4], float (&W)[atoms][4], Tile<T, 64> x, int row,
                           const Monomials& m, const StateTile<T>& state) {
  using M = Mma<T>;
  const typename M::template RightColumns<64> rights(state.S, state.row, 0);
#pragma unroll
  for (int step = 0; step < 16 / M::kDepth; ++step) {
    typename M::A left[atoms];
#pragma unroll
    for (int i = 0; i < atoms; ++i) left[i] = Factors<T>::rows(x, row + 16 * i, m, step);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const auto right = rights.at(step * M::kDepth, 8 * j);
#pragma unroll
      for (int i = 0; i < atoms; ++i)
        M::template multiply<true>(N[i][j], N[i][j + 1], left[i], right);
    }
    if constexpr (with_sum) {
      const auto z = Factors<T>::stored_column(state.z, step);
#pragma unroll
      for (int i = 0; i < atoms; ++i) Factors<T>::add_column(W[i], left[i], z);
    }
  }
}

// Rows of a tile as left factors: in registers where they fit.
template <class T, int atoms>
struct LeftRows {
  Tile<T, 64> y;
  int row;

  __device__ LeftRows(Tile<T, 64> y, int row) : y(y), row(row) {}
  __device__ void products(float (&c)[atoms][2][4], const StateTile<T>& state) const {
    rows_by_rows<T>(c, y, row, state.S, state.row);
  }
};
template <int atoms>
struct LeftRows<bf16, atoms> {
  Mma<bf16>::A left[atoms][4];

  __device__ LeftRows(Tile<bf16, 64> y, int row) {
    const Mma<bf16>::LeftRows<64> lefts(y, row);
#pragma unroll
    for (int i = 0; i < atoms; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k) left[i][k] = lefts.at(16 * i, 16 * k);
  }
  __device__ void products(float (&c)[atoms][2][4], const StateTile<bf16>& state) const {
    const Mma<bf16>::RightRows<64> rights(state.S, state.row);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const auto right = rights.at(0, 16 * k);
#pragma unroll
      for (int i = 0; i < atoms; ++i)
        k == 0 ? Mma<bf16>::multiply<false>(c[i][0], c[i][1], left[i][k], right)
               : Mma<bf16>::multiply<true>(c[i][0], c[i][1], left[i][k], right);
    }
  }
};

// Gradients of the rows of a warp, in shared memory.
inline constexpr int kGradientStride = 64 + 4;
template <int atoms>
struct Gradients {
  float* of;  // [16 atoms, kGradientStride], of this warp alone

  __device__ float* at(int i, int row, int column) const {
    return of + (16 * i + 8 * row + lane() / 4) * kGradientStride + column + lane() % 4 * 2;
  }
  template <bool add = false>
  __device__ void set(const float (&c)[atoms][8][4], float scale) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < atoms; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float2& to = *reinterpret_cast<float2*>(at(i, r, 8 * j));
          to.x = c[i][j][2 * r] * scale + (add ? to.x : 0);
          to.y = c[i][j][2 * r + 1] * scale + (add ? to.y : 0);
        }
    __syncwarp();
  }
  // To rows of `channels` numbers, the first of them at `to`; `kept(row)` says which are not 0.
  template <class T, class Kept>
  __device__ void store(void* to, int64_t first, int channels, int rows, const Kept& kept) const {
    __syncwarp();
    for (int r = 0; r < min(16 * atoms, rows); ++r) {
      const float2 y = *reinterpret_cast<const float2*>(of + r * kGradientStride + 2 * lane());
      const bool there = kept(r);
      if (2 * lane() < channels)
        store_pair<T>(to, (first + r) * channels + 2 * lane(), there ? y.x : 0, there ? y.y : 0);
    }
    __syncwarp();
  }
};

// What the monomials of x get, whose sums with S and z have the gradients a y and b:
//   g_f = a S_f.y + b z_f,  of x_j: g,  of x_i x_j: x_j gets x_i g and x_i gets x_j g.
template <class T, int atoms>
struct AskBackward {
  Tile<T, 64> x;
  int row;
  LeftRows<T, atoms> y;
  float a[atoms][2], b[atoms][2];
  Gradients<atoms> to;
  int block;
  float xj[atoms][2][4], sums[atoms][2][4];  // of the block at hand

  __device__ AskBackward(Tile<T, 64> x, Tile<T, 64> y, int row, const Gradients<atoms>& to)
      : x(x), row(row), y(y, row), to(to), block(-1) {}

  __device__ void begin(int next) {
    if (block >= 0) flush();
    block = next;
#pragma unroll
    for (int i = 0; i < atoms; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int r = row + 16 * i + j % 2 * 8 + lane() / 4;
        const float2 two = load_pair(T(), x.number(r, 16 * block + j / 2 * 8 + lane() % 4 * 2));
        xj[i][j / 2][j % 2 * 2] = two.x, xj[i][j / 2][j % 2 * 2 + 1] = two.y;
        sums[i][j / 2][j % 2 * 2] = 0, sums[i][j / 2][j % 2 * 2 + 1] = 0;
      }
  }
  __device__ void flush() const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < atoms; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float2& at = *reinterpret_cast<float2*>(to.at(i, j % 2, 16 * block + j / 2 * 8));
        at.x += sums[i][j / 2][j % 2 * 2], at.y += sums[i][j / 2][j % 2 * 2 + 1];
      }
    __syncwarp();
  }
  __device__ void add(const Monomials& m, const StateTile<T>& state) {
    if (m.block != block) begin(m.block);
    float g[atoms][2][4];
    y.products(g, state);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float2 z = Factors<T>::stored_pair(state.z, 8 * j + lane() % 4 * 2);
#pragma unroll
      for (int i = 0; i < atoms; ++i)
#pragma unroll
        for (int n = 0; n < 4; ++n)
          g[i][j][n] = a[i][n / 2] * g[i][j][n] + b[i][n / 2] * (n % 2 ? z.y : z.x);
    }
#pragma unroll
    for (int i = 0; i < atoms; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int t = row + 16 * i + 8 * r + lane() / 4;
        const float xi = m.i < 0 ? 1 : load_number(T(), x.number(t, m.i));
        float own = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float y = g[i][j / 2][2 * r + j % 2];
          own += y * xj[i][j / 2][2 * r + j % 2];
          sums[i][j / 2][2 * r + j % 2] += y * xi;
        }
        if (m.i < 0) continue;
        own = quad_sum(own);
        if (lane() % 4 == 0) to.of[(16 * i + 8 * r + lane() / 4) * kGradientStride + m.i] += own;
      }
  }
};

// each(monomials, tile) for all tiles of a record, through 2 kStateStage bytes of shared memory at
// `memory` and the z behind them.
inline constexpr int kStateStage = 16384;
template <class T>
inline constexpr int kStateTiles = kStateStage / (1024 * int(sizeof(T)));
template <class T>
inline constexpr int kColumnBytes = 2 * kStateTiles<T> * 4 * kTileColumn;
template <class T, int threads, class F>
__device__ inline void over_state(const ChunkStates& states, int64_t record, int tiles, int blocks,
                                  uint32_t memory, uint32_t columns, const F& each) {
  constexpr int n = kStateTiles<T>, kBytes = 4 * kTileColumn;
  const T* const S = static_cast<const T*>(states.S) + record * tiles * 1024;
  const uint32_t* const z = states.z + record * tiles * kTileColumn;
  const auto tile = [&](int stage) { return Tile<T, 64>{memory + uint32_t(stage * kStateStage)}; };
  const auto copy = [&](int stage, int first) {
    copy_rows<16 * n, threads>(tile(stage), S + int64_t(first) * 1024, 64, 16 * (tiles - first),
                               64);
    const int at = int(threadIdx.x);  // 16 bytes of z
    if (at < n * kBytes / 16) {
      const bool real = first * kBytes + at * 16 < tiles * kBytes;
      copy_16_bytes(columns + uint32_t(stage * n * kBytes + at * 16),
                    z + (real ? first * kTileColumn + at * 4 : 0), real);
    }
  };
  __syncthreads();  // all are done with what was there
  copy(0, 0);
  for (int first = 0, stage = 0; first < tiles; first += n, stage ^= 1) {
    wait_for_copies();
    __syncthreads();
    if (first + n < tiles) copy(stage ^ 1, first + n);
#pragma unroll 1
    for (int u = first; u < min(tiles, first + n); ++u)
      each(monomials(u, blocks),
           StateTile<T>{tile(stage), 16 * (u - first),
                        columns + uint32_t((stage * n + u - first) * kBytes)});
  }
}

}  // namespace horner::attn::kernels::cuda
