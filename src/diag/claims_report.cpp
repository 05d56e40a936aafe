// The sections of a report about the paper's remaining claims.
#include <algorithm>
#include <cmath>

#include "diag/claims.h"
#include "diag/diag_report.h"
#include "diag/softmax_rows.h"

namespace horner::diag {

using namespace report;

static Cell number_cell(double x) {
  return {number_text(x), x};
}
static std::string interval_text(const Interval& x) {
  return number_text(x.middle) + " (" + number_text(x.low) + " to " + number_text(x.high) + ")";
}
static Cell interval_cell(const Interval& x) {
  return {interval_text(x), x.middle};
}

// The N of a figure: 16 if it was measured, else the largest below.
static int64_t shown_top(const Diagnosis& d) {
  int64_t out = d.separable.front();
  for (const int64_t N : d.separable)
    if (N <= 16) out = N;
  return out;
}

void add_coverage(Report& r, const Diagnosis& d) {
  Chart c{.x_label = "N", .y_label = "share of the selected tokens", .log_x = true};
  struct Curve3 {
    const char* name;
    double Covered::* what;
    bool dashed;
  };
  for (const Curve3& curve : {Curve3{"one head: p = N_s / N", &Covered::share, false},
                              {"measured: separated by at least one", &Covered::measured, false},
                              {"independent heads", &Covered::expected, true},
                              {"the paper: 1 − (1 − p)^H", &Covered::paper, true}}) {
    Series s{.name = curve.name, .dashed = curve.dashed};
    for (const Covered& x : covered_by_top(d)) s.points.push_back({double(x.N), x.*curve.what});
    c.series.push_back(s);
  }
  r.sections.push_back(
      {"Coverage by several heads",
       "Of the tokens that at least one head of a layer selects, the share that at least one of "
       "the heads that select them separates; means over layers. Independent heads: the mean of "
       "1 − (1 − p)^m over tokens that m heads select.",
       c, true});
  const int64_t N = shown_top(d);
  Chart by{.x_label = "heads that select the token", .y_label = "share that is covered"};
  Series measured{.name = "measured"},
      expected{.name = "independent: 1 − (1 − p)^m", .dashed = true},
      tokens{.name = "share of the tokens"};
  for (const CoveredBy& x : covered_by_heads(d, N)) {
    if (x.tokens == 0) continue;
    measured.points.push_back({double(x.heads), x.measured});
    expected.points.push_back({double(x.heads), x.expected});
    tokens.points.push_back({double(x.heads), x.tokens});
  }
  by.series = {measured, expected, tokens};
  r.sections.push_back({"Coverage by number of heads",
                        "N = " + std::to_string(N) +
                            ", all layers; how many heads select a token, and how many of such "
                            "tokens at least one of them separates.",
                        by, true});
}

void add_growth(Report& r, const Diagnosis& d) {
  Chart c{.x_label = "tokens seen, n",
          .y_label = "mean distance over rows and heads",
          .log_x = true,
          .log_y = true};
  for (size_t i = 0; i < std::size(kFractions); ++i) {
    const double f = kFractions[i];
    Series s{.name = f == 1 ? "N = n − 1" : "N = " + number_text(f) + " n"};
    for (size_t l = 0; l < d.settings.lengths.size(); ++l) {
      double rows = 0, n = 0, distance = 0;
      for (const Head& h : d.heads) {
        const GrowthSums& g = h.growth[i].lengths[l];
        rows += g.rows, n += g.n, distance += g.distance;
      }
      if (rows > 0) s.points.push_back({n / rows, distance / rows});
    }
    c.series.push_back(s);
  }
  r.sections.push_back({"Distance for N = f n",
                        "Each row selects N = f n of the n tokens that it sees. Rows that see "
                        "between half of a length and all of it.",
                        c, true});
  Table t{.columns = {{"N"},
                      {"distance", true},
                      {"verdict"},
                      {"per token left out", true},
                      {"expectation A", true}}};
  for (const Exponents& e : exponents(d))
    t.rows.push_back({{e.fraction == 1 ? "n − 1" : number_text(e.fraction) + " n"},
                      interval_cell(e.distance),
                      {verdict(e.distance, d.heads.size())},
                      interval_cell(e.each),
                      interval_cell(e.expected)});
  const LastToken last = last_token(d);
  r.sections.push_back(
      {"Does the distance vanish as N grows with L?",
       "Exponents of n: medians over heads (95 % bootstrap interval over heads). Below 0 the "
       "distance tends to 0. At the largest length, from N = 0.06 n to N = n − 1, the distance "
       "falls to " +
           interval_text(last.distance) +
           " of its value, because fewer tokens are left out; per token left out it becomes " +
           interval_text(last.each) + " times as large.",
       t});
}

void add_jacobians(Report& r, const Diagnosis& d) {
  Table t{.columns = {{"normaliser"},
                      {"|J|", true, "median over rows"},
                      {"largest |J|", true},
                      {"derived bound", true, "√n |a| max|F'| / ΣF, median"},
                      {"two terms", true, "(1 + √n |a|) max|F'| / (n min F), median"},
                      {"attained", true, "|J| over the derived bound, median"},
                      {"at most", true}}};
  for (const JacobianSummary& s : jacobian_summaries(d)) {
    std::vector<Cell> row = {{s.name + (s.name == d.attention ? " (the model's own)" : "")}};
    for (const double x :
         {s.norm, s.largest, s.derived, s.two_terms, s.attained, s.attained_largest})
      row.push_back(number_cell(x));
    t.rows.push_back(row);
  }
  r.sections.push_back(
      {"Jacobian of the weights by the scores (Lemma 2)",
       "Spectral norm of J for weights F(x) / ΣF, on a few rows of every head with the scores of "
       "this model, and its bounds. The bounds are derived here: the paper's formula is not in any "
       "source at hand, only that it has two terms, both divided by min F.",
       t});
}

// The curves of one kind of units, and the line 1/(2T).
static Chart sensitivity_chart(const Diagnosis& d, Sensitivity Head::* units, const char* x_label) {
  const Settings& s = d.settings;
  Chart c{
      .x_label = x_label, .y_label = "g(T, ε), largest over heads", .log_x = true, .log_y = true};
  for (const bool most : {false, true})
    for (size_t j = 0; j < s.epsilons.size(); ++j) {
      Series seen{.name = "ε = " + number_text(s.epsilons[j]) + (most ? ", largest row" : "")};
      const auto g =
          largest_over_heads(d, units, most ? &Sensitivity::most : &Sensitivity::mean, j);
      for (size_t i = 0; i < g.size(); ++i) seen.points.push_back({s.temperatures[i], g[i]});
      c.series.push_back(seen);
    }
  if (!d.softmax) return c;  // Corollary 3 is about softmax
  Series bound{.name = "1/(2T)", .dashed = true, .strong = true},
      printed{.name = "min{1/(4T), √2}, as printed", .dashed = true};
  for (const double T : s.temperatures)
    bound.points.push_back({T, 1 / (2 * T)}), printed.points.push_back({T, sensitivity_printed(T)});
  c.series.push_back(bound), c.series.push_back(printed);
  return c;
}

static std::string crossings(const Diagnosis& d, Sensitivity Head::* units) {
  const Settings& s = d.settings;
  std::vector<std::vector<double>> curves;
  std::string out;
  for (size_t j = 0; j < s.epsilons.size(); ++j) {
    curves.push_back(largest_over_heads(d, units, &Sensitivity::mean, j));
    out += (j ? ", " : "") + number_text(law_from(s.temperatures, curves.back())) +
           " (ε = " + number_text(s.epsilons[j]) + ")";
  }
  return "The means are nearer to 1/T than to a constant from T = " + out +
         "; all ε agree within 10 % from T = " + number_text(agree_from(s.temperatures, curves)) +
         ".";
}

void add_sensitivity(Report& r, const Diagnosis& d) {
  const double scale = d.heads.front().scale;
  const std::string factor = number_text(1 / scale);
  r.sections.push_back({"Gradient sensitivity",
                        "Means over rows, and the most sensitive row. T = 1 is the model's own "
                        "scale. The valid bound is min{1/(2T), √2/ε} (figure 4). " +
                            crossings(d, &Head::sensitivity),
                        sensitivity_chart(d, &Head::sensitivity, "temperature T of the scores"),
                        true});
  r.sections.push_back({"Sensitivity by raw q·k",
                        "The paper's units: T and ε apply to q·k itself, so T = " + factor +
                            " is the model's own scale (" + number_text(scale) +
                            " q·k in the first layer measured); every fourth row. " +
                            crossings(d, &Head::raw_sensitivity),
                        sensitivity_chart(d, &Head::raw_sensitivity, "temperature T of raw q·k"),
                        true});
  const Settings& s = d.settings;
  Table t{.columns = {{"T of the scores", true}, {"T of raw q·k", true}}};
  std::vector<std::vector<double>> curves;
  for (size_t j = 0; j < s.epsilons.size(); ++j) {
    const double eps = s.epsilons[j];
    t.columns.push_back({"g, ε = " + number_text(eps), true});
    curves.push_back(largest_over_heads(d, &Head::sensitivity, &Sensitivity::mean, j));
    t.columns.push_back({"exponent", true, "−d log g / d log T up to the next T: 1 for 1/T"});
  }
  for (size_t i = 0; i < s.temperatures.size(); ++i) {
    std::vector<Cell> row = {number_cell(s.temperatures[i]),
                             number_cell(s.temperatures[i] / scale)};
    for (const auto& g : curves) {
      const auto e = local_exponents(s.temperatures, g);
      row.push_back(number_cell(g[i]));
      row.push_back(number_cell(i < e.size() ? e[i] : NAN));
    }
    t.rows.push_back(row);
  }
  r.sections.push_back({"The 1/T law in both units",
                        "Means over rows, largest over heads. In units of raw q·k, T and ε are " +
                            factor + " times as large and g is as many times smaller.",
                        t});
}

}  // namespace horner::diag
