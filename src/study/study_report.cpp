#include "study/study_report.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "diag/series.h"
#include "study/findings.h"
#include "study/study_fits.h"
#include "study/study_lengths.h"
#include "study/study_tables.h"

namespace horner::study {

using namespace report;

// The number that ranks variants on a task.
static const Spread& score(const TaskData& t, const Group& g) {
  return t.chance > 0 ? g.accuracy : g.loss;
}
static const char* score_name(const TaskData& t) {
  return t.chance > 0 ? "validation accuracy" : "validation loss";
}

static std::string colour_group(const Group& g) {
  return g.name == "softmax" ? "" : words(g.kind).name;
}

// Six digits: more are noise, and a page holds many numbers.
static double rounded(double x) {
  if (x == 0 || !std::isfinite(x)) return x;
  const double unit = std::pow(10, std::floor(std::log10(std::abs(x))) - 5);
  return unit >= 1 ? std::round(x / unit) * unit : std::round(x / unit) / std::round(1 / unit);
}

// Thinned to screen resolution: means of a few points each.
static Points thinned(const Points& points) {
  constexpr size_t kMost = 400;
  const size_t each = std::max<size_t>(1, (points.size() + kMost - 1) / kMost);
  Points out;
  for (size_t i = 0; i < points.size(); i += each) {
    Point p{0, 0};
    const size_t n = std::min(each, points.size() - i);
    for (size_t k = 0; k < n; ++k)
      p.x += points[i + k].x / double(n), p.y += points[i + k].y / double(n);
    out.push_back({p.x, rounded(p.y)});
  }
  return out;
}

static Section curves(const TaskData& t, const std::string& what, Points RunData::* points,
                      bool log_y, bool smooth) {
  Chart c{.x_label = "step", .y_label = what, .log_y = log_y, .smooth = smooth};
  for (const Group& g : t.groups)
    for (const RunData* r : g.runs)
      c.series.push_back({.name = g.name,
                          .points = thinned(r->*points),
                          .group = colour_group(g),
                          .strong = &g == t.softmax});
  return {task_title(t) + ": " + what, "", c};
}

// Loss or accuracy against the order of the series, with softmax as the reference line.
static void add_sweep(const TaskData& t, std::vector<Section>& out) {
  Chart c{.x_label = "order of the series", .y_label = score_name(t), .log_y = t.chance == 0};
  double first = INFINITY, last = -INFINITY;
  const auto add = [&](Series s, size_t least, const auto& belongs) {
    for (const Group& g : t.groups) {
      if (score(t, g).n == 0 || !belongs(g)) continue;
      s.points.push_back({double(g.order), score(t, g).mean});
      s.spread.push_back(score(t, g).deviation);
      first = std::min(first, double(g.order)), last = std::max(last, double(g.order));
    }
    if (s.points.size() >= least) c.series.push_back(s);
  };
  add({.name = "plain"}, 1, [](const Group& g) { return g.kind == Kind::taylor; });
  add({.name = "plain, raw sum"}, 2, [](const Group& g) { return g.kind == Kind::raw_taylor; });
  add({.name = "centred"}, 1, [](const Group& g) { return g.kind == Kind::centred_taylor; });
  for (const std::string kernel : {"elu", "relu", "cosine"})
    add({.name = kernel + " kernel", .dashed = true}, 2, [&](const Group& g) {
      return g.name == "linear_" + kernel || g.name.starts_with(kernel + "_taylor");
    });
  if (c.series.empty() || first == last) return;
  if (t.softmax && score(t, *t.softmax).n > 0) {
    const double y = score(t, *t.softmax).mean;
    c.series.insert(
        c.series.begin(),
        {.name = "softmax", .points = {{first, y}, {last, y}}, .dashed = true, .strong = true});
  }
  out.push_back({"Orders: " + task_title(t),
                 std::string("The ") + score_name(t) +
                     " of the series truncated at each order; softmax is the reference.",
                 c, true});
}

static Section ranking(const TaskData& t) {
  std::vector<const Group*> groups;
  for (const Group& g : t.groups)
    if (score(t, g).n > 0) groups.push_back(&g);
  const double sign = t.chance > 0 ? -1 : 1;
  std::stable_sort(groups.begin(), groups.end(), [&](const Group* a, const Group* b) {
    return sign * score(t, *a).mean < sign * score(t, *b).mean;
  });
  Bars b{.label = score_name(t), .dots = t.chance == 0};
  std::map<std::string, size_t> series;  // one colour per kind, as in the curves
  const auto kind = [&](const Group& g) {
    return std::string(&g == t.softmax ? "softmax" : words(g.kind).name);
  };
  const std::vector<double> none(groups.size(), std::nan(""));
  for (const Group& g : t.groups)
    if (score(t, g).n > 0 && series.emplace(kind(g), b.series.size()).second)
      b.series.push_back(
          {.name = kind(g), .values = none, .spread = none, .strong = &g == t.softmax});
  for (size_t i = 0; i < groups.size(); ++i) {
    Bar& bar = b.series[series[kind(*groups[i])]];
    b.categories.push_back(groups[i]->name);
    bar.values[i] = score(t, *groups[i]).mean, bar.spread[i] = score(t, *groups[i]).deviation;
  }
  return {"Best first: " + task_title(t), "", b, true};
}

static void add_pairs(const std::vector<TaskData>& tasks, std::vector<Section>& out) {
  Chart c{.x_label = "number of pairs", .y_label = "validation accuracy", .log_x = true};
  std::map<std::string, size_t> at;
  size_t sizes = 0;
  for (const TaskData& t : tasks) {
    if (t.pairs == 0) continue;
    ++sizes;
    for (const Group& g : t.groups) {
      if (g.accuracy.n == 0) continue;
      if (at.emplace(g.name, c.series.size()).second)
        c.series.push_back({.name = g.name, .group = colour_group(g), .strong = &g == t.softmax});
      Series& s = c.series[at[g.name]];
      s.points.push_back({double(t.pairs), g.accuracy.mean}),
          s.spread.push_back(g.accuracy.deviation);
    }
  }
  if (sizes > 1) out.push_back({"Recall against the number of pairs", "", c});
}

// A row per variant, a column per layer; means over seeds.
static void add_layers(const TaskData& t, const std::string& heading, const char* text,
                       const char* label,
                       std::vector<double> (*values)(const Group&, const RunData&),
                       std::vector<Section>& out) {
  HeatMap h{.label = label, .x_label = "layer", .y_label = ""};
  for (const Group& g : t.groups) {
    std::vector<std::vector<double>> layers;
    for (const RunData* r : g.runs) {
      const std::vector<double> v = values(g, *r);
      layers.resize(std::max(layers.size(), v.size()));
      for (size_t i = 0; i < v.size(); ++i) layers[i].push_back(v[i]);
    }
    if (layers.empty()) continue;
    h.y.push_back(g.name);
    h.values.emplace_back();
    for (const auto& layer : layers) h.values.back().push_back(spread(layer).mean);
    while (h.x.size() < layers.size()) h.x.push_back(std::to_string(h.x.size()));
  }
  if (!h.y.empty()) out.push_back({heading + ": " + task_title(t), text, h, true});
}

// For weights that are exp or its series; a linear kernel has no such terms.
static std::vector<double> dominant_orders(const Group& g, const RunData& r) {
  std::vector<double> out;
  if (g.kind == Kind::linear) return out;
  for (const auto& layer : r.taylor) out.push_back(double(diag::dominant_order(layer)));
  return out;
}
static std::vector<double> entropies(const Group&, const RunData& r) {
  return r.entropy;
}
// Undefined for weights that may be negative.
static std::vector<double> separabilities(const Group&, const RunData& r) {
  const auto none = [](double x) { return std::isnan(x); };
  const auto& all = r.separability;
  return std::all_of(all.begin(), all.end(), none) ? std::vector<double>() : all;
}

static void add_terms(const TaskData& t, std::vector<Section>& out) {
  if (!t.softmax || t.softmax->runs[0]->taylor.empty()) return;
  Chart c{.x_label = "order", .y_label = "mean |x|ⁿ / n!", .log_y = true};
  const auto& layers = t.softmax->runs[0]->taylor;
  for (size_t i = 0; i < layers.size(); ++i) {
    Series s{.name = "layer " + std::to_string(i), .group = layers.size() > 8 ? "layers" : ""};
    for (size_t n = 0; n < layers[i].size() && n <= 30; ++n)
      if (layers[i][n] > -14) s.points.push_back({double(n), std::exp(layers[i][n])});
    c.series.push_back(s);
  }
  out.push_back({"Terms of exp in softmax: " + task_title(t),
                 "The mean of |x|ⁿ/n! over the visible scores x of the trained softmax model. A "
                 "series must extend beyond the peak of every layer.",
                 c, true});
}

static Section origin(const std::vector<RunData>& runs, const Origin& o) {
  Facts facts;
  if (!o.command.empty()) facts.push_back({"command", o.command, true});
  if (!o.version.empty()) facts.push_back({"version", "horner " + o.version});
  size_t done = 0;
  std::map<std::string, size_t> devices;
  for (const RunData& r : runs) {
    done += r.finished;
    if (r.result.is_object()) ++devices[r.result.value("device", std::string("?"))];
  }
  facts.push_back(
      {"runs", std::to_string(runs.size()) + ", " + std::to_string(done) + " finished"});
  for (const auto& [device, n] : devices)
    facts.push_back({"device", device + " (" + std::to_string(n) + " runs)"});
  std::map<std::string, Json> shown;
  for (const RunData& r : runs) {
    Json j = to_json(r.settings);
    for (const char* name : {"attention", "seed", "task", "device", "threads", "backend", "keep"})
      j.erase(name);
    const auto [at, fresh] = shown.emplace(r.settings.task, j);
    for (const auto& [name, value] : j.items())
      if (at->second[name] != value) at->second[name] = "(varies)";
  }
  for (const auto& [task, settings] : shown) {
    std::string text;
    for (const auto& [name, value] : settings.items())
      if (!(value.is_string() && value == "") && !(value.is_object() && value.empty()))
        text += (text.empty() ? "" : ", ") + name + " " +
                (value.is_string() ? value.get<std::string>() : value.dump());
    facts.push_back({"settings of " + task, text, true});
  }
  return {"How it was made", "", facts};
}

report::Report make_report(const std::vector<RunData>& runs, const Origin& o) {
  const std::vector<TaskData> tasks = by_task(runs);
  size_t variants = 0, seeds = 0;
  for (const TaskData& t : tasks) {
    variants = std::max(variants, t.groups.size());
    for (const Group& g : t.groups) seeds = std::max(seeds, g.runs.size());
  }
  Report r{.title = o.title,
           .subtitle = std::to_string(variants) + (variants == 1 ? " variant, " : " variants, ") +
                       std::to_string(tasks.size()) + (tasks.size() == 1 ? " task, " : " tasks, ") +
                       std::to_string(seeds) + (seeds == 1 ? " seed: " : " seeds: ") +
                       std::to_string(runs.size()) + (runs.size() == 1 ? " run" : " runs")};
  r.summary = findings(tasks);
  if (!o.added.empty()) {
    std::string all;
    for (const std::string& each : o.added) all += (all.empty() ? "" : ", ") + each;
    r.summary.push_back(
        "Learning rates that were added because the best one was at the edge of the grid: " + all +
        ".");
  }
  auto& out = r.sections;
  for (const TaskData& t : tasks) add_sweep(t, out);
  add_pairs(tasks, out);
  for (const TaskData& t : tasks) add_lengths(t, colour_group, out);
  add_fits(tasks, colour_group, out);
  for (const TaskData& t : tasks) out.push_back(ranking(t));
  add_length_table(tasks, out);
  add_heads(tasks, out);
  add_fit_tables(tasks, out);
  add_comparisons(tasks, out);
  out.push_back(ablation(tasks));
  for (const TaskData& t : tasks) add_rate_chart(t, colour_group, out);
  add_rates(tasks, out);
  for (const TaskData& t : tasks) {
    out.push_back(curves(t, "training loss", &RunData::loss, true, true));
    if (t.chance > 0)
      out.push_back(curves(t, "validation accuracy", &RunData::validation_accuracy, false, false));
    else
      out.push_back(curves(t, "validation loss", &RunData::validation_loss, true, false));
  }
  for (const TaskData& t : tasks) {
    add_terms(t, out);
    add_layers(t, "Dominant order",
               "The order of the largest term of exp's series for the scores of each layer; "
               "means over seeds.",
               "order", dominant_orders, out);
  }
  for (const TaskData& t : tasks)
    add_layers(
        t, "Entropy of the weights",
        "Mean over rows of −Σ p log p, where p is a weight's share of its row; latest measurement.",
        "entropy", entropies, out);
  for (const TaskData& t : tasks)
    add_layers(t, "Separability",
               "How many of a row's N largest weights are separable among the values: the share "
               "whose weighted unit value is nearer to their sum than that of every other token. "
               "N = 16, or a quarter of a sequence below 64 tokens. Latest measurement, for "
               "variants with non-negative weights.",
               "N_s / N", separabilities, out);
  for (const TaskData& t : tasks)
    out.push_back(curves(t, "gradient norm", &RunData::gradient, true, true));
  out.push_back(origin(runs, o));
  return r;
}

report::Report make_speeds(const std::vector<RunData>& runs, const Origin& o) {
  Report r{.title = o.title + ": speed and memory"};
  r.sections = {speeds(by_task(runs)), origin(runs, o)};
  return r;
}

}  // namespace horner::study
