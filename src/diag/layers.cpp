#include "diag/layers.h"

#include <algorithm>

#include "core/check.h"
#include "nn/pattern.h"
#include "nn/rows.h"

namespace horner::diag {

std::string attention_of(const nn::ModelConfig& c) {
  return nn::pattern_text(nn::variants_of(c));
}

// Of the sum of several operators, none has the weights of the head.
std::string why_no_rows(const nn::LayerConfig& l, int64_t head) {
  std::string why;
  size_t operators = 0;
  for (const nn::Part& p : l.parts)
    if (std::ranges::find(p.heads, head) != p.heads.end())
      why = nn::why_no_rows(p.attention), ++operators;
  return operators > 1 ? "it adds the results of several operators" : why;
}

Heads heads_with_rows(const nn::ModelConfig& c) {
  Heads out;
  for (size_t i = 0; i < c.layers.size(); ++i)
    for (int64_t h = 0; h < c.H; ++h)
      if (why_no_rows(c.layers[i], h).empty()) out.emplace_back(int64_t(i), h);
  check(!out.empty(), "layer 0 has no attention weights to analyse: ", why_no_rows(c.layers[0], 0),
        c.layers.size() > 1 ? "; nor has any other layer" : "");
  return out;
}

std::string layers_text(const nn::ModelConfig& c) {
  const std::vector<nn::LayersOf> all = nn::by_variant(nn::variants_of(c));
  if (all.size() == 1) return "";
  std::string out;
  for (const nn::LayersOf& each : all) {
    const nn::LayerConfig& l = c.layers[size_t(each.layers[0])];
    const std::string why = l.uniform() ? why_no_rows(l, 0) : "";
    out += (out.empty() ? "" : "; ") + each.variant + " in " +
           (each.layers.size() == 1 ? "layer " : "layers ") + each.text() +
           (why.empty() ? "" : " (not measured: " + why + ")");
  }
  return out;
}

}  // namespace horner::diag
