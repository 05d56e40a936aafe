#include "study/sweep.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>

#include "files/json.h"
#include "study/runs.h"
#include "study/tasks.h"

namespace horner::study {

namespace fs = std::filesystem;

// Two significant digits: 0.01 · 3.33… is 0.033.
static double rounded_rate(double rate) {
  const double unit = std::pow(10, std::floor(std::log10(rate)) - 1);
  return Json::parse(Json(std::round(rate / unit)).dump() + "e" +
                     std::to_string(int(std::lround(std::log10(unit)))))
      .get<double>();
}

Run at_rate(const Run& like, double rate) {
  Run r = like;
  r.settings.learning_rate = rate;
  const fs::path seed = fs::path(like.name).filename(),
                 variant = fs::path(like.name).parent_path().parent_path();
  const fs::path out = like.folder.parent_path().parent_path();
  const std::string folder = "lr" + Json(rate).dump();
  r.name = (variant / folder / seed).string(), r.folder = out / folder / seed;
  return r;
}

namespace {

struct Rate {
  std::vector<const Run*> runs;
  std::vector<double> losses, accuracies;  // of finished runs whose loss is finite
};
using Rates = std::map<double, Rate>;  // of one variant on one task

std::map<std::string, Rates> sweeps(const std::vector<Run>& runs) {
  std::map<std::string, Rates> out;
  for (const Run& r : runs) {
    const fs::path rate = fs::path(r.name).parent_path();
    if (!rate.filename().string().starts_with("lr")) continue;
    Rate& at = out[rate.parent_path().string()][r.settings.learning_rate];
    at.runs.push_back(&r);
    if (!fs::exists(r.folder / "result.json")) continue;
    const Json result = files::read_json(r.folder / "result.json");
    const Json loss = result.value("validation_loss", Json());
    if (loss.is_number()) at.losses.push_back(loss);
    const Json accuracy = result.value("validation_accuracy", Json());
    if (accuracy.is_number()) at.accuracies.push_back(accuracy);
  }
  return out;
}

// As the report chooses: most finite losses first, then the lowest mean.
double best_rate(const Rates& rates) {
  const auto key = [](const Rate& r) {
    return std::pair(r.losses.size(), r.losses.empty() ? 0 : -spread(r.losses).mean);
  };
  return std::max_element(
             rates.begin(), rates.end(),
             [&](const auto& a, const auto& b) { return key(a.second) < key(b.second); })
      ->first;
}

bool solved(const Run& r, const Rate& at) {
  return find_task(r.settings.task).task && spread(at.accuracies).mean >= kSolved;
}

}  // namespace

std::vector<Run> beyond_edges(const std::vector<Run>& grid, const std::vector<Run>& all,
                              size_t most) {
  std::vector<Run> out;
  auto first = sweeps(grid);
  for (const auto& [name, rates] : sweeps(all)) {
    if (rates.size() < 2) continue;
    const double best = best_rate(rates), low = rates.begin()->first, high = rates.rbegin()->first;
    const Rate& at = rates.at(best);
    if ((best != low && best != high) || at.losses.empty() || solved(*at.runs[0], at)) continue;
    const double own = best == low ? first[name].begin()->first : first[name].rbegin()->first;
    const auto added = size_t(std::count_if(rates.begin(), rates.end(), [&](const auto& r) {
      return best == low ? r.first < own : r.first > own;
    }));
    if (added >= most) continue;
    const double neighbour =
        best == low ? std::next(rates.begin())->first : std::prev(rates.end(), 2)->first;
    const double next = rounded_rate(best * best / neighbour);
    for (const Run* r : at.runs) out.push_back(at_rate(*r, next));
  }
  return out;
}

// Validation losses by step; NaN where the loss is not finite.
static std::map<int64_t, double> validations(const fs::path& folder) {
  std::map<int64_t, double> out;
  std::ifstream in(folder / "metrics.jsonl");
  for (std::string line; std::getline(in, line);) {
    if (line.find("validation_loss") == line.npos) continue;
    const Json j = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!j.is_object() || !j.contains("step")) continue;
    const Json loss = j.value("validation_loss", Json());
    out[j["step"].get<int64_t>()] = loss.is_number() ? loss.get<double>() : std::nan("");
  }
  return out;
}

std::string hopeless(const Run& run, const std::vector<Run>& all, const GiveUp& rule) {
  if (rule.after <= 0) return "";
  const auto own = validations(run.folder);
  if (own.empty() || own.rbegin()->first >= run.settings.steps) return "";
  const auto variant = [](const Run& r) {
    return fs::path(r.name).parent_path().parent_path();  // above its rate
  };
  for (const Run& other : all) {
    if (variant(other) != variant(run) || other.settings.seed != run.settings.seed ||
        other.name == run.name)
      continue;
    const auto its = validations(other.folder);
    for (auto mine = own.rbegin(); mine != own.rend(); ++mine) {
      const auto [step, loss] = *mine;
      if (double(step) < rule.after * double(run.settings.steps)) break;
      const auto at = its.find(step);
      if (at == its.end() || !std::isfinite(at->second)) continue;
      if (loss > at->second * (1 + rule.behind) || std::isnan(loss))
        return "at step " + std::to_string(step) + " its validation loss is " + Json(loss).dump() +
               ", that of " + other.name + " " + Json(at->second).dump();
      break;  // the latest step that both have decides
    }
  }
  return "";
}

}  // namespace horner::study
