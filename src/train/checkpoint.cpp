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

// "mean.NAME", and "mean.NAME@FIRST" of a part that begins at another element.
static std::string piece_name(const char* what, const Optimizer& o, const Piece& p) {
  return what + o.parameters[p.of].name + (p.begin > 0 ? "@" + std::to_string(p.begin) : "");
}

static files::TensorsFile optimizer_file(const Optimizer& o, bool first) {
  files::TensorsFile out;
  for (const Piece& p : o.pieces) {
    out.tensors[piece_name("mean.", o, p)] = p.mean;
    out.tensors[piece_name("square.", o, p)] = p.square;
  }
  if (!first) return out;
  out.tensors["count"] = o.count;
  for (auto& [name, generator] : generators()) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    out.tensors[name] = generator.get_state();
  }
  return out;
}

static void write_model(const fs::path& folder, const nn::Model& m, const Position& p) {
  nn::save_model(m, folder);
  files::write_json(folder / "training.json",
                    {{"step", p.step},
                     {"spikes", p.spikes},
                     {"skipped", p.skipped},
                     {"seconds", p.seconds},
                     {"losses", p.losses.values},
                     {"gradient_norms", p.norms.values}},
                    1);
}

// This rank's part of the optimizer.
static void write_part(const fs::path& folder, const Optimizer& o, const Ranks& r) {
  char name[64] = "optimizer.safetensors";
  if (r.world > 1)
    std::snprintf(name, sizeof name, "optimizer-%05d-of-%05d.safetensors", r.rank + 1, r.world);
  check(fs::is_directory(folder), "rank ", r.rank, " does not see ", folder.string(),
        ", which rank 0 has made: with --shard every process writes a part of a checkpoint; give "
        "--out a folder that all machines share");
  files::save_tensors(folder / name, optimizer_file(o, r.rank == 0));
}

fs::path checkpoint_path(const fs::path& run, int64_t step) {
  char number[32];
  std::snprintf(number, sizeof number, "%08lld", static_cast<long long>(step));
  return run / (kPrefix + std::string(number));
}

void save_checkpoint(const fs::path& run, const nn::Model& m, const Optimizer& o, const Position& p,
                     int64_t keep, const Group& group) {
  const fs::path whole = checkpoint_path(run, p.step), part = whole.string() + kPart;
  const bool first = group.ranks().rank == 0;
  const at::Tensor there = at::zeros({}, at::kDouble);  // an interrupted run has written it already
  if (first && fs::exists(whole)) there.fill_(1);
  group.broadcast({there});
  if (there.item<double>() > 0) return;
  try {
    if (first) {
      for (const fs::path& left : checkpoints(run, false)) fs::remove_all(left);
      write_model(part, m, p);
    }
    group.barrier();
    write_part(part, o, group.ranks());
    group.barrier();
    if (!first) return;
    files::write_checksums(part);
  } catch (...) {
    std::error_code ignored;  // the first error is the one to report
    if (first) fs::remove_all(part, ignored);
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

namespace {

struct Stored {
  int64_t begin;
  at::Tensor values;
  fs::path file;
};
using StoredTensors = std::map<std::string, std::vector<Stored>>;  // by name, without "@FIRST"

StoredTensors stored_optimizer(const fs::path& checkpoint) {
  StoredTensors out;
  for (const fs::directory_entry& e : fs::directory_iterator(checkpoint)) {
    const std::string file = e.path().filename().string();
    if (!file.starts_with("optimizer") || !file.ends_with(".safetensors")) continue;
    for (const auto& [name, x] : files::load_tensors(e.path()).tensors) {
      const size_t at = name.rfind('@');
      const int64_t begin = at == name.npos ? 0 : std::atoll(name.c_str() + at + 1);
      out[name.substr(0, at)].push_back({begin, x, e.path()});
    }
  }
  return out;
}

// Copies elements begin, begin + 1, … of the stored tensor.
void take(const StoredTensors& all, const fs::path& checkpoint, const std::string& name,
          int64_t begin, const at::Tensor& into) {
  const auto found = all.find(name);
  check(found != all.end(), (checkpoint / "optimizer.safetensors").string(), " has no tensor '",
        name, "'");
  const int64_t end = begin + into.numel();
  const at::Tensor flat = into.view({-1});
  int64_t copied = 0;
  for (const Stored& s : found->second) {
    const int64_t lo = std::max(begin, s.begin), hi = std::min(end, s.begin + s.values.numel());
    if (hi <= lo) continue;
    flat.narrow(0, lo - begin, hi - lo)
        .copy_(s.values.reshape({-1}).narrow(0, lo - s.begin, hi - lo));
    copied += hi - lo;
  }
  const Stored& s = found->second.front();
  check(copied == into.numel(), s.file.string(), ": '", name, "' must be ", into.sizes(), ", not ",
        s.values.sizes(), found->second.size() > 1 ? " and others" : "");
}

}  // namespace

Position load_checkpoint(const fs::path& checkpoint, Optimizer& o) {
  const c10::NoGradGuard without_gradients;
  const StoredTensors saved = stored_optimizer(checkpoint);
  for (const Piece& p : o.pieces) {
    const std::string& name = o.parameters[p.of].name;
    take(saved, checkpoint, "mean." + name, p.begin, p.mean);
    take(saved, checkpoint, "square." + name, p.begin, p.square);
  }
  take(saved, checkpoint, "count", 0, o.count);
  for (auto& [name, generator] : generators()) {
    const auto found = saved.find(name);
    if (found == saved.end()) continue;  // saved on a machine without this device
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(found->second.front().values.clone());
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
