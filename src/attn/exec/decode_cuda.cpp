#include "attn/exec/decode_cuda.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>

#include "attn/exec/cuda_stream.h"
#include "attn/kernels/cuda/decode/decode.h"

namespace horner::attn::exec {

std::string why_not_on_gpu(const StateShape& s) {
  if (std::max(s.D, s.E) <= kernels::cuda::kMaxDecodeChannels) return "";
  return "supports head dimensions up to " + std::to_string(kernels::cuda::kMaxDecodeChannels);
}

void apply_state_on_gpu(const kernels::Decode<float>& c, const at::Tensor& like) {
  const c10::cuda::CUDAGuard guard(like.device());
  const at::Tensor scratch =
      at::empty({kernels::cuda::decode_scratch(c)}, like.options().dtype(at::kFloat));
  kernels::cuda::decode_attend(c, scratch.data_ptr<float>(), stream());
}

void fold_on_gpu(const kernels::Decode<float>& c, const at::Tensor& like) {
  const c10::cuda::CUDAGuard guard(like.device());
  kernels::cuda::decode_fold(c, stream());
}

}  // namespace horner::attn::exec
