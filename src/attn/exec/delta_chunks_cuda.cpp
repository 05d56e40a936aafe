#include "attn/exec/delta_chunks_cuda.h"

#include <ATen/ATen.h>

#include "attn/exec/autograd.h"
#include "attn/exec/counted_cuda.h"
#include "attn/exec/cuda.h"
#include "attn/exec/cuda_stream.h"
#include "attn/kernels/cuda/delta/chunks.h"
#include "attn/kernels/cuda/delta/norm.h"

namespace horner::attn::exec {

namespace cuda = kernels::cuda;
using cuda::DeltaChunks;

namespace {

struct DeltaJob {
  double scale, most;
  DeltaGates gates;
  DeltaState state;
};
// What backward needs: numbers of tokens, and matrices of chunks (chunks.h).
struct ChunksResult {
  at::Tensor N, numbers, left, S, rest, sums, q_from_start, k_to_end, k_from_start;

  static auto outputs(auto& r) { return std::array{&r.N}; }
  static auto saved(auto& r) {
    return std::array{&r.numbers, &r.left,         &r.S,        &r.rest,
                      &r.sums,    &r.q_from_start, &r.k_to_end, &r.k_from_start};
  }
};

DeltaChunks problem(const DeltaJob& job, const DeltaInputs& x) {
  DeltaChunks p{};
  p.B = int(x.q.size(0)), p.H = int(x.q.size(1)), p.T = int(x.q.size(2)), p.C = int(x.q.size(3));
  p.scale = float(job.scale), p.most = float(job.most);
  p.q = view(x.q), p.k = view(x.k), p.v = view(x.v);
  p.beta = memory<float>(x.beta), p.logs = memory<float>(x.logs);
  p.channel_logs = typed(x.channel_logs);
  if (const at::Tensor& S = job.state.after; S.defined())
    p.state = {job.state.before.data_ptr(),
               S.data_ptr(),
               int(S.size(1)),
               int(S.size(2)),
               int(job.state.E),
               int(S.size(3)),
               S.scalar_type() == at::kDouble};
  return p;
}
void set_saved(DeltaChunks& p, const ChunksResult& r) {
  const int64_t n = p.records() * cuda::kChunkTokens;
  if (p.beta) {
    float* numbers = memory<float>(r.numbers);
    p.share = numbers, p.own = numbers + n, p.sums = numbers + 2 * n, p.factor = numbers + 3 * n;
  }
  p.left = memory<float>(r.left), p.S = memory<void>(r.S), p.rest = memory<void>(r.rest);
  p.channel_sums = memory<float>(r.sums), p.q_from_start = memory<void>(r.q_from_start);
  p.k_to_end = memory<void>(r.k_to_end), p.k_from_start = memory<void>(r.k_from_start);
}

// The kernels take a NaN among the logs for one far below 0.
void spoil(const DeltaJob& job, const DeltaChunks& p, at::TensorList rows,
           at::TensorList by_last = {}) {
  if (!job.gates.logs.defined()) return;
  cuda::Seen seen{.T = p.T, .S = p.T, .causal = true};
  seen.keep = memory<uint8_t>(job.gates.keep);
  spoil_rows(job.gates.logs, seen, {}, rows, by_last);
}

ChunksResult forward(const DeltaJob& job, const DeltaInputs& x, bool) {
  DeltaChunks p = problem(job, x);
  const auto narrow = x.q.options(), wide = narrow.dtype(at::kFloat);
  const int64_t n = p.records(), C = p.C, tokens = cuda::kChunkTokens;
  const bool channels = bool(p.channel_logs);
  ChunksResult r;
  r.N = at::empty({p.B, p.H, p.T, C}, narrow), r.S = at::empty({n, C, C}, narrow);
  r.left = at::empty({n, channels ? C : 1}, wide);
  at::Tensor taken, given;
  if (p.beta) {
    r.numbers = at::empty({4, n, tokens}, wide), r.rest = at::empty({n, C, tokens}, narrow);
    taken = at::empty({n, C, tokens}, narrow), given = at::empty({n, C, tokens}, wide);
  }
  if (channels) {
    r.sums = at::empty({n, tokens, C}, wide), r.q_from_start = at::empty({n, tokens, C}, narrow);
    r.k_to_end = at::empty_like(r.q_from_start);
    if (p.beta) r.k_from_start = at::empty_like(r.q_from_start);
  }
  set_saved(p, r);
  p.N = r.N.data_ptr(), p.taken = memory<void>(taken), p.given = memory<float>(given);
  cuda::delta_forward(p, stream());
  spoil(job, p, {r.N});
  return r;
}

DeltaInputs backward(const DeltaJob& job, const DeltaInputs& x, const ChunksResult& r,
                     const ChunksResult& grads) {
  DeltaChunks p = problem(job, x);
  set_saved(p, r);
  const auto narrow = x.q.options(), wide = narrow.dtype(at::kFloat);
  const int64_t n = p.records(), C = p.C, tokens = cuda::kChunkTokens;
  const at::Tensor dN = laid_out(grads.N), dS = at::empty({n, C, C}, narrow);
  at::Tensor taken, given, factor, state, dv_t;
  if (p.beta) {
    taken = at::empty({n, C, tokens}, narrow), given = at::empty({n, C, tokens}, wide);
    factor = at::empty({n, tokens}, wide), state = at::empty({n, C, C}, narrow);
    dv_t = at::empty({n, C, tokens}, narrow);
  }
  const std::vector<int64_t> rows{p.B, p.H, p.T, C}, each{p.B, p.H, p.T};
  DeltaInputs d{at::empty(rows, narrow), at::empty(rows, narrow), at::empty(rows, narrow)};
  if (x.beta.defined()) d.beta = at::empty(each, wide);
  if (x.logs.defined()) d.logs = at::empty(each, wide);
  if (x.channel_logs.defined()) d.channel_logs = at::empty(rows, x.channel_logs.options());
  p.dN = view(dN), p.d_taken = memory<void>(taken), p.d_given = memory<float>(given);
  p.d_factor = memory<float>(factor), p.d_state = memory<void>(state);
  p.dS = dS.data_ptr(), p.dv_t = memory<void>(dv_t);
  p.dq = d.q.data_ptr(), p.dk = d.k.data_ptr(), p.dv = d.v.data_ptr();
  p.d_beta = memory<float>(d.beta), p.d_logs = memory<float>(d.logs);
  p.d_channel_logs = typed(d.channel_logs);
  cuda::delta_backward(p, stream());
  spoil(job, p, {d.q}, {d.k, d.v, d.beta, d.logs, d.channel_logs});
  return d;
}

struct NormJob {
  double eps;
};
struct NormInputs {
  at::Tensor N, weight;

  static auto fields(auto& x) { return std::array{&x.N, &x.weight}; }
};
cuda::NormedRows problem(const NormJob& job, const NormInputs& x) {
  cuda::NormedRows p{};
  p.rows = x.N.size(0) * x.N.size(1) * x.N.size(2), p.stride = int(x.N.size(3));
  p.channels = int(x.weight.size(0)), p.eps = float(job.eps);
  p.weight = memory<float>(x.weight), p.N = x.N.data_ptr();
  return p;
}
Output norm_forward(const NormJob& job, const NormInputs& x, bool) {
  cuda::NormedRows p = problem(job, x);
  const Output r{
      at::empty({x.N.size(0), x.N.size(1), x.N.size(2), x.weight.size(0)}, x.N.options())};
  p.o = r.y.data_ptr();
  cuda::norm_forward(p, stream());
  return r;
}
NormInputs norm_backward(const NormJob& job, const NormInputs& x, const Output&,
                         const Output& grads) {
  cuda::NormedRows p = problem(job, x);
  const at::Tensor d_o = grads.y.contiguous();
  const at::Tensor parts = at::empty({cuda::norm_blocks(p), p.stride}, x.weight.options());
  const at::Tensor dN = at::empty_like(x.N);
  p.d_o = d_o.data_ptr(), p.dN = dN.data_ptr(), p.d_weight = memory<float>(parts);
  cuda::norm_backward(p, stream());
  return {dN, parts.sum(0).narrow(0, 0, p.channels)};
}

}  // namespace

at::Tensor delta_in_chunks(const DeltaInputs& x, double scale, double most, const DeltaGates& gates,
                           const DeltaState& state) {
  const DeltaJob job{scale, most, gates, state};
  return differentiable("chunked_cuda", job, x, forward, backward).N;
}

bool has_room_for_chunks(int64_t channels, bool channel_gates, bool corrected, int device) {
  return cuda::delta_shared_memory(int(channels), channel_gates, corrected) <=
         cuda::shared_memory(device);
}

at::Tensor rms_of_rows(const at::Tensor& N, const at::Tensor& weight, double eps) {
  const NormInputs x{N.contiguous(), weight};
  return differentiable("chunked_cuda", NormJob{eps}, x, norm_forward, norm_backward).y;
}

}  // namespace horner::attn::exec
