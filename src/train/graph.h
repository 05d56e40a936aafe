// CUDA graphs, and the other device functions of training.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace horner::train {

struct CapturedWork;  // a CUDA graph

// Switches this thread to a stream that can be captured.
void use_own_stream(at::Device);

// The work must use the same tensors each time and must have run before. Null without CUDA.
std::shared_ptr<CapturedWork> capture(const std::function<void()>& work);
void launch(CapturedWork&);

void wait_for(at::Device);                 // until its work is done
void begin_peak(at::Device);               // resets the peak memory statistics
int64_t peak_bytes(at::Device);            // since begin_peak; on a CPU, of the process
int64_t peak_allocated_bytes(at::Device);  // the part that tensors have on a GPU; 0 on a CPU
std::string device_name(at::Device);

}  // namespace horner::train
