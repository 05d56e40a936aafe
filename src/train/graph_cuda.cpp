#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include "core/machine.h"
#include "train/graph.h"
#include "train/machine.h"

namespace horner::train {

struct CapturedWork {
  at::cuda::CUDAGraph graph;
};

void use_own_stream(at::Device device) {
  if (!device.is_cuda()) return;
  c10::cuda::set_device(device.index());
  c10::cuda::CUDACachingAllocator::init(c10::cuda::device_count());  // before its statistics
  c10::cuda::setCurrentCUDAStream(c10::cuda::getStreamFromPool(false, device.index()));
}

std::shared_ptr<CapturedWork> capture(const std::function<void()>& work) {
  auto out = std::make_shared<CapturedWork>();
  c10::cuda::device_synchronize();
  c10::cuda::CUDACachingAllocator::emptyCache();
  out->graph.capture_begin();
  work();
  out->graph.capture_end();
  return out;
}

void launch(CapturedWork& w) {
  w.graph.replay();
}

void wait_for(at::Device device) {
  if (device.is_cuda()) c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
}

void begin_peak(at::Device device) {
  if (device.is_cuda()) c10::cuda::CUDACachingAllocator::resetPeakStats(device.index());
}

int64_t peak_bytes(at::Device device) {
  if (!device.is_cuda()) return process_peak_bytes();
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  return stats.reserved_bytes[0].peak;
}

int64_t peak_allocated_bytes(at::Device device) {
  if (!device.is_cuda()) return 0;
  return c10::cuda::CUDACachingAllocator::getDeviceStats(device.index()).allocated_bytes[0].peak;
}

std::string device_name(at::Device device) {
  if (!device.is_cuda()) return processor_name();
  cudaDeviceProp properties;
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index()));
  return properties.name;
}

}  // namespace horner::train
