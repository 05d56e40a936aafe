// The kernels of the parts on CUDA, on the current stream.
#include <c10/cuda/CUDAStream.h>

#include "core/check.h"
#include "nn/parts_launch.h"

namespace horner::nn::parts {

template <auto kernel>
static void run(const auto& problem) {
  if (problem.rows.count == 0) return;
  kernel(problem, c10::cuda::getCurrentCUDAStream().stream());
  const char* error = kernels::cuda::last_error();
  check(!error, "CUDA kernel launch failed: ", error ? error : "");
}

const Launch* cuda_launch() {
  namespace k = kernels::cuda;
  static const Launch launch{
      [](const kernels::Norm& p) { run<k::norm>(p); },
      [](const kernels::Norm& p) { run<k::norm_backward>(p); },
      [](const kernels::Heads& p) { run<k::heads>(p); },
      [](const kernels::Heads& p) { run<k::heads_backward>(p); },
      [](const kernels::Gated& p) { run<k::gated>(p); },
      [](const kernels::Gated& p) { run<k::gated_backward>(p); },
      [](const kernels::Loss& p) { run<k::loss>(p); },
  };
  return &launch;
}

}  // namespace horner::nn::parts
