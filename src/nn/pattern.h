// Which layer of a model has which attention variant. A pattern is a text such as
// "linear_decay*3,softmax", or a JSON list of such texts; it repeats until every layer has a
// variant. A variant alone is the pattern of a model whose layers are all the same.
//
// The heads of a layer may differ: "softmax^2|lolcats" has softmax in the first two heads, lolcats
// in the third. "softmax_window+gated_delta" is the sum of two operators.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "files/json.h"

namespace horner::nn {

// One turn of a pattern. A comma separates variants, except where it separates the changes of one:
// "taylor2:norm=l2,post_gate,softmax" has two. Does not look up the names.
std::vector<std::string> pattern(const files::Json& text_or_list);

// The operators of the heads of a layer, whose results add up: [H][1 or more] variants. Throws
// unless the text has one variant, or H heads.
std::vector<std::vector<std::string>> variants_of_heads(const std::string& layer, int64_t H);

// The shortest text of them: "softmax^2|lolcats".
std::string heads_text(const std::vector<std::string>& forms);

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
