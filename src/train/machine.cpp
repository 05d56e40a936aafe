#include "train/machine.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "core/machine.h"
#include "core/stopwatch.h"
#include "train/graph.h"

namespace horner::train {

int64_t process_peak_bytes() {
  const std::string kilobytes = proc_value("/proc/self/status", "VmHWM");
  return kilobytes.empty() ? 0 : std::stoll(kilobytes) * 1024;
}

double matmul_peak(at::Device device, at::ScalarType dtype) {
  const int64_t n = device.is_cuda() ? 8192 : 1024;
  const at::Tensor a = at::ones({n, n}, at::TensorOptions(device).dtype(dtype));
  double best = 1e300;
  for (int i = 0; i < 8; ++i) {
    wait_for(device);
    const Stopwatch watch;
    const at::Tensor b = at::matmul(a, a);
    wait_for(device);
    if (i > 1) best = std::min(best, watch.ms());
  }
  return 2 * double(n) * double(n) * double(n) / (best * 1e-3);
}

}  // namespace horner::train
