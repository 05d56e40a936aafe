#include "attn/exec/cuda.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "attn/dropout.h"
#include "attn/exec/exec.h"
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
    return RuntimeWeight{.kind = RuntimeWeight::entmax, .alpha = float(w.alpha)};
  }
  cuda::Weights operator()(TopK w) const {
    return RuntimeWeight{.kind = RuntimeWeight::top_k, .k = w.k, .renormalise = w.renormalise};
  }
  cuda::Weights operator()(SelfAdjusted) const {
    return RuntimeWeight{.kind = RuntimeWeight::self_adjusted};
  }
  cuda::Weights operator()(Softpick) const {
    return RuntimeWeight{.kind = RuntimeWeight::softpick};
  }
  cuda::Weights operator()(OffGpu auto) const {
    fail("the CUDA kernels do not support this weight");
  }
};
cuda::Weights cuda_weights(const Weight& w) {
  return std::visit(CudaWeights{}, w);
}

Inputs in_float32(Inputs in) {
  for (at::Tensor* x : {&in.q, &in.k, &in.v}) *x = x->to(at::kFloat);
  return in;
}

at::Tensor scaled(const at::Tensor& q, double factor, float& scale) {
  scale = factor > 0 ? float(factor) : 1;
  return factor > 0 ? q : q * factor;
}

std::string why_not_on_cuda(const Spec& spec) {
  if (!facts(spec.weight).on_gpu && !is<StickBreaking>(spec.weight))
    return "the CUDA kernels do not support its weight";
  constexpr Has kHas{.softcap = true,
                     .bias = true,
                     .sink = true,
                     .near = true,
                     .delta = true,
                     .dropout = true,
                     .first_keys = true,
                     .softpick = true,
                     .stick = true};
  if (const std::string lacks = why_lacking(spec, kHas); !lacks.empty()) return lacks;
  if (is<Softpick>(spec.weight) && !is<NoDecay>(spec.decay))
    return "the CUDA kernels do not support softpick with decay";
  if (spec.centred && (spec.softcap != 0 || spec.bias))
    return "the CUDA kernels do not support centred scores with a soft cap or a bias";
  if (spec.centred && !is<NoKeys>(spec.near))
    return "the CUDA kernels do not support centred scores with near keys";
  return WithoutChannelGates::why_not(spec);
}

// The others are tensors (divisor_on_gpu).
struct SetCudaDenominator {
  cuda::Epilogue& p;
  bool counted;  // by tensor code

  void operator()(Sum z) const {
    p.by_sum = true, p.plus = float(z.plus), p.least = float(z.least), p.floor = float(z.floor);
    p.detach = z.detach;
  }
  void operator()(Count) const { p.by_count = !counted; }
  void operator()(CumulativeGate) const {}
  void operator()(Nothing) const {}
};
cuda::Epilogue cuda_epilogue(const Spec& spec, const Inputs& in) {
  cuda::Epilogue p{};
  const bool counted = in.keep.defined() || is_listed(spec.mask, in);
  std::visit(SetCudaDenominator{p, counted}, spec.denominator);
  std::visit(SetNorm<cuda::Epilogue>{p}, spec.norm);
  return p;
}

bool is_listed(const Mask& mask, const Inputs& in) {
  return in.cu_seqlens_k.defined() || !is_interval(mask);
}

// A query sees key s from the first with hi > s to the first with lo > s; one of the first keys, to
// the end of its sequence.
void list_keys(const KeysSeen& k, int64_t S, SeenKeys& keys) {
  const auto words = [](const at::Tensor& x) {
    return x.defined() ? x.to(at::kInt).contiguous() : x;
  };
  keys.lo = words(k.lo), keys.hi = words(k.hi), keys.from = words(k.from), keys.to = words(k.to);
  const at::Tensor s = at::arange(S, keys.lo.options());
  const auto above = [&](const at::Tensor& bounds) {  // how many bounds are at most s
    const at::Tensor each = bounds.dim() == 1 ? s : s.expand({bounds.size(0), -1}).contiguous();
    return at::searchsorted(bounds, each, /*out_int32=*/true, /*right=*/true);
  };
  keys.first_query = above(keys.hi), keys.end_query = above(keys.lo);
  if (keys.from.defined()) {
    const at::Tensor end = above(keys.from);  // of the sequence that key s is in
    const at::Tensor is_first = s < keys.to.index_select(0, (end - 1).clamp_min(0));
    keys.end_query = at::where(is_first.logical_and(end > 0), end, keys.end_query);
  }
  cuda::SeenLists& to = keys.lists;
  to.lo = memory<int32_t>(keys.lo), to.hi = memory<int32_t>(keys.hi);
  to.from = memory<int32_t>(keys.from), to.to = memory<int32_t>(keys.to);
  to.first_query = memory<int32_t>(keys.first_query);
  to.end_query = memory<int32_t>(keys.end_query);
  if (keys.hi.dim() == 2) to.hi_batch = int(keys.hi.size(1)), to.first_batch = int(S);
}

SeenKeys seen_keys(const Mask& mask, const Inputs& in) {
  SeenKeys keys;
  cuda::Seen& seen = keys.seen;
  seen.T = int(in.q.size(2)), seen.S = int(in.k.size(2));
  const Reach r = reach(mask);
  seen.causal = r.ahead != kAllKeys, seen.window = r.back, seen.chunk = r.chunk;
  if (seen.causal) seen.ahead = std::min(r.ahead, seen.S + seen.T);
  if (in.keep.defined()) keys.keep = in.keep.contiguous();
  if (is_listed(mask, in)) {
    if (seen.T > 0) list_keys(keys_seen(mask, in), in.k.size(2), keys);
  } else if (in.cu_seqlens.defined()) {
    std::tie(keys.begin, keys.end) = sequences(in);
  }
  seen.begin = memory<int32_t>(keys.begin), seen.end = memory<int32_t>(keys.end);
  seen.keep = memory<uint8_t>(keys.keep);
  return keys;
}

DropoutOnGpu dropout_on_gpu(const Spec& spec, const Inputs& in) {
  DropoutOnGpu d;
  if (spec.dropout == 0) return d;
  d.seed = in.seed.contiguous();
  d.pairs = {memory<int64_t>(d.seed), dropped_below(spec.dropout), float(1 / (1 - spec.dropout))};
  return d;
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
at::Tensor gates(const at::Tensor& x) {
  return x.defined() && x.scalar_type() != at::kDouble ? x.contiguous() : plain(x);
}
cuda::TypedPointer typed(const at::Tensor& x) {
  return x.defined() ? cuda::TypedPointer{x.data_ptr(), dtype_of(x)} : cuda::TypedPointer{};
}

at::Tensor CountedKeys::keys() const {
  if (counted.defined()) return counted;
  const KeysSeen keys = keys_seen(mask, in);
  if (in.keep.defined()) {
    counted = sums_over_keys(keys, in.keep.unsqueeze(1).unsqueeze(3));
  } else {
    counted = keys.hi - at::minimum(keys.lo, keys.hi);
    if (keys.from.defined()) counted = counted + (keys.to - keys.from);
    counted = counted.view({-1, 1, in.q.size(2), 1});
  }
  return counted = counted.to(at::kFloat);
}

}  // namespace horner::attn::exec
