// One warp holds a slice of the state of a head in registers: four columns (channels of values),
// eight lanes each, where the products with keys are summed, or four rows (channels of keys) where
// those with values are. No slice needs another.
#include "attn/kernels/cuda/common/launch.cuh"
#include "attn/kernels/cuda/delta/tokens.h"

namespace horner::attn::kernels::cuda {

namespace {

constexpr int kLanes = 8, kSlices = 4, kWarps = 4;

__device__ double sum_of_lanes(double x) {
#pragma unroll
  for (int i = 1; i < kLanes; i *= 2) x += __shfl_xor_sync(~0u, x, i);
  return x;
}

// The slices of this warp: of one head, `size` in each head.
struct Slice {
  int64_t head;  // b G + g
  int at, first;
  bool there;

  __device__ Slice(const Tokens& p, int size) {
    const int blocks = (size + kSlices - 1) / kSlices;
    const int64_t i = int64_t(blockIdx.x) * kWarps + warp();
    head = i / blocks, at = int(i % blocks) * kSlices + lane() / kLanes, first = lane() % kLanes;
    there = at < size && head < int64_t(p.B) * p.G;
    if (head >= int64_t(p.B) * p.G) head = 0;
    if (at >= size) at = 0;
  }
};

// N channels of a row, every kLanes-th from `first` on, 0 beyond `size`.
template <int N>
struct Row {
  float x[N];

  __device__ void load(const float* row, int first, int size) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = first + i * kLanes < size ? row[first + i * kLanes] : 0;
  }
};
template <int N>
struct Gates {
  double x[N];

  __device__ void load(const Tokens& p, int64_t token, int first) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      x[i] = !p.gates                   ? 1
             : !p.channels              ? p.gates[token]
             : first + i * kLanes < p.D ? p.gates[token * p.D + first + i * kLanes]
                                        : 0;
  }
};
__device__ double gate_of(const Tokens& p, int64_t token, int d) {
  return !p.gates ? 1 : p.channels ? p.gates[token * p.D + d] : p.gates[token];
}

// Element (d, e) of the state of a head.
__device__ int64_t place(const Tokens& p, int64_t head, int d, int e) {
  return (head * p.D + d) * p.state_row + e;
}
__device__ double state_at(const Tokens& p, int64_t head, int d, int e) {
  if (!p.before || d >= p.D || e >= p.E) return 0;
  const int64_t i = place(p, head, d, e);
  return p.state_in_double ? static_cast<const double*>(p.before)[i]
                           : static_cast<const float*>(p.before)[i];
}

// N and rest, and the state after the tokens. Slices: columns.
template <int N>
__global__ void forward_kernel(Tokens p) {
  const Slice s(p, p.E);
  const int R = p.H / p.G;
  double S[N];
#pragma unroll
  for (int i = 0; i < N; ++i) S[i] = state_at(p, s.head, s.first + i * kLanes, s.at);
  Row<N> k, q;
  Gates<N> g;
  k.load(p.k + s.head * p.T * p.D, s.first, p.D), g.load(p, s.head * p.T, s.first);
  for (int t = 0; t < p.T; ++t) {
    const int64_t token = s.head * p.T + t;
    const Row<N> key = k;
    const double v = p.v[token * p.E + s.at];
    double given = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) S[i] *= g.x[i], given += S[i] * key.x[i];
    if (t + 1 < p.T) k.load(p.k + (token + 1) * p.D, s.first, p.D), g.load(p, token + 1, s.first);
    double u = v;
    if (p.share) {
      const double rest = v - p.scale * sum_of_lanes(given);
      const float rounded = float(rest);
      u = double(p.share[token]) * rounded;
      if (p.rest && s.there && s.first == 0) p.rest[token * p.E + s.at] = rounded;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) S[i] += key.x[i] * u;
    for (int r = 0; r < R; ++r) {
      const int64_t row = (s.head * R + r) * p.T + t;
      q.load(p.q + row * p.D, s.first, p.D);
      double sum = 0;
#pragma unroll
      for (int i = 0; i < N; ++i) sum += S[i] * q.x[i];
      sum = sum_of_lanes(sum);
      if (s.there && s.first == 0) p.N[row * p.E + s.at] = float(p.scale * sum);
    }
  }
  if (!p.after || !s.there) return;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int d = s.first + i * kLanes;
    if (d >= p.D) continue;
    const int64_t to = place(p, s.head, d, s.at);
    if (p.state_in_double)
      static_cast<double*>(p.after)[to] = S[i];
    else
      static_cast<float*>(p.after)[to] = float(S[i]);
  }
}

// du: from the last token to the first, dS_t = scale q_t dN_t^T + what later tokens take. Slices:
// columns.
template <int N>
__global__ void backward_values_kernel(Tokens p) {
  const Slice s(p, p.E);
  const int R = p.H / p.G;
  double dS[N] = {};
  Row<N> k, q;
  Gates<N> g;
  for (int t = p.T - 1; t >= 0; --t) {
    const int64_t token = s.head * p.T + t;
    k.load(p.k + token * p.D, s.first, p.D), g.load(p, token, s.first);
    for (int r = 0; r < R; ++r) {
      const int64_t row = (s.head * R + r) * p.T + t;
      q.load(p.q + row * p.D, s.first, p.D);
      const double dN = p.scale * double(p.dN[row * p.E + s.at]);
#pragma unroll
      for (int i = 0; i < N; ++i) dS[i] += q.x[i] * dN;
    }
    double du = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) du += dS[i] * k.x[i];
    const float rounded = float(sum_of_lanes(du));
    if (s.there && s.first == 0) p.du[token * p.E + s.at] = rounded;
    const double taken = p.share ? double(p.scale) * double(p.share[token]) * rounded : 0;
#pragma unroll
    for (int i = 0; i < N; ++i) dS[i] = g.x[i] * (dS[i] - k.x[i] * taken);
  }
}

// dk by dS and u, from the last token to the first, with du known. Slices: rows.
template <int N>
__global__ void backward_keys_kernel(Tokens p) {
  const Slice s(p, p.D);
  const int R = p.H / p.G;
  double dS[N] = {};
  Row<N> u, du, dN;
  for (int t = p.T - 1; t >= 0; --t) {
    const int64_t token = s.head * p.T + t;
    u.load((p.share ? p.rest : p.v) + token * p.E, s.first, p.E);
    const double k = p.k[token * p.D + s.at], share = p.share ? p.share[token] : 1;
    for (int r = 0; r < R; ++r) {
      const int64_t row = (s.head * R + r) * p.T + t;
      dN.load(p.dN + row * p.E, s.first, p.E);
      const double q = p.scale * double(p.q[row * p.D + s.at]);
#pragma unroll
      for (int i = 0; i < N; ++i) dS[i] += q * dN.x[i];
    }
    double dk = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) dk += dS[i] * (share * u.x[i]);
    dk = sum_of_lanes(dk);
    if (s.there && s.first == 0) {
      p.dk[token * p.D + s.at] = float(dk);
      if (p.d_sums) p.d_sums[token * p.D + s.at] = -k * dk;
    }
    const double g = gate_of(p, token, s.at);
    if (p.share) du.load(p.du + token * p.E, s.first, p.E);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const double taken = p.share ? double(p.scale) * share * du.x[i] : 0;
      dS[i] = g * (dS[i] - k * taken);
    }
  }
}

// dq by S, and dk by what the tokens before take from its value. Slices: rows.
template <int N>
__global__ void backward_queries_kernel(Tokens p) {
  const Slice s(p, p.D);
  const int R = p.H / p.G;
  double S[N];
  Row<N> u, du, dN;
#pragma unroll
  for (int i = 0; i < N; ++i) S[i] = state_at(p, s.head, s.at, s.first + i * kLanes);
  for (int t = 0; t < p.T; ++t) {
    const int64_t token = s.head * p.T + t;
    u.load((p.share ? p.rest : p.v) + token * p.E, s.first, p.E);
    const double k = p.k[token * p.D + s.at], share = p.share ? p.share[token] : 1;
    const double g = gate_of(p, token, s.at);
    double dk = 0, flow = 0;
    if (p.share) {
      du.load(p.du + token * p.E, s.first, p.E);
#pragma unroll
      for (int i = 0; i < N; ++i) dk -= g * S[i] * (double(p.scale) * share * du.x[i]);
      dk = sum_of_lanes(dk), flow = k * dk;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) S[i] = g * S[i] + k * (share * u.x[i]);
    for (int r = 0; r < R; ++r) {
      const int64_t row = (s.head * R + r) * p.T + t;
      dN.load(p.dN + row * p.E, s.first, p.E);
      double dq = 0;
#pragma unroll
      for (int i = 0; i < N; ++i) dq += S[i] * dN.x[i];
      dq = p.scale * sum_of_lanes(dq), flow += double(p.q[row * p.D + s.at]) * dq;
      if (s.there && s.first == 0) p.dq[row * p.D + s.at] = float(dq);
    }
    if (!s.there || s.first != 0) continue;
    if (p.share) p.dk[token * p.D + s.at] += float(dk);
    if (p.d_sums) p.d_sums[token * p.D + s.at] += flow;
  }
}

template <class F>
void with_row(int size, const F& f) {
  check(size <= kMaxTokenChannels, "rows have at most ", kMaxTokenChannels, " channels, not ",
        size);
  if (size <= 16) return f(std::integral_constant<int, 2>());
  if (size <= 64) return f(std::integral_constant<int, 8>());
  f(std::integral_constant<int, 16>());
}
Grid grid(const Tokens& p, int size) {
  const int64_t warps = int64_t(p.B) * p.G * ceil_div(size, kSlices);
  return {ceil_div(warps, kWarps), 1, 32 * kWarps, 0};
}

}  // namespace

void tokens_forward(const Tokens& p, Stream stream) {
  with_row(p.D, [&](auto n) { launch(forward_kernel<n()>, grid(p, p.E), stream, p); });
}

void tokens_backward(const Tokens& p, Stream stream) {
  with_row(p.D, [&](auto n) { launch(backward_values_kernel<n()>, grid(p, p.E), stream, p); });
  with_row(p.E, [&](auto n) {
    launch(backward_keys_kernel<n()>, grid(p, p.D), stream, p);
    launch(backward_queries_kernel<n()>, grid(p, p.D), stream, p);
  });
}

}  // namespace horner::attn::kernels::cuda
