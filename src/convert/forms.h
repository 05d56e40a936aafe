// The forms that a head of a trained model can take, each a variant of the catalog or the sum of
// two: what it keeps of the past, and what of it is learned.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "nn/model.h"

namespace horner::convert {

struct FormKind {
  const char *name, *about;
  int number;  // the default of the number after the name; 0: it takes none
  // The variant, with the number and the near window.
  std::string (*variant)(int64_t number, int64_t near);
};
std::span<const FormKind> form_kinds();

inline constexpr const char* kCache = "cache";  // the head's own operator

// The text of a form in a layer of the teacher, for nn::heads_text: "hedgehog64" with a window of
// 64 is "lolcats:features=hedgehog(64),near=window(64)". Throws for an unknown form.
std::string form_text(const nn::ModelConfig& teacher, size_t layer, const std::string& form,
                      int64_t near);

// The forms of all heads, [layer][head].
using Assignment = std::vector<std::vector<std::string>>;
Assignment assign_all(const nn::ModelConfig& teacher, const std::string& form,
                      const std::vector<int64_t>& layers);

// The teacher's config with these forms.
nn::ModelConfig converted_config(const nn::ModelConfig& teacher, const Assignment&, int64_t near);

// What decoding keeps after `tokens` tokens; keys and values count as bfloat16, sums as they are.
double kept_bytes(const nn::ModelConfig&, int64_t tokens);
double kept_bytes(const nn::ModelConfig&, const nn::LayerConfig&, int64_t tokens);

}  // namespace horner::convert
