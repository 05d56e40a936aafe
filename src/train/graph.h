// Work on a GPU, captured once and launched as one.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace horner::train {

struct CapturedWork;  // a CUDA graph

// All work of this thread goes to a stream that can be captured from now on.
void use_own_stream(at::Device);

// The work must read and write the same tensors each time, and must have run before. Null where
// there is no CUDA.
std::shared_ptr<CapturedWork> capture(const std::function<void()>& work);
void launch(CapturedWork&);

void wait_for(at::Device);       // until all its work is done
void begin_peak(at::Device);     // of memory
int64_t peak_bytes(at::Device);  // since then; of the process on a CPU
std::string device_name(at::Device);

}  // namespace horner::train
