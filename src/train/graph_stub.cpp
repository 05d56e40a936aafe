// Used if torch has no CUDA.
#include "core/machine.h"
#include "train/graph.h"
#include "train/machine.h"

namespace horner::train {

struct CapturedWork {};

void use_own_stream(at::Device) {}
std::shared_ptr<CapturedWork> capture(const std::function<void()>&) {
  return nullptr;
}
void launch(CapturedWork&) {}
void wait_for(at::Device) {}
void begin_peak(at::Device) {}
int64_t peak_bytes(at::Device) {
  return process_peak_bytes();
}
int64_t peak_allocated_bytes(at::Device) {
  return 0;
}
std::string device_name(at::Device) {
  return processor_name();
}

}  // namespace horner::train
