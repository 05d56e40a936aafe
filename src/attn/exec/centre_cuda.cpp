#include "attn/exec/centre_cuda.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include "attn/exec/cpu.h"
#include "attn/exec/cuda_stream.h"
#include "attn/exec/kernels/centre_cuda.h"

namespace horner::attn::exec {

namespace cuda = kernels::cuda;

struct CentreJob : torch::CustomClassHolder {
  CentreOf of;
  explicit CentreJob(CentreOf c) : of(std::move(c)) {}
};

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

struct CentreFunction : torch::autograd::Function<CentreFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx,
                            const c10::intrusive_ptr<CentreJob>& job, const at::Tensor& q,
                            const at::Tensor& k) {
    const c10::cuda::CUDAGuard guard(q.device());
    cuda::Centre f = problem(job->of, q, k);
    const at::Tensor sums = scratch(f, q);
    const at::Tensor centre = at::zeros({f.B, f.H, f.T}, q.options().dtype(at::kFloat));
    f.centre = memory<float>(centre);
    cuda::centre_forward(f, stream());
    ctx->save_for_backward({q, k});
    ctx->saved_data["job"] = c10::IValue::make_capsule(job);
    return centre;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    check_first_order("the CUDA kernels");
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], given = grads[0].contiguous();
    const c10::cuda::CUDAGuard guard(q.device());
    const auto job =
        c10::static_intrusive_pointer_cast<CentreJob>(ctx->saved_data["job"].toCapsule());
    cuda::Centre f = problem(job->of, q, k);
    const at::Tensor sums = scratch(f, q);
    const at::Tensor dq = at::empty({f.B, f.H, f.T, f.D}, q.options());
    const at::Tensor dk = at::empty({f.B, f.G, f.S, f.D}, k.options());
    if (f.T == 0 || f.S == 0) return {at::Tensor(), dq.zero_(), dk.zero_()};
    f.d_centre = memory<float>(given), f.dq = dq.data_ptr(), f.dk = dk.data_ptr();
    cuda::centre_backward(f, stream());
    return {at::Tensor(), dq, dk};
  }
};

at::Tensor centre(const CentreOf& of, const at::Tensor& q, const at::Tensor& k) {
  return CentreFunction::apply(c10::make_intrusive<CentreJob>(of), q, k);
}

}  // namespace horner::attn::exec
