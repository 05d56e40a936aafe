// The tensor code around the CUDA kernels: stages and tensors in the form that the kernels take.
#pragma once

#include <ATen/ATen.h>

#include "attn/attend.h"
#include "attn/kernels/cuda/common/problem.h"
#include "attn/stages.h"

namespace horner::attn::exec {

Inputs in_float32(Inputs);  // q, k and v

// The kernels require a scale above 0: returns q for such a `factor`, and else their product, with
// 1 for the scale.
at::Tensor scaled(const at::Tensor& q, double factor, float& scale);

kernels::cuda::Weights cuda_weights(const Weight&);
kernels::cuda::Epilogue cuda_epilogue(const Spec&, const Inputs&);  // without its pointers
std::string why_not_on_cuda(const Spec&);  // "" when the kernels have its weight and mask

// Whether the keys of some query are not the interval of kernels::cuda::Seen: they are listed.
bool is_listed(const Mask&, const Inputs&);

// The keys that each query sees, with the memory that `seen` and `lists` point to.
struct SeenKeys {
  kernels::cuda::Seen seen{};
  kernels::cuda::SeenLists lists{};
  at::Tensor begin, end, keep;
  at::Tensor lo, hi, from, to, first_query, end_query;
};
SeenKeys seen_keys(const Mask&, const Inputs&);
void list_keys(const KeysSeen&, int64_t S, SeenKeys&);

// Dropout as the kernels take it, with the memory of its seed.
struct DropoutOnGpu {
  at::Tensor seed;
  kernels::cuda::DroppedPairs pairs{};
};
DropoutOnGpu dropout_on_gpu(const Spec&, const Inputs&);

// With contiguous channels, padded with zeros to a multiple of kPad, and rows aligned to kAlignment
// bytes.
at::Tensor laid_out(const at::Tensor&);
kernels::cuda::View view(const at::Tensor&);  // of a tensor from laid_out
kernels::cuda::Dtype dtype_of(const at::Tensor&);
at::Tensor gates(const at::Tensor&);  // `plain` of stages.h, but 16-bit tensors keep their dtype
kernels::cuda::TypedPointer typed(const at::Tensor&);

// The memory of a tensor as any type; null where it is undefined.
template <class T>
T* memory(const at::Tensor& x) {
  return x.defined() ? static_cast<T*>(x.data_ptr()) : nullptr;
}

// Sizes, and the memory of q, k, v and the inputs of the epilogue.
template <class Tensors>
kernels::cuda::Fused problem_of(const Tensors& x, const kernels::cuda::Epilogue& e, int channels) {
  kernels::cuda::Fused f{};
  f.B = int(x.q.size(0)), f.H = int(x.q.size(1)), f.G = int(x.k.size(1));
  f.T = int(x.q.size(2)), f.S = int(x.k.size(2)), f.D = int(x.q.size(3)), f.E = int(x.v.size(3));
  f.channels = channels, f.dtype = dtype_of(x.q);
  f.q = view(x.q), f.k = view(x.k), f.v = view(x.v);
  f.epilogue = e;
  f.epilogue.divisor = memory<float>(x.divisor);
  f.epilogue.out_gate = typed(x.out_gate), f.epilogue.post_gate = typed(x.post_gate);
  f.epilogue.norm_weight = memory<float>(x.norm_weight);
  f.epilogue.norm_bias = memory<float>(x.norm_bias);
  return f;
}

// Memory for the gradients of the epilogue's inputs, which `row_gradients` fills; `parts` is its
// scratch.
template <class Tensors>
Tensors epilogue_gradients(const Tensors& x, kernels::cuda::Fused& f, at::Tensor& parts) {
  const auto like = [](const at::Tensor& y) {
    return y.defined() && y.requires_grad() ? at::empty_like(y) : at::Tensor();
  };
  Tensors d;
  d.divisor = like(x.divisor), d.out_gate = like(x.out_gate), d.post_gate = like(x.post_gate);
  at::Tensor norm;
  if (x.norm_weight.defined()) {
    norm = at::empty({2, f.E}, x.norm_weight.options());
    parts = at::empty({kernels::cuda::row_blocks(f), 2, f.E}, norm.options());
    d.norm_weight = norm.select(0, 0).narrow(0, 0, f.channels);
  }
  if (x.norm_bias.defined()) d.norm_bias = norm.select(0, 1).narrow(0, 0, f.channels);
  kernels::cuda::Epilogue& e = f.epilogue;
  e.d_divisor = memory<float>(d.divisor);
  e.d_out_gate = typed(d.out_gate), e.d_post_gate = typed(d.post_gate);
  e.d_norm = memory<float>(norm), e.d_norm_parts = memory<float>(parts);
  return d;
}

// The number of keys that each query sees, computed when first used: most variants do not need it.
struct CountedKeys {
  CountedKeys(const Mask& mask, const Inputs& in) : mask(mask), in(in) {}

  at::Tensor keys() const;  // [1 or B, 1, T, 1]
  at::Tensor count() const { return keys().clamp_min(1); }

 private:
  const Mask& mask;
  const Inputs& in;
  mutable at::Tensor counted;
};

}  // namespace horner::attn::exec
