#include "attn/exec/chunk_rows.h"

#include <ATen/ATen.h>

#include <cmath>

#include "attn/exec/cpu.h"
#include "attn/exec/large.h"
#include "attn/parallel.h"

namespace horner::attn::exec {

bool is_elementwise(const Features& f) {
  return is<Identity>(f) || is<Elu1>(f) || is<Relu>(f);
}

// f(x), 0 in the channels from D on.
static at::Tensor mapped_rows(const Features& f, const at::Tensor& x, int64_t D) {
  if (is<Identity>(f)) return {};
  at::Tensor y = large_empty(x.sizes(), x.options());
  if (is<Relu>(f)) return at::clamp_min_out(y, x, 0);
  at::elu_out(y, x).add_(1);
  if (D < x.size(-1)) y.narrow(-1, D, x.size(-1) - D).zero_();
  return y;
}

// Calls f(row) for every row, many at a time.
template <class F>
static void for_each_row(int64_t rows, const F& f) {
  constexpr int64_t kEach = 256;
  for_each_task((rows + kEach - 1) / kEach, [&](int64_t i) {
    for (int64_t row = i * kEach; row < std::min(rows, (i + 1) * kEach); ++row) f(row);
  });
}

// Both features have a derivative that their value tells: e^x = f(x) below 0 and 1 above it for
// Elu1; 0 or 1 for Relu.
template <class R>
static void times_derivative(const Features& f, const at::Tensor& d, const at::Tensor& mapped) {
  if (is<Identity>(f)) return;
  const bool relu = is<Relu>(f);
  const int64_t C = d.size(-1);
  for_each_row(d.numel() / C, [&, to = pointer<R>(d), y = pointer<R>(mapped)](int64_t row) {
    for (int64_t i = row * C; i < (row + 1) * C; ++i)
      to[i] *= relu ? (y[i] <= 0 ? R(0) : R(1)) : (y[i] > 1 ? R(1) : y[i]);
  });
}

// Z of Sum, and whether it is W.
template <class R>
static R bounded(R W, bool* is_W = nullptr) {
  constexpr R kTiny = R(1e-6);
  const bool small = std::abs(W) < kTiny;
  if (is_W) *is_W = !small;
  return small ? (W < 0 ? -kTiny : kTiny) : W;
}

template <class R>
RowsResult chunk_rows(const RowsJob& job, const ChunkTensors& x, bool for_backward) {
  const auto kernels = x.channels.defined() ? channel_sums<R> : chunk_sums<R>;
  RowsResult r;
  r.q = mapped_rows(job.features, x.q, job.chunks.D);
  r.k = mapped_rows(job.features, x.k, job.chunks.D);
  ChunkTensors y = x;
  if (r.q.defined()) y.q = r.q, y.k = r.k;
  r.sums = kernels(job.chunks, y, for_backward);
  if (job.divided) {
    const int64_t E = r.sums.N.size(-1);
    for_each_row(r.sums.W.numel(),
                 [&, N = pointer<R>(r.sums.N), W = pointer<R>(r.sums.W)](int64_t row) {
                   const R per_Z = 1 / bounded(W[row]);
                   for (int64_t e = 0; e < E; ++e) N[row * E + e] *= per_Z;
                 });
  }
  return r;
}

template <class R>
ChunkTensors chunk_rows_backward(const RowsJob& job, const ChunkTensors& x, const RowsResult& r,
                                 const RowsResult& grads) {
  const auto kernels = x.channels.defined() ? channel_sums_backward<R> : chunk_sums_backward<R>;
  ChunkTensors y = x;
  if (r.q.defined()) y.q = r.q, y.k = r.k;
  ChunkResult d = grads.sums;
  if (job.divided) {
    const at::Tensor given = d.N.contiguous(), sums = d.W.contiguous();
    const int64_t E = given.size(-1);
    d.N = large_empty(given.sizes(), given.options()), d.W = at::empty_like(sums);
    for_each_row(sums.numel(),
                 [&, g = pointer<R>(given), o = pointer<R>(r.sums.N), W = pointer<R>(r.sums.W),
                  dW = pointer<R>(d.W), own = pointer<R>(sums), dN = pointer<R>(d.N)](int64_t row) {
                   bool is_W;
                   const R per_Z = 1 / bounded(W[row], &is_W);
                   R along = 0;
                   for (int64_t i = row * E; i < (row + 1) * E; ++i)
                     along += g[i] * o[i], dN[i] = g[i] * per_Z;
                   dW[row] = own[row] - (is_W ? along * per_Z : R(0));
                 });
  }
  const ChunkTensors dx = kernels(job.chunks, y, r.sums, d);
  times_derivative<R>(job.features, dx.q, r.q);
  times_derivative<R>(job.features, dx.k, r.k);
  return dx;
}

template RowsResult chunk_rows<float>(const RowsJob&, const ChunkTensors&, bool);
template RowsResult chunk_rows<double>(const RowsJob&, const ChunkTensors&, bool);
template ChunkTensors chunk_rows_backward<float>(const RowsJob&, const ChunkTensors&,
                                                 const RowsResult&, const RowsResult&);
template ChunkTensors chunk_rows_backward<double>(const RowsJob&, const ChunkTensors&,
                                                  const RowsResult&, const RowsResult&);

}  // namespace horner::attn::exec
