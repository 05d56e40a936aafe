// From chunk to chunk: the state, or in reverse its gradient. A warp holds 16 columns of the state
// of a head, transposed, in registers, where they are operands of its products as they are; tiles
// of the next chunks arrive meanwhile.
#pragma once

#include "attn/kernels/cuda/delta/solve.cuh"

namespace horner::attn::kernels::cuda::delta {

// What there is: `corrected`, the delta rule; `channels`, gates of channels.
template <int C, bool reverse, bool channels, bool corrected>
struct ScanShape {
  static constexpr int kTaken = corrected ? C * kTokens * 2 : 0, kKeys = kTokens * C * 2;
  // fragments of what the values are without the state, or the values themselves
  static constexpr int kGiven = corrected ? kWarps * (kTokens / 8) * 32 * 16 : kTokens * 64 * 2;
  static constexpr int kAdded = corrected && reverse ? kWarps * (C / 16) * 32 * 16 : 0;
  static constexpr int kKeysAt = kTaken, kGivenAt = kKeysAt + kKeys, kAddedAt = kGivenAt + kGiven;
  static constexpr int kFactorAt = kAddedAt + kAdded, kLeftAt = kFactorAt + kTokens * 4;
  static constexpr int kStage = (kLeftAt + (channels ? C * 4 : 4) + 1023) / 1024 * 1024;
  static constexpr int kStages = C == 64 ? 3 : corrected ? 2 : 3;
  static constexpr int kThroughAt = kStages * kStage;  // of each warp: [16, C]
  static constexpr int kBytes = kThroughAt + kWarps * 16 * C * 2;
};

template <int n>
__device__ inline void cp_async_wait_but() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(n) : "memory");
}
__device__ inline void cp_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
__device__ inline float4 load_floats(uint32_t at) {
  float4 y;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(y.x), "=f"(y.y), "=f"(y.z), "=f"(y.w)
               : "r"(at)
               : "memory");
  return y;
}

// Between a thread's part of a head's state, transposed, and its memory.
template <int C>
__device__ inline void load_state(float (&S)[C / 8][4], const StateMemory& m, int64_t head,
                                  int first) {
#pragma unroll
  for (int j = 0; j < C / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int d = 8 * j + column_in(i), e = first + row_in(i);
      if (d >= m.D || e >= m.E) continue;
      const int64_t at = m.place(head, d, e);
      S[j][i] = m.in_double ? float(static_cast<const double*>(m.before)[at])
                            : static_cast<const float*>(m.before)[at];
    }
}
template <int C>
__device__ inline void store_state(const float (&S)[C / 8][4], const StateMemory& m, int64_t head,
                                   int first) {
#pragma unroll
  for (int j = 0; j < C / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int d = 8 * j + column_in(i), e = first + row_in(i);
      if (d >= m.D || e >= m.E) continue;
      const int64_t at = m.place(head, d, e);
      if (m.in_double)
        static_cast<double*>(m.after)[at] = S[j][i];
      else
        static_cast<float*>(m.after)[at] = S[j][i];
    }
}

//   x = given + S taken,   S := left S + (factor x) k,   in reverse with d_state added
// Without the delta rule x is the values, or in reverse dN, with the queries as k.
// blockIdx: the head, and the block of 64 columns.
template <int C, bool reverse, bool channels, bool corrected>
__global__ void __launch_bounds__(kThreads) scan_kernel(DeltaChunks p) {
  using Shape = ScanShape<C, reverse, channels, corrected>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const int chunks = p.chunks(), own = int(blockIdx.y) * kWarps + warp();  // of 16 columns
  const int64_t first = int64_t(blockIdx.x) * chunks;
  const void* taken = reverse ? p.d_taken : p.taken;
  const float* given = reverse ? p.d_given : p.given;
  const float* factor = reverse ? p.d_factor : p.factor;
  const void* keys = !reverse ? p.k_to_end : corrected ? p.k_from_start : p.q_from_start;
  const uint32_t base = shared_address(memory);
  const auto record_of = [&](int step) { return first + (reverse ? chunks - 1 - step : step); };
  const auto load = [&](int step) {
    if (step < chunks) {
      const int64_t record = record_of(step);
      const Chunk c(p, record);
      const uint32_t stage = base + uint32_t(step % Shape::kStages * Shape::kStage);
      const Rows<C> k{stage + Shape::kKeysAt};
      const int i = int(threadIdx.x);
      if constexpr (channels) {
        copy_matrix<kTokens>(k, at(keys, record, kTokens * C));
        if (i < C / 4)
          cp_async_16(stage + Shape::kLeftAt + uint32_t(16 * i), p.left + record * C + 4 * i, true);
      } else {
        c.copy(k, p.k);
        if (i == 32) cp_async_4(stage + Shape::kLeftAt, p.left + record);
      }
      if constexpr (corrected) {
        copy_matrix<C>(Pairs{stage}, at(taken, record, C * kTokens));
        const float4* from = fragments_of<C>(const_cast<float*>(given), record, own);
        const uint32_t to =
            stage + Shape::kGivenAt + uint32_t((warp() * (kTokens / 8) * 32 + lane()) * 16);
#pragma unroll
        for (int j = 0; j < kTokens / 8; ++j)
          cp_async_16(to + uint32_t(512 * j), from + 32 * j, true);
        if (i < kTokens / 4)
          cp_async_16(stage + Shape::kFactorAt + uint32_t(16 * i),
                      factor + record * kTokens + 4 * i, true);
      } else {
        const View& x = reverse ? p.dN : p.v;
        copy_rows<kTokens, kThreads>(Rows<64>{stage + Shape::kGivenAt}, c.rows(x) + 64 * blockIdx.y,
                                     x.row, c.real, 64);
      }
      if constexpr (corrected && reverse) {
        const uint4* add = static_cast<const uint4*>(p.d_state) +
                           (record * (C / 16) + own) * (C / 16) * 32 + lane();
        const uint32_t added =
            stage + Shape::kAddedAt + uint32_t((warp() * (C / 16) * 32 + lane()) * 16);
#pragma unroll
        for (int j = 0; j < C / 16; ++j) cp_async_16(added + uint32_t(512 * j), add + 32 * j, true);
      }
    }
    cp_async_commit();
  };

  float S[C / 8][4] = {};
  const int repeats = p.state.G > 0 ? p.H / p.state.G : 1;
  const int64_t group = int64_t(blockIdx.x) / repeats;
  if (!reverse && p.state.before) load_state<C>(S, p.state, group, 16 * own);
  const Rows<C> through{base + uint32_t(Shape::kThroughAt + warp() * 16 * C * 2)};
#pragma unroll 1
  for (int i = 0; i + 1 < Shape::kStages; ++i) load(i);
#pragma unroll 1
  for (int step = 0; step < chunks; ++step) {
    cp_async_wait_but<Shape::kStages - 2>();
    __syncthreads();
    load(step + Shape::kStages - 1);
    const int64_t record = record_of(step);
    const int offset = step % Shape::kStages * Shape::kStage;
    const uint32_t stage = base + uint32_t(offset);
    const auto* numbers = reinterpret_cast<const float*>(memory + offset + Shape::kFactorAt);
    const auto* left = reinterpret_cast<const float*>(memory + offset + Shape::kLeftAt);
    write_rows(S, through, 0, at(reverse ? p.dS : p.S, record, C * C) + own * 16 * C, C, 16);
    Fragments x;
    if constexpr (corrected) {
#pragma unroll
      for (int j = 0; j < kTokens / 8; ++j) {
        const float4 y = load_floats(stage + Shape::kGivenAt +
                                     uint32_t(((warp() * (kTokens / 8) + j) * 32 + lane()) * 16));
        x[j][0] = y.x, x[j][1] = y.y, x[j][2] = y.z, x[j][3] = y.w;
      }
      const M::BColumns<kTokens> of_taken(Pairs{stage}, 0, 0);
#pragma unroll
      for (int d = 0; d < C / 16; ++d) {
        const M::A a = M::to_a_operand(S, d);
#pragma unroll
        for (int j = 0; j < kTokens / 8; j += 2)
          M::multiply<true>(x[j], x[j + 1], a, of_taken.at(16 * d, 8 * j));
      }
    }
    if constexpr (channels) {
      scale_columns(S, left);
    } else {
      const float by = *left;
#pragma unroll
      for (int d = 0; d < C / 8; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) S[d][i] *= by;
    }
    if constexpr (corrected && reverse) {
#pragma unroll
      for (int d = 0; d < C / 16; ++d) {
        const float4 y = load_floats(stage + Shape::kAddedAt +
                                     uint32_t(((warp() * (C / 16) + d) * 32 + lane()) * 16));
        const float words[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 two = unpack2(bf16(), __float_as_uint(words[i]));
          S[2 * d + i / 2][i % 2 * 2] += two.x, S[2 * d + i / 2][i % 2 * 2 + 1] += two.y;
        }
      }
    }
    if constexpr (corrected) {
      bf16* to = at(reverse ? p.dv_t : p.rest, record, C * kTokens) + own * 16 * kTokens;
      write_rows(x, Pairs{through.at}, 0, to, kTokens, 16);
      scale_columns(x, numbers);
    }
    const M::AColumns<64> of_values(Rows<64>{stage + Shape::kGivenAt}, 0, 16 * warp());
    const M::BColumns<C> of_keys(Rows<C>{stage + Shape::kKeysAt}, 0, 0);
#pragma unroll
    for (int k = 0; k < kTokens / 16; ++k) {
      const M::A a = corrected ? M::to_a_operand(x, k) : of_values.at(16 * k, 0);
#pragma unroll
      for (int d = 0; d < C / 8; d += 2)
        M::multiply<true>(S[d], S[d + 1], a, of_keys.at(16 * k, 8 * d));
    }
  }
  if (!reverse && p.state.after && int(blockIdx.x) % repeats == 0)
    store_state<C>(S, p.state, group, 16 * own);
}

}  // namespace horner::attn::kernels::cuda::delta
