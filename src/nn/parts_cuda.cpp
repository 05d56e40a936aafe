// The kernels of the parts on CUDA, on the current stream.
#include <c10/cuda/CUDAStream.h>

#include "nn/parts_launch.h"

namespace horner::nn::parts {

template <auto kernel>
static void run(const auto& problem) {
  if (problem.rows.count > 0) kernel(problem, c10::cuda::getCurrentCUDAStream().stream());
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
