// States in safetensors files; declared in attn/state.h, defined here because the format is JSON.
#include <ATen/ATen.h>

#include <charconv>

#include "attn/inputs.h"
#include "attn/spec_text.h"
#include "attn/state.h"
#include "core/check.h"
#include "files/tensors_file.h"

namespace horner::attn {

int64_t bytes(const State& state) {
  State s = state;
  int64_t n = 0;
  for (const auto& [name, x] : tensors_of(s))
    if (x->defined()) n += int64_t(x->nbytes());
  return n;
}

static const std::pair<const char*, int64_t StateShape::*> kSizes[] = {
    {"B", &StateShape::B}, {"G", &StateShape::G}, {"D", &StateShape::D}, {"E", &StateShape::E}};

void save(const State& state, const std::filesystem::path& path) {
  State s = state;
  files::TensorsFile file;
  for (const auto& [name, x] : tensors_of(s))
    if (x->defined()) file.tensors[name] = *x;
  file.metadata = {{"format", "horner state 1"},     {"spec", text(s.spec)},
                   {"dtype", dtype_name(s.dtype)},   {"tokens", std::to_string(s.tokens)},
                   {"room", std::to_string(s.room)}, {"held", std::to_string(s.held)}};
  for (const auto& [name, at] : kSizes) file.metadata[name] = std::to_string(s.shape.*at);
  files::save_tensors(path, file);
}

State load_state(const std::filesystem::path& path) {
  const files::TensorsFile file = files::load_tensors(path);
  const auto word = [&](const std::string& name) {
    const auto found = file.metadata.find(name);
    check(found != file.metadata.end(), path.string(), " is not a state file: missing metadata '",
          name, "'");
    return found->second;
  };
  const auto number = [&](const std::string& name) {
    const std::string w = word(name);
    int64_t n = -1;
    const auto [end, error] = std::from_chars(w.data(), w.data() + w.size(), n);
    check(error == std::errc() && end == w.data() + w.size() && n >= 0, path.string(), ": '", name,
          "' must be a non-negative integer, got '", w, "'");
    return n;
  };
  check(word("format") == "horner state 1", path.string(),
        ": format must be 'horner state 1', got '", word("format"), "'");
  at::ScalarType dtype = at::kFloat;
  bool known = false;
  for (at::ScalarType t : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    if (dtype_name(t) == word("dtype")) dtype = t, known = true;
  check(known, path.string(), ": unknown dtype '", word("dtype"), "'");
  StateShape shape{};
  for (const auto& [name, at] : kSizes) shape.*at = number(name);
  return state_of(with(Spec{}, word("spec")), shape, dtype,
                  {number("tokens"), number("room"), number("held")}, file.tensors, path.string());
}

}  // namespace horner::attn
