#include "attn/exec/cuda.h"

#include <ATen/ATen.h>

#include "attn/stages.h"
#include "core/check.h"

namespace horner::attn::exec {

namespace cuda = kernels::cuda;
using cuda::RuntimeWeight;

template <class W>
concept OffGpu = !FactsOf{}(W{}).on_gpu;

struct CudaWeights {
  cuda::Weights operator()(Exp w) const { return w; }
  cuda::Weights operator()(Taylor w) const { return polynomial(0, w.order); }
  cuda::Weights operator()(Power w) const { return polynomial(w.degree, w.degree); }
  cuda::Weights operator()(Sigmoid) const { return RuntimeWeight{.kind = RuntimeWeight::sigmoid}; }
  cuda::Weights operator()(Entmax w) const {
    return RuntimeWeight{.kind = RuntimeWeight::entmax, .alpha = w.alpha};
  }
  cuda::Weights operator()(TopK w) const {
    return RuntimeWeight{.kind = RuntimeWeight::top_k, .k = w.k, .renormalise = w.renormalise};
  }
  cuda::Weights operator()(SelfAdjusted) const {
    return RuntimeWeight{.kind = RuntimeWeight::self_adjusted};
  }
  cuda::Weights operator()(OffGpu auto) const {
    fail("the CUDA kernels do not support this weight");
  }
};
cuda::Weights cuda_weights(const Weight& w) {
  return std::visit(CudaWeights{}, w);
}

std::string why_not_on_cuda(const Spec& spec) {
  if (!facts(spec.weight).on_gpu) return "the CUDA kernels do not support its weight";
  const int ahead = reach(spec.mask).ahead;
  if (ahead != 0 && ahead != kAllKeys)
    return "the CUDA kernels support only masks that see no later key, or all of them";
  return "";
}

struct SetCudaNorm {
  cuda::Epilogue& p;

  void operator()(NoNorm) const { p.norm = cuda::Epilogue::none; }
  void operator()(L2 n) const { p.norm = cuda::Epilogue::l2, p.times_dim = n.times_dim; }
  void operator()(Rms n) const { p.norm = cuda::Epilogue::rms, p.eps = n.eps; }
  void operator()(Layer n) const { p.norm = cuda::Epilogue::layer, p.eps = n.eps; }
};
// The others are tensors (divisor_on_gpu).
struct SetCudaDenominator {
  cuda::Epilogue& p;
  bool keep;

  void operator()(Sum z) const {
    p.by_sum = true, p.plus = z.plus, p.least = z.least, p.detach = z.detach;
  }
  void operator()(Count) const { p.by_count = !keep; }
  void operator()(CountPower) const {}
  void operator()(CumulativeGate) const {}
  void operator()(Nothing) const {}
};
cuda::Epilogue cuda_epilogue(const Spec& spec, const Inputs& in) {
  cuda::Epilogue p{};
  std::visit(SetCudaDenominator{p, in.keep.defined()}, spec.denominator);
  std::visit(SetCudaNorm{p}, spec.norm);
  return p;
}

std::pair<at::Tensor, at::Tensor> sequences(const Inputs& in) {
  const at::Tensor cuts = in.cu_seqlens.to(at::kInt).contiguous();
  const at::Tensor t = at::arange(in.q.size(2), cuts.options());
  const at::Tensor next = at::searchsorted(cuts, t, /*out_int32=*/false, /*right=*/true);
  return {cuts.index_select(0, next - 1), cuts.index_select(0, next)};
}

SeenKeys seen_keys(const Mask& mask, const Inputs& in) {
  SeenKeys keys;
  cuda::Seen& seen = keys.seen;
  seen.T = int(in.q.size(2)), seen.S = int(in.k.size(2));
  const auto [back, ahead] = reach(mask);
  seen.causal = ahead == 0, seen.window = back;
  if (in.cu_seqlens.defined()) std::tie(keys.begin, keys.end) = sequences(in);
  if (in.keep.defined()) keys.keep = in.keep.contiguous();
  seen.begin = memory<int32_t>(keys.begin), seen.end = memory<int32_t>(keys.end);
  seen.keep = memory<uint8_t>(keys.keep);
  return keys;
}

at::Tensor laid_out(const at::Tensor& x) {
  const int64_t unit = cuda::kAlignment / x.element_size();
  const int64_t rest = (cuda::kPad - x.size(-1) % cuda::kPad) % cuda::kPad;
  if (rest) return at::constant_pad_nd(x, {0, rest}).contiguous();
  const bool aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % cuda::kAlignment == 0;
  bool fits = x.stride(-1) == 1 && aligned;
  for (int64_t i = 0; i + 1 < x.dim(); ++i)
    fits = fits && (x.size(i) == 1 || (x.stride(i) % unit == 0));
  return fits ? x : x.clone(at::MemoryFormat::Contiguous);
}

cuda::View view(const at::Tensor& x) {
  return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}
cuda::Dtype dtype_of(const at::Tensor& x) {
  return x.scalar_type() == at::kBFloat16 ? cuda::Dtype::bfloat16
         : x.scalar_type() == at::kHalf   ? cuda::Dtype::float16
                                          : cuda::Dtype::float32;
}
at::Tensor plain(const at::Tensor& x) {
  return x.defined() ? x.to(at::kFloat).contiguous() : x;
}

at::Tensor gates(const at::Tensor& x) {
  return x.defined() && x.scalar_type() != at::kDouble ? x.contiguous() : plain(x);
}
cuda::TypedPointer typed(const at::Tensor& x) {
  return x.defined() ? cuda::TypedPointer{x.data_ptr(), dtype_of(x)} : cuda::TypedPointer{};
}

void CountedKeys::find_intervals() const {
  if (lo.defined()) return;
  std::tie(lo, hi) = intervals(mask, in);
  if (in.cu_seqlens.defined()) {
    const auto [begin, end] = sequences(in);
    lo = at::maximum(lo, begin), hi = at::minimum(hi, end);
  }
  lo = at::minimum(lo, hi);
}

at::Tensor CountedKeys::running_sums(const at::Tensor& x) const {
  find_intervals();
  const at::Tensor sums = at::constant_pad_nd(x.to(at::kDouble).cumsum(-2), {0, 0, 1, 0});
  return sums.index_select(-2, hi) - sums.index_select(-2, lo);
}

at::Tensor CountedKeys::count() const {
  if (counted.defined()) return counted;
  find_intervals();
  counted = in.keep.defined() ? running_sums(in.keep.view({in.q.size(0), 1, -1, 1}))
                              : (hi - lo).view({1, 1, -1, 1});
  return counted = counted.to(at::kFloat).clamp_min(1);
}

}  // namespace horner::attn::exec
