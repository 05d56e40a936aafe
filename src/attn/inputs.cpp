#include "attn/inputs.h"

#include <ATen/ATen.h>

#include <map>

#include "attn/spec_text.h"
#include "core/check.h"

namespace horner::attn {

std::string dtype_name(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

static bool always(const Spec&) {
  return true;
}

// clang-format off
static const Input kInputs[] = {
    {"q",                &Inputs::q,                "BHTD", Role::tensor,    always, "queries"},
    {"k",                &Inputs::k,                "BGSD", Role::tensor,    always, "keys"},
    {"v",                &Inputs::v,                "BGSE", Role::tensor,    always, "values"},
    {"decay",            &Inputs::decay,            "BGS",  Role::log_gate,  [](const Spec& s) { return is<TokenGate>(s.decay); },             "the log of each token's gate"},
    {"input_gate",       &Inputs::input_gate,       "BGS",  Role::gate,      [](const Spec& s) { return s.input_gate; },                       "what multiplies each value"},
    {"denominator_gate", &Inputs::denominator_gate, "BGS",  Role::log_gate,  [](const Spec& s) { return is<CumulativeGate>(s.denominator); },  "the log of each token's share of the denominator"},
    {"output_gate",      &Inputs::output_gate,      "BHT",  Role::gate,      [](const Spec& s) { return s.output_gate; },                      "what multiplies each output before the norm"},
    {"post_gate",        &Inputs::post_gate,        "BHT",  Role::gate,      [](const Spec& s) { return s.post_gate; },                        "what multiplies each output after the norm"},
    {"length_scale",     &Inputs::length_scale,     "H",    Role::parameter, [](const Spec& s) { return is<LogLength>(s.sharpness); },         "s of SSMax"},
    {"log_power",        &Inputs::log_power,        "H3",   Role::parameter, [](const Spec& s) { return is<LogPower>(s.sharpness); },          "delta, beta and gamma of ASEntmax"},
    {"count_exponent",   &Inputs::count_exponent,   "H",    Role::parameter, [](const Spec& s) { return is<CountPower>(s.denominator); },      "the count's power, before a sigmoid"},
    {"norm_weight",      &Inputs::norm_weight,      "E",    Role::parameter, [](const Spec& s) { return is<Rms>(s.norm) || is<Layer>(s.norm); }, "the norm's weight"},
    {"norm_bias",        &Inputs::norm_bias,        "E",    Role::parameter, [](const Spec& s) { return is<Layer>(s.norm); },                  "the norm's bias"},
    {"query_projection", &Inputs::query_projection, "HDF",  Role::parameter, [](const Spec& s) { return is<Project>(s.features); },            "what projects the queries"},
    {"key_projection",   &Inputs::key_projection,   "GDF",  Role::parameter, [](const Spec& s) { return is<Project>(s.features); },            "what projects the keys"},
    {"keep",             &Inputs::keep,             "BS",   Role::mask,      nullptr, "false hides a key"},
    {"cu_seqlens",       &Inputs::cu_seqlens,       "n",    Role::mask,      nullptr, "where packed sequences begin, and the end"},
};
// clang-format on

std::span<const Input> input_table() {
  return kInputs;
}

Inputs tokens(Inputs in, int64_t from, int64_t to) {
  for (const Input& i : kInputs) {
    at::Tensor& x = in.*i.at;
    const size_t axis = std::string_view(i.shape).find_first_of("TS");
    if (x.defined() && axis != std::string_view::npos) x = x.narrow(int64_t(axis), from, to - from);
  }
  return in;
}

// The shape as a reader wants it: "[B, H, 3]".
static std::string shape_text(const char* shape) {
  std::string out;
  for (const char* c = shape; *c; ++c) out += (out.empty() ? "" : ", ") + std::string(1, *c);
  return "[" + out + "]";
}

// Each letter is set by the first input that has it, and binds the others.
static void check_shape(const Input& i, const at::Tensor& x, std::map<char, int64_t>& sizes) {
  const std::string_view shape = i.shape;
  check(x.dim() == int64_t(shape.size()), i.name, " must be ", shape_text(i.shape), ", not ",
        x.sizes());
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] == 'n') continue;
    const int64_t size = x.size(int64_t(d));
    const int64_t wanted =
        std::isdigit(shape[d]) ? shape[d] - '0' : sizes.try_emplace(shape[d], size).first->second;
    const std::string where =
        std::isdigit(shape[d]) ? ""
                               : std::string(" with ") + shape[d] + " = " + std::to_string(wanted);
    check(size == wanted, i.name, " must be ", shape_text(i.shape), where, ", not ", x.sizes());
  }
}

static void check_type(const Input& i, const at::Tensor& x, const Inputs& in) {
  check(x.device() == in.q.device(), i.name, " is on ", x.device(), ", q on ", in.q.device());
  if (i.role == Role::mask) {
    const bool whole = x.scalar_type() == at::kInt || x.scalar_type() == at::kLong;
    const bool is_keep = i.at == &Inputs::keep;
    check(is_keep ? x.scalar_type() == at::kBool : whole, i.name, " must be ",
          is_keep ? "bool" : "int32 or int64", ", not ", dtype_name(x.scalar_type()));
    return;
  }
  check(at::isFloatingType(x.scalar_type()), i.name,
        " must be float64, float32, bfloat16 or float16, not ", dtype_name(x.scalar_type()));
  if (i.role == Role::tensor)
    check(x.scalar_type() == in.q.scalar_type(), "q, k and v must have one dtype: q is ",
          dtype_name(in.q.scalar_type()), ", ", i.name, " is ", dtype_name(x.scalar_type()));
}

static void check_packing(const Inputs& in) {
  const at::Tensor& c = in.cu_seqlens;
  check(in.q.size(2) == in.k.size(2), "packed sequences need as many keys as queries: there are ",
        in.q.size(2), " queries and ", in.k.size(2), " keys");
  check(c.numel() >= 2, "cu_seqlens must hold at least a beginning and an end, not ", c.numel(),
        " numbers");
  if (!c.is_cpu()) return;  // reading it would wait for the device
  const at::Tensor whole = c.to(at::kLong).contiguous();
  const int64_t *at = whole.const_data_ptr<int64_t>(), n = whole.numel();
  check(at[0] == 0 && at[n - 1] == in.q.size(2), "cu_seqlens must go from 0 to ", in.q.size(2),
        ", not from ", at[0], " to ", at[n - 1]);
  for (int64_t i = 1; i < n; ++i)
    check(at[i - 1] <= at[i], "cu_seqlens must not decrease: it goes from ", at[i - 1], " to ",
          at[i]);
}

void check_inputs(const Spec& spec, const Inputs& in) {
  check_spec(spec);
  check(is<NoDecay>(spec.decay) || !sees_future(spec.mask),
        "decay fades with the distance to a past key: it needs a causal or window mask, not full");
  std::map<char, int64_t> sizes;
  if (const auto* p = std::get_if<Project>(&spec.features)) sizes['F'] = p->dim;
  for (const Input& i : kInputs) {
    const at::Tensor& x = in.*i.at;
    if (i.wanted)
      check(i.wanted(spec) == x.defined(), "this variant takes ", x.defined() ? "no " : "", i.name,
            x.defined() ? "" : " " + shape_text(i.shape) + " (" + i.about + "): none was given");
    if (!x.defined()) continue;
    check_shape(i, x, sizes);
    check_type(i, x, in);
  }
  check(sizes['G'] > 0 && sizes['H'] % sizes['G'] == 0, "the ", sizes['H'],
        " heads of q must be a multiple of the ", sizes['G'], " heads of k and v");
  check(sizes['S'] > 0, "there must be at least one key: k is ", in.k.sizes());
  check(sizes['D'] > 0 && sizes['E'] > 0, "head dimensions must be at least 1, not ", sizes['D'],
        " and ", sizes['E']);
  if (in.cu_seqlens.defined()) check_packing(in);
}

}  // namespace horner::attn
