// Which layer of a model has which attention variant. A pattern is a text such as
// "linear_decay*3,softmax", or a JSON list of such texts; it repeats until every layer has a
// variant. A variant alone is the pattern of a model whose layers are all the same.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "files/json.h"

namespace horner::nn {

// One turn of a pattern. A comma separates variants, except where it separates the changes of one:
// "taylor2:norm=l2,post_gate,softmax" has two. Does not look up the names.
std::vector<std::string> pattern(const files::Json& text_or_list);

// The variants of all layers. Throws if the pattern is longer than that.
std::vector<std::string> variants_of_layers(const files::Json& text_or_list, int64_t layers);

// The shortest pattern with these variants: "linear_decay*3,softmax".
std::string pattern_text(const std::vector<std::string>& variants);

// Each variant once, with its layers: "linear_decay" and "0-2, 4-6".
struct LayersOf {
  std::string variant;
  std::vector<int64_t> layers;

  std::string text() const;  // of the layers
};
std::vector<LayersOf> by_variant(const std::vector<std::string>& variants);

}  // namespace horner::nn
