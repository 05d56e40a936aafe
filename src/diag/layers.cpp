#include "diag/layers.h"

#include "core/check.h"
#include "nn/pattern.h"
#include "nn/rows.h"

namespace horner::diag {

std::string attention_of(const nn::ModelConfig& c) {
  return nn::pattern_text(nn::variants_of(c));
}

std::vector<int64_t> layers_with_rows(const nn::ModelConfig& c) {
  std::vector<int64_t> out;
  for (size_t i = 0; i < c.layers.size(); ++i)
    if (nn::why_no_rows(c.layers[i].attention).empty()) out.push_back(int64_t(i));
  check(!out.empty(),
        "layer 0 has no attention weights to analyse: ", nn::why_no_rows(c.layers[0].attention),
        c.layers.size() > 1 ? "; nor has any other layer" : "");
  return out;
}

std::string layers_text(const nn::ModelConfig& c) {
  const std::vector<nn::LayersOf> all = nn::by_variant(nn::variants_of(c));
  if (all.size() == 1) return "";
  std::string out;
  for (const nn::LayersOf& each : all) {
    const std::string why = nn::why_no_rows(c.layers[size_t(each.layers[0])].attention);
    out += (out.empty() ? "" : "; ") + each.variant + " in " +
           (each.layers.size() == 1 ? "layer " : "layers ") + each.text() +
           (why.empty() ? "" : " (not measured: " + why + ")");
  }
  return out;
}

}  // namespace horner::diag
