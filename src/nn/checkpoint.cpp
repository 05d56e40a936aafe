#include "nn/checkpoint.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "core/check.h"
#include "files/files.h"
#include "files/tensors_file.h"

namespace horner::nn {

namespace fs = std::filesystem;

Json read_json(const fs::path& file) {
  check(fs::is_regular_file(file), "there is no file '", file.string(), "'");
  const files::MappedFile mapped(file);
  try {
    return Json::parse(mapped.text());
  } catch (const Json::exception& e) {
    fail(file.string(), " is no JSON: ", e.what());
  }
}

// GPT-2 keeps weights of products [in, out], and those of q, k and v side by side in one tensor.
static bool is_turned(const ModelConfig& c, const Slot& s) {
  return c.family->names == Family::gpt2 && s.shape.size() == 2 &&
         s.name.find(".h.") != std::string::npos && !is_of_variant(s);
}
static bool is_joined(const Slot& s) {
  return s.name.find(".c_attn.") != std::string::npos;
}

// Without a generator every tensor must be there.
static Model load(const fs::path& folder, const ModelConfig& config, const at::Generator* random) {
  Model m{config};
  const files::TensorsFile file = files::load_tensors(folder);
  std::map<std::string, int64_t> taken;  // of joined tensors: how many rows
  for (Slot& s : slots(m)) {
    auto found = file.tensors.find(s.name);
    const size_t dot = s.name.find('.');
    if (found == file.tensors.end() && s.name != "lm_head.weight")  // saved without its head
      found = file.tensors.find(s.name.substr(dot + 1));
    if (random && found == file.tensors.end() && is_of_variant(s)) {
      *s.at = random_start(s, config, *random).to(m.embedding.scalar_type());
      continue;
    }
    check(found != file.tensors.end(), folder.string(), " has no tensor '", s.name, "'");
    at::Tensor x = is_turned(m.config, s) ? found->second.t() : found->second;
    if (is_joined(s)) {
      int64_t& row = taken[s.name];
      check(x.dim() >= 1 && x.size(0) == 3 * s.shape[0], folder.string(), ": '", s.name,
            "' must hold q, k and v of ", s.shape[0], " rows each, not ", found->second.sizes());
      x = x.narrow(0, row, s.shape[0]);
      row += s.shape[0];
    }
    check(x.sizes() == at::IntArrayRef(s.shape), folder.string(), ": '", s.name, "' must be ",
          at::IntArrayRef(s.shape), ", not ", x.sizes());
    check(at::isFloatingType(x.scalar_type()), folder.string(), ": '", s.name, "' is of ",
          x.scalar_type(), ", no floating type");
    *s.at = is_turned(m.config, s) ? x.contiguous() : x;
  }
  if (m.config.tied) m.head = m.embedding;
  return m;
}

Model load_model(const fs::path& folder) {
  return load(folder, model_config(read_json(folder / "config.json")), nullptr);
}

Model load_model(const fs::path& folder, const ModelConfig& config, uint64_t seed) {
  const at::Generator random = at::make_generator<at::CPUGeneratorImpl>(seed);
  return load(folder, config, &random);
}

void save_model(const Model& model, const fs::path& folder) {
  fs::create_directories(folder);
  Model m = model;
  files::TensorsFile file;
  file.metadata["format"] = "pt";
  std::map<std::string, std::vector<at::Tensor>> joined;
  for (const Slot& s : slots(m)) {
    at::Tensor x = s.at->detach();
    if (is_joined(s))
      joined[s.name].push_back(x);
    else
      file.tensors[s.name] = is_turned(m.config, s) ? x.t().contiguous() : x;
  }
  for (const auto& [name, parts] : joined) {
    const at::Tensor x = at::cat(parts, 0);
    file.tensors[name] = x.dim() == 2 ? x.t().contiguous() : x;
  }
  std::vector<at::Tensor> kept;
  files::safetensors::write_sharded(folder, files::arrays_of(file, kept));
  Json config = m.config.json;
  config["dtype"] = m.embedding.scalar_type() == at::kBFloat16 ? "bfloat16"
                    : m.embedding.scalar_type() == at::kHalf   ? "float16"
                                                               : "float32";
  files::NewFile out(folder / "config.json");
  const std::string text = config.dump(2) + "\n";
  out.write(text);
  out.commit();
}

}  // namespace horner::nn
