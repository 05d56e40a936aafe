#include "study/study_tables.h"

#include <algorithm>
#include <cmath>

#include "study/findings.h"

namespace horner::study {

using namespace report;

double mean_of(const Group& g, const char* field) {
  std::vector<double> values;
  for (const RunData* r : g.runs)
    if (r->result.is_object() && r->result.contains(field) && r->result[field].is_number())
      values.push_back(r->result[field]);
  return spread(values).mean;
}

std::string with_spread(const char* format, const Spread& s) {
  return formatted(format, s.mean) + (s.n > 1 ? " ± " + formatted(format, s.deviation) : "");
}

static Cell against_softmax(const TaskData& t, const Group& g) {
  const Comparison* const c = t.find(g, t.softmax);
  if (!c || c->change.n == 0) return {"–", &g == t.softmax ? 0 : NAN};
  return {change_text(t, *c), c->change.mean};
}

// Of a run of the group: all its tokens, and the arithmetic of training on them.
struct Budget {
  double tokens, flops;
};
static Budget budget(const Group& g) {
  const train::Settings& s = g.runs[0]->settings;
  const double tokens = double(g.runs[0]->step) * double(s.batch) * double(s.length);
  return {tokens, tokens * mean_of(g, "flops_per_token")};
}

static std::vector<Cell> ablation_row(const TaskData& t, const Group& g) {
  const double spikes = mean_of(g, "spikes"), weights = mean_of(g, "parameters"),
               state = 4 * mean_of(g, "state_numbers");
  const Budget all = budget(g);
  return {{g.name},
          {t.name},
          {with_spread("%.4f", g.loss), g.loss.mean},
          against_softmax(t, g),
          {with_spread("%.3f", g.accuracy), g.accuracy.mean},
          {std::to_string(g.runs.size()), double(g.runs.size())},
          {formatted("%.0f", weights), weights},
          {formatted("%.0f", state), state},
          {formatted("%.3g M", all.tokens / 1e6), all.tokens},
          {formatted("%.3g", all.flops), all.flops},
          {formatted("%.3g", spikes), spikes},
          {g.about}};
}

Section ablation(const std::vector<TaskData>& tasks) {
  Table table{
      .columns = {{"variant"},
                  {"task"},
                  {"validation loss", true, "at the end; ± standard deviation over seeds"},
                  {"against softmax", true,
                   "losses in percent, accuracies in points; in brackets the 95 % interval of the "
                   "differences paired by seed"},
                  {"accuracy", true, "over the tokens that have a target"},
                  {"seeds", true},
                  {"weights", true},
                  {"state, bytes", true,
                   "what decoding keeps, in float32, of a sequence as long as those of training: "
                   "sums, or keys and values"},
                  {"tokens", true, "of training, per run"},
                  {"FLOPs", true,
                   "of training, per run: matrix products and softmax attention's "
                   "share, the same count for every variant"},
                  {"spikes", true, "steps per run with a spike of the loss or gradient norm"},
                  {"what it is"}}};
  for (const TaskData& t : tasks)
    for (const Group& g : t.groups) table.rows.push_back(ablation_row(t, g));
  return {"The ablation",
          "Every variant under the same conditions: the runs of a seed share batches, schedule and "
          "initial weights. Click a column to sort by it.",
          table};
}

Section speeds(const std::vector<TaskData>& tasks) {
  Table table{
      .columns = {
          {"variant"},
          {"task"},
          {"tokens/s", true, "median over steps; runs that share a machine slow each other"},
          {"of peak", true, "measured share of the device's peak of matrix products"},
          {"memory, MB", true, "peak"},
          {"runs", true}}};
  for (const TaskData& t : tasks)
    for (const Group& g : t.groups) {
      const double rate = mean_of(g, "tokens_per_second"), bytes = mean_of(g, "peak_bytes"),
                   peak = mean_of(g, "share_of_peak");
      table.rows.push_back({{g.name},
                            {t.name},
                            {formatted("%.0f", rate), rate},
                            {std::isfinite(peak) ? percent(peak) : "–", peak},
                            {formatted("%.0f", bytes / 1e6), bytes},
                            {std::to_string(g.runs.size()), double(g.runs.size())}});
    }
  return {"Speed and memory", "What the machines of the runs measured; means over runs.", table};
}

void add_comparisons(const std::vector<TaskData>& tasks, std::vector<Section>& out) {
  Table table{.columns = {{"variant"},
                          {"against"},
                          {"task"},
                          {"tokens", true, "of a sequence"},
                          {"difference", true, "losses in percent, accuracies in points"},
                          {"from", true, "lower end of the 95 % t-interval"},
                          {"to", true, "upper end"},
                          {"p", true, "two-sided, of no difference"},
                          {"p, Holm", true, "corrected for all comparisons of this page"},
                          {"seeds", true, "pairs of runs with the same seed"},
                          {"shown"}}};
  for (const TaskData& t : tasks)
    for (const Comparison& c : t.comparisons) {
      const Interval& i = c.change;
      if (i.n < 2) continue;
      const int64_t length = c.length > 0 ? c.length : c.mine->runs[0]->settings.length;
      const auto cell = [](double x) { return Cell{formatted("%+.2f", 100 * x), x}; };
      table.rows.push_back({{c.mine->name},
                            {c.other->name},
                            {t.name},
                            {std::to_string(length), double(length)},
                            cell(i.mean),
                            cell(i.low),
                            cell(i.high),
                            {formatted("%.2g", i.p), i.p},
                            {formatted("%.2g", c.p_holm), c.p_holm},
                            {std::to_string(i.n), double(i.n)},
                            {c.shown() ? "yes" : "no"}});
    }
  const auto swept = [](const TaskData& t) {
    return std::ranges::any_of(t.groups, [](const Group& g) { return !g.tried.empty(); });
  };
  const std::string rates = std::ranges::any_of(tasks, swept)
                                ? ", each variant at the best of the learning rates it was given"
                                : "";
  if (!table.rows.empty())
    out.push_back({"Comparisons",
                   "Differences of runs with the same seed, which share initial weights and data "
                   "order" +
                       rates + ". Shown: Holm's corrected p is below 0.05.",
                   table});
}

void add_rates(const std::vector<TaskData>& tasks, std::vector<Section>& out) {
  Table table{.columns = {{"variant"},
                          {"task"},
                          {"learning rate", true},
                          {"validation loss", true, "± standard deviation over seeds"},
                          {"accuracy", true},
                          {"seeds", true},
                          {"reported"},
                          {"given up", true, "runs that the study stopped early"}}};
  for (const TaskData& t : tasks)
    for (const Group& g : t.groups)
      for (const Tried& each : g.tried)
        table.rows.push_back({{g.name},
                              {t.name},
                              {formatted("%g", each.rate), each.rate},
                              {with_spread("%.4f", each.loss), each.loss.mean},
                              {with_spread("%.4f", each.accuracy), each.accuracy.mean},
                              {std::to_string(each.loss.n), double(each.loss.n)},
                              {each.chosen ? "yes" : ""},
                              {std::to_string(each.given_up), double(each.given_up)}});
  if (!table.rows.empty())
    out.push_back({"Learning rates",
                   "Every variant was trained with each; the other sections have the one with the "
                   "lowest mean validation loss at the length of training.",
                   table});
}

void add_rate_chart(const TaskData& t, std::string (*group)(const Group&),
                    std::vector<Section>& out) {
  Chart c{.x_label = "learning rate", .y_label = "validation loss", .log_x = true, .log_y = true};
  for (const Group& g : t.groups) {
    Series s{.name = g.name, .group = group(g), .strong = &g == t.softmax};
    for (const Tried& each : g.tried)
      if (each.loss.n > 0)
        s.points.push_back({each.rate, each.loss.mean}), s.spread.push_back(each.loss.deviation);
    if (!s.points.empty()) c.series.push_back(s);
  }
  if (!c.series.empty())
    out.push_back({"Loss against learning rate: " + task_title(t),
                   "Means and standard deviations over seeds of finished runs; each variant is "
                   "reported at the rate of its lowest mean.",
                   c, true});
}

}  // namespace horner::study
