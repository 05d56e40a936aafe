// fused_cuda with kernels for compute capability 9.0: wgmma, TMA and a producer warp. bfloat16 and
// float16, exponentials and polynomials, head dimensions up to 128.
#include <ATen/ATen.h>

#include "attn/exec/cuda.h"
#include "attn/exec/exec.h"
#include "attn/exec/fused_cuda.h"
#include "attn/kernels/cuda/fused/fused.h"
#include "attn/kernels/cuda/hopper/hopper.h"
#include "attn/plan.h"

namespace horner::attn::exec {

namespace cuda = kernels::cuda;
using cuda::Fused;

// TMA does not support strides of 0.
static at::Tensor laid_out_for_tma(const at::Tensor& given) {
  const at::Tensor x = laid_out(given);
  bool repeats = false;
  for (int64_t i = 0; i < x.dim(); ++i) repeats |= x.size(i) > 1 && x.stride(i) == 0;
  return repeats ? x.clone(at::MemoryFormat::Contiguous) : x;
}

static void forward(const Fused& f, const cuda::Weights& w, cuda::Stream stream) {
  // TMA does not support empty tensors.
  if (f.B == 0 || f.T == 0) return cuda::fused_forward(f, w, stream);
  at::Tensor factors;  // of the keys' weights
  if (f.decay) {
    factors = at::empty({f.B, f.G, cuda::factor_tiles(f), cuda::kFactorRow},
                        at::device(at::kCUDA).dtype(at::kFloat));
    cuda::hopper_decay_factors(f, w, memory<float>(factors), stream);
  }
  cuda::hopper_forward(f, w, memory<float>(factors), stream);
}

// Without atomic additions `fused_dq` sums the queries' part of the decay's gradient, from weights
// that are not rounded: the keys' part must then come from such weights too.
static void backward(const Fused& f, const cuda::Weights& w, cuda::Stream stream) {
  (f.d_decay_key && !f.dq_sum ? cuda::fused_backward : cuda::hopper_backward)(f, w, stream);
}

static constexpr TileKernels kKernels{
    .execution = kHopperCuda.name,
    .forward = forward,
    .keys = backward,
    .laid_out = laid_out_for_tma,
    .dq_channels = cuda::hopper_channels,
    .owns_keys = [](const Fused&) { return true; },
};

static at::Tensor run(const Spec& spec, const Inputs& in, Statistics* statistics) {
  return attend_in_tiles(kKernels, spec, in, statistics);
}

static std::string why_not(const Spec& spec, const Inputs& in) {
  if (const std::string reason = why_not_in_tiles(spec, in); !reason.empty()) return reason;
  if (const std::string reason = cuda::hopper_why_not(in.q.device().index()); !reason.empty())
    return reason;
  const auto dtype = in.q.scalar_type();
  if (dtype != at::kBFloat16 && dtype != at::kHalf) return "supports only bfloat16 and float16";
  if (dtype == at::kHalf && needs_float32(spec))
    return "does not support this variant in float16, which lacks the precision";
  if (is<Delta>(spec.values)) return "does not support values=delta";
  if (!is<NoKeys>(spec.near)) return "does not support near keys";
  if (is<StickBreaking>(spec.weight)) return "does not support stick breaking";
  if (std::holds_alternative<cuda::RuntimeWeight>(cuda_weights(spec.weight)))
    return "supports only exponential and polynomial weights";
  const bool decays = !is<NoDecay>(spec.decay);
  if (decays && !is<Exp>(spec.weight) && cuda_epilogue(spec, in).by_sum)
    return "does not support decay with a sum as denominator, other than of exp";
  if (spec.dropout != 0) return "does not support dropout";
  if (in.cu_seqlens_k.defined()) return kNoOtherKeys;
  if (!is_interval(spec.mask)) return "does not support a mask of more than one interval";
  if (spec.bias) return "does not support a bias, whose reads take longer than what it saves";
  const bool centred = spec.centred || spec.less_log_count;
  if (spec.softcap != 0 && (centred || decays || !is<Exp>(spec.weight)))
    return "supports a soft cap only for exp, and not with decay or scores less log n";
  if (centred && decays) return "does not support centred scores, or scores less log n, with decay";
  if (std::max(mapped_channels(spec, in.q.size(-1)), in.v.size(-1)) > cuda::kMaxHopperChannels)
    return "supports head dimensions up to 128";
  return "";
}

const Execution hopper_cuda =
    complete(kHopperCuda, why_not, run, work_in_tiles_on_gpu, kept_in_tiles);

}  // namespace horner::attn::exec
