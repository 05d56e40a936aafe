#include "study/heads.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "diag/findings.h"
#include "diag/statistics.h"
#include "files/json.h"
#include "nn/checkpoint.h"
#include "study/tasks.h"
#include "study/taylor.h"
#include "train/checkpoint.h"

namespace horner::study {

static constexpr const char* kMetrics[] = {"entropy ratio", "effective support", "largest weight",
                                           "exponent of the 1/L law", "separable share, N = 16"};

std::span<const char* const> head_metrics() {
  return kMetrics;
}

static Json numbers_at(const diag::Diagnosis& d, int64_t length) {
  Json out = {{"length", length}, {"heads", d.heads.size()}};
  for (const char* const name : kMetrics)
    for (const diag::Metric& metric : diag::metrics()) {
      if (std::string_view(metric.name) != name) continue;
      std::vector<double> each;
      for (const diag::Head& h : d.heads)
        if (const double x = metric.of(d, h); std::isfinite(x)) each.push_back(x);
      out[name] = each.empty() ? Json() : Json(diag::quantile(each, 0.5));
    }
  return out;
}

Json heads_of(const nn::Model& m, const train::Source& source, std::span<const int64_t> lengths) {
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  const at::Tensor tokens = at::empty({longest}, at::kLong);
  std::vector<int64_t> targets(static_cast<size_t>(longest));
  source.fill(train::Split::validation, 0, {tokens.data_ptr<int64_t>(), size_t(longest)}, targets);
  Json out = Json::array();
  for (const int64_t length : lengths) {
    const diag::Settings asked{.lengths = {length},
                               .tops = {5},
                               .temperatures = {1},
                               .epsilons = {0.1},
                               .embedding = diag::Embedding::values};
    out.push_back(numbers_at(diag::diagnose(m, tokens.narrow(0, 0, length), asked), length));
  }
  return out;
}

void measure_run(const Run& r) {
  measure_run(r.folder, r.settings);
  const auto last = train::newest_checkpoint(r.folder);
  const std::filesystem::path file = r.folder / "heads.json";
  if (r.diagnose.empty() || !last || std::filesystem::exists(file)) return;
  const train::Settings& s = r.settings;
  Json out;
  try {
    out = heads_of(nn::load_model(*last), make_source(s.task, s.data, s.seed, s.validation),
                   r.diagnose);
  } catch (const Error& e) {
    out = {{"why", e.what()}};
  }
  files::write_json(file, out);
}

}  // namespace horner::study
