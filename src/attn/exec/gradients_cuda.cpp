#include "attn/exec/gradients_cuda.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include "attn/exec/cuda.h"
#include "attn/exec/cuda_stream.h"
#include "attn/kernels/cuda/fused/fused.h"

namespace horner::attn::exec {

namespace cuda = kernels::cuda;

FusedSums::FusedSums(cuda::Fused& f, const cuda::Weights& weights, const at::TensorOptions& options)
    : o(at::empty({f.B, f.H, f.T, f.E}, options)),
      rows(at::empty({3, f.B, f.H, f.T}, options.dtype(at::kFloat))) {
  f.o = o.data_ptr(), f.W = memory<float>(rows);
  f.shift = f.W + rows[0].numel(), f.r = f.shift + rows[0].numel();
  cuda::fused_forward(f, weights, stream());
}

at::Tensor dq_sums(cuda::Fused& f, const at::Tensor& q, int channels) {
  if (at::globalContext().deterministicAlgorithms()) return {};
  f.dq_rows = cuda::dq_in_fragments(f) ? cuda::kDqTile : 1, f.dq_row = channels;
  const int64_t rows = (f.T + f.dq_rows - 1) / f.dq_rows * f.dq_rows;
  return at::empty({f.B, f.H, rows, f.dq_row}, q.options().dtype(at::kFloat));
}

at::Tensor fused_gradients(cuda::Fused& f, const cuda::Weights& weights, const at::Tensor& q) {
  const bool in_fragments = cuda::dq_in_fragments(f);
  const at::Tensor sums = dq_sums(f, q, f.D);
  if (sums.defined()) sums.zero_();
  at::Tensor dq;
  if (!sums.defined() || in_fragments) dq = at::empty({f.B, f.H, f.T, f.D}, q.options());
  f.dq = memory<void>(dq), f.dq_sum = memory<float>(sums);
  cuda::fused_backward(f, weights, stream());
  if (!sums.defined())
    cuda::fused_dq(f, weights, stream());
  else if (in_fragments)
    cuda::unpack_dq(f, stream());
  return dq.defined() ? dq : sums;
}

}  // namespace horner::attn::exec
