#include "diag/findings.h"

#include <algorithm>
#include <cmath>

#include "diag/claims.h"

namespace horner::diag {

std::string number_text(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", x);
  return std::isfinite(x) ? text : "–";
}

double share_at(const Diagnosis& d, const Head& h, int64_t N) {
  for (size_t k = 0; k < d.separable.size(); ++k)
    if (d.separable[k] == N && h.separations[k].rows > 0)
      return h.separations[k].share / h.separations[k].rows;
  return NAN;
}

static double distance_at(const Diagnosis& d, const Head& h, int64_t N) {
  for (size_t k = 0; k < d.grid.size(); ++k)
    if (d.grid[k] == N && h.distances.back()[k].rows > 0)
      return h.distances.back()[k].distance / h.distances.back()[k].rows;
  return NAN;
}

// clang-format off
static const Metric kMetrics[] = {
    {"entropy ratio", "entropy divided by the log of the number of visible tokens", [](const Diagnosis&, const Head& h) { return h.entropy_ratio; }},
    {"entropy", "in nats", [](const Diagnosis&, const Head& h) { return h.entropy; }},
    {"effective support", "1 / sum of squared weights", [](const Diagnosis&, const Head& h) { return h.support; }},
    {"largest weight", "mean over rows", [](const Diagnosis&, const Head& h) { return h.largest; }},
    {"first-token mass", "weight of the text's first token; 0 if it is not visible", [](const Diagnosis&, const Head& h) { return h.first; }},
    {"attention distance", "weighted mean distance to the keys, in tokens", [](const Diagnosis&, const Head& h) { return h.reach; }},
    {"exponent of the 1/L law", "slope of log largest weight against log n: -1 if weights disperse, 0 if length has no effect", [](const Diagnosis&, const Head& h) { return h.law.slope(); }},
    {"separable share, N = 16", "N_s / N", [](const Diagnosis& d, const Head& h) { return share_at(d, h, 16); }},
    {"distance, N = 5", "sum of the distances of tokens that are not selected", [](const Diagnosis& d, const Head& h) { return distance_at(d, h, 5); }},
    {"effective temperature", "1 / standard deviation of a row's scores", [](const Diagnosis&, const Head& h) { return h.temperature(); }},
    {"largest score", "|x|, over a few rows", [](const Diagnosis&, const Head& h) { return h.series.largest; }},
    {"dominant Taylor order", "the order with the largest mean |x|^n / n!", [](const Diagnosis&, const Head& h) { return double(h.series.dominant); }},
    {"Taylor order for 1 %", "the least order from which the output's error stays below 1 %", [](const Diagnosis&, const Head& h) { return double(enough(h.series.plain)); }},
    {"centred order for 1 %", "the same, about each row's mean score", [](const Diagnosis&, const Head& h) { return double(enough(h.series.centred)); }},
};
// clang-format on

std::span<const Metric> metrics() {
  return kMetrics;
}

// Between 0.70 and 0.85 for every N >= 16, and flat.
bool is_saturated(const Diagnosis& d, const Head& h) {
  double low = INFINITY, high = -INFINITY;
  for (int64_t N : d.separable) {
    const double s = N >= 16 ? share_at(d, h, N) : NAN;
    if (!std::isnan(s)) low = std::min(low, s), high = std::max(high, s);
  }
  return low >= 0.70 && high <= 0.85 && high - low < 0.05;
}
bool is_dispersed(const Head& h) {
  return h.entropy_ratio > 0.9;
}
bool is_fragile(const Head& h) {
  return h.temperature() < 0.1;
}

static std::string name(const Head& h) {
  return std::to_string(h.layer) + "." + std::to_string(h.head);
}
static std::string percent(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%+.1f %%", 100 * x);
  return text;
}

static const Effect* find(const std::vector<Effect>& list, const std::string& part) {
  for (const Effect& e : list)
    if (e.name.find(part) != e.name.npos) return &e;
  return nullptr;
}
// ": measured on T tokens without training, X for the model's own Y changes the loss by …"
static std::string effect(const std::optional<WhatIf>& w, const std::string& part) {
  const Effect* e = w ? find(w->normalisers, part) : nullptr;
  if (!e) return w ? " (not measured)" : " (not measured; add --what-if)";
  std::string out = ": measured on " + std::to_string(w->tokens) + " tokens without training, " +
                    e->name + " instead of the model's own " + w->attention +
                    " changes the loss by " + percent(e->all / w->loss - 1) + " in all heads";
  if (!std::isnan(e->saturated))
    out += ", by " + percent(e->saturated / w->loss - 1) +
           " in the quarter with the least separable top 20";
  return out;
}

template <class Is>
static Finding of_heads(const Diagnosis& d, const char* what, const char* rule, Is is) {
  Finding f{.title = what, .rule = rule};
  for (const Head& h : d.heads)
    if (is(h)) f.heads.push_back(name(h));
  f.text = std::to_string(f.heads.size()) + " of " + std::to_string(d.heads.size()) + " heads";
  return f;
}

static Finding separability(const Diagnosis& d) {
  const auto half = [&](int64_t N) {
    std::vector<double> shares;
    for (const Head& h : d.heads) shares.push_back(share_at(d, h, N));
    return quantile(shares, 0.5);
  };
  Finding f{.title = "Separability", .rule = "median over heads of the mean N_s / N"};
  for (int64_t N : d.separable)
    f.text += (f.text.empty() ? "" : ", ") + number_text(half(N)) + " at N = " + std::to_string(N);
  return f;
}

static Finding law(const Diagnosis& d) {
  std::vector<double> slopes;
  for (const Head& h : d.heads) slopes.push_back(h.law.slope());
  return {"The 1/L law",
          "the largest weight of a row scales as n to the power " +
              number_text(quantile(slopes, 0.5)) + " in the median head (quartiles " +
              number_text(quantile(slopes, 0.25)) + " and " + number_text(quantile(slopes, 0.75)) +
              ")",
          "least squares of log largest weight on log n over rows with at least 8 visible tokens; "
          "-1 is full dispersion",
          {}};
}

static Finding critical_N(const Diagnosis& d) {
  Finding f{.title = "Critical top N",
            .rule =
                "the least N at which the heads' distances cannot be distinguished from their "
                "expectations: two-sample Kolmogorov-Smirnov, exact, level " +
                number_text(d.settings.level)};
  const size_t n = d.heads.size();  // two disjoint samples of n have the least possible p
  std::vector<double> low(n, 0), high(n, 1);
  if (kolmogorov_smirnov(low, high).p >= d.settings.level) {
    f.text = "not tested: " + std::to_string(n) + " heads are too few for this level";
    return f;
  }
  for (const Reading r : {Reading::A, Reading::B}) {
    const Critical c = critical(d, r, d.settings.level).back();
    f.text += std::string(r == Reading::A ? "random sets (A): " : "; permuted tokens (B): ");
    f.text +=
        c.N < 0 ? "none up to " + std::to_string(d.grid.back())
                : std::to_string(c.N) + " = " + number_text(double(c.N) / double(c.length)) + " L";
    f.text += " at L = " + std::to_string(c.length);
  }
  return f;
}

static std::string interval(const Interval& x) {
  return number_text(x.middle) + " (" + number_text(x.low) + " to " + number_text(x.high) + ")";
}

static Finding coverage(const Diagnosis& d) {
  Finding f{.title = "Coverage by the heads of a layer",
            .rule =
                "a token that any head selects is covered if at least one of the heads that select "
                "it separates it; independent heads: the mean of 1 - (1 - p)^m for m heads that "
                "select it; the paper's formula: m is the number of heads; means over layers"};
  Covered c{};
  for (const Covered& x : covered_by_top(d))
    if (x.N <= 16) c = x;
  f.text = "at N = " + std::to_string(c.N) + " one head separates p = " + number_text(c.share) +
           " of its tokens, the heads of a layer together " + number_text(c.measured) +
           "; independent heads would separate " + number_text(c.expected) +
           ", and 1 - (1 - p)^H is " + number_text(c.paper);
  return f;
}

static Finding growth(const Diagnosis& d) {
  const std::vector<Exponents> all = exponents(d);
  const Exponents& paper = all.front();
  Finding f{.title = "Distance with N in proportion to the length",
            .rule =
                "distance of rows that select N = f n of n tokens, least squares of its log on "
                "log n; median over heads, 95 % bootstrap interval over heads; the distance tends "
                "to 0 only if the interval is below 0"};
  const std::string says = verdict(paper.distance, d.heads.size());
  f.text = "'distance → 0 as N grows with L' " +
           (says == "grows"       ? std::string("does not hold")
            : says == "falls"     ? std::string("is supported")
            : says == "undecided" ? std::string("is undecided")
                                  : "is undecided (" + says + ")") +
           ": with N = " + number_text(paper.fraction) + " n it scales as n to the power " +
           interval(paper.distance);
  for (const Exponents& e : all)
    if (e.fraction == 0.5 || e.fraction == 0.9)
      f.text += ", N = " + number_text(e.fraction) + " n: " + interval(e.distance);
  const LastToken last = last_token(d);
  f.text += "; at the largest length it falls to " + interval(last.distance) +
            " of its value from N = " + number_text(paper.fraction) +
            " n to n - 1, per token left out it becomes " + interval(last.each) + " times as large";
  return f;
}

static Finding lemma_2(const Diagnosis& d) {
  Finding f{.title = "Jacobian of the weights (Lemma 2)",
            .rule =
                "spectral norm over a few rows of every head; the derived bound is "
                "sqrt(n) |a| max|F'| / sum F; Lemma 2's own formula is not known"};
  for (const JacobianSummary& s : jacobian_summaries(d))
    if (s.name == d.attention)
      f.text = d.attention + ": median " + number_text(s.norm) + ", largest " +
               number_text(s.largest) + "; the derived bound is " + number_text(s.derived) +
               " in the median and attained to " + number_text(100 * s.attained) + " % (at most " +
               number_text(100 * s.attained_largest) + " %)";
  if (f.text.empty()) f.text = "does not apply to " + d.attention;
  return f;
}

static void add_tops(const WhatIf& w, std::vector<Finding>& out) {
  for (const Truncated& t : w.truncated)
    out.push_back({t.renormalised ? "Top N, renormalised" : "Top N, rest deleted",
                   "truncating every head to its " + std::to_string(t.within_1) +
                       " largest weights costs at most 1 % of the loss, to " +
                       std::to_string(t.within_5) + " at most 5 % (" + std::to_string(w.tokens) +
                       " tokens)",
                   "bisection on the loss",
                   {}});
  if (!w.tops) return;
  const auto half = [&](int j) {
    std::vector<double> all;
    for (const HeadTop& h : w.tops->heads) all.push_back(double(h.together[j]));
    return number_text(quantile(all, 0.5));
  };
  out.push_back({"Top N of each head",
                 "with every head truncated to its own N, the median head keeps " + half(0) +
                     " weights at a cost of at most 1 % of the loss, " + half(1) + " at 5 %",
                 "N is the least with an output error within a level common to all heads; "
                 "bisection on the level by the loss",
                 {}});
  Finding alone{.title = "Heads that need more than one weight",
                .rule =
                    "truncating only this head to its largest weight costs more than 1 % of the "
                    "loss"};
  for (const HeadTop& h : w.tops->heads)
    if (h.alone[0] > 1)
      alone.heads.push_back(std::to_string(h.layer) + "." + std::to_string(h.head));
  alone.text =
      std::to_string(alone.heads.size()) + " of " + std::to_string(w.tops->heads.size()) + " heads";
  out.push_back(alone);
}

// Given if the finding of that index names heads.
struct Advice {
  size_t finding;
  const char *title, *text, *variant, *rule;
};
// clang-format off
static constexpr Advice kAdvice[] = {
    {3, "Advice: keep the active set small", "top-k near 0.06 L", "topk", "guideline 1 of the paper, for saturated heads"},
    {4, "Advice: a length-aware normaliser", "ssmax sharpens with length", "ssmax", "guideline 2, for dispersed heads"},
    {5, "Advice: a temperature floor", "a higher temperature makes weights less sensitive", "temperature=2", "guideline 3, for heads with an effective temperature below 0.1"},
};
// clang-format on

std::vector<Finding> findings(const Diagnosis& d, const std::optional<WhatIf>& w) {
  std::vector<Finding> out = {law(d), separability(d), critical_N(d)};
  out.push_back(of_heads(d, "Saturated heads",
                         "N_s / N between 0.70 and 0.85 and within 0.05 for every N >= 16",
                         [&](const Head& h) { return is_saturated(d, h); }));
  out.push_back(of_heads(d, "Dispersed heads", "mean entropy over log n above 0.9", is_dispersed));
  out.push_back(of_heads(
      d, "Fragile heads",
      "effective temperature, 1 / standard deviation of a row's scores, below 0.1", is_fragile));
  out.push_back(of_heads(d, "Sinks", "more than 0.3 of the weight on the first token",
                         [](const Head& h) { return h.first > 0.3; }));
  out.push_back(of_heads(d, "Really linear heads",
                         "centred order 1 keeps the head's output within 1 %",
                         [](const Head& h) { return enough(h.series.centred) <= 1; }));
  out.push_back(of_heads(d, "Heads of order 2 to 4",
                         "the least centred order that keeps the output within 1 % is 2, 3 or 4",
                         [](const Head& h) {
                           const int n = enough(h.series.centred);
                           return n >= 2 && n <= 4;
                         }));
  for (const Advice& a : kAdvice)
    if (!out[a.finding].heads.empty())
      out.push_back({a.title, a.text + effect(w, a.variant), a.rule, {}});
  for (auto* make : {coverage, growth, lemma_2}) out.push_back(make(d));
  if (w) add_tops(*w, out);
  if (!d.layers_text.empty())
    out.push_back({"Layers", d.layers_text, "the pattern of config.json's horner_variant", {}});
  return out;
}

}  // namespace horner::diag
