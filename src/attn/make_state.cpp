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

int64_t seen_by_newest(const State& s) {
  const auto [lo, hi] = interval(s.spec.mask, s.tokens - 1, s.tokens, s.tokens);
  return std::min(s.tokens, hi - lo + reach(s.spec.mask).first);
}

void check_alike(const char* verb, const State& a, const State& b) {
  check(text(a.spec) == text(b.spec), "cannot ", verb, " states of two variants: '", text(a.spec),
        "' and '", text(b.spec), "'");
  check(a.dtype == b.dtype, "cannot ", verb, " states of two dtypes: ", dtype_name(a.dtype),
        " and ", dtype_name(b.dtype));
  const at::Device here = a.carry.count.device(), there = b.carry.count.device();
  check(here == there, "cannot ", verb, " states on two devices: ", here.str(), " and ",
        there.str());
}

int64_t padded_size(int64_t channels) {
  return (channels + kernels::kPad - 1) / kernels::kPad * kernels::kPad;
}

bool caches_corrected(const Spec& spec) {
  return is<Delta>(spec.values) && !is<ChannelGate>(spec.decay);
}

at::ScalarType cache_dtype(const Spec& spec, at::ScalarType of_inputs) {
  return of_inputs == at::kBFloat16 && !caches_corrected(spec) ? of_inputs : wide(of_inputs);
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
  check(double(shape.B) * double(shape.G) * sizeof(double) <= kMostStateBytes, "a state of batch ",
        shape.B, " with ", shape.G, " heads is too large");
  check(buffer >= 0, "the buffer must hold 0 tokens or more, not ", buffer);
  const bool held_there =
      device.is_cpu() ||
      (exec::has_other_sums(spec)
           ? dtype != at::kDouble && exec::why_no_linear(spec, shape).empty()
           : exec::sums_dtype(spec, dtype) == at::kFloat && exec::why_not_on_gpu(shape).empty());
  const bool folds =
      why_no_state(spec).empty() && exec::why_lacking(spec, exec::kChunkedHas).empty();
  State s{spec, shape, dtype, buffer > 0 && folds && held_there, cache_dtype(spec, dtype)};
  const int64_t near = near_keys(spec);
  s.room = s.finite ? near + buffer : 0;
  const auto exact = at::TensorOptions(at::kDouble).device(device);
  s.carry.count = at::zeros({shape.B}, exact);
  if (is<CumulativeGate>(spec.denominator)) s.carry.gates = at::zeros({shape.B, shape.G}, exact);
  const auto D = key_channels(s);
  const bool has_mean =
      spec.centred && (s.finite || (sees_all_past(spec.mask) && is<Identity>(spec.features)));
  if (has_mean && (device.is_cpu() || s.finite))
    s.carry.keys = at::zeros({shape.B, shape.G, D}, exact);
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

// Of the recent tokens: every input that a step reads again, with room for the same number.
static void check_recent(const State& s, const std::string& from) {
  const auto [B, G, D, E] = s.shape;
  const auto fits = [&](const std::string& name, const at::Tensor& x, at::IntArrayRef sizes,
                        bool is_mask, bool is_kept = false) {
    const at::ScalarType type = x.scalar_type();
    const bool whole = type == at::kFloat || type == at::kDouble;
    const bool right = is_mask ? type == at::kBool : is_kept ? type == s.kept : whole;
    check(x.sizes() == sizes && right, from, ": 'recent.", name, "' must be ", sizes, " of ",
          is_mask   ? "bool"
          : is_kept ? dtype_name(s.kept)
                    : "float32 or float64",
          ", got ", x.sizes(), " of ", dtype_name(type));
  };
  for (const Input& i : input_table()) {
    const at::Tensor& x = s.recent.*i.at;
    const std::string_view letters(i.shape);
    const bool is_mask = i.at == &Inputs::keep;
    const bool in_v = !s.finite && caches_corrected(s.spec) &&
                      (i.at == &Inputs::beta || i.at == &Inputs::input_gate);
    const bool is_read = letters.starts_with("BGS") && !in_v;
    const bool is_held = is_read && s.held > 0 && !(s.finite && letters.size() == 3);
    check(x.defined() || !is_held || (i.wanted && !i.wanted(s.spec)), from,
          ": missing tensor 'recent.", i.name, "'");
    if (!x.defined()) continue;
    check(is_read || is_mask, from, ": 'recent.", i.name, "' is unexpected");
    const int64_t channels = letters.ends_with('E') ? E : i.at == &Inputs::k ? key_channels(s) : D;
    std::vector<int64_t> sizes{B, G, s.room, padded_size(channels)};
    if (letters.size() == 3) sizes.pop_back();
    if (is_mask) sizes = {B, s.room};
    fits(i.name, x, sizes, is_mask, !s.finite && (i.at == &Inputs::k || i.at == &Inputs::v));
  }
  const bool decays = is<TokenGate>(s.spec.decay) || is<HeadSlope>(s.spec.decay);
  check(s.decay_sums.defined() || !decays || s.held == 0, from, ": missing tensor 'recent.fades'");
  if (s.decay_sums.defined()) fits("fades", s.decay_sums, {B, G, s.room}, false);
}

State state_of(const Spec& spec, const StateShape& shape, at::ScalarType dtype,
               const StateNumbers& n, const std::map<std::string, at::Tensor>& tensors,
               const std::string& from) {
  const bool sums = tensors.contains("S") || tensors.contains("z");  // else all keys
  const auto count = tensors.find("count"), recent = tensors.find("recent.k");
  const auto held = [&](const auto& at, int64_t axis, int64_t size) {
    return at != tensors.end() && at->second.dim() > axis && at->second.size(axis) == size;
  };
  check(std::min({shape.B, shape.G, shape.D, shape.E, n.tokens, n.room, n.held}) >= 0, from,
        ": the sizes of a state must not be negative");
  check(sums || !sees_all_past(spec.mask) || n.held == n.tokens, from, ": holds ", n.held, " of ",
        n.tokens, " tokens, but no sums of the others");
  check(n.held <= n.room && n.held <= n.tokens, from, ": holds ", n.held, " of ", n.tokens,
        " tokens with room for ", n.room);
  check(held(count, 0, shape.B) && (!sums || held(recent, 2, n.room)), from,
        ": its tensors are not those of a batch of ", shape.B, " with room for ", n.room,
        " tokens");
  check_spec(spec);
  const int64_t buffer = sums ? std::max<int64_t>(1, n.room - near_keys(spec)) : 0;
  State s = make_state(spec, shape, dtype, buffer, count->second.device());
  s.tokens = n.tokens, s.room = n.room, s.held = n.held;
  const at::Device device = s.carry.count.device();
  for (const auto& [name, x] : tensors_of(s)) {
    const auto found = tensors.find(name);
    if (name.starts_with("near.") && s.held > 0) *x = at::Tensor();  // they are among the recent
    check(found != tensors.end() || !x->defined(), from, ": missing tensor '", name, "'");
    if (found == tensors.end()) continue;
    const at::Tensor& given = found->second;
    if (x->defined())
      check(given.sizes() == x->sizes() && given.scalar_type() == x->scalar_type(), from,
            ": tensor '", name, "' must be ", x->sizes(), " ", x->scalar_type(), ", got ",
            given.sizes(), " ", given.scalar_type());
    else
      check(name.starts_with("recent.") && x != &s.given_k, from, ": '", name, "' is unexpected");
    check(given.device() == device && given.layout() == at::kStrided, from, ": tensor '", name,
          "' must be a dense tensor on ", device.str());
    *x = given.clone(at::MemoryFormat::Contiguous);
  }
  // A cache of bfloat16 inputs may be in float32: files had it so, and the numbers are the same.
  if (!s.finite && s.recent.k.defined() && s.recent.k.scalar_type() == wide(dtype))
    s.kept = wide(dtype);
  check_recent(s, from);
  return s;
}

}  // namespace horner::attn
