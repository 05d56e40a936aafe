#include "train/checkpoint.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "core/check.h"
#include "files/checksums.h"
#include "files/files.h"
#include "files/json.h"
#include "files/tensors_file.h"
#include "nn/checkpoint.h"

namespace horner::train {

namespace fs = std::filesystem;

static constexpr const char* kPrefix = "checkpoint-";
static constexpr const char* kPart = ".part";

// A checkpoint's name is kPrefix and at least eight digits; while it is incomplete, and kPart. What
// has any other name is not ours: it is neither loaded nor removed.
static bool is_checkpoint(std::string name, bool whole) {
  if (!name.starts_with(kPrefix) || name.ends_with(kPart) == whole) return false;
  name = name.substr(std::strlen(kPrefix));
  if (!whole) name.resize(name.size() - std::strlen(kPart));
  return name.size() >= 8 && name.size() <= 18 &&
         name.find_first_not_of("0123456789") == std::string::npos;
}

int64_t step_of(const fs::path& checkpoint) {
  return std::stoll(checkpoint.filename().string().substr(std::strlen(kPrefix)));
}

// Oldest first.
static std::vector<fs::path> checkpoints(const fs::path& run, bool whole) {
  std::vector<fs::path> out;
  if (!fs::is_directory(run)) return out;
  for (const fs::directory_entry& e : fs::directory_iterator(run))
    if (e.is_directory() && is_checkpoint(e.path().filename().string(), whole))
      out.push_back(e.path());
  std::sort(out.begin(), out.end(),
            [](const fs::path& a, const fs::path& b) { return step_of(a) < step_of(b); });
  return out;
}

std::optional<fs::path> newest_checkpoint(const fs::path& run) {
  const auto all = checkpoints(run, true);
  return all.empty() ? std::optional<fs::path>() : all.back();
}

Found find_checkpoint(const fs::path& run) {
  Found out;
  auto all = checkpoints(run, true);
  for (; !all.empty() && !out.whole; all.pop_back()) {
    const std::string why = files::damage_of(all.back());
    if (why.empty())
      out.whole = all.back();
    else
      out.damaged.push_back({all.back(), why});
  }
  return out;
}

void set_aside(const fs::path& checkpoint) {
  const fs::path to = checkpoint.string() + ".damaged";
  fs::remove_all(to);
  fs::rename(checkpoint, to);
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
  files::write_checksums(folder);
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
