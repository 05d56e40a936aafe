#include "diag/claims.h"

#include <algorithm>
#include <cmath>

namespace horner::diag {

std::vector<Covered> covered_by_top(const Diagnosis& d) {
  std::vector<Covered> out;
  for (const int64_t N : d.separable) {
    Covered sum{N, 0, 0, 0, 0};
    double layers = 0;
    for (const Coverage& c : d.coverage) {
      if (c.N != N || c.of == 0) continue;
      sum.share += c.share(), sum.measured += c.measured();
      sum.expected += c.expected(), sum.paper += c.paper(), ++layers;
    }
    if (layers == 0) continue;
    for (double* x : {&sum.share, &sum.measured, &sum.expected, &sum.paper}) *x /= layers;
    out.push_back(sum);
  }
  return out;
}

std::vector<CoveredBy> covered_by_heads(const Diagnosis& d, int64_t N) {
  std::vector<CoveredBy> out;
  double all = 0;
  for (const Coverage& c : d.coverage) {
    if (c.N != N || c.of == 0) continue;
    out.resize(std::max(out.size(), c.selected.size()));
    for (size_t m = 0; m < c.selected.size(); ++m) {
      out[m].tokens += c.selected[m], out[m].measured += c.covered[m], all += c.selected[m];
      out[m].expected += c.selected[m] * at_least_one(c.share(), double(m + 1));
    }
  }
  for (size_t m = 0; m < out.size(); ++m) {
    CoveredBy& x = out[m];
    x.heads = int64_t(m + 1), x.measured /= x.tokens, x.expected /= x.tokens, x.tokens /= all;
  }
  return out;
}

template <class Of>
static Interval over_heads(const Diagnosis& d, Of of) {
  std::vector<double> all;
  for (const Head& h : d.heads) all.push_back(of(h));
  return bootstrap_median(all);
}

std::vector<Exponents> exponents(const Diagnosis& d) {
  std::vector<Exponents> out;
  for (size_t i = 0; i < std::size(kFractions); ++i) {
    const auto slope = [&](Line Growth::* line) {
      return over_heads(d, [&](const Head& h) { return (h.growth[i].*line).slope(); });
    };
    out.push_back(
        {kFractions[i], slope(&Growth::distance), slope(&Growth::each), slope(&Growth::expected)});
  }
  return out;
}

LastToken last_token(const Diagnosis& d) {
  const auto ratio = [&](double GrowthSums::* what) {
    return over_heads(d, [&](const Head& h) {
      return h.growth.back().lengths.back().*what / h.growth.front().lengths.back().*what;
    });
  };
  return {ratio(&GrowthSums::distance), ratio(&GrowthSums::each)};
}

std::vector<JacobianSummary> jacobian_summaries(const Diagnosis& d) {
  std::vector<JacobianSummary> out;
  for (const JacobianRows& j : d.jacobians) {
    const auto at = [&](double p, auto of) {
      std::vector<double> all;
      for (const Jacobian& row : j.rows) all.push_back(of(row));
      return quantile(all, p);
    };
    const auto norm = [](const Jacobian& r) { return r.norm; };
    const auto attained = [](const Jacobian& r) { return r.norm / r.derived; };
    out.push_back({j.name, at(0.5, norm), at(1, norm),
                   at(0.5, [](const Jacobian& r) { return r.derived; }),
                   at(0.5, [](const Jacobian& r) { return r.with_least; }),
                   at(0.5, [](const Jacobian& r) { return r.two_terms; }), at(0.5, attained),
                   at(1, attained)});
  }
  return out;
}

std::vector<double> largest_over_heads(const Diagnosis& d, Sensitivity Head::* units,
                                       std::vector<std::vector<double>> Sensitivity::* what,
                                       size_t epsilon) {
  std::vector<double> out(d.settings.temperatures.size());
  for (const Head& h : d.heads)
    for (size_t i = 0; i < out.size(); ++i) out[i] = std::max(out[i], (h.*units.*what)[i][epsilon]);
  return out;
}

std::vector<double> local_exponents(const std::vector<double>& T, const std::vector<double>& g) {
  std::vector<double> out;
  for (size_t i = 0; i + 1 < T.size(); ++i)
    out.push_back(-std::log(g[i + 1] / g[i]) / std::log(T[i + 1] / T[i]));
  return out;
}

double law_from(const std::vector<double>& T, const std::vector<double>& g) {
  const std::vector<double> e = local_exponents(T, g);
  const auto middle = [&](size_t i) { return std::log(T[i] * T[i + 1]) / 2; };
  size_t i = e.size();
  while (i > 0 && e[i - 1] > 0.5) --i;
  if (i == e.size()) return NAN;
  if (i == 0) return T[0];
  const double share = (0.5 - e[i - 1]) / (e[i] - e[i - 1]);
  return std::exp(middle(i - 1) + share * (middle(i) - middle(i - 1)));
}

double agree_from(const std::vector<double>& T, const std::vector<std::vector<double>>& curves) {
  double from = NAN;
  for (size_t i = T.size(); i-- > 0;) {
    double low = INFINITY, high = 0;
    for (const auto& g : curves) low = std::min(low, g[i]), high = std::max(high, g[i]);
    if (!(high <= 1.1 * low)) break;
    from = T[i];
  }
  return from;
}

}  // namespace horner::diag
