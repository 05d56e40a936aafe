// The library's tables in Python: variants, executions, inputs; and settings as a Spec.
#include <torch/library.h>

#include <map>
#include <mutex>

#include "attn/catalog.h"
#include "attn/inputs.h"
#include "attn/plan.h"
#include "attn/spec_text.h"
#include "core/check.h"
#include "python/spec.h"

namespace horner::python {

static attn::Spec parsed(const std::string& variant, const Text& mask) {
  constexpr size_t kMost = 1000;
  static std::mutex mutex;
  static std::map<std::pair<std::string, Text>, attn::Spec> known;
  const std::lock_guard lock(mutex);
  std::pair key(variant, mask);
  if (const auto at = known.find(key); at != known.end()) return at->second;
  attn::Spec spec = attn::find(variant).spec;
  if (mask) spec = attn::with(spec, "mask=" + *mask);
  if (known.size() == kMost) known.clear();
  return known[std::move(key)] = spec;
}

attn::Spec make_spec(const std::string& variant, const Text& mask, Number scale, Number temperature,
                     Number clamp) {
  attn::Spec spec = parsed(variant, mask);
  if (scale) spec.scale = attn::Fixed{*scale};
  if (temperature) spec.temperature = *temperature;
  if (clamp) spec.clamp = *clamp;
  return spec;
}

static std::vector<std::string> variants() {
  std::vector<std::string> names;
  for (const attn::Variant& v : attn::variants()) names.push_back(v.name);
  return names;
}

static std::vector<std::string> executions() {
  std::vector<std::string> names;
  for (const attn::Execution* e : attn::executions()) names.emplace_back(e->name);
  return names;
}

static c10::Dict<std::string, std::string> describe(const std::string& name) {
  const attn::Variant v = attn::find(name);
  std::string notes, inputs;
  for (const std::string& note : attn::notes(v.spec)) notes += (notes.empty() ? "" : "; ") + note;
  for (const attn::Input& i : attn::input_table())
    if (i.wanted && i.role != attn::Role::tensor && i.wanted(v.spec))
      inputs += (inputs.empty() ? "" : " ") + std::string(i.name);
  c10::Dict<std::string, std::string> out;
  out.insert("name", v.name);
  out.insert("about", v.about);
  out.insert("source", v.source);
  out.insert("spec", attn::text(v.spec));
  out.insert("notes", notes);
  out.insert("inputs", inputs);
  out.insert("no_state", attn::why_no_state(v.spec));
  return out;
}

// What a model puts around the operator (catalog.h), and the features that a projection has.
static c10::Dict<std::string, int64_t> around(const std::string& name) {
  const attn::Variant v = attn::find(name);
  const auto* projected = std::get_if<attn::Project>(&v.spec.features);
  const auto* hedgehog = std::get_if<attn::Hedgehog>(&v.spec.features);
  c10::Dict<std::string, int64_t> out;
  out.insert("short_conv", v.around.short_conv);
  out.insert("rope", v.around.rope);
  out.insert("mamba", v.around.mamba);
  out.insert("raw_decay", v.around.raw_decay);
  out.insert("exp_gate", v.around.exp_gate);
  out.insert("silu_gate", v.around.silu_gate);
  out.insert("tied_keys", v.around.tied_keys);
  out.insert("gate_root", v.around.gate_root);
  out.insert("alibi", attn::is<attn::Exp>(v.spec.weight));  // which slopes a decay of heads has
  out.insert("channel_gates", v.spec.channel_gates);
  out.insert("features", projected ? projected->dim : hedgehog ? hedgehog->dim : 0);
  return out;
}

// The table of inputs: name, shape, role and meaning.
static std::vector<std::tuple<std::string, std::string, std::string, std::string>> inputs() {
  static constexpr const char* kRoles[] = {"tensor",    "gate",     "log_gate", "logit",
                                           "parameter", "constant", "score",    "mask"};
  std::vector<std::tuple<std::string, std::string, std::string, std::string>> rows;
  for (const attn::Input& i : attn::input_table())
    rows.emplace_back(i.name, i.shape, kRoles[size_t(i.role)], i.about);
  return rows;
}

// The variant's mask as text ("" for causal), its reach (back, ahead, chunk, first; back -1: all
// keys), and whether its scale is a fixed number.
static std::tuple<std::string, std::vector<int64_t>, bool> mask_and_scale(const std::string& of) {
  const attn::Spec spec = make_spec(of, std::nullopt);
  const std::string mask = attn::text(attn::Spec{.mask = spec.mask});
  const attn::Reach r = attn::reach(spec.mask);
  const bool all = attn::sees_all_past(spec.mask);
  return {mask.substr(std::min(mask.size(), std::string("mask=").size())),
          {all ? -1 : r.back, r.ahead, r.chunk, r.first},
          attn::is<attn::Fixed>(spec.scale)};
}

// Whether a score of -inf leaves its key out of the row, as a mask does.
struct LeavesOut {
  bool operator()(attn::Exp) const { return true; }
  bool operator()(attn::Taylor) const { return false; }
  bool operator()(attn::Power) const { return false; }
  bool operator()(attn::Sigmoid) const { return true; }
  bool operator()(attn::Entmax) const { return true; }
  bool operator()(attn::TopK) const { return true; }
  bool operator()(attn::SelfAdjusted) const { return false; }  // its least score becomes -inf
  bool operator()(attn::Softpick) const { return false; }      // W sums |e^x - 1|, which is 1
  bool operator()(attn::StickBreaking) const { return true; }
};

// Why a tensor of 0 and -inf that is added to the scores is not a mask of this variant; "" if it
// is. And whether the variant has a bias.
static std::tuple<std::string, bool> mask_as_bias(const std::string& variant) {
  attn::Spec spec = make_spec(variant, std::nullopt);
  const bool bias = spec.bias;
  spec.bias = true, spec.mask = attn::Full{};
  try {
    attn::check_spec(spec);
  } catch (const Error& error) {
    return {error.what(), bias};
  }
  const auto* sum = std::get_if<attn::Sum>(&spec.denominator);
  const bool counts = spec.less_log_count || !attn::is<attn::Flat>(spec.sharpness) ||
                      !attn::is<attn::AsGiven>(spec.values) ||
                      attn::is<attn::Count>(spec.denominator) ||
                      attn::is<attn::CumulativeGate>(spec.denominator) || (sum && sum->floor != 0);
  if (!std::visit(LeavesOut{}, spec.weight)) return {"a score of -inf has a weight there", bias};
  if (spec.centred) return {"the mean score of a row would be -inf", bias};
  if (counts) return {"it counts the keys of a row, and would count hidden ones", bias};
  return {"", bias};
}

// The variant without its output gate, its norm and the gate after it.
static std::string before_norm(const std::string& variant) {
  const attn::Spec spec = make_spec(variant, std::nullopt);
  std::string changes;
  const auto leave_out = [&](bool has, const char* stage) {
    if (has) changes += (changes.empty() ? "" : ",") + std::string(stage);
  };
  leave_out(spec.output_gate, "no_output_gate");
  leave_out(!attn::is<attn::NoNorm>(spec.norm), "norm=none");
  leave_out(spec.post_gate, "no_post_gate");
  leave_out(spec.channel_gates, "no_channel_gates");
  if (changes.empty()) return variant;
  return variant + (variant.find(':') == variant.npos ? ":" : ",") + changes;
}

TORCH_LIBRARY_FRAGMENT(horner, m) {
  m.def("inputs", &inputs);
  m.def("before_norm(str variant) -> str", &before_norm);
  m.def("mask_as_bias(str variant) -> (str, bool)", &mask_as_bias);
  m.def("mask_and_scale(str variant) -> (str, int[], bool)", &mask_and_scale);
  m.def("version() -> str", [] { return std::string(HORNER_VERSION); });
  m.def("variants() -> str[]", &variants);
  m.def("executions() -> str[]", &executions);
  m.def("describe(str variant) -> Dict(str, str)", &describe);
  m.def("around(str variant) -> Dict(str, int)", &around);
}

}  // namespace horner::python
