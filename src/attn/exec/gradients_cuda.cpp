#include "attn/exec/gradients_cuda.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include "attn/exec/cuda.h"
#include "attn/exec/cuda_stream.h"
#include "attn/kernels/cuda/fused/fused.h"

namespace horner::attn::exec {

namespace cuda = kernels::cuda;

at::Tensor fused_gradients(cuda::Fused& f, const cuda::Weights& weights, const at::Tensor& q) {
  const bool in_fragments = cuda::dq_in_fragments(f);
  at::Tensor dq, sums;
  if (!at::globalContext().deterministicAlgorithms()) {
    f.dq_rows = in_fragments ? cuda::kDqTile : 1, f.dq_row = f.D;
    const int64_t rows = (f.T + f.dq_rows - 1) / f.dq_rows * f.dq_rows;
    sums = at::zeros({f.B, f.H, rows, f.dq_row}, q.options().dtype(at::kFloat));
  }
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
