// Order 1, bf16: one-pass scan of states. Each thread block owns a segment of chunks and keeps the
// sums in registers; it stores the state before each chunk, summed from the start of the segment
// (for queries: from its end). A second kernel scans the segments; readers add the two.
#pragma once

#include "attn/kernels/cuda/chunked/features.cuh"

namespace horner::attn::kernels::cuda {

__device__ inline void cp_async_commit() {  // one group per stage
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
template <int stages>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(stages) : "memory");
}

struct ScanShape {
  static constexpr int kTokens = 64, kWarps = 4, kThreads = 32 * kWarps, kStages = 3, kBlocks = 3;
  static constexpr int kTile = kTokens * 128, kFactorsAt = kStages * 2 * kTile;
  static constexpr int kGatesAt = kFactorsAt + kStages * kTokens * int(sizeof(Query));
  static constexpr int kBytes = kGatesAt + kStages * kTokens * 8;
  static_assert(kChunkUnit % kTokens == 0);
};

// The sums of a warp: S and z of sixteen features, and order 0: sixteen channels, and z.
struct ScanSums {
  float S[8][4], z[4], constant[2][4], count[4];

  __device__ void scale(float decay) {
#pragma unroll
    for (int i = 0; i < 32; ++i) S[i / 4][i % 4] *= decay;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      z[i] *= decay, count[i] *= decay;
      constant[0][i] *= decay, constant[1][i] *= decay;
    }
  }
};
// Running sums of the log gates before a chunk and at its end.
struct ChunkGates {
  double before, end;
};

template <bool of_queries>
struct StateScan {
  using M = Mma<bf16>;
  using Rows = Tile<bf16, 64>;
  static constexpr int kTokens = ScanShape::kTokens, kThreads = ScanShape::kThreads;

  const Chunks& p;
  const Fused& f;
  unsigned char* memory;
  int key_head, b, g, segment, each, begin, end;  // chunks [begin, end)

  __device__ StateScan(const Chunks& p, unsigned char* memory)
      : p(p),
        f(p.f),
        memory(memory),
        key_head(int(blockIdx.x)),
        b(key_head / f.G),
        g(key_head % f.G),
        segment(int(blockIdx.y)),
        each(of_queries ? f.H / f.G : 1),
        begin(segment * p.segment),
        end(min(p.chunks(), begin + p.segment)) {}
  // Stages per chunk, and the chunk of stage i; queries start at the last chunk.
  __device__ int stages() const { return p.length / kTokens * each; }
  __device__ int chunk(int i) const {
    return of_queries ? end - 1 - i / stages() : begin + i / stages();
  }
  __device__ Rows x(int i) const {
    return {shared_address(memory + i % ScanShape::kStages * 2 * ScanShape::kTile)};
  }
  __device__ Rows y(int i) const { return {x(i).at + ScanShape::kTile}; }
  __device__ Query* factors(int i) const {
    return reinterpret_cast<Query*>(memory + ScanShape::kFactorsAt) +
           i % ScanShape::kStages * kTokens;
  }
  __device__ double* gates(int i) const {
    return reinterpret_cast<double*>(memory + ScanShape::kGatesAt) +
           i % ScanShape::kStages * kTokens;
  }
  __device__ ChunkGates gates_of_chunk(int i) const {
    if (!f.decay || i >= (end - begin) * stages()) return {};
    const int from = chunk(i) * p.length, to = min(f.S, from + p.length);
    return {gates_to(f, key_head, from - 1), gates_to(f, key_head, to - 1)};
  }
  __device__ void copy(int i) const {
    if (i < (end - begin) * stages()) {
      const int of = i % stages(), head = g * each + of % each, n = int(threadIdx.x);
      const int t0 = chunk(i) * p.length + of / each * kTokens, real = f.T - t0;
      const View &from = of_queries ? f.q : f.k, &with = of_queries ? f.d_o : f.v;
      copy_rows<kTokens, kThreads>(x(i), row_of<bf16>(from, b, head, t0), from.row, real, f.D);
      copy_rows<kTokens, kThreads>(y(i), row_of<bf16>(with, b, head, t0), with.row, real, f.E);
      if (f.decay && n < kTokens)
        cp_async_8(shared_address(gates(i) + n),
                   f.decay + int64_t(key_head) * f.S + min(t0 + n, f.S - 1));
      if (n < kTokens) {
        if constexpr (of_queries) {
          const Query* const at = f.queries + int64_t(b * f.H + head) * f.T;
          cp_async_16(shared_address(factors(i) + n), at + (n < real ? t0 + n : 0), n < real);
        } else {
          const bool there = n < real && (!f.seen.keep || f.seen.keep[int64_t(b) * f.S + t0 + n]);
          factors(i)[n] = {0, 0, there ? 1.f : 0.f, there ? 1.f : 0.f};
        }
      }
    }
    cp_async_commit();
  }

  // Two elements of an A or B operand in bf16: lanes 0-3 hold them, 4-7 their rounding errors.
  static __device__ uint32_t split(float a, float b) {
    const uint32_t high = pack2(bf16(), a, b);
    return lane() < 4   ? high
           : lane() < 8 ? pack2(bf16(), a - unpack2(high).x, b - unpack2(high).y)
                        : 0;
  }
  static __device__ uint32_t scaled(uint32_t two, float a, float b) {
    const float2 y = unpack2(two);
    return pack2(bf16(), y.x * a, y.y * b);
  }
  // Each thread handles the token it copied itself: no barrier needed.
  __device__ void apply_decay(int i, const ChunkGates& chunk) const {
    if (const int n = int(threadIdx.x); n < kTokens) {
      const double here = gates(i)[n];
      const float decay =
          of_queries ? decay_factor(here, chunk.before) : decay_factor(chunk.end, here);
      factors(i)[n].a *= decay, factors(i)[n].dW *= decay;
    }
  }
  __device__ void add(ScanSums& sums, int i) const {
    const bool has_factors = of_queries || f.seen.keep || f.decay, has_constant = p.w.c[0] != 0;
    const M::AColumns<64> a_tile(x(i), 0, 16 * warp());
    const M::BColumns<64> b_tile(y(i), 0, 0), own(y(i), 0, 16 * warp());
#pragma unroll
    for (int t = 0; t < kTokens; t += 16) {
      const Query* const s = factors(i) + t + lane() % 4 * 2;
      float a[4], dW[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = j / 2 * 8 + j % 2;
        a[j] = s[at].a, dW[j] = s[at].dW;
      }
      const uint32_t column[2] = {split(dW[0], dW[1]), split(dW[2], dW[3])};
      M::A a_frag = a_tile.at(t, 0);
      if (p.relu)
#pragma unroll
        for (int j = 0; j < 4; ++j) a_frag.x[j] = relu(a_frag.x[j]);
      M::multiply(sums.z, a_frag, column[0], column[1], sums.z);
      if (has_factors)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          a_frag.x[j] = scaled(a_frag.x[j], a[j / 2 * 2], a[j / 2 * 2 + 1]);
#pragma unroll
      for (int j = 0; j < 8; j += 2)
        M::multiply<true>(sums.S[j], sums.S[j + 1], a_frag, b_tile.at(t, 8 * j));
      if (has_constant) {
        const M::A ones = Features<bf16>::constant();
        M::multiply(sums.count, ones, column[0], column[1], sums.count);
        const M::A factors = {{split(a[0], a[1]), 0, split(a[2], a[3]), 0}};
        M::multiply<true>(sums.constant[0], sums.constant[1], factors, own.at(t, 0));
      }
    }
  }

  // Rows 0 and 1 of the order-0 sums (high and low parts) add up to one row.
  template <class F>
  __device__ void over_constant(const ScanSums& sums, const F& each) const {
    if (p.w.c[0] == 0) return;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x = sums.constant[j / 2][j % 2], y = x + __shfl_down_sync(~0u, x, 4);
      if (lane() < 4) each(16 * warp() + j / 2 * 8 + lane() % 4 * 2 + j % 2, y);
    }
    if (threadIdx.x == 0) each(64, sums.count[0] + sums.count[1]);
  }
  __device__ void store_chunk_state(const ScanSums& sums, int chunk) const {
    const ChunkStates& to = of_queries ? p.suffix : p.prefix;
    const int64_t record = int64_t(key_head) * p.chunks() + chunk;
    const int tiles = p.tiles(), row = lane() / 4;
    over_constant(sums, [&](int at, float y) { to.constant[record * kConstantSums + at] = y; });
    if (warp() >= tiles) return;
    const int64_t tile = record * tiles + warp();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        store_pair<bf16>(to.S, tile * 1024 + (row + 8 * r) * 64 + 8 * j + lane() % 4 * 2,
                         sums.S[j][2 * r], sums.S[j][2 * r + 1]);
      if (lane() % 4 == 0)
        to.z[tile * kTileColumn + row + 8 * r] = __float_as_uint(sums.z[2 * r] + sums.z[2 * r + 1]);
    }
  }
  __device__ void store_segment_state(const ScanSums& sums) const {
    const int tiles = p.tiles(), row = lane() / 4;
    float* const to = (of_queries ? p.suffix : p.prefix).segments +
                      (int64_t(key_head) * p.segments() + segment) * (tiles + 1) * kTileSums;
    over_constant(sums,
                  [&](int at, float y) { to[tiles * kTileSums + (at < 64 ? at : 1024)] = y; });
    if (warp() >= tiles) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float* const at = to + warp() * kTileSums;
#pragma unroll
      for (int j = 0; j < 8; ++j)
        *reinterpret_cast<float2*>(at + (row + 8 * r) * 64 + 8 * j + lane() % 4 * 2) =
            make_float2(sums.S[j][2 * r], sums.S[j][2 * r + 1]);
      if (lane() % 4 == 0) at[1024 + row + 8 * r] = sums.z[2 * r] + sums.z[2 * r + 1];
    }
  }
};

template <bool of_queries>
__global__ __launch_bounds__(ScanShape::kThreads, ScanShape::kBlocks) void scan_states_kernel(
    const __grid_constant__ Chunks p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const StateScan<of_queries> scan(p, memory);
  const int stages = scan.stages(), all = (scan.end - scan.begin) * stages;
  ScanSums sums = {};
  ChunkGates gates{}, next = scan.gates_of_chunk(0);
  scan.copy(0);
  scan.copy(1);
  for (int i = 0; i < all; ++i) {
    cp_async_wait<1>();
    if (p.f.decay) {
      if (i % stages == 0) gates = next, next = scan.gates_of_chunk(i + stages);
      scan.apply_decay(i, gates);
    }
    __syncthreads();  // these tokens have arrived; all warps are done with the last ones
    scan.copy(i + 2);
    if (i % stages == 0) {
      scan.store_chunk_state(sums, scan.chunk(i));
      if (p.f.decay) sums.scale(decay_factor(gates.end, gates.before));
    }
    scan.add(sums, i);
  }
  scan.store_segment_state(sums);
}

// Scans the sums of segments into the state before each of them, or after (`backward`).
template <bool backward>
__global__ __launch_bounds__(128) void scan_segments_kernel(const __grid_constant__ Chunks p) {
  constexpr int kBatch = 16;
  const int record = (p.tiles() + 1) * kTileSums, n = p.segments();
  const int at = int(blockIdx.x) * 128 + int(threadIdx.x);
  if (at >= record) return;
  float* const of = (backward ? p.suffix : p.prefix).segments + int64_t(blockIdx.y) * n * record;
  const auto place = [&](int i) { return of + int64_t(backward ? n - 1 - i : i) * record + at; };
  float sum = 0;
  for (int first = 0; first < n; first += kBatch) {
    float x[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) x[i] = *place(min(first + i, n - 1));
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= n) return;
      *place(first + i) = sum;
      if (p.f.decay) {
        const int length = p.segment * p.length;
        const int from = (backward ? n - 1 - first - i : first + i) * length;
        sum *= decay_factor(gates_to(p.f, int(blockIdx.y), min(p.f.S, from + length) - 1),
                            gates_to(p.f, int(blockIdx.y), from - 1));
      }
      sum += x[i];
    }
  }
}

}  // namespace horner::attn::kernels::cuda
