#include "study/findings.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <map>

#include "diag/series.h"
#include "study/study_fits.h"
#include "study/study_lengths.h"

namespace horner::study {

std::string formatted(const char* format, double x) {
  char text[64];
  std::snprintf(text, sizeof text, format, x);
  return std::isfinite(x) ? text : "–";
}

std::string percent(double share) {
  const double p = 100 * std::abs(share);
  return formatted(p < 9.95 ? "%.1f %%" : "%.0f %%", p);
}
std::string signed_percent(double share) {
  return (share < 0 ? "−" : "+") + percent(share);
}

std::string counted(int64_t n) {  // 1,000
  const std::string digits = std::to_string(n);
  std::string out;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return out;
}

std::string joined(const std::vector<std::string>& parts) {
  std::string out;
  for (size_t i = 0; i < parts.size(); ++i)
    out += (i == 0 ? "" : i + 1 == parts.size() ? " and " : ", ") + parts[i];
  return out;
}

std::string task_title(const TaskData& t) {
  const std::string size = t.size.empty() ? "" : ", " + t.size;
  if (t.pairs > 0)
    return (t.name.starts_with("mqar") ? "Multi-query recall of " : "Recall of ") +
           std::to_string(t.pairs) + " pairs" + size;
  std::string name = t.task.substr(0, t.task.find(':'));
  if (!name.empty()) name[0] = char(std::toupper(static_cast<unsigned char>(name[0])));
  return name + size;
}

double behind(const TaskData& t, const Group& g) {
  return t.softmax ? g.loss.mean / t.softmax->loss.mean - 1 : std::nan("");
}

static std::vector<const Group*> of_kind(const TaskData& t, Kind kind) {
  std::vector<const Group*> out;
  for (const Group& g : t.groups)
    if (g.kind == kind && &g != t.softmax && g.loss.n > 0) out.push_back(&g);
  return out;
}

std::string change_text(const TaskData& t, const Comparison& c) {
  const auto one = [&](double x) {
    if (t.chance == 0) return signed_percent(x);
    return (x < 0 ? "−" : "+") + formatted("%.1f", 100 * std::abs(x));
  };
  const Interval& i = c.change;
  return one(i.mean) + (i.n > 1 ? " (" + one(i.low) + " to " + one(i.high) + ")" : "");
}

static std::string change_text(const TaskData& t, const Group& g) {
  const Comparison* const c = t.find(g, t.softmax);
  return c && c->change.n > 0 ? change_text(t, *c) : signed_percent(behind(t, g));
}

static std::string each(const TaskData& t, const std::vector<const Group*>& groups) {
  std::vector<std::string> parts;
  for (const Group* g : groups) parts.push_back(g->name + " " + change_text(t, *g));
  return joined(parts);
}

// The upper end of the interval of a loss relative to softmax's; with one seed, that loss.
static double at_most(const TaskData& t, const Group& g) {
  const Comparison* const c = t.find(g, t.softmax);
  return c && c->change.n > 1 ? c->change.high : behind(t, g);
}
static bool shown(const TaskData& t, const Group& g) {
  const Comparison* const c = t.find(g, t.softmax);
  return c && c->shown();
}

static void say_softmax(const TaskData& t, Sentences& out) {
  const Group& g = *t.softmax;
  std::string s =
      task_title(t) + ": softmax reaches a validation loss of " + formatted("%.4f", g.loss.mean);
  if (g.loss.n > 1) s += " ± " + formatted("%.4f", g.loss.deviation);
  s += " after " + counted(g.runs[0]->step) + " steps";
  if (g.loss.n > 1) s += " (" + std::to_string(g.loss.n) + " seeds)";
  out.push_back(s + "; the percentages below are losses relative to it.");
}

static void say_norms(const TaskData& t, Sentences& out) {
  constexpr double kNear = 0.03;
  const auto norms = of_kind(t, Kind::norms);
  if (norms.empty()) return;
  bool near = true, far = false;
  for (const Group* g : norms) {
    near = near && at_most(t, *g) < kNear;
    far = far || (shown(t, *g) && behind(t, *g) > 0 && at_most(t, *g) >= kNear);
  }
  out.push_back((near  ? "A norm in place of the denominator is at most 3 % behind softmax: "
                 : far ? "A norm replaces the denominator only in part: "
                       : "Whether a norm can replace the denominator is not decided: ") +
                each(t, norms) + ".");
}

// The smallest order from which every order is within `share`; -1: none.
static int from_order(const TaskData& t, const std::vector<const Group*>& orders, double share) {
  int from = -1;
  for (auto g = orders.rbegin(); g != orders.rend() && at_most(t, **g) <= share; ++g)
    from = (*g)->order;
  return from;
}

// One family of series: its orders, and from which on they are near softmax.
static void say_family(const TaskData& t, Kind kind, const std::string& name, Sentences& out) {
  const auto orders = of_kind(t, kind);
  if (orders.size() < 2) return;
  std::vector<std::string> parts;
  for (const Group* g : orders)
    parts.push_back(std::to_string(g->order) + " " + change_text(t, *g));
  std::string s = name + ", truncated at order " + joined(parts) + ".";
  std::map<int, double> within;  // from an order: the tightest share
  for (const double share : {0.1, 0.05, 0.03, 0.01})
    if (const int from = from_order(t, orders, share); from >= 0) within[from] = share;
  std::vector<std::string> reached;
  for (const auto& [from, share] : within)
    reached.push_back("from " + std::to_string(from) + " are within " +
                      formatted("%.0f %%", 100 * share));
  out.push_back(s + (reached.empty() ? " No order is within 10 % of softmax."
                                     : " Orders " + joined(reached) + "."));
}

static void say_orders(const TaskData& t, Sentences& out) {
  say_family(t, Kind::taylor, "The series of exp", out);
  say_family(t, Kind::raw_taylor, "The series of exp without a floor under its sum", out);
}

static void say_centred(const TaskData& t, Sentences& out) {
  std::map<int, const Group*> plain;
  for (const Group* g : of_kind(t, Kind::taylor)) plain[g->order] = g;
  std::vector<std::string> lower, higher, open;
  for (const Group* g : of_kind(t, Kind::centred_taylor)) {
    const Comparison* const c = plain.contains(g->order) ? t.find(*g, plain[g->order]) : nullptr;
    if (!c || c->change.n == 0) continue;
    auto& to = !c->shown() ? open : c->change.mean < 0 ? lower : higher;
    to.push_back("order " + std::to_string(g->order) + " " + change_text(t, *c));
  }
  std::vector<std::string> parts;
  if (!lower.empty()) parts.push_back("lowers the loss at " + joined(lower));
  if (!higher.empty()) parts.push_back("raises the loss at " + joined(higher));
  if (!open.empty()) parts.push_back("is not shown to change the loss at " + joined(open));
  std::string s;
  for (const std::string& part : parts) s += (s.empty() ? "" : "; it ") + part;
  if (!s.empty()) out.push_back("Centring the scores of a row " + s + ".");
}

static void say_linear(const TaskData& t, Sentences& out) {
  auto linear = of_kind(t, Kind::linear), powers = of_kind(t, Kind::linear_powers);
  const auto nearer = [&](const Group* a, const Group* b) { return a->loss.mean < b->loss.mean; };
  std::sort(linear.begin(), linear.end(), nearer), std::sort(powers.begin(), powers.end(), nearer);
  std::string s;
  if (!linear.empty()) s = "Linear kernels: " + each(t, linear) + ".";
  if (!powers.empty()) {
    const Group& best = *powers[0];
    s += std::string(s.empty() ? "" : " ") + "The lowest loss with powers added, that of " +
         best.name + ", is " + change_text(t, best) + ": " +
         (!shown(t, best)       ? "not shown to differ from softmax."
          : behind(t, best) > 0 ? "still behind softmax."
                                : "ahead of softmax.");
  }
  if (!s.empty()) out.push_back(s);
}

static void say_others(const TaskData& t, Sentences& out) {
  for (const Kind kind : {Kind::changed_taylor, Kind::no_sum, Kind::gates, Kind::gates_and_norms,
                          Kind::sums, Kind::weights, Kind::patterns})
    if (const auto groups = of_kind(t, kind); !groups.empty())
      out.push_back(words(kind).intro + each(t, groups) + ".");
}

// What the differences in the other sentences are, and which of them are shown.
static void say_compared(const TaskData& t, Sentences& out) {
  if (!t.softmax) return;
  std::vector<std::string> higher, lower, open;
  size_t seeds = 0;
  bool swept = false;
  for (const Group& g : t.groups) {
    swept = swept || !g.tried.empty() ||
            g.runs[0]->settings.learning_rate != t.softmax->runs[0]->settings.learning_rate;
    const Comparison* const c = t.find(g, t.softmax);
    if (!c || c->change.n < 2) continue;
    seeds = std::max(seeds, c->change.n);
    (!c->shown() ? open : c->change.mean > 0 ? higher : lower).push_back(g.name);
  }
  if (seeds == 0)
    return out.push_back(task_title(t) + ": one seed per variant, so no difference is shown; the " +
                         "numbers are those of single runs.");
  std::vector<std::string> parts;
  const bool loss = t.chance == 0;
  if (!lower.empty())
    parts.push_back((loss ? "ahead of" : "behind") + (" softmax: " + joined(lower)));
  if (!higher.empty())
    parts.push_back((loss ? "behind" : "ahead of") + (" softmax: " + joined(higher)));
  if (!open.empty()) parts.push_back("not shown to differ from softmax: " + joined(open));
  std::string s;
  for (const std::string& part : parts) s += (s.empty() ? "" : "; ") + part;
  out.push_back(
      task_title(t) + ", at the level of 5 % for all comparisons of this page together: " + s +
      ". (In brackets: 95 % t-intervals of differences paired by seed and data order, " +
      std::to_string(seeds) + " seeds, " +
      (swept ? "each variant at its own learning rate.)" : "one learning rate for all of them.)"));
}

static void say_accuracy(const TaskData& t, Sentences& out) {
  std::vector<const Group*> all;
  for (const Group& g : t.groups)
    if (g.accuracy.n > 0) all.push_back(&g);
  std::stable_sort(all.begin(), all.end(), [](const Group* a, const Group* b) {
    return a->accuracy.mean > b->accuracy.mean;
  });
  std::vector<std::string> solved, partly, lost;
  for (const Group* g : all) {
    const double a = g->accuracy.mean;
    if (a >= kSolved)
      solved.push_back(g->name);
    else if (a > 2 * t.chance)
      partly.push_back(g->name + " " + formatted("%.0f %%", 100 * a));
    else
      lost.push_back(g->name);
  }
  std::string s = task_title(t) + ": ";
  if (!solved.empty())
    s += joined(solved) + (solved.size() > 1 ? " answer" : " answers") +
         " at least 99 % of the questions";
  if (!partly.empty()) s += (solved.empty() ? "" : "; ") + joined(partly);
  if (!lost.empty())
    s += (solved.empty() && partly.empty() ? "" : "; ") + joined(lost) +
         (lost.size() > 1 ? " stay" : " stays") + " near the level of guessing";
  out.push_back(s + " (guessing: " + percent(t.chance) + ").");
  std::vector<std::string> parts;
  for (const Group& g : t.groups)
    if (const Comparison* c = t.find(g, t.softmax); c && c->change.n > 1)
      parts.push_back(g.name + " " + change_text(t, *c));
  if (!parts.empty())
    out.push_back(task_title(t) +
                  ", right answers against softmax in percentage points: " + joined(parts) + ".");
}

// How recall falls as the number of pairs grows.
static void say_pairs(const std::vector<TaskData>& tasks, Sentences& out) {
  std::map<int64_t, const TaskData*> by_pairs;
  for (const TaskData& t : tasks)
    if (t.pairs > 0) by_pairs[t.pairs] = &t;
  if (by_pairs.size() < 2) return;
  const auto& [few, easy] = *by_pairs.begin();
  const auto& [many, hard] = *by_pairs.rbegin();
  std::vector<std::string> kept, fell;
  for (const Group& g : easy->groups)
    for (const Group& h : hard->groups) {
      if (g.name != h.name || g.accuracy.n == 0 || h.accuracy.n == 0) continue;
      const double a = g.accuracy.mean, b = h.accuracy.mean;
      if (b > a - 0.02)
        kept.push_back(g.name);
      else
        fell.push_back(g.name + " from " + formatted("%.0f", 100 * a) + " to " +
                       formatted("%.0f %%", 100 * b));
    }
  std::string s = "From " + std::to_string(few) + " to " + std::to_string(many) + " pairs: ";
  if (!fell.empty()) s += joined(fell);
  if (!kept.empty()) s += (fell.empty() ? "" : "; ") + joined(kept) + " unchanged";
  out.push_back(s + ".");
}

static void say_dominant(const TaskData& t, Sentences& out) {
  if (!t.softmax || t.softmax->runs[0]->taylor.empty()) return;
  int least = INT_MAX, most = 0;
  for (const RunData* r : t.softmax->runs)
    for (const auto& layer : r->taylor) {
      const int order = diag::dominant_order(layer);
      least = std::min(least, order), most = std::max(most, order);
    }
  out.push_back(task_title(t) +
                ": in the trained softmax models the largest term of exp's series has " +
                (least == most ? "order " + std::to_string(least)
                               : "order " + std::to_string(least) + " to " + std::to_string(most) +
                                     ", depending on the layer" +
                                     (t.softmax->runs.size() > 1 ? " and the seed" : "")) +
                ".");
}

static std::string repeated_steps(const RunData& r) {
  const std::string attention =
      r.settings.attention.empty() ? r.settings.model : r.settings.attention;
  return "The steps of " + attention + " on " + r.settings.task + ", seed " +
         std::to_string(r.settings.seed) + ", repeat or run backwards in " +
         std::to_string(r.repeated) + (r.repeated > 1 ? " lines" : " line") +
         " of its metrics.jsonl: several processes have written it, and its numbers are not those "
         "of one run.";
}

std::vector<std::string> repeated_steps(const std::vector<RunData>& runs) {
  Sentences out;
  for (const RunData& r : runs)
    if (r.repeated > 0) out.push_back(repeated_steps(r));
  return out;
}

// Best rates that are at the edge of the grid, and runs that were given up.
static void say_rates(const TaskData& t, Sentences& out) {
  std::vector<std::string> edge, given_up;
  for (const Group& g : t.groups) {
    if (g.tried.empty()) continue;
    size_t stopped = 0;
    for (const Tried& each : g.tried) stopped += each.given_up;
    if (stopped > 0) given_up.push_back(g.name + " " + std::to_string(stopped));
    const bool solved = t.chance > 0 && g.accuracy.mean >= kSolved;
    if (!solved && (g.tried.front().chosen || g.tried.back().chosen))
      edge.push_back(g.name + " (" + formatted("%g", g.runs[0]->settings.learning_rate) + ")");
  }
  if (!edge.empty())
    out.push_back(task_title(t) + ": the best learning rate is at the edge of the grid for " +
                  joined(edge) + "; with another, the loss may be lower.");
  if (!given_up.empty())
    out.push_back(
        task_title(t) + ": runs given up before their last step, because another rate " +
        "of the same variant and seed was far ahead at the same step: " + joined(given_up) + ".");
}

static void say_trouble(const std::vector<TaskData>& tasks, Sentences& out) {
  size_t open = 0, all = 0;
  std::vector<std::string> lost;
  for (const TaskData& t : tasks)
    for (const Group& g : t.groups) {
      all += g.runs.size();
      for (const RunData* r : g.runs) {
        open += !r->finished;
        if (r->repeated > 0) out.push_back(repeated_steps(*r));
      }
      if (g.diverged > 0)
        lost.push_back(g.name + " on " + t.name + " (" + std::to_string(g.diverged) + " of " +
                       std::to_string(g.runs.size()) + ")");
    }
  if (!lost.empty()) out.push_back("Runs that did not learn: " + joined(lost) + ".");
  if (open > 0)
    out.push_back(std::to_string(open) + " of " + std::to_string(all) +
                  " runs are unfinished: their latest validation is used.");
}

Sentences findings(const std::vector<TaskData>& tasks) {
  Sentences out;
  for (const TaskData& t : tasks) {
    if (t.chance > 0) {
      say_accuracy(t, out);
      say_compared(t, out);
    } else if (t.softmax && t.softmax->loss.n > 0) {
      for (auto* say :
           {say_softmax, say_norms, say_orders, say_centred, say_linear, say_others, say_compared})
        say(t, out);
    }
    say_lengths(t, out);
    say_heads(t, out);
    say_rates(t, out);
    say_dominant(t, out);
  }
  say_pairs(tasks, out);
  say_fits(tasks, out);
  say_trouble(tasks, out);
  return out;
}

}  // namespace horner::study
