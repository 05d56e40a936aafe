// The kernels of the parts on the CPU: runs the tasks on torch's threads.
#include <ATen/Parallel.h>

#include "core/simd/isa.h"
#include "nn/parts_launch.h"

namespace horner::nn::parts {

static const kernels::PartKernels& best() {
  const simd::Isa isa = simd::isa();
  return isa >= simd::Isa::avx512 ? kernels::avx512::part_kernels
         : isa == simd::Isa::avx2 ? kernels::avx2::part_kernels
                                  : kernels::portable::part_kernels;
}

template <auto kernel>
static void run(const auto& problem) {
  const auto f = best().*kernel;
  at::parallel_for(0, problem.rows.tasks(), 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) f(problem, i);
  });
}

const Launch& cpu_launch() {
  using K = kernels::PartKernels;
  static const Launch launch{
      [](const kernels::Norm& p) { run<&K::norm>(p); },
      [](const kernels::Norm& p) { run<&K::norm_backward>(p); },
      [](const kernels::Heads& p) { run<&K::heads>(p); },
      [](const kernels::Heads& p) { run<&K::heads_backward>(p); },
      [](const kernels::Gated& p) { run<&K::gated>(p); },
      [](const kernels::Gated& p) { run<&K::gated_backward>(p); },
      [](const kernels::Loss& p) { run<&K::loss>(p); },
  };
  return launch;
}

}  // namespace horner::nn::parts
