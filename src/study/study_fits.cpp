#include "study/study_fits.h"

#include <cmath>
#include <map>

#include "study/findings.h"
#include "study/study_tables.h"

namespace horner::study {

using namespace report;

namespace {

// The runs of a variant on one task with models of several sizes.
struct SizedRuns {
  std::string task, name;
  const Group* first;  // of the smallest task, for its colour
  std::vector<Sized> points;
};
std::vector<SizedRuns> by_size(const std::vector<TaskData>& tasks) {
  std::vector<SizedRuns> out;
  for (const TaskData& t : tasks) {
    if (t.size.empty() || t.chance > 0) continue;
    for (const Group& g : t.groups) {
      auto at = std::find_if(out.begin(), out.end(), [&](const SizedRuns& s) {
        return s.task == t.task && s.name == g.name;
      });
      if (at == out.end()) at = out.insert(out.end(), {t.task, g.name, &g, {}});
      for (const RunData* r : g.runs)
        if (r->finished && r->result.contains("parameters") &&
            r->result["validation_loss"].is_number())
          at->points.push_back({r->result["parameters"], r->result["validation_loss"]});
    }
  }
  return out;
}

// The runs of a variant on recall: every seed, number of pairs and state.
struct RecallRuns {
  std::string name;
  const Group* first;
  double guessing;
  std::vector<Recalled> points;
};
std::vector<RecallRuns> by_state(const std::vector<TaskData>& tasks) {
  std::vector<RecallRuns> out;
  for (const TaskData& t : tasks) {
    if (t.pairs == 0) continue;
    for (const Group& g : t.groups) {
      auto at = std::find_if(out.begin(), out.end(),
                             [&](const RecallRuns& s) { return s.name == g.name; });
      if (at == out.end()) at = out.insert(out.end(), {g.name, &g, t.chance, {}});
      for (const RunData* r : g.runs)
        if (r->finished && r->result.contains("state_numbers") &&
            r->result["validation_accuracy"].is_number())
          at->points.push_back(
              {double(t.pairs), r->result["state_numbers"], r->result["validation_accuracy"]});
    }
  }
  return out;
}

// A capacity that the results do not bracket is not one: some must be above the middle between
// guessing and all right, and some below.
std::optional<Capacity> capacity(const RecallRuns& runs) {
  bool above = false, below = false;
  for (const Recalled& p : runs.points)
    (p.accuracy > (1 + runs.guessing) / 2 ? above : below) = true;
  return above && below ? fit_capacity(runs.points, runs.guessing) : std::nullopt;
}

std::string text(const char* format, const Estimate& e) {
  return formatted(format, e.value) +
         (std::isfinite(e.low)
              ? " (" + formatted(format, e.low) + " to " + formatted(format, e.high) + ")"
              : "");
}

}  // namespace

void add_fits(const std::vector<TaskData>& tasks, std::string (*group)(const Group&),
              std::vector<Section>& out) {
  std::map<std::string, Chart> charts;
  for (const SizedRuns& s : by_size(tasks)) {
    Chart& c = charts
                   .try_emplace(s.task, Chart{.x_label = "weights",
                                              .y_label = "validation loss",
                                              .log_x = true,
                                              .log_y = true})
                   .first->second;
    std::map<double, std::vector<double>> losses;
    for (const Sized& p : s.points) losses[p.weights].push_back(p.loss);
    Series series{.name = s.name, .group = group(*s.first), .strong = s.name == "softmax"};
    for (const auto& [weights, each] : losses)
      series.points.push_back({weights, spread(each).mean}),
          series.spread.push_back(spread(each).deviation);
    c.series.push_back(series);
    const auto fit = fit_scaling(s.points);
    if (!fit) continue;
    Series line{.name = s.name + ", fit", .points = {}, .dashed = true, .group = group(*s.first)};
    const double first = losses.begin()->first, last = losses.rbegin()->first;
    for (int i = 0; i <= 40; ++i) {
      const double weights = first * std::pow(last / first, i / 40.0);
      line.points.push_back({weights, fit->at(weights)});
    }
    c.series.push_back(line);
  }
  for (const auto& [task, chart] : charts)
    out.push_back({"Loss against weights: " + task,
                   "Means over seeds, and floor + height · (weights / middle)^−exponent by least "
                   "squares of relative errors.",
                   chart, true});
  Chart c{.x_label = "numbers in the state",
          .y_label = "pairs of which half are recalled",
          .log_x = true,
          .log_y = true};
  for (const RecallRuns& r : by_state(tasks)) {
    const auto fit = capacity(r);
    if (!fit || !fit->has_exponent) continue;
    Series line{.name = r.name, .group = group(*r.first), .strong = r.name == "softmax"};
    double first = INFINITY, last = 0;
    for (const Recalled& p : r.points)
      first = std::min(first, p.state), last = std::max(last, p.state);
    for (int i = 0; i <= 20; ++i) {
      const double state = first * std::pow(last / first, i / 20.0);
      line.points.push_back({state, fit->at(state)});
    }
    c.series.push_back(line);
  }
  if (!c.series.empty())
    out.push_back({"Capacity against state",
                   "The pairs of which half of what is beyond guessing is recalled, factor · "
                   "state^exponent, fitted to all runs of a variant.",
                   c, true});
}

void add_fit_tables(const std::vector<TaskData>& tasks, std::vector<Section>& out) {
  Table scaling{.columns = {{"variant"},
                            {"task"},
                            {"floor", true, "of the loss; 0 is assumed with fewer than 4 sizes"},
                            {"exponent", true, "of the weights; in brackets the 95 % interval"},
                            {"error", true, "root mean square, relative"},
                            {"sizes", true},
                            {"runs", true}}};
  for (const SizedRuns& s : by_size(tasks))
    if (const auto fit = fit_scaling(s.points))
      scaling.rows.push_back({{s.name},
                              {s.task},
                              {fit->has_floor ? text("%.3f", fit->floor) : "0", fit->floor.value},
                              {text("%.4f", fit->exponent), fit->exponent.value},
                              {percent(fit->error), fit->error},
                              {std::to_string(fit->sizes), double(fit->sizes)},
                              {std::to_string(fit->points), double(fit->points)}});
  if (!scaling.rows.empty())
    out.push_back({"Scaling", "loss = floor + height · (weights / middle)^−exponent.", scaling});
  Table held{.columns = {{"variant"},
                         {"pairs", true, "C at the state beside: half of them are recalled"},
                         {"state", true, "numbers; the geometric mean of the runs"},
                         {"exponent", true, "of the state in C"},
                         {"steepness", true},
                         {"error", true, "root mean square, of accuracies"},
                         {"runs", true}}};
  for (const RecallRuns& r : by_state(tasks))
    if (const auto fit = capacity(r))
      held.rows.push_back({{r.name},
                           {text("%.1f", fit->pairs), fit->pairs.value},
                           {formatted("%.0f", fit->state), fit->state},
                           {fit->has_exponent ? text("%.3f", fit->exponent) : "–",
                            fit->has_exponent ? fit->exponent.value : NAN},
                           {formatted("%.2f", fit->steepness), fit->steepness},
                           {formatted("%.3f", fit->error), fit->error},
                           {std::to_string(fit->points), double(fit->points)}});
  if (!held.rows.empty())
    out.push_back({"Capacity",
                   "accuracy = guessing + (1 − guessing) / (1 + (pairs / C)^steepness), C = factor "
                   "· state^exponent; in brackets 95 % intervals. Only variants some of whose runs "
                   "recall more than half, and some less.",
                   held});
}

void say_fits(const std::vector<TaskData>& tasks, Sentences& out) {
  std::map<std::string, std::vector<std::string>> exponents;
  for (const SizedRuns& s : by_size(tasks))
    if (const auto fit = fit_scaling(s.points))
      exponents[s.task].push_back(s.name + " " + text("%.3f", fit->exponent));
  for (const auto& [task, parts] : exponents)
    out.push_back("Exponents of the weights in the loss on " + task +
                  " (95 % intervals): " + joined(parts) + ".");
  std::vector<std::string> held;
  for (const RecallRuns& r : by_state(tasks))
    if (const auto fit = capacity(r))
      held.push_back(r.name + " " + text("%.0f", fit->pairs) + " with " +
                     counted(std::llround(fit->state)) + " numbers" +
                     (fit->has_exponent
                          ? ", in proportion to their power " + text("%.2f", fit->exponent)
                          : ""));
  if (!held.empty())
    out.push_back("Pairs of which half are recalled (95 % intervals): " + joined(held) + ".");
}

}  // namespace horner::study
