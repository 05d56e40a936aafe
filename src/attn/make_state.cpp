#include "attn/make_state.h"

#include <ATen/ATen.h>

#include "attn/exec/chunked.h"
#include "attn/exec/cpu.h"
#include "attn/exec/decode_cuda.h"
#include "attn/exec/delta_cuda.h"
#include "attn/exec/exec.h"
#include "attn/inputs.h"
#include "attn/spec_text.h"
#include "attn/stages.h"
#include "core/check.h"

namespace horner::attn {

at::ScalarType sums_dtype(const State& s) {
  return s.finite ? exec::sums_dtype(s.spec, s.dtype) : wide(s.dtype);
}

int64_t key_channels(const State& s) {
  return s.finite ? mapped_channels(s.spec, s.shape.D) : s.shape.D;
}

int64_t near_keys(const Spec& spec) {
  const auto* near = std::get_if<Window>(&spec.near);
  return near ? near->size : 0;
}

int64_t padded_size(int64_t channels) {
  return (channels + kernels::kPad - 1) / kernels::kPad * kernels::kPad;
}

State make_state(const Spec& spec, const StateShape& shape, at::ScalarType dtype, int64_t buffer,
                 at::Device device) {
  if (sees_future(spec.mask))
    fail(
        "a stream requires a mask that sees no later tokens, such as mask=causal or "
        "mask=window(n), not ",
        text(Spec{.mask = spec.mask}));
  check(reach(spec.mask).first == 0 || is<NoDecay>(spec.decay),
        "a stream with mask=streaming does not support decay: it drops the keys between the first "
        "and the last, and their gates");
  check(spec.dropout == 0, "a stream does not support dropout: it is for training");
  check(!spec.bias, "a stream does not support a bias of each score");
  check(buffer >= 0, "the buffer must hold 0 tokens or more, not ", buffer);
  const bool held_there =
      device.is_cpu() ||
      (exec::has_other_sums(spec)
           ? dtype != at::kDouble && exec::why_no_linear(spec, shape).empty()
           : exec::sums_dtype(spec, dtype) == at::kFloat && exec::why_not_on_gpu(shape).empty());
  const bool folds =
      why_no_state(spec).empty() && exec::why_lacking(spec, exec::kChunkedHas).empty();
  State s{spec, shape, dtype, buffer > 0 && folds && held_there};
  const int64_t near = near_keys(spec);
  s.room = s.finite ? near + buffer : 0;
  const auto exact = at::TensorOptions(at::kDouble).device(device);
  s.carry.count = at::zeros({shape.B}, exact);
  if (is<CumulativeGate>(spec.denominator)) s.carry.gates = at::zeros({shape.B, shape.G}, exact);
  const auto D = key_channels(s);
  const bool has_mean =
      spec.centred && (s.finite || (sees_all_past(spec.mask) && is<Identity>(spec.features)));
  if (has_mean && device.is_cpu()) s.carry.keys = at::zeros({shape.B, shape.G, D}, exact);
  if (!s.finite) return s;
  const std::string reason = why_too_large(spec, shape);
  check(reason.empty(), reason);
  const auto F = int64_t(feature_count(spec, shape.D));
  const auto options = exact.dtype(sums_dtype(s));
  s.carry.S = at::zeros({shape.B, shape.G, F, padded_size(shape.E)}, options);
  s.carry.z = at::zeros({shape.B, shape.G, F}, options);
  if (near > 0) {
    s.carry.near_k = at::zeros({shape.B, shape.G, near, shape.D}, exact.dtype(dtype));
    s.carry.near_v = at::zeros({shape.B, shape.G, near, shape.E}, exact.dtype(wide(dtype)));
    s.carry.near_keep = at::zeros({shape.B, near}, exact.dtype(at::kBool));
    if (!is<NoDecay>(spec.decay)) s.carry.near_decay = at::zeros({shape.B, shape.G, near}, exact);
    if (!is<Identity>(spec.features))
      s.given_k = at::zeros({shape.B, shape.G, s.room, padded_size(shape.D)}, options);
  }
  if (is<ChannelGate>(spec.decay)) {
    s.carry.decay = at::zeros({shape.B, shape.G, D}, exact);
  } else if (!is<NoDecay>(spec.decay)) {
    s.carry.decay = at::zeros({shape.B, shape.G}, exact);
    s.decay_sums = at::zeros({shape.B, shape.G, s.room}, exact);
  }
  s.recent.k = at::zeros({shape.B, shape.G, s.room, padded_size(D)}, options);
  s.recent.v = at::zeros({shape.B, shape.G, s.room, padded_size(shape.E)}, options);
  return s;
}

std::vector<std::pair<std::string, at::Tensor*>> tensors_of(State& s) {
  std::vector<std::pair<std::string, at::Tensor*>> all = {{"S", &s.carry.S},
                                                          {"z", &s.carry.z},
                                                          {"count", &s.carry.count},
                                                          {"keys", &s.carry.keys},
                                                          {"gates", &s.carry.gates},
                                                          {"decay", &s.carry.decay},
                                                          {"near.k", &s.carry.near_k},
                                                          {"near.v", &s.carry.near_v},
                                                          {"near.keep", &s.carry.near_keep},
                                                          {"near.decay", &s.carry.near_decay},
                                                          {"recent.fades", &s.decay_sums},
                                                          {"recent.given_k", &s.given_k}};
  for (const Input& i : input_table())
    all.emplace_back("recent." + std::string(i.name), &(s.recent.*i.at));
  return all;
}

}  // namespace horner::attn
