#include "convert/convert_report.h"

#include <algorithm>
#include <cmath>

#include "core/quantities.h"
#include "study/statistics.h"

namespace horner::convert {

using namespace report;

static const Probed* find(const Probes& p, const std::string& name) {
  const auto at = std::ranges::find(p.models, name, &Probed::name);
  return at == p.models.end() ? nullptr : &*at;
}

// Differences of two models, sequence by sequence, in percent of the second.
static study::Interval difference(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> out;
  for (size_t i = 0; i < a.size(); ++i) out.push_back(100 * (a[i] / b[i] - 1));
  return study::t_interval(out);
}

static std::string interval_text(const study::Interval& d) {
  return d.n < 2 ? formatted("%+.2f %% (one sequence, no interval)", d.mean)
                 : formatted("%+.2f %% [%+.2f, %+.2f]", d.mean, d.low, d.high);
}

// Of one model with another, with the p-value that Holm's correction leaves of the page's.
struct Comparison {
  std::string before, with;  // the sentence: before, "is ahead of", with
  study::Interval difference;
};
static std::string sentence(const Comparison& c, double p) {
  const std::string verdict = !(p < 0.05)             ? "is not distinguished from "
                              : c.difference.mean > 0 ? "is behind "
                                                      : "is ahead of ";
  return c.before + " " + verdict + c.with + ": " + interval_text(c.difference) + ".";
}

// The loss of copies farther back than the window, of each sequence: the mean over distances.
static std::vector<double> far_copies(const Result& r, const Probed& p) {
  std::vector<double> out(p.losses.size(), 0);
  double distances = 0;
  for (size_t d = 0; d < r.probes.distances.size(); ++d) {
    if (r.probes.distances[d] < r.plan.near) continue;
    ++distances;
    for (size_t i = 0; i < out.size(); ++i) out[i] += p.copies[d][i];
  }
  for (double& x : out) x /= distances;
  return out;
}

std::vector<std::string> findings(const Result& r) {
  std::vector<std::string> out;
  int64_t kept = 0;
  for (const Choice& c : r.plan.heads) kept += c.form == kCache;
  out.push_back(
      formatted("%lld of %zu planned heads keep their cache. At %lld tokens decoding keeps ",
                (long long)kept, r.plan.heads.size(), (long long)r.plan.tokens) +
      size_text(r.plan.bytes) + " instead of " + size_text(r.plan.cache_bytes) +
      formatted(" (1/%.1f); keys and values count as bfloat16.",
                r.plan.cache_bytes / std::max(1., r.plan.bytes)));
  const Probed* converted = find(r.probes, kConverted);
  if (!converted) return out;
  std::vector<Comparison> all;
  const std::string loss = formatted("On text the converted model (loss %.4f)", converted->loss());
  for (const char* name : {kControl, kTeacher, kNear, kState, kNone})
    if (const Probed* other = find(r.probes, name)) {
      const bool part = other->name == kNear || other->name == kState || other->name == kNone;
      const std::string with = part ? "'" + other->name + "'" : "the " + other->name;
      all.push_back({loss, with + formatted(" (%.4f)", other->loss()),
                     difference(converted->losses, other->losses)});
      if (part)
        all.push_back({"On copies beyond the window the converted model", with,
                       difference(far_copies(r, *converted), far_copies(r, *other))});
    }
  std::vector<double> p;
  for (const Comparison& c : all) p.push_back(c.difference.p);
  const std::vector<double> corrected = study::holm(p);
  for (size_t i = 0; i < all.size(); ++i) out.push_back(sentence(all[i], corrected[i]));
  return out;
}

static Section loss_table(const Result& r) {
  Table t{{{"model"},
           {"loss", true},
           {"against the control, %", true},
           {"95 % interval"},
           {"far copies, loss", true}},
          {}};
  const Probed* base = find(r.probes, kControl);
  if (!base) base = find(r.probes, kTeacher);
  for (const Probed& p : r.probes.models) {
    const study::Interval d = difference(p.losses, base->losses);
    const std::vector<double> far = far_copies(r, p);
    double mean = 0;
    for (const double x : far) mean += x / double(far.size());
    t.rows.push_back({{p.name},
                      {formatted("%.4f", p.loss()), p.loss()},
                      {formatted("%+.2f", d.mean), d.mean},
                      {&p == base || d.n < 2 ? "" : formatted("%+.2f to %+.2f", d.low, d.high)},
                      {formatted("%.3f", mean), mean}});
  }
  return {"Losses",
          formatted("%zu validation sequences of %lld tokens that nothing was trained on; "
                    "differences are paired by sequence. Every model but the teacher learned from "
                    "the same %lld tokens.",
                    r.probes.models[0].losses.size(), (long long)r.settings.length,
                    (long long)r.tokens),
          t};
}

static Section copies_chart(const Result& r) {
  Chart c{.x_label = "distance, tokens", .y_label = "loss of a copied passage", .log_x = true};
  for (const Probed& p : r.probes.models) {
    Series s{.name = p.name, .dashed = p.name == kTeacher, .strong = p.name == kConverted};
    for (size_t d = 0; d < r.probes.distances.size(); ++d) {
      double mean = 0;
      for (const double x : p.copies[d]) mean += x / double(p.copies[d].size());
      s.points.push_back({double(r.probes.distances[d]), mean});
    }
    c.series.push_back(s);
  }
  return {
      "Copies by distance",
      formatted("The loss of the second occurrence of a passage. Beyond the window of %lld keys "
                "only a cache or a state can know the first.",
                (long long)r.plan.near),
      c, true};
}

static Section bytes_chart(const Result& r, const nn::ModelConfig& teacher) {
  Chart c{.x_label = "context, tokens", .y_label = "bytes", .log_x = true, .log_y = true};
  Series own{.name = kTeacher, .dashed = true}, converted{.name = kConverted, .strong = true};
  const nn::ModelConfig config =
      converted_config(teacher, assignment_of(r.plan, teacher), r.plan.near);
  for (int64_t n = 1024; n <= 1 << 20; n *= 2) {
    own.points.push_back({double(n), kept_bytes(teacher, n)});
    converted.points.push_back({double(n), kept_bytes(config, n)});
  }
  c.series = {own, converted};
  return {"Memory by context", "What decoding keeps, calculated; keys and values in bfloat16.", c,
          true};
}

static Section heads_table(const Result& r) {
  Table t{{{"head"}, {"form"}, {"why"}}, {}};
  for (const Measure& m : measure_table()) t.columns.push_back({m.name, true, m.about});
  for (const Choice& c : r.plan.heads) {
    std::vector<Cell> row{
        {formatted("%lld.%lld", (long long)c.layer, (long long)c.head)}, {c.form}, {c.why}};
    const auto h = std::ranges::find_if(r.measures.heads, [&](const HeadMeasures& h) {
      return h.layer == c.layer && h.head == c.head;
    });
    for (const Measure& m : measure_table()) {
      const double x = h == r.measures.heads.end() ? NAN : (*h).*m.at;
      row.push_back({std::isnan(x) ? "" : formatted("%.3g", x), x});
    }
    t.rows.push_back(row);
  }
  return {"Heads", "What each head became, and the measures of the teacher's head.", t};
}

static void add_measures(Report& page, const Result& r) {
  const std::vector<Correlation> all = correlations(r.measures, r.settings.seed);
  if (all.empty()) return;
  Table t{{{"measure"}, {"rank correlation", true}, {"95 % interval"}}, {}};
  for (const Correlation& c : all)
    t.rows.push_back({{c.measure},
                      {formatted("%.2f", c.rho), c.rho},
                      {formatted("%.2f to %.2f", c.low, c.high)}});
  page.sections.push_back({"Which measure predicts the cost of a head?",
                           "Spearman's correlation over heads with the loss that converting the "
                           "head alone adds, in its cheapest form after the trial; percentile "
                           "bootstrap over heads. Measures and costs choose heads, so they are of "
                           "training text, in other sequences than those of the trials.",
                           t, true});
  Chart c{.x_label = "heads that keep their cache", .y_label = "loss"};
  for (const Kept& k : r.kept) {
    Series s{.name = k.by, .dashed = k.by == "random" || k.by == "uniform"};
    for (const auto& [heads, loss] : k.losses) s.points.push_back({double(heads), loss});
    c.series.push_back(s);
  }
  if (!r.kept.empty())
    page.sections.push_back({"Heads kept by measure",
                             "The loss on validation text of the teacher with the other heads as "
                             "they are after the trials, without any healing.",
                             c, true});
}

static Section steps_chart(const Result& r) {
  Chart c{.x_label = "step", .y_label = "loss"};
  for (const auto& [name, losses] :
       {std::pair("heal", &r.heal), {"control", &r.control}, {"transfer (error)", &r.transfer}}) {
    Series s{.name = name};
    for (size_t i = 0; i < losses->size(); ++i) s.points.push_back({double(i + 1), (*losses)[i]});
    if (!s.points.empty()) c.series.push_back(s);
  }
  return {"Learning", "The loss of each step; of the transfer the mean squared error of outputs.",
          c, true};
}

Report make_report(const Result& r, const nn::ModelConfig& teacher,
                   const std::vector<Sample>& samples, const std::string& command) {
  Report page{"Conversion", command, findings(r), {}};
  if (!r.probes.models.empty())
    page.sections.push_back(loss_table(r)), page.sections.push_back(copies_chart(r));
  page.sections.push_back(bytes_chart(r, teacher));
  if (!r.transfer.empty()) page.sections.push_back(steps_chart(r));
  add_measures(page, r);
  page.sections.push_back(heads_table(r));
  if (!samples.empty()) {
    Table t{{{"prompt"}, {"teacher"}, {"converted"}}, {}};
    for (const Sample& s : samples) t.rows.push_back({{s.prompt}, {s.teacher}, {s.converted}});
    page.sections.push_back({"Text", "The most likely continuation, by both models.", t});
  }
  return page;
}

}  // namespace horner::convert
