#include "train/checkpoint.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <mutex>

#include "core/check.h"
#include "files/files.h"
#include "files/json.h"
#include "files/tensors_file.h"
#include "nn/checkpoint.h"

namespace horner::train {

namespace fs = std::filesystem;

static constexpr const char* kPrefix = "checkpoint-";
static constexpr const char* kPart = ".part";

// Oldest first. The names of incomplete checkpoints end in kPart.
static std::vector<fs::path> checkpoints(const fs::path& run, bool whole) {
  std::vector<fs::path> out;
  if (!fs::is_directory(run)) return out;
  for (const fs::directory_entry& e : fs::directory_iterator(run)) {
    const std::string name = e.path().filename().string();
    if (!e.is_directory() || !name.starts_with(kPrefix)) continue;
    if (name.ends_with(kPart) != whole) out.push_back(e.path());
  }
  std::sort(out.begin(), out.end());
  return out;
}

std::optional<fs::path> newest_checkpoint(const fs::path& run) {
  const auto all = checkpoints(run, true);
  return all.empty() ? std::optional<fs::path>() : all.back();
}

// The generators whose states a checkpoint saves.
static std::vector<std::pair<std::string, at::Generator>> generators() {
  std::vector<std::pair<std::string, at::Generator>> out;
  out.emplace_back("random.cpu", at::globalContext().defaultGenerator(at::kCPU));
  if (at::hasCUDA())
    out.emplace_back("random.cuda", at::globalContext().defaultGenerator(at::kCUDA));
  return out;
}

static files::TensorsFile optimizer_file(const Optimizer& o) {
  files::TensorsFile out;
  for (const Parameter& p : o.parameters) {
    out.tensors["mean." + p.name] = p.mean;
    out.tensors["square." + p.name] = p.square;
  }
  out.tensors["count"] = o.count;
  for (auto& [name, generator] : generators()) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    out.tensors[name] = generator.get_state();
  }
  return out;
}

static void write_all(const fs::path& folder, const nn::Model& m, const Optimizer& o,
                      const Position& p) {
  nn::save_model(m, folder);
  files::save_tensors(folder / "optimizer.safetensors", optimizer_file(o));
  files::write_json(folder / "training.json",
                    {{"step", p.step},
                     {"spikes", p.spikes},
                     {"skipped", p.skipped},
                     {"seconds", p.seconds},
                     {"losses", p.losses.values},
                     {"gradient_norms", p.norms.values}},
                    1);
}

void save_checkpoint(const fs::path& run, const nn::Model& m, const Optimizer& o, const Position& p,
                     int64_t keep) {
  char number[32];
  std::snprintf(number, sizeof number, "%08lld", static_cast<long long>(p.step));
  const fs::path whole = run / (kPrefix + std::string(number)), part = whole.string() + kPart;
  if (fs::exists(whole)) return;  // an interrupted run has written it already
  for (const fs::path& left : checkpoints(run, false)) fs::remove_all(left);
  try {
    write_all(part, m, o, p);
  } catch (...) {
    std::error_code ignored;  // the first error is the one to report
    fs::remove_all(part, ignored);
    throw;
  }
  files::sync_folder(part);
  fs::rename(part, whole);
  files::sync_folder(run);
  const auto all = checkpoints(run, true);
  for (int64_t i = 0; i + keep < int64_t(all.size()); ++i) {
    const fs::path old = all[size_t(i)].string() + kPart;  // half removed, it must be incomplete
    fs::rename(all[size_t(i)], old);
    fs::remove_all(old);
  }
}

Position load_checkpoint(const fs::path& checkpoint, Optimizer& o) {
  const c10::NoGradGuard without_gradients;
  const fs::path file = checkpoint / "optimizer.safetensors";
  const files::TensorsFile saved = files::load_tensors(file);
  const auto take = [&](const std::string& name, const at::Tensor& into) {
    const auto found = saved.tensors.find(name);
    check(found != saved.tensors.end(), file.string(), " has no tensor '", name, "'");
    check(found->second.sizes() == into.sizes(), file.string(), ": '", name, "' must be ",
          into.sizes(), ", not ", found->second.sizes());
    into.copy_(found->second);
  };
  for (const Parameter& p : o.parameters) {
    take("mean." + p.name, p.mean);
    take("square." + p.name, p.square);
  }
  take("count", o.count);
  for (auto& [name, generator] : generators()) {
    const auto found = saved.tensors.find(name);
    if (found == saved.tensors.end()) continue;  // saved on a machine without this device
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(found->second.clone());
  }
  const Json j = files::read_json(checkpoint / "training.json");
  try {
    return {j.at("step"),    j.at("spikes"),   j.at("skipped"),
            j.at("seconds"), {j.at("losses")}, {j.at("gradient_norms")}};
  } catch (const Json::exception& e) {
    fail((checkpoint / "training.json").string(), " is damaged: ", files::problem_of(e));
  }
}

}  // namespace horner::train
