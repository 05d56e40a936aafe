#include "study/study_lengths.h"

#include <algorithm>
#include <cmath>

#include "study/findings.h"
#include "study/heads.h"
#include "study/study_tables.h"

namespace horner::study {

using namespace report;

// The number that a task is judged by.
static const Spread& score(const TaskData& t, const Group::Longer& at) {
  return t.chance > 0 ? at.accuracy : at.loss;
}

// Accuracy or loss against the length of the sequences, for runs with evaluate-lengths.
void add_lengths(const TaskData& t, std::string (*group)(const Group&), std::vector<Section>& out) {
  const bool right = t.chance > 0;
  Chart c{.x_label = "tokens",
          .y_label = right ? "validation accuracy" : "validation loss",
          .log_x = true,
          .log_y = !right};
  double first = INFINITY, last = 0;
  for (const Group& g : t.groups) {
    if (g.lengths.empty()) continue;
    Series s{.name = g.name, .group = group(g), .strong = &g == t.softmax};
    for (const Group::Longer& at : g.lengths) {
      s.points.push_back({double(at.length), score(t, at).mean});
      s.spread.push_back(score(t, at).deviation);
      first = std::min(first, double(at.length)), last = std::max(last, double(at.length));
    }
    c.series.push_back(s);
  }
  if (c.series.empty()) return;
  if (right)
    c.series.push_back(
        {.name = "guessing", .points = {{first, t.chance}, {last, t.chance}}, .dashed = true});
  out.push_back({"Longer sequences: " + task_title(t),
                 std::string(right ? "The share of right answers" : "The loss") +
                     " of the finished models; means and standard deviations over seeds.",
                 c, true});
}

void add_length_table(const std::vector<TaskData>& tasks, std::vector<Section>& out) {
  Table table{.columns = {{"variant"},
                          {"task"},
                          {"tokens", true},
                          {"of training", true, "multiple of the length of training"},
                          {"loss", true, "± standard deviation over seeds"},
                          {"accuracy", true, "± standard deviation over seeds"},
                          {"least seed", true},
                          {"best seed", true},
                          {"guessing", true},
                          {"solved", true, "seeds with at least 99 % right answers"}}};
  for (const TaskData& t : tasks)
    for (const Group& g : t.groups)
      for (const Group::Longer& at : g.lengths) {
        const double times = double(at.length) / double(g.runs[0]->settings.length);
        table.rows.push_back(
            {{g.name},
             {t.name},
             {std::to_string(at.length), double(at.length)},
             {formatted("%.3g ×", times), times},
             {with_spread("%.4f", at.loss), at.loss.mean},
             {with_spread("%.4f", at.accuracy), at.accuracy.mean},
             {formatted("%.4f", at.least), at.least},
             {formatted("%.4f", at.most), at.most},
             {t.chance > 0 ? formatted("%.4f", t.chance) : "–", t.chance > 0 ? t.chance : NAN},
             {t.chance > 0 ? std::to_string(at.solved) + " of " + std::to_string(at.accuracy.n)
                           : "–",
              t.chance > 0 ? double(at.solved) : NAN}});
      }
  if (!table.rows.empty())
    out.push_back({"Scores by length", "The same models on sequences of other lengths.", table});
}

void say_lengths(const TaskData& t, Sentences& out) {
  std::vector<const Group*> all;
  for (const Group& g : t.groups)
    if (!g.lengths.empty()) all.push_back(&g);
  if (all.empty()) return;
  const bool right = t.chance > 0;
  std::stable_sort(all.begin(), all.end(), [&](const Group* a, const Group* b) {
    const double x = score(t, a->lengths.back()).mean, y = score(t, b->lengths.back()).mean;
    return right ? x > y : x < y;
  });
  const int64_t length = all[0]->lengths.back().length, trained = all[0]->runs[0]->settings.length;
  std::vector<std::string> parts, against;
  for (const Group* g : all) {
    const Group::Longer& last = g->lengths.back();
    parts.push_back(g->name + (right ? " " + formatted("%.1f %%", 100 * last.accuracy.mean) + " (" +
                                           std::to_string(last.solved) + " of " +
                                           std::to_string(last.accuracy.n) + ")"
                                     : " " + formatted("%.4f", last.loss.mean)));
    const Comparison* const c = t.find(*g, t.softmax, length);
    if (c && c->change.n > 1)
      against.push_back(g->name + " " + change_text(t, *c) + (c->shown() ? "" : ", not shown"));
  }
  out.push_back(task_title(t) + ", sequences of " + counted(length) +
                " tokens after training with " + counted(trained) +
                (right ? ": right answers, and in how many seeds it is solved (" +
                             formatted("%.0f %%", 100 * kSolved) + "): "
                       : ": losses ") +
                joined(parts) + ".");
  if (!against.empty())
    out.push_back(task_title(t) + ", at " + counted(length) +
                  " tokens against softmax: " + joined(against) + ".");
}

// A metric of the heads at one length: of every seed.
static Spread metric_at(const Group& g, int64_t length, const char* name) {
  std::vector<double> values;
  for (const RunData* r : g.runs)
    if (r->heads.is_array())
      for (const Json& at : r->heads)
        if (at.value("length", int64_t(0)) == length && at.contains(name) && at[name].is_number())
          values.push_back(at[name]);
  return spread(values);
}

static std::vector<int64_t> lengths_of(const Group& g) {
  std::vector<int64_t> out;
  for (const RunData* r : g.runs)
    if (r->heads.is_array() && out.empty())
      for (const Json& at : r->heads) out.push_back(at.value("length", int64_t(0)));
  return out;
}

static double loss_at(const Group& g, int64_t length) {
  for (const Group::Longer& at : g.lengths)
    if (at.length == length) return at.loss.mean;
  return length == g.runs[0]->settings.length ? g.loss.mean : NAN;
}

void add_heads(const std::vector<TaskData>& tasks, std::vector<Section>& out) {
  Table table{.columns = {{"variant"},
                          {"task"},
                          {"tokens", true, "of the text that is diagnosed"},
                          {"validation loss", true, "at that length, if it was evaluated"}}};
  for (const char* const name : head_metrics())
    table.columns.push_back({name, true, "median over heads; ± standard deviation over seeds"});
  for (const TaskData& t : tasks)
    for (const Group& g : t.groups)
      for (const int64_t length : lengths_of(g)) {
        const double loss = loss_at(g, length);
        std::vector<Cell> row = {{g.name},
                                 {t.name},
                                 {std::to_string(length), double(length)},
                                 {formatted("%.4f", loss), loss}};
        for (const char* const name : head_metrics()) {
          const Spread s = metric_at(g, length, name);
          row.push_back({with_spread("%.3f", s), s.mean});
        }
        table.rows.push_back(row);
      }
  if (!table.rows.empty())
    out.push_back({"What the heads select",
                   "The diagnosis of every finished model (horner diagnose) on a text of "
                   "validation, with values as points: entropy over log n, 1 / Σ a², the largest "
                   "weight of a row and its exponent in n (−1: dispersed), and the share of the 16 "
                   "largest weights that can be told apart.",
                   table});
}

void say_heads(const TaskData& t, Sentences& out) {
  constexpr const char* kShare = "separable share, N = 16";
  constexpr const char* kEntropy = "entropy ratio";
  std::vector<std::string> parts;
  int64_t few = 0, many = 0;
  for (const Group& g : t.groups) {
    const std::vector<int64_t> lengths = lengths_of(g);
    if (lengths.size() < 2) continue;
    few = lengths.front(), many = lengths.back();
    const auto from_to = [&](const char* name) {
      return formatted("%.2f", metric_at(g, few, name).mean) + " to " +
             formatted("%.2f", metric_at(g, many, name).mean);
    };
    parts.push_back(g.name + " " + from_to(kShare) + " (entropy " + from_to(kEntropy) + ")");
  }
  if (!parts.empty())
    out.push_back(task_title(t) + ", the separable share of a row's 16 largest weights and the " +
                  "entropy over log n, in the median head, from " + counted(few) + " to " +
                  counted(many) + " tokens: " + joined(parts) + ".");
}

}  // namespace horner::study
