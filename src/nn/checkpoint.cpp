#include "nn/checkpoint.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>

#include "core/check.h"
#include "files/checksums.h"

namespace horner::nn {

namespace fs = std::filesystem;

// Of the tensors in files; several slots may share one.
static std::map<std::string, int64_t> stored_rows(const std::vector<Slot>& all) {
  std::map<std::string, int64_t> out;
  for (const Slot& s : all) out[s.name] += s.shape[0];
  return out;
}

// Without a seed every tensor must be there.
static Model load(const fs::path& folder, const ModelConfig& config, std::optional<uint64_t> seed) {
  if (fs::exists(folder / files::kChecksums)) {
    const std::string damage = files::damage_of(folder, [](const std::string& name) {
      return name == "config.json" || name.starts_with("model");
    });
    check(damage.empty(), folder.string(), " is damaged: ", damage);
  }
  Model m{config};
  const files::TensorsFile file = files::load_tensors(folder);
  const std::vector<Slot> all = slots(m);
  const std::map<std::string, int64_t> rows = stored_rows(all);
  for (const Slot& s : all) {
    auto found = file.tensors.find(s.name);
    const size_t dot = s.name.find('.');
    if (found == file.tensors.end() && s.at != &m.head)  // saved without its head
      found = file.tensors.find(s.name.substr(dot + 1));
    if (seed && found == file.tensors.end() && is_of_variant(s)) {
      *s.at = random_start(s, *seed).to(m.embedding.scalar_type());
      continue;
    }
    check(found != file.tensors.end(), folder.string(), ": missing tensor '", s.name,
          "', which config.json requires; both files must be of one model");
    at::Tensor x = found->second;
    std::vector<int64_t> shape = s.shape;
    shape[0] = rows.at(s.name);
    if (s.transposed) std::ranges::reverse(shape);
    check(x.sizes() == at::IntArrayRef(shape), folder.string(), ": tensor '", s.name,
          "' must have shape ", at::IntArrayRef(shape), ", got ", x.sizes());
    check(at::isFloatingType(x.scalar_type()), folder.string(), ": tensor '", s.name,
          "' must have a floating-point dtype, got ", x.scalar_type());
    if (s.transposed) x = x.t();
    x = s.rows.empty() ? x.narrow(0, s.first, s.shape[0])
                       : x.index_select(0, at::tensor(s.rows, at::kLong));
    *s.at = s.transposed ? x.contiguous() : x;
  }
  if (m.config.tied) m.head = m.embedding;
  return m;
}

Model load_model(const fs::path& folder) {
  return load(folder, model_config(files::read_json(folder / "config.json")), std::nullopt);
}

Model load_model(const fs::path& folder, const ModelConfig& config, uint64_t seed) {
  return load(folder, config, seed);
}

files::TensorsFile stored_tensors(const std::vector<Slot>& all) {
  files::TensorsFile file;
  file.metadata["format"] = "pt";
  const std::map<std::string, int64_t> rows = stored_rows(all);
  for (const Slot& s : all) {
    const at::Tensor x = s.at->detach();
    at::Tensor& stored = file.tensors[s.name];
    if (rows.at(s.name) == s.shape[0] && s.rows.empty()) {
      stored = x;
      continue;
    }
    std::vector<int64_t> shape = s.shape;
    shape[0] = rows.at(s.name);
    if (!stored.defined()) stored = at::empty(shape, x.options());
    if (s.rows.empty())
      stored.narrow(0, s.first, s.shape[0]).copy_(x);
    else
      stored.index_copy_(0, at::tensor(s.rows, at::kLong).to(x.device()), x);
  }
  for (const Slot& s : all)
    if (s.transposed && s.part == 0) file.tensors[s.name] = file.tensors[s.name].t().contiguous();
  return file;
}

void save_model(const Model& model, const fs::path& folder) {
  fs::create_directories(folder);
  Model m = model;
  const files::TensorsFile file = stored_tensors(slots(m));
  std::vector<at::Tensor> kept;
  files::safetensors::write_sharded(folder, files::arrays_of(file, kept));
  Json config = m.config.json;
  config["dtype"] = m.embedding.scalar_type() == at::kBFloat16 ? "bfloat16"
                    : m.embedding.scalar_type() == at::kHalf   ? "float16"
                                                               : "float32";
  files::write_json(folder / "config.json", config);
}

}  // namespace horner::nn
