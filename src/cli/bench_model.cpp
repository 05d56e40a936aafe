// horner bench decode --model DIR: the time of a token and the memory of a model, by context
// length.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "attn/inputs.h"
#include "cli/bench.h"
#include "cli/errors.h"
#include "cli/model.h"
#include "cli/options.h"
#include "cli/run.h"
#include "cli/table.h"
#include "core/median.h"
#include "core/stopwatch.h"
#include "instruments/bench.h"

namespace horner::cli {

constexpr int64_t kShortest = 1 << 10, kLongest = 1 << 20;

struct ModelRow {
  std::string model;
  std::vector<double> us = {}, bytes = {};  // by context; fewer where memory does not suffice
  bool out_of_memory = false;               // at the next context
};

static double kept(const nn::ModelConfig& c, at::ScalarType dtype, int64_t tokens) {
  double sum = 0;
  for (const nn::LayerConfig& l : c.layers)
    for (const nn::Part& p : l.parts) sum += nn::kept_bytes(c, p, dtype, tokens);
  return sum;
}

// µs of one token after those that the states hold.
static double time_token(const nn::Model& m, std::vector<nn::LayerState>& states, int runs) {
  const at::Tensor token = at::zeros({1, 1}, m.embedding.options().dtype(at::kLong));
  std::vector<double> us;
  for (int run = -1; run < runs && !stopped(); ++run) {
    instruments::wait_for(token.device());
    const Stopwatch watch;
    nn::logits(m, nn::hidden(m, token, {.states = &states}).select(1, -1));
    instruments::wait_for(token.device());
    if (run >= 0) us.push_back(watch.ms() * 1e3);
  }
  return us.empty() ? 0 : median(us);
}

static void measure(const ModelTiming& t, ModelRow& row) try {
  nn::Model m = load_model(model_folder(row.model), t.device, t.dtype);
  const at::ScalarType dtype = m.embedding.scalar_type();
  const nn::ModelConfig config = m.config;
  std::vector<nn::LayerState> states = nn::empty_states(m, 1);
  if (!m.positions.defined()) m.config.positions = 2 * kLongest;  // learned ones: as many as it has
  const int64_t most = m.config.positions - (t.runs + 1);         // before the timed tokens
  horner::check(most > 0 && m.config.positions >= kShortest, "model '", row.model, "' has ",
                m.config.positions, " learned positions; bench decode requires at least ",
                kShortest, ", and more than --repeats");
  const at::Tensor prompt = at::randint(m.config.V, {1, std::min(kShortest, most)},
                                        m.embedding.options().dtype(at::kLong));
  nn::hidden(m, prompt, {.states = &states});
  constexpr double kGrowth = 3;  // a cache that grows has twice the room, and is copied
  for (int64_t n = kShortest; n <= std::min(kLongest, m.config.positions); n *= 4) {
    const bool fits = kGrowth * kept(config, dtype, n) < instruments::free_bytes();
    if (n > kShortest && t.device.is_cpu() && !fits) break;
    for (nn::LayerState& layer : states)
      for (attn::State& part : layer.parts) attn::repeat(part, std::min(n, most));
    const double us = time_token(m, states, t.runs);
    if (stopped()) break;
    row.us.push_back(us);
    row.bytes.push_back(kept(config, dtype, n));
  }
} catch (const std::exception& e) {
  if (!is_out_of_memory(e)) throw;
  row.out_of_memory = true;
}

static void print(const std::vector<ModelRow>& rows) {
  Table t{.head = {"tokens"}, .right = {0}};
  for (const ModelRow& r : rows)
    for (const std::string& head : {r.model, std::string("keeps")}) {
      t.right.push_back(t.head.size());
      t.head.push_back(head);
    }
  for (size_t i = 0; kShortest << (2 * i) <= kLongest; ++i) {
    Row row{std::to_string(kShortest << (2 * i))};
    for (const ModelRow& r : rows) {
      const bool full = r.out_of_memory && i == r.us.size();
      row.push_back(i < r.us.size() ? formatted("%.0f µs", r.us[i]) : full ? "out of memory" : "–");
      row.push_back(i < r.us.size() ? size_text(r.bytes[i]) : "–");
    }
    t.rows.push_back(row);
  }
  std::cout << text(t);
}

Outcome bench_models(const std::vector<std::string>& models, const ModelTiming& t, bool json) {
  const c10::NoGradGuard without_gradients;
  for (const std::string& name : models) model_folder(name);  // fails before the work
  catch_interrupt();
  std::vector<ModelRow> rows;
  Progress progress{.command = "bench", .all = models.size()};
  for (const std::string& name : models) {
    if (stopped()) break;
    progress.show(name);
    rows.push_back({name});
    measure(t, rows.back());
    ++progress.done;
  }
  progress.clear();
  if (!json) {
    print(rows);
    return stopped() ? Outcome::interrupted : Outcome::fine;
  }
  Json all = Json::array();
  for (const ModelRow& r : rows) {
    Json times = Json::array();
    for (size_t i = 0; i < r.us.size(); ++i)
      times.push_back({{"context", kShortest << (2 * i)}, {"us", r.us[i]}, {"bytes", r.bytes[i]}});
    all.push_back({{"model", r.model}, {"times", times}, {"out_of_memory", r.out_of_memory}});
  }
  print_json({{"models", all}});
  return stopped() ? Outcome::interrupted : Outcome::fine;
}

}  // namespace horner::cli
