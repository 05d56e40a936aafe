#include "convert/forms.h"

#include <charconv>
#include <cmath>

#include "core/check.h"
#include "core/names.h"
#include "nn/pattern.h"

namespace horner::convert {

static std::string window(int64_t near) {
  return "window(" + std::to_string(near) + ")";
}

// clang-format off
static const FormKind kForms[] = {
    {kCache,     "the head's own operator, with its KV cache", 0, [](int64_t, int64_t) { return std::string(); }},
    {"hedgehog", "softmax of the near keys, n learned features twice for the others", 64,
     [](int64_t n, int64_t near) { return "lolcats:features=hedgehog(" + std::to_string(n) + "),near=" + window(near); }},
    {"taylor",   "softmax of the near keys, the centred series up to order n for the others", 1,
     [](int64_t n, int64_t near) { return "near_centred_taylor" + std::to_string(n) + ":near=" + window(near); }},
    {"delta",    "softmax of the near keys, plus the gated delta rule of all", 0,
     [](int64_t, int64_t near) { return "softmax:mask=" + window(near) + "+gated_delta"; }},
    {"near",     "softmax of the near keys alone (a control)", 0,
     [](int64_t, int64_t near) { return "softmax:mask=" + window(near); }},
    {"state",    "n learned features twice for all keys (a control)", 64,
     [](int64_t n, int64_t) { return "hedgehog:features=hedgehog(" + std::to_string(n) + ")"; }},
};
// clang-format on

std::span<const FormKind> form_kinds() {
  return kForms;
}

// A feature map sees near keys with 1 / sqrt(D), divided by the temperature: the one that gives the
// scale of the layer.
static std::string temperature(const nn::ModelConfig& c, const attn::Spec& own) {
  const auto* scale = std::get_if<attn::Fixed>(&own.scale);
  const double t = own.temperature / (scale ? scale->factor * std::sqrt(double(c.D)) : 1);
  return std::abs(t - 1) < 1e-6 ? "" : ",temperature=" + std::to_string(t);
}

std::string form_text(const nn::ModelConfig& c, size_t layer, const std::string& form,
                      int64_t near) {
  const size_t digits = form.find_last_not_of("0123456789") + 1;
  int64_t n = 0;
  const bool given =
      std::from_chars(form.data() + digits, form.data() + form.size(), n).ec == std::errc();
  for (const FormKind& kind : kForms) {
    if (form.substr(0, digits) != kind.name || (given && kind.number == 0)) continue;
    const nn::Part& own = c.layers[layer].parts[0];
    if (form == kCache) return c.layers[layer].variant;
    const std::string text = kind.variant(given ? n : kind.number, near);
    return text + (text.starts_with("lolcats") ? temperature(c, own.attention) : "");
  }
  std::vector<std::string> names;
  for (const FormKind& kind : kForms)
    names.push_back(kind.name + (kind.number > 0 ? std::to_string(kind.number) : ""));
  fail("no form '", form, "' of a head; possible: ", quoted(names), " (the numbers may be others)");
}

Assignment assign_all(const nn::ModelConfig& c, const std::string& form,
                      const std::vector<int64_t>& layers) {
  Assignment out(c.layers.size(), std::vector<std::string>(size_t(c.H), kCache));
  for (const int64_t i : layers) out[size_t(i)].assign(size_t(c.H), form);
  return out;
}

nn::ModelConfig converted_config(const nn::ModelConfig& teacher, const Assignment& forms,
                                 int64_t near) {
  nn::Json variants = nn::Json::array();
  for (size_t i = 0; i < forms.size(); ++i) {
    std::vector<std::string> heads;
    for (const std::string& form : forms[i]) heads.push_back(form_text(teacher, i, form, near));
    variants.push_back(nn::heads_text(heads));
  }
  nn::Json j = teacher.json;
  j["horner_variant"] = variants;
  return nn::model_config(j);
}

double kept_bytes(const nn::ModelConfig& c, const nn::LayerConfig& l, int64_t tokens) {
  double sum = 0;
  for (const nn::Part& p : l.parts) sum += nn::kept_bytes(c, p, at::kBFloat16, tokens);
  return sum;
}

double kept_bytes(const nn::ModelConfig& c, int64_t tokens) {
  double sum = 0;
  for (const nn::LayerConfig& l : c.layers) sum += kept_bytes(c, l, tokens);
  return sum;
}

}  // namespace horner::convert
