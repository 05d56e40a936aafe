// A chunk of one head, its tiles, and what the kernels of this folder share.
#pragma once

#include "attn/kernels/cuda/common/launch.cuh"
#include "attn/kernels/cuda/common/tiles.cuh"
#include "attn/kernels/cuda/delta/chunks.h"

namespace horner::attn::kernels::cuda::delta {

inline constexpr int kTokens = kChunkTokens, kWarps = 4, kThreads = 32 * kWarps;
using M = Mma<bf16>;
using Pairs = Tile<bf16, kTokens>;  // rows of 64 tokens
template <int C>
using Rows = Tile<bf16, C>;
using Fragments = float[kTokens / 8][4];  // of a warp: 16 rows, 64 tokens

__device__ inline const bf16* at(const void* matrices, int64_t record, int size) {
  return static_cast<const bf16*>(matrices) + record * size;
}
__device__ inline bf16* at(void* matrices, int64_t record, int size) {
  return static_cast<bf16*>(matrices) + record * size;
}

struct Chunk {
  int64_t record;
  int b, h, first, real;  // real: tokens of this chunk that there are

  template <class P>
  __device__ Chunk(const P& p, int64_t record) : record(record) {
    const int64_t head = record / p.chunks();
    b = int(head / p.H), h = int(head % p.H);
    first = int(record % p.chunks()) * kTokens, real = min(p.T - first, kTokens);
  }
  __device__ const bf16* rows(const View& x) const { return row_of<bf16>(x, b, h, first); }
  template <class P>
  __device__ int64_t token(const P& p, int i) const {
    return (int64_t(b) * p.H + h) * p.T + first + i;
  }
  template <int C>
  __device__ void copy(Rows<C> to, const View& x) const {
    copy_rows<kTokens, kThreads>(to, rows(x), x.row, real, C);
  }
};
// A matrix of a record, whole.
template <int rows, int C>
__device__ inline void copy_matrix(Tile<bf16, C> to, const bf16* from) {
  copy_rows<rows, kThreads>(to, from, C, rows, C);
}

// The row and column of element i of a thread's fragment [16, 8].
__device__ inline int row_in(int i) {
  return lane() / 4 + i / 2 * 8;
}
__device__ inline int column_in(int i) {
  return lane() % 4 * 2 + i % 2;
}
__device__ inline float2 load_pair(uint32_t at) {
  return unpack2(bf16(), load_word(at));
}

// An operand as two fragments: [16, 16] numbers.
__device__ inline void unpack(const M::A& a, float (&x)[4], float (&y)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 l = unpack2(bf16(), a.x[i]), r = unpack2(bf16(), a.x[i + 2]);
    x[2 * i] = l.x, x[2 * i + 1] = l.y, y[2 * i] = r.x, y[2 * i + 1] = r.y;
  }
}
template <int n>
__device__ inline void scale_columns(float (&x)[n][4], const float* by) {
#pragma unroll
  for (int j = 0; j < n; ++j) {
    const float2 two = *reinterpret_cast<const float2*>(by + 8 * j + lane() % 4 * 2);
    x[j][0] *= two.x, x[j][1] *= two.y, x[j][2] *= two.x, x[j][3] *= two.y;
  }
}

// Writes rows of 8 n columns of one warp to global memory, through `through`, rows of which no
// other warp uses: whole lines.
template <int n, int C>
__device__ inline void write_rows(const float (&x)[n][4], Tile<bf16, C> through, int row, bf16* to,
                                  int64_t stride, int real) {
  const M::Writer<C> writer(through, row);
  __syncwarp();
#pragma unroll
  for (int j = 0; j < n; j += 2) {
    const M::Rounded two[2] = {M::rounded(x[j]), M::rounded(x[j + 1])};
    writer.put(0, 8 * j, two);
  }
  __syncwarp();
  constexpr int kChunks = n;  // of 16 bytes in a row
#pragma unroll
  for (int i = lane(); i < 16 * kChunks; i += 32) {
    const int r = i / kChunks, chunk = i % kChunks;
    uint4 y;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w)
                 : "r"(through.chunk(row + r, chunk))
                 : "memory");
    if (r < real) *reinterpret_cast<uint4*>(to + r * stride + 8 * chunk) = y;
  }
  __syncwarp();
}

// In one warp: running sums of 64 numbers, two of each lane.
__device__ inline float2 running_sums(float x, float y) {
  float all = x + y;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const float before = __shfl_up_sync(~0u, all, i);
    if (lane() >= i) all += before;
  }
  return {all - y, all};
}

}  // namespace horner::attn::kernels::cuda::delta
