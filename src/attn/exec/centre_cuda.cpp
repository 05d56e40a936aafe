#include "attn/exec/centre_cuda.h"

#include <ATen/ATen.h>

#include "attn/exec/cuda_stream.h"
#include "attn/kernels/cuda/prepare/centre.h"

namespace horner::attn::exec {

namespace cuda = kernels::cuda;

static cuda::Centre problem(const CentreOf& of, const at::Tensor& q, const at::Tensor& k) {
  cuda::Centre f{};
  f.B = int(q.size(0)), f.H = int(q.size(1)), f.T = int(q.size(2)), f.D = int(q.size(3));
  f.G = int(k.size(1)), f.S = int(k.size(2));
  f.dtype = dtype_of(q), f.scale = of.scale, f.seen = of.keys.seen;
  f.count = memory<float>(of.count);
  f.q = view(q), f.k = view(k);
  return f;
}
static at::Tensor scratch(cuda::Centre& f, const at::Tensor& like) {
  const at::Tensor sums = at::empty({cuda::centre_scratch(f)}, like.options().dtype(at::kDouble));
  f.sums = memory<double>(sums);
  return sums;
}

at::Tensor centre(const CentreOf& of, const at::Tensor& q, const at::Tensor& k) {
  cuda::Centre f = problem(of, q, k);
  const at::Tensor sums = scratch(f, q);
  const at::Tensor centre = at::zeros({f.B, f.H, f.T}, q.options().dtype(at::kFloat));
  f.centre = memory<float>(centre);
  cuda::centre_forward(f, stream());
  return centre;
}

void add_centre_gradients(const CentreOf& of, const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& d_centre, const at::Tensor& dq_sum,
                          const at::Tensor& dq, const at::Tensor& dk) {
  cuda::Centre f = problem(of, q, k);
  const at::Tensor sums = scratch(f, q);
  f.d_centre = memory<float>(d_centre), f.dq_sum = memory<float>(dq_sum);
  f.dq = dq.data_ptr(), f.dk = dk.data_ptr();
  cuda::centre_backward(f, stream());
}

}  // namespace horner::attn::exec
