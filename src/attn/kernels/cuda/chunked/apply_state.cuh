// N += phi(x) S and W += phi(x) z for the rows x of a warp and a state S, z; and the gradient of x.
#pragma once

#include "attn/kernels/cuda/chunked/features.cuh"

namespace horner::attn::kernels::cuda {

inline constexpr int kStateStage = 16384;  // bytes per stage
template <class T>
inline constexpr int kStateTiles = kStateStage / (1024 * int(sizeof(T)));
template <class T>
inline constexpr int kColumnBytes = 2 * kStateTiles<T> * 4 * kTileColumn;

// Tiles of a state in shared memory. Tiles of x_i x_j share the block of j and have consecutive i:
// a stage never spans two pairs of blocks. Tiles of x_j are one block each.
template <class T>
struct Stage {
  Monomials m;  // of the first tile
  int tiles;
  Tile<T, 64> S;
  uint32_t z;

  __device__ Monomials of(int u) const {
    return m.i < 0 ? Monomials{-1, m.block + u} : Monomials{m.i + u, m.block};
  }
  __device__ uint32_t column(int u) const { return z + uint32_t(u * 4 * kTileColumn); }
};

// Calls each(stage) for all tiles of a record, double-buffered in 2 kStateStage bytes of shared
// memory at `memory`, with z at `columns`.
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
      cp_async_16(columns + uint32_t(stage * n * kBytes + at * 16),
                  z + (real ? first * kTileColumn + at * 4 : 0), real);
    }
  };
  __syncthreads();  // all warps are done with the previous contents
  copy(0, 0);
  for (int first = 0, stage = 0; first < tiles; first += n, stage ^= 1) {
    cp_async_wait_all();
    __syncthreads();
    if (first + n < tiles) copy(stage ^ 1, first + n);
    each(Stage<T>{monomials(first, tiles, blocks), min(n, tiles - first), tile(stage),
                  columns + uint32_t(stage * n * kBytes)});
  }
}

// Eight consecutive x_i of the rows lane / 4 and lane / 4 + 8.
struct FirstFactors {
  uint32_t x[2][4];

  __device__ FirstFactors(Tile<bf16, 64> from, int row, int i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 y = *static_cast<const uint4*>(
          __cvta_shared_to_generic(from.chunk(row + 8 * r + lane() / 4, i / 8)));
      x[r][0] = y.x, x[r][1] = y.y, x[r][2] = y.z, x[r][3] = y.w;
    }
  }
  __device__ uint32_t broadcast2(int r, int u) const {
    return __byte_perm(x[r][u / 2], 0, u % 2 ? 0x3232 : 0x1010);
  }
  __device__ float element(int r, int u) const {
    const float2 two = unpack2(x[r][u / 2]);
    return u % 2 ? two.y : two.x;
  }
};

// N += phi(x) S and, if `with_sum`, W += phi(x) z; the warp's rows of x start at `row`.
template <bool with_sum>
__device__ inline void apply_state_tile(float (&N)[8][4], float (&W)[4], const Mma<bf16>::A& a_frag,
                                        const Stage<bf16>& stage, int u) {
  const Mma<bf16>::BColumns<64> b_tile(stage.S, 0, 0);
#pragma unroll
  for (int j = 0; j < 8; j += 2)
    Mma<bf16>::multiply<true>(N[j], N[j + 1], a_frag, b_tile.at(16 * u, 8 * j));
  if constexpr (with_sum)
    Features<bf16>::add_column(W, a_frag, Features<bf16>::stored_column(stage.column(u), 0));
}
template <bool with_sum>
__device__ inline void apply_state(float (&N)[8][4], float (&W)[4], Tile<bf16, 64> x, int row,
                                   const Stage<bf16>& stage) {
  const auto block = [&](int b) {
    Mma<bf16>::A a;
    ldmatrix(a.x, x.chunk(row + a_row(), 2 * b + a_chunk()));
    return a;
  };
  if (stage.m.i < 0) {
#pragma unroll
    for (int u = 0; u < 4; ++u)
      if (u < stage.tiles) apply_state_tile<with_sum>(N, W, block(u), stage, u);
    return;
  }
  const FirstFactors first(x, row, stage.m.i);
  const Mma<bf16>::A second = block(stage.m.block);
#pragma unroll
  for (int u = 0; u < 8; ++u) {
    Mma<bf16>::A a_frag;
#pragma unroll
    for (int j = 0; j < 4; ++j) a_frag.x[j] = mul2(bf16(), second.x[j], first.broadcast2(j % 2, u));
    apply_state_tile<with_sum>(N, W, a_frag, stage, u);
  }
}
template <bool with_sum>
__device__ inline void apply_state(float (&N)[8][4], float (&W)[4], Tile<float, 64> x, int row,
                                   const Stage<float>& stage) {
  using M = Mma<float>;
#pragma unroll 1
  for (int u = 0; u < stage.tiles; ++u) {
    const M::BColumns<64> b_tile(stage.S, 16 * u, 0);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const M::A a_frag = Features<float>::rows(x, row, stage.of(u), step);
#pragma unroll
      for (int j = 0; j < 8; j += 2)
        M::multiply<true>(N[j], N[j + 1], a_frag, b_tile.at(step * M::kDepth, 8 * j));
      if constexpr (with_sum)
        Features<float>::add_column(W, a_frag,
                                    Features<float>::stored_column(stage.column(u), step));
    }
  }
}

// Gradients of a warp's rows, in shared memory.
inline constexpr int kGradientStride = 64 + 4;
struct Gradients {
  float* of;  // [16, kGradientStride], private to this warp

  __device__ float* at(int row, int column) const {
    return of + (8 * row + lane() / 4) * kGradientStride + column + lane() % 4 * 2;
  }
  template <bool add = false>
  __device__ void set(const float (&c)[8][4], float scale) const {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float2& to = *reinterpret_cast<float2*>(at(r, 8 * j));
        to.x = c[j][2 * r] * scale + (add ? to.x : 0);
        to.y = c[j][2 * r + 1] * scale + (add ? to.y : 0);
      }
    __syncwarp();
  }
  // Stores to `to` [rows, channels] from row `first`; rows that are not `kept(row)` become 0.
  template <class T, class Kept>
  __device__ void store(void* to, int64_t first, int channels, int rows, const Kept& kept) const {
    __syncwarp();
    for (int r = 0; r < min(16, rows); ++r) {
      const float2 y = *reinterpret_cast<const float2*>(of + r * kGradientStride + 2 * lane());
      const bool there = kept(r);
      if (2 * lane() < channels)
        store_pair<T>(to, (first + r) * channels + 2 * lane(), there ? y.x : 0, there ? y.y : 0);
    }
    __syncwarp();
  }
};

// The gradient of x, where N = phi(x) S and W = phi(x) z have the gradients a y and a b:
//   g_f = a (S_f.y + b z_f);  for x_j: dx_j += g;  for x_i x_j: dx_j += x_i g, dx_i += x_j g.
// a is multiplied in at the end; with `totals`, so are the sums of all phi_f(x) g_f, in a thread's
// columns. Common to all dtypes: the sums of one block of x_j.
template <class T, bool totals>
struct BlockSums {
  Tile<T, 64> x;
  int row;
  float a[2], b[2];
  Gradients to;
  int block;
  float xj[2][4], sums[2][4];
  DecaySum<T> total[2] = {};

  __device__ BlockSums(Tile<T, 64> x, int row, const Gradients& to)
      : x(x), row(row), to(to), block(-1) {}
  __device__ void load(int next) {
    block = next;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = row + j % 2 * 8 + lane() / 4;
      const float2 two = load_pair(T(), x.element(r, 16 * block + j / 2 * 8 + lane() % 4 * 2));
      xj[j / 2][j % 2 * 2] = two.x, xj[j / 2][j % 2 * 2 + 1] = two.y;
    }
  }
  __device__ void begin(int next) {
    load(next);
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[j / 4][j % 4] = 0;
  }
  __device__ void end(float times) {
    if constexpr (totals)
#pragma unroll
      for (int j = 0; j < 8; ++j)
        total[j / 2 % 2] += DecaySum<T>(xj[j / 4][j % 4]) * DecaySum<T>(sums[j / 4][j % 4]);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float2& at = *reinterpret_cast<float2*>(to.at(j % 2, 16 * block + j / 2 * 8));
      at.x += sums[j / 2][j % 2 * 2] * (a[j % 2] * times);
      at.y += sums[j / 2][j % 2 * 2 + 1] * (a[j % 2] * times);
    }
    __syncwarp();
  }
};

template <class T, bool totals>
struct ApplyStateBackward;
template <bool totals>
struct ApplyStateBackward<bf16, totals> : BlockSums<bf16, totals> {
  using M = Mma<bf16>;
  using Base = BlockSums<bf16, totals>;
  using Base::a, Base::b, Base::begin, Base::block, Base::end, Base::load, Base::row, Base::sums,
      Base::to, Base::x, Base::xj;
  M::A a_frag[4];
  uint32_t of_z[2];  // b as bf16 high and low parts, twice: for the high and low parts of z

  __device__ ApplyStateBackward(Tile<bf16, 64> x, Tile<bf16, 64> y, int row, const Gradients& to)
      : Base(x, row, to) {
    const M::ARows<64> a_tile(y, row);
#pragma unroll
    for (int k = 0; k < 4; ++k) a_frag[k] = a_tile.at(0, 16 * k);
  }
  __device__ void prepare() {  // once a and b are set
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float high = unpack2(pack2(bf16(), b[r], b[r])).x;
      of_z[r] = lane() % 4 < 2 ? pack2(bf16(), high, b[r] - high) : 0;
    }
  }
  __device__ void products(float (&g)[2][4], const Stage<bf16>& stage, int u) const {
    const M::BRows<64> b_tile(stage.S, 0);
    const uint32_t z = stage.column(u) + uint32_t(lane() % 2 * 32 + lane() / 4 * 2);
#pragma unroll
    for (int j = 0; j < 2; ++j) multiply_8(g[j], of_z, broadcast2(bf16(), z + 16 * j));
#pragma unroll
    for (int k = 0; k < 4; ++k) M::multiply<true>(g[0], g[1], a_frag[k], b_tile.at(16 * u, 16 * k));
  }
  static __device__ void multiply_8(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%7, %7, %7, %7};\n"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b), "f"(0.f));
  }
  __device__ void add(const Stage<bf16>& stage) {
    if (stage.m.i < 0) {
#pragma unroll
      for (int u = 0; u < 4; ++u)
        if (u < stage.tiles) {
          products(sums, stage, u);
          totals ? load(u) : void(block = u);
          end(1);
        }
      return;
    }
    if (stage.m.i % 16 == 0) begin(stage.m.block);
    const bool both = stage.m.i / 16 == block;  // S_ij = S_ji: dx_i and dx_j are one sum
    both ? pairs<true>(stage) : pairs<false>(stage);
    if (stage.m.i % 16 == 8) end(both ? 2 : 1);
  }
  template <bool both>
  __device__ void pairs(const Stage<bf16>& stage) {
    const FirstFactors first(x, row, stage.m.i);
    float own[2][8];
#pragma unroll
    for (int u = 0; u < 8; ++u) {
      float g[2][4];
      products(g, stage, u);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float xi = first.element(r, u);
        own[r][u] = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float y = g[j / 2][2 * r + j % 2];
          sums[j / 2][2 * r + j % 2] += y * xi;
          if constexpr (!both) own[r][u] += y * xj[j / 2][2 * r + j % 2];
        }
      }
    }
    if constexpr (!both) add_own(own, stage.m.i);
  }
  // Reduces over the four lanes of a quad; each keeps two of the eight sums.
  __device__ void add_own(const float (&own)[2][8], int first) const {
    const bool upper = lane() & 2, odd = lane() & 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x[4], y[2];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[i] = (upper ? own[r][i + 4] : own[r][i]) +
               __shfl_xor_sync(~0u, upper ? own[r][i] : own[r][i + 4], 2);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        y[i] = (odd ? x[i + 2] : x[i]) + __shfl_xor_sync(~0u, odd ? x[i] : x[i + 2], 1);
      float2& at = *reinterpret_cast<float2*>(to.at(r, first));
      at.x += y[0] * a[r], at.y += y[1] * a[r];
    }
  }
};
template <bool totals>
struct ApplyStateBackward<float, totals> : BlockSums<float, totals> {
  using Base = BlockSums<float, totals>;
  using Base::a, Base::b, Base::begin, Base::end, Base::row, Base::sums, Base::to, Base::x,
      Base::xj;
  Tile<float, 64> y;

  __device__ ApplyStateBackward(Tile<float, 64> x, Tile<float, 64> y, int row, const Gradients& to)
      : Base(x, row, to), y(y) {}
  __device__ void prepare() const {}
  __device__ void add(const Stage<float>& stage) {
#pragma unroll 1
    for (int u = 0; u < stage.tiles; ++u) add(stage, u);
  }
  __device__ void add(const Stage<float>& stage, int u) {
    const Monomials m = stage.of(u);
    if (m.i < 0 || m.i % 16 == 0) begin(m.block);
    float g[1][2][4];
    mma_abt<float>(g, y, row, stage.S, 16 * u);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = row + 8 * r + lane() / 4;
      const float xi = m.i < 0 ? 1 : load_element(0.f, x.element(t, m.i));
      float own = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 z = Features<float>::stored_pair(stage.column(u), j / 2 * 8 + lane() % 4 * 2);
        const float of = g[0][j / 2][2 * r + j % 2] + b[r] * (j % 2 ? z.y : z.x);
        own += of * xj[j / 2][2 * r + j % 2];
        sums[j / 2][2 * r + j % 2] += of * xi;
      }
      if (m.i < 0) continue;
      own = quad_sum(own) * a[r];
      if (lane() % 4 == 0) to.of[(8 * r + lane() / 4) * kGradientStride + m.i] += own;
    }
    if (m.i < 0 || m.i % 16 == 15) end(1);
  }
};

}  // namespace horner::attn::kernels::cuda
