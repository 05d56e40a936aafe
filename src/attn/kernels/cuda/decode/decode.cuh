// A decode step: one query per head attends to the KV cache and to the state of earlier keys,
//   N = sum_s w(x_s) decay_s gate_s v_s + phi(q) S;  and the fold of cached keys into that state.
#pragma once

#include <cmath>
#include <type_traits>

#include "attn/kernels/cuda/decode/decode.h"

namespace horner::attn::kernels::cuda {

inline constexpr int kDecodeWarps = 4, kDecodeThreads = 32 * kDecodeWarps;
inline constexpr int kMaxDecodeHeads = 4;  // query heads per thread block
inline constexpr int kKeysPerPart = 256, kFeaturesPerPart = 64;

// How the work is split: parts of the keys, then parts of the features.
struct DecodeParts {
  int heads, groups;   // query heads per key head, in groups of kMaxDecodeHeads
  int keys, features;  // number of parts
  int64_t per_key_part, per_feature_part;
  HORNER_HD int all() const { return keys + features; }
};

template <class W>
struct DecodeArguments {
  Decode<float> c;  // its weight is unused on the GPU: w is
  W w;
  DecodeParts parts;
  float* scratch;  // [B, H, parts, E + 2]: N, W and the shift
};

// The number of monomials of degree p in the variables before i.
__device__ inline int monomials_before(int p, int i) {
  return p == 1 ? i : p == 2 ? i * (i + 1) / 2 : i * (i + 1) * (i + 2) / 6;
}
// One monomial feature: x_i[0] x_i[1] ..., with `order` variables, and its coefficient 1 / a!.
struct Term {
  int order, i[kMaxDecodeOrder];
  float coefficient;

  // Feature f of D variables and orders from `first`, in the order of cpu/chunked/monomials.h.
  __device__ Term(int D, int first, int f) : order(first), i{}, coefficient(1) {
    for (int n; f >= (n = order == 0 ? 1 : monomials_before(order, D)); ++order) f -= n;
    int power = 0;
#pragma unroll
    for (int n = 0; n < kMaxDecodeOrder; ++n) {
      const int p = order - n;
      if (p <= 0) break;
      int at = p == 1 ? f : p == 2 ? int(sqrtf(2.f * float(f))) : int(cbrtf(6.f * float(f)));
      at = min(at, n > 0 ? i[n - 1] : D - 1);
      while (monomials_before(p, at) > f) --at;
      while (at + 1 < D && monomials_before(p, at + 1) <= f) ++at;
      f -= monomials_before(p, at);
      power = n > 0 && at == i[n - 1] ? power + 1 : 1;
      coefficient /= float(power), i[n] = at;
    }
  }
  __device__ float of(const float* x) const {
    float y = order > 0 ? x[i[0]] : 1;
#pragma unroll
    for (int n = 1; n < kMaxDecodeOrder; ++n)
      if (n < order) y *= x[i[n]];
    return y;
  }
};

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// Of a cache in float32 or bfloat16: four channels of a key from i on, one of a value.
__device__ inline float4 four_of_keys(const Decode<float>& c, int64_t i) {
  if (!c.k16) return *reinterpret_cast<const float4*>(c.k + i);
  const uint2 x = *reinterpret_cast<const uint2*>(c.k16 + i);
  return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u),
                     __uint_as_float(x.y << 16), __uint_as_float(x.y & 0xffff0000u));
}

// N, W and shift of `heads` heads. Channels are spread over the lanes of a warp: coalesced reads.
template <int heads, int columns>
struct DecodeSums {
  float N[heads][columns], W[heads], top[heads];

  __device__ explicit DecodeSums(float start) : N{}, W{} {
#pragma unroll
    for (int r = 0; r < heads; ++r) top[r] = start;
  }
  static __device__ void load(float (&row)[columns], const float* from, int E) {
    const int lane = int(threadIdx.x) % 32;
#pragma unroll
    for (int j = 0; j < columns; ++j) row[j] = 32 * j + lane < E ? from[32 * j + lane] : 0;
  }
  static __device__ void load_values(float (&row)[columns], const Decode<float>& c, int64_t key) {
    if (!c.v16) return load(row, c.v + key * c.E, int(c.E));
    const uint16_t* const from = c.v16 + key * c.E;
    const int lane = int(threadIdx.x) % 32;
#pragma unroll
    for (int j = 0; j < columns; ++j) {
      const int e = 32 * j + lane;
      row[j] = e < c.E ? __uint_as_float(uint32_t(from[e]) << 16) : 0;
    }
  }
  __device__ void add(int r, float w, const float (&row)[columns]) {
#pragma unroll
    for (int j = 0; j < columns; ++j) N[r][j] += w * row[j];
  }
  __device__ void raise_shift(int r, float to) {
    if (!(to > top[r])) return;
    const float rescale = expf(top[r] - to);
    W[r] *= rescale, top[r] = to;
#pragma unroll
    for (int j = 0; j < columns; ++j) N[r][j] *= rescale;
  }
};

// The factor on the weight of key s: 0 if masked, otherwise its decay factor.
__device__ inline float key_scale(const Decode<float>& c, int64_t key_head, int64_t s, double now) {
  if (c.keep && !c.keep[key_head / c.G * c.room + s]) return 0;
  return c.decay ? float(exp(now - c.decay[key_head * c.room + s])) : 1;
}
__device__ inline double gates_now(const Decode<float>& c, int64_t key_head) {
  return c.decay && c.to > 0 ? c.decay[key_head * c.room + c.to - 1] : 0;
}

// The queries of a thread block: `count` heads of one key head.
struct DecodeQueries {
  int64_t key_head, first;
  int count;
  const float* q;  // [heads, width], in shared memory; 0 from `count` on
};

// Each warp takes four keys at a time, eight lanes per key.
template <class W, int heads, int columns>
__device__ inline void over_keys(const DecodeArguments<W>& d, const DecodeQueries& queries,
                                 int part, DecodeSums<heads, columns>& sums) {
  const Decode<float>& c = d.c;
  const int64_t key_head = queries.key_head;
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, width = int(c.width);
  const double now = gates_now(c, key_head);
  const int64_t begin = c.from + part * d.parts.per_key_part;
  const int64_t end = min(c.to, begin + d.parts.per_key_part);
  for (int64_t s0 = begin + 4 * warp; s0 < end; s0 += 4 * kDecodeWarps) {
    const int64_t s = min(s0 + lane / 8, end - 1);
    const int64_t key = (key_head * c.room + s) * c.width;
    float values[4][columns];  // loads in flight during the products
#pragma unroll
    for (int j = 0; j < 4; ++j)
      sums.load_values(values[j], c, key_head * c.room + min(s0 + j, end - 1));
    float x[heads] = {};
#pragma unroll 2
    for (int i = lane % 8 * 4; i < width; i += 32) {
      const float4 k = four_of_keys(c, key + i);
#pragma unroll
      for (int r = 0; r < heads; ++r) {
        const float4 q = *reinterpret_cast<const float4*>(queries.q + r * width + i);
        x[r] += q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w;
      }
    }
    const float factor = s0 + lane / 8 < end ? key_scale(c, key_head, s, now) : 0;
    const float gate = c.gate ? c.gate[key_head * c.room + s] : 1;
#pragma unroll
    for (int r = 0; r < heads; ++r) {
#pragma unroll
      for (int step = 1; step < 8; step *= 2) x[r] += __shfl_xor_sync(~0u, x[r], step);
      const float centre = c.centre && r < queries.count ? c.centre[queries.first + r] : 0;
      const float y = fminf(x[r] * c.scale - centre, c.clamp);
      float w;
      if constexpr (std::is_same_v<W, Exp>) {
        float top = factor == 0 ? -INFINITY : y;
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 8));
        sums.raise_shift(r, fmaxf(top, __shfl_xor_sync(~0u, top, 16)));
        w = factor == 0 ? 0 : expf(y - sums.top[r]) * factor;
      } else {
        w = weight(d.w, y).w * factor;
      }
      if (lane % 8 == 0) sums.W[r] += w;
#pragma unroll
      for (int j = 0; j < 4; ++j) sums.add(r, __shfl_sync(~0u, w * gate, 8 * j), values[j]);
    }
  }
}

// The factor of one order in e_N(x - b) = sum_n e_{N-n}(-b) x^n / n!, times the state's decay.
__device__ inline float order_factor(const Decode<float>& c, int64_t head, int order, double now) {
  float e = 1;
  if (c.centre) {
    const float b = -c.centre[head];
    float term = 1;
    for (int m = 1; m <= c.last - order; ++m) term *= b / float(m), e += term;
  }
  return c.decay ? e * float(exp(now)) : e;
}

template <class W, int heads, int columns>
__device__ inline void over_features(const DecodeArguments<W>& d, const DecodeQueries& queries,
                                     float* phi, int part, DecodeSums<heads, columns>& sums) {
  const Decode<float>& c = d.c;
  const int64_t key_head = queries.key_head;
  const int warp = int(threadIdx.x) / 32;
  const double now = gates_now(c, key_head);
  const int64_t begin = part * d.parts.per_feature_part;
  const int64_t end = min(c.F, begin + d.parts.per_feature_part);
  for (int64_t f0 = begin; f0 < end; f0 += kFeaturesPerPart) {
    const int n = int(min(end - f0, int64_t(kFeaturesPerPart)));
    __syncthreads();
    for (int i = int(threadIdx.x); i < n * heads; i += kDecodeThreads) {
      const int r = i / n, f = i % n;
      const Term term(int(c.D), c.first, int(f0) + f);
      float y = term.of(queries.q + r * c.width);
      for (int p = 0; p < term.order; ++p) y *= c.scale;
      if (r < queries.count) y *= order_factor(c, queries.first + r, term.order, now);
      phi[r * kFeaturesPerPart + f] = y;
    }
    __syncthreads();
    const float* const S = c.S + (key_head * c.F + f0) * c.E;
#pragma unroll 8
    for (int f = warp; f < n; f += kDecodeWarps) {
      float row[columns];
      sums.load(row, S + f * c.E, int(c.E));
#pragma unroll
      for (int r = 0; r < heads; ++r) sums.add(r, phi[r * kFeaturesPerPart + f], row);
    }
    for (int f = int(threadIdx.x); f < n; f += kDecodeThreads)
#pragma unroll
      for (int r = 0; r < heads; ++r)
        sums.W[r] += phi[r * kFeaturesPerPart + f] * c.z[key_head * c.F + f0 + f];
  }
}

template <class W, int heads, int columns>
__global__ __launch_bounds__(kDecodeThreads) void decode_attend_kernel(
    const __grid_constant__ DecodeArguments<W> d) {
  __shared__ __align__(16) float q[heads * kMaxDecodeChannels];
  __shared__ float phi[heads * kFeaturesPerPart];
  __shared__ float parts[kDecodeWarps][kMaxDecodeChannels + 2];
  const Decode<float>& c = d.c;
  const int group = int(blockIdx.x) % d.parts.groups, part = int(blockIdx.y);
  const int64_t key_head = blockIdx.x / d.parts.groups;
  const DecodeQueries queries{key_head, key_head * d.parts.heads + group * heads,
                              min(heads, d.parts.heads - group * heads), q};
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, E = int(c.E);
  for (int i = int(threadIdx.x); i < heads * int(c.width); i += kDecodeThreads)
    q[i] = i < queries.count * int(c.width) ? c.q[queries.first * c.width + i] : 0;
  __syncthreads();
  DecodeSums<heads, columns> sums(std::is_same_v<W, Exp> ? -INFINITY : 0);
  if (part < d.parts.keys)
    over_keys(d, queries, part, sums);
  else
    over_features(d, queries, phi, part - d.parts.keys, sums);

#pragma unroll
  for (int r = 0; r < heads; ++r) {
    if (r >= queries.count) break;
    const float W_r = warp_sum(sums.W[r]);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < columns; ++j)
      if (32 * j + lane < E) parts[warp][32 * j + lane] = sums.N[r][j];
    if (lane == 0) parts[warp][E] = W_r, parts[warp][E + 1] = sums.top[r];
    __syncthreads();
    float top = -INFINITY;
    for (int i = 0; i < kDecodeWarps; ++i) top = fmaxf(top, parts[i][E + 1]);
    float* const to = d.scratch + ((queries.first + r) * d.parts.all() + part) * (E + 2);
    for (int e = int(threadIdx.x); e <= E; e += kDecodeThreads) {
      float sum = 0;
      for (int i = 0; i < kDecodeWarps; ++i)
        if (parts[i][E + 1] > -INFINITY) sum += parts[i][e] * expf(parts[i][E + 1] - top);
      to[e] = sum;
    }
    if (threadIdx.x == 0) to[E + 1] = top;
  }
}

// Combines the parts of each head at a common shift.
static __global__ void decode_combine_kernel(Decode<float> c, int parts, const float* scratch) {
  const int E = int(c.E);
  const int64_t head = blockIdx.x;
  const float* const from = scratch + head * parts * (E + 2);
  float top = -INFINITY;
  for (int i = 0; i < parts; ++i) top = fmaxf(top, from[i * (E + 2) + E + 1]);
  for (int e = int(threadIdx.x); e <= E; e += int(blockDim.x)) {
    float sum = 0;
    for (int i = 0; i < parts; ++i) {
      const float shift = from[i * (E + 2) + E + 1];
      if (shift > -INFINITY) sum += from[i * (E + 2) + e] * expf(shift - top);
    }
    e < E ? c.N[head * E + e] = sum : c.W[head] = sum;
  }
  if (threadIdx.x == 0) c.shift[head] = top == -INFINITY ? 0 : top;
}

// A thread block owns 64 features x 64 channels of one state, a thread 16 features of a channel.
inline constexpr int kFoldThreads = 256, kFoldFeatures = 64, kFoldTokens = 16;
static __global__ void __launch_bounds__(kFoldThreads) decode_fold_kernel(Decode<float> c) {
  __shared__ float keys[kFoldTokens][kMaxDecodeChannels + 1];
  __shared__ float values[kFoldTokens][64], factor[kFoldTokens];
  __shared__ __align__(16) float phi[kFoldTokens][kFoldFeatures + 4];
  static_assert(kFoldThreads % kFoldFeatures == 0);
  constexpr int kOwn = 16, kTilesTogether = 16;  // two-level sum, for accuracy
  const int64_t key_head = blockIdx.x, f0 = int64_t(blockIdx.y) * kFoldFeatures;
  const int e0 = int(blockIdx.z) * 64, e = e0 + int(threadIdx.x) % 64;
  const int own = int(threadIdx.x) / 64 * kOwn;
  const double now = gates_now(c, key_head);
  const int n = int(min(c.F - f0, int64_t(kFoldFeatures)));
  const int mine = int(threadIdx.x) % kFoldFeatures;  // the feature that this thread computes
  const Term term(int(c.D), c.first, int(f0) + min(mine, n - 1));
  float sum[kOwn] = {}, total[kOwn] = {}, z_sum = 0, z_total = 0;
  int tiles = 0;
  for (int64_t s0 = c.from; s0 < c.to; s0 += kFoldTokens) {
    __syncthreads();
    const int tokens = int(min(c.to - s0, int64_t(kFoldTokens)));
    for (int i = int(threadIdx.x); i < kFoldTokens * int(c.D); i += kFoldThreads) {
      const int t = i / int(c.D), d = i % int(c.D);
      keys[t][d] = t < tokens ? c.k[(key_head * c.room + s0 + t) * c.width + d] : 0;
    }
    for (int i = int(threadIdx.x); i < kFoldTokens * 64; i += kFoldThreads) {
      const int t = i / 64, at = e0 + i % 64;
      values[t][i % 64] = t < tokens && at < c.E ? c.v[(key_head * c.room + s0 + t) * c.E + at] : 0;
    }
    if (threadIdx.x < kFoldTokens)
      factor[threadIdx.x] =
          int(threadIdx.x) < tokens ? key_scale(c, key_head, s0 + threadIdx.x, now) : 0;
    __syncthreads();
    for (int t = int(threadIdx.x) / kFoldFeatures; t < kFoldTokens;
         t += kFoldThreads / kFoldFeatures)
      phi[t][mine] = mine < n ? factor[t] * term.coefficient * term.of(keys[t]) : 0;
    __syncthreads();
#pragma unroll 4
    for (int t = 0; t < kFoldTokens; ++t) {
      const float v = values[t][threadIdx.x % 64];
#pragma unroll
      for (int i = 0; i < kOwn; i += 4) {
        const float4 p = *reinterpret_cast<const float4*>(&phi[t][own + i]);
        sum[i] += p.x * v, sum[i + 1] += p.y * v, sum[i + 2] += p.z * v, sum[i + 3] += p.w * v;
      }
      if (threadIdx.x < kFoldFeatures) z_sum += phi[t][threadIdx.x];
    }
    if (++tiles % kTilesTogether != 0 && s0 + kFoldTokens < c.to) continue;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) total[i] += sum[i], sum[i] = 0;
    z_total += z_sum, z_sum = 0;
  }
  const float decay = c.decay ? float(exp(now)) : 1;
#pragma unroll
  for (int i = 0; i < kOwn; ++i)
    if (own + i < n && e < c.E) {
      float& S = c.S[(key_head * c.F + f0 + own + i) * c.E + e];
      S = S * decay + total[i];
    }
  if (blockIdx.z == 0 && int(threadIdx.x) < n) {
    float& z = c.z[key_head * c.F + f0 + threadIdx.x];
    z = z * decay + z_total;
  }
}

}  // namespace horner::attn::kernels::cuda
