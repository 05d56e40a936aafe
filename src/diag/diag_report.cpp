#include "diag/diag_report.h"

#include <algorithm>
#include <cmath>

namespace horner::diag {

using namespace report;

static Cell cell(double x) {
  return {number_text(x), x};
}

// The mean over heads of one of the sums, at a length and an N.
static double mean(const Diagnosis& d, size_t l, size_t k, double DistanceSums::* what) {
  double sum = 0, n = 0;
  for (const Head& h : d.heads) {
    const DistanceSums& s = h.distances[l][k];
    if (s.rows > 0 && std::isfinite(s.*what)) sum += s.*what / s.rows, ++n;
  }
  return n > 0 ? sum / n : NAN;
}

struct Curve {
  const char* name;
  double DistanceSums::* what;
  bool dashed;
};
static constexpr Curve kCurves[] = {
    {"distance", &DistanceSums::distance, false},
    {"expected, random sets (A), reconstructed", &DistanceSums::expected, false},
    {"expected, permuted tokens (B)", &DistanceSums::permuted, false},
    {"bound of Theorem 1", &DistanceSums::bound, true},
};

template <class Mean>
static Chart distance_chart(const char* x_label, const std::vector<int64_t>& x, Mean mean_at) {
  Chart c{.x_label = x_label, .y_label = "mean over rows and heads", .log_x = true, .log_y = true};
  for (const Curve& curve : kCurves) {
    Series s{.name = curve.name, .dashed = curve.dashed, .strong = c.series.empty()};
    for (size_t i = 0; i < x.size(); ++i)
      if (const double y = mean_at(i, curve.what); std::isfinite(y))
        s.points.push_back({double(x[i]), y});
    c.series.push_back(s);
  }
  return c;
}

static Section against_length(const Diagnosis& d) {
  const int64_t N = d.settings.tops.size() > 1 ? d.settings.tops[1] : d.settings.tops[0];
  const size_t k = size_t(std::find(d.grid.begin(), d.grid.end(), N) - d.grid.begin());
  return {"Distance against length",
          "N = " + std::to_string(N) +
              " (the paper's figure 2a). The expectation A is Theorem 1.2, whose formula is "
              "reconstructed; B is another reading of the paper's random sets.",
          distance_chart("length L", d.settings.lengths,
                         [&](size_t l, auto what) { return mean(d, l, k, what); }),
          true};
}

static Section against_top(const Diagnosis& d) {
  const size_t last = d.settings.lengths.size() - 1;
  return {"Distance against N",
          "L = " + std::to_string(d.tokens) + " (figure 2b); rows that see more than N tokens.",
          distance_chart("N", d.grid, [&](size_t k, auto what) { return mean(d, last, k, what); }),
          true};
}

static Section critical_section(const Diagnosis& d) {
  Chart c{.x_label = "length L", .y_label = "critical N", .log_x = true, .log_y = true};
  for (const double level : {0.01, 0.05})
    for (const Reading r : {Reading::A, Reading::B}) {
      Series s{.name = std::string(r == Reading::A ? "A" : "B") + ", level " + number_text(level),
               .dashed = level != d.settings.level};
      for (const Critical& x : critical(d, r, level))
        s.points.push_back({double(x.length), x.N < 0 ? NAN : double(x.N)});
      c.series.push_back(s);
    }
  Series paper{.name = "0.06 L", .dashed = true, .strong = true};
  for (int64_t L : d.settings.lengths) paper.points.push_back({double(L), 0.06 * double(L)});
  c.series.push_back(paper);
  return {"Critical N against length",
          "The least N at which the heads' mean distances cannot be distinguished from their "
          "expectations (two-sample Kolmogorov-Smirnov over heads, exact; figure 2c). No point: "
          "distinguished at every N up to " +
              std::to_string(d.grid.back()) + ".",
          c, true};
}

static Section separability_section(const Diagnosis& d) {
  Boxes b{.x_label = "N", .y_label = "N_s / N", .series = {{"heads", {}}}};
  struct Line2 {
    const char* name;
    double SeparationSums::* what;
  };
  static constexpr Line2 kLines[] = {{"lower, reconstructed", &SeparationSums::lower_markov},
                                     {"lower, sharp", &SeparationSums::lower},
                                     {"upper, reconstructed", &SeparationSums::upper_hoeffding},
                                     {"upper, in expectation", &SeparationSums::upper_mean},
                                     {"upper, certain", &SeparationSums::upper}};
  for (const Line2& l : kLines) b.lines.push_back({.name = l.name, .dashed = true});
  for (size_t k = 0; k < d.separable.size(); ++k) {
    std::vector<double> shares, box;
    for (const Head& h : d.heads) shares.push_back(share_at(d, h, d.separable[k]));
    for (double p : {0., 0.25, 0.5, 0.75, 1.}) box.push_back(quantile(shares, p));
    b.categories.push_back(std::to_string(d.separable[k]));
    b.series[0].boxes.push_back(box);
    for (size_t i = 0; i < b.lines.size(); ++i) {
      double sum = 0, n = 0;
      for (const Head& h : d.heads)
        if (const SeparationSums& s = h.separations[k]; s.rows > 0)
          sum += s.*kLines[i].what / s.rows, ++n;
      b.lines[i].points.push_back({double(k), sum / n});
    }
  }
  return {"Separability against N",
          "Mean N_s / N over heads, unit points (figure 3); bounds of Theorem 2, means over heads. "
          "The paper's formulas are reconstructed; the others are derived here.",
          b, true};
}

static Section bounds_section(const Diagnosis& d) {
  Table t{.columns = {{"bound"}, {"violations", true}, {"of", true}, {"share", true}}};
  for (const auto& [name, c] : d.crossed)
    t.rows.push_back({{name},
                      {std::to_string(c.times), double(c.times)},
                      {std::to_string(c.of), double(c.of)},
                      cell(double(c.times) / double(c.of))});
  return {
      "Bounds",
      "Violations of each bound, over rows (and N, T, ε). A bound in expectation does not bound "
      "single rows; the others must show 0 unless they are wrong as printed or said not to be a "
      "bound. Reconstructed: the paper's formula is not in any source at hand, this is ours "
      "(docs/diagnosis.md has the list).",
      t};
}

static std::vector<Section> details(const Diagnosis& d, const Head& h) {
  Facts facts;
  for (const Metric& m : metrics()) facts.push_back({m.name, number_text(m.of(d, h))});
  HeatMap picture{.label = "weight", .x_label = "keys", .y_label = "queries"};
  picture.values.resize(size_t(kPicture));
  for (int64_t i = 0; i < kPicture; ++i) {
    const std::string at = std::to_string(i * d.tokens / kPicture);
    picture.x.push_back(at), picture.y.push_back(at);
    for (int64_t j = 0; j < kPicture; ++j) {  // three digits keep the page small
      const double x = h.picture[size_t(i * kPicture + j)];
      picture.values[size_t(i)].push_back(j > i ? NAN : std::round(x * 1e3) / 1e3);
    }
  }
  const std::string name = "Layer " + std::to_string(h.layer) + ", head " + std::to_string(h.head);
  return {{name, "", facts, true},
          {name + ": attention map", "Mean weights of blocks of queries and keys.", picture, true}};
}

// A number of each head.
struct OfHead {
  int64_t layer, head;
  double value;
};
static size_t place(std::vector<std::string>& list, int64_t number) {
  const std::string name = std::to_string(number);
  const size_t i = size_t(std::find(list.begin(), list.end(), name) - list.begin());
  if (i == list.size()) list.push_back(name);
  return i;
}
static HeatMap head_map(const std::string& label, const std::vector<OfHead>& heads) {
  HeatMap map{.label = label, .x_label = "head", .y_label = "layer"};
  for (const OfHead& h : heads) {
    const size_t j = place(map.x, h.head), i = place(map.y, h.layer);
    map.values.resize(map.y.size());
    map.values[i].resize(map.x.size(), NAN);
    map.values[i][j] = h.value;
  }
  return map;
}

static Section heat_map(const Diagnosis& d, const Metric& m, bool with_details) {
  std::vector<OfHead> all;
  for (const Head& h : d.heads) all.push_back({h.layer, h.head, m.of(d, h)});
  HeatMap map = head_map(m.name, all);
  if (with_details)
    for (const Head& h : d.heads)
      map.details[{place(map.y, h.layer), place(map.x, h.head)}] = details(d, h);
  return {std::string(1, char(std::toupper(m.name[0]))) + (m.name + 1),
          std::string(m.about) +
              (with_details ? ". Click a head for its numbers and attention map." : "."),
          map, true};
}

static Section series_section(const Diagnosis& d) {
  Chart c{.x_label = "Taylor order", .y_label = "median error of a head's output", .log_y = true};
  for (const bool centred : {false, true}) {
    Series s{.name = centred ? "centred" : "plain"};
    for (size_t n = 0; n <= 40; ++n) {
      std::vector<double> errors;
      for (const Head& h : d.heads) {  // small errors end the list early
        const auto& e = centred ? h.series.centred : h.series.plain;
        errors.push_back(e[std::min(n, e.size() - 1)]);
      }
      s.points.push_back({double(n), quantile(errors, 0.5)});
    }
    c.series.push_back(s);
  }
  return {"Series instead of exp",
          "The relative error of a head's output with the series of exp truncated at an order, "
          "against its own operator, " +
              d.attention + ".",
          c, true};
}

// The losses with all heads switched; with --per-head also those of some heads, and the rows.
static void add_what_if(Report& r, const WhatIf& w) {
  const auto change = [&](double loss) {
    return Cell{number_text(100 * (loss / w.loss - 1)), 100 * (loss / w.loss - 1)};
  };
  const auto is_measured = [](const Effect& e) { return !std::isnan(e.half); };
  const bool heads = std::any_of(w.normalisers.begin(), w.normalisers.end(), is_measured);
  Table t{.columns = {{"normaliser"}, {"loss, all heads", true}, {"change, %", true}}};
  if (heads)
    t.columns.insert(t.columns.end(), {{"least affected half, %", true},
                                       {"least separable quarter, %", true},
                                       {"entropy ratio", true},
                                       {"separable, N = 5", true},
                                       {"sensitivity", true}});
  t.rows.push_back({{w.attention + ", unchanged"}, cell(w.loss), change(w.loss)});
  t.rows.back().resize(t.columns.size(), cell(NAN));
  for (const Effect& e : w.normalisers) {
    t.rows.push_back({{e.name}, cell(e.all), change(e.all)});
    if (heads)
      t.rows.back().insert(t.rows.back().end(),
                           {change(e.half), change(e.saturated), cell(e.rows.entropy_ratio),
                            cell(e.rows.share), cell(e.rows.sensitivity)});
  }
  r.sections.push_back(
      {"What if: another normaliser",
       "The same logits, no training, compared with the model's own operator, " + w.attention +
           ": a loss of " + number_text(w.loss) + " nats on " + std::to_string(w.tokens) +
           " tokens." +
           (w.whole ? "" : " This analysis was interrupted: some of its numbers are missing."),
       t});
  Chart c{.x_label = "Taylor order", .y_label = "loss", .log_y = true};
  const auto add = [&](const std::string& name, const std::vector<Effect>& list,
                       double Effect::* what) {
    Series s{.name = name};
    for (size_t i = 0; i < list.size(); ++i)
      if (!std::isnan(list[i].*what)) s.points.push_back({double(i + 1), list[i].*what});
    if (!s.points.empty()) c.series.push_back(s);
  };
  add("plain, every head", w.plain, &Effect::all),
      add("plain, least affected half", w.plain, &Effect::half);
  add("centred, every head", w.centred, &Effect::all),
      add("centred, least affected half", w.centred, &Effect::half);
  c.series.push_back({.name = "unchanged (" + w.attention + ")",
                      .points = {{1, w.loss}, {double(w.plain.size()), w.loss}},
                      .dashed = true,
                      .strong = true});
  if (!w.plain.empty())
    r.sections.push_back({"What if: a series instead of exp",
                          "taylor<n> and centred_taylor<n> in every head; the dashed line is the "
                          "model's own operator, " +
                              w.attention + ".",
                          c, true});
  Chart cut{.x_label = "N", .y_label = "loss", .log_x = true};
  for (const Truncated& u : w.truncated) {
    Series s{.name = u.renormalised ? "renormalised" : "rest deleted"};
    for (const auto& [N, loss] : u.losses) s.points.push_back({double(N), loss});
    cut.series.push_back(s);
  }
  if (!w.truncated.empty()) {
    cut.series.push_back({.name = "+5 %",
                          .points = {{1, 1.05 * w.loss}, {double(w.tokens), 1.05 * w.loss}},
                          .dashed = true});
    r.sections.push_back(
        {"What if: only the top N",
         "Every head keeps the N largest of its own weights (" + w.attention + ").", cut, true});
  }
}

static void add_tops(Report& r, const Tops& t) {
  const auto map = [&](const char* title, const std::string& about, const auto& N) {
    std::vector<OfHead> all;
    for (const HeadTop& h : t.heads) all.push_back({h.layer, h.head, double(N(h))});
    r.sections.push_back({title, about, head_map("N", all), true});
  };
  map("N of each head alone, 1 %",
      "The least N that costs at most 1 % of the loss if only this head is truncated to its N "
      "largest weights, the rest deleted.",
      [](const HeadTop& h) { return h.alone[0]; });
  for (const int j : {0, 1})
    map(j == 0 ? "N of each head, all truncated, 1 %" : "N of each head, all truncated, 5 %",
        "Every head keeps the N at which the relative error of its output is at most " +
            number_text(t.level[j]) +
            ", the largest value within the limit. Loss: " + number_text(t.loss[j]) + ".",
        [&](const HeadTop& h) { return h.together[j]; });
}

Report make_report(const WhatIf& w, const About& about) {
  Report r{.title = "What if " + about.model + " had another normaliser",
           .subtitle = about.text + ", " + std::to_string(w.tokens) +
                       " tokens; attention: " + w.attention + "; interrupted"};
  r.summary.push_back("The analysis was interrupted: only the losses below were measured.");
  add_what_if(r, w);
  r.sections.push_back(
      {"How it was made", "", Facts{{"command", about.command, true}, {"version", about.version}}});
  return r;
}

Report make_report(const Diagnosis& d, const std::optional<WhatIf>& w, const About& about) {
  const Settings& s = d.settings;
  Report r{.title = "What the attention of " + about.model + " selects",
           .subtitle = about.text + ", " + std::to_string(d.tokens) +
                       " tokens; attention: " + d.attention + "; points: " + name_of(s.embedding) +
                       (s.unit ? ", normalized" : "")};
  Table words{.columns = {{"finding"}, {"evidence"}, {"heads (layer.head)"}, {"rule"}}};
  for (const Finding& f : findings(d, w)) {
    r.summary.push_back(f.title + ": " + f.text + ".");
    std::string heads;
    for (const std::string& h : f.heads) heads += (heads.empty() ? "" : ", ") + h;
    words.rows.push_back({{f.title}, {f.text}, {heads}, {f.rule}});
  }
  r.sections.push_back({"Findings", "", words});
  for (auto* make : {against_length, against_top, critical_section, separability_section})
    r.sections.push_back(make(d));
  add_sensitivity(r, d);
  add_coverage(r, d);
  r.sections.push_back(series_section(d));
  add_growth(r, d);
  add_jacobians(r, d);
  if (w) add_what_if(r, *w);
  if (w && w->tops) add_tops(r, *w->tops);
  bool first = true;
  for (const Metric& m : metrics())
    r.sections.push_back(heat_map(d, m, std::exchange(first, false)));
  r.sections.push_back(bounds_section(d));
  r.sections.push_back(
      {"Definitions chosen where the paper leaves them open", "docs/diagnosis.md has the sources.",
       Facts{{"points x_i", std::string(name_of(s.embedding)) +
                                (s.unit ? ", normalized" : ", not normalized for distances") +
                                "; normalized for separability"},
             {"rows", "only the tokens that a query sees; a row counts for N if it sees more"},
             {"distance", "sum of |a_i x_i - s| over the tokens outside the N largest weights"},
             {"expectation",
              "A: random sets of N tokens (Theorem 1.2, reconstructed); B: weights "
              "keep their ranks, tokens are permuted"},
             {"critical N", "Kolmogorov-Smirnov at level " + number_text(s.level) +
                                "; the paper has 0.01 in its text and 0.05 in its algorithm"},
             {"radius of separability", "the least |a_j x_j - s| of a token that is not selected"},
             {"temperature", "of the model's scores, and of raw q·k as in the paper"}}});
  r.sections.push_back({"How it was made", "",
                        Facts{{"command", about.command, true},
                              {"version", about.version},
                              {"model", about.model},
                              {"text", about.text}}});
  return r;
}

}  // namespace horner::diag
