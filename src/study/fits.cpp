#include "study/fits.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "study/statistics.h"

namespace horner::study {

using Vector = std::vector<double>;
using Matrix = std::vector<Vector>;

static double squares(const Vector& r) {
  double sum = 0;
  for (const double x : r) sum += x * x;
  return sum;
}

// The inverse of a small symmetric positive matrix, or nothing if it is singular.
static std::optional<Matrix> inverse(Matrix a) {
  const size_t n = a.size();
  Matrix out(n, Vector(n, 0));
  for (size_t i = 0; i < n; ++i) out[i][i] = 1;
  for (size_t i = 0; i < n; ++i) {
    size_t pivot = i;
    for (size_t k = i + 1; k < n; ++k)
      if (std::abs(a[k][i]) > std::abs(a[pivot][i])) pivot = k;
    if (!(std::abs(a[pivot][i]) > 1e-280)) return std::nullopt;
    std::swap(a[i], a[pivot]), std::swap(out[i], out[pivot]);
    const double by = a[i][i];
    for (size_t c = 0; c < n; ++c) a[i][c] /= by, out[i][c] /= by;
    for (size_t k = 0; k < n; ++k) {
      const double times = a[k][i];
      if (k == i || times == 0) continue;
      for (size_t c = 0; c < n; ++c) a[k][c] -= times * a[i][c], out[k][c] -= times * out[i][c];
    }
  }
  return out;
}

// J^T J and J^T r, with derivatives by central differences.
struct Normal {
  Matrix square;
  Vector gradient;
};
static Normal normal_equations(const Residuals& f, const Vector& p, const Vector& r) {
  Matrix columns;
  for (size_t i = 0; i < p.size(); ++i) {
    const double step = 1e-5 * std::max(1.0, std::abs(p[i]));
    Vector up = p, down = p;
    up[i] += step, down[i] -= step;
    Vector a = f(up);
    const Vector b = f(down);
    for (size_t k = 0; k < a.size(); ++k) a[k] = (a[k] - b[k]) / (2 * step);
    columns.push_back(a);
  }
  Normal out{Matrix(p.size(), Vector(p.size(), 0)), Vector(p.size(), 0)};
  for (size_t i = 0; i < p.size(); ++i) {
    for (size_t k = 0; k < r.size(); ++k) out.gradient[i] += columns[i][k] * r[k];
    for (size_t j = 0; j < p.size(); ++j)
      for (size_t k = 0; k < r.size(); ++k) out.square[i][j] += columns[i][k] * columns[j][k];
  }
  return out;
}

static Fit with_intervals(const Residuals& f, const Vector& p) {
  const Vector r = f(p);
  Fit out{{}, std::sqrt(squares(r) / double(r.size())), r.size()};
  const auto spread = inverse(normal_equations(f, p, r).square);
  for (size_t i = 0; i < p.size(); ++i) {
    double half = INFINITY;
    if (r.size() > p.size() && spread) {
      const auto df = double(r.size() - p.size());
      half = t_quantile(0.975, df) * std::sqrt((*spread)[i][i] * squares(r) / df);
    }
    out.at.push_back({p[i], p[i] - half, p[i] + half});
  }
  return out;
}

std::optional<Fit> least_squares(const Residuals& f, Vector p) {
  Vector r = f(p);
  double damping = 1e-3;
  for (int step = 0; step < 500; ++step) {
    const Normal n = normal_equations(f, p, r);
    bool better = false, settled = false;
    while (!better && damping < 1e12) {
      Matrix damped = n.square;
      for (size_t i = 0; i < p.size(); ++i) damped[i][i] += damping * (n.square[i][i] + 1e-12);
      const auto solved = inverse(damped);
      Vector next = p;
      for (size_t i = 0; solved && i < p.size(); ++i)
        for (size_t j = 0; j < p.size(); ++j) next[i] -= (*solved)[i][j] * n.gradient[j];
      const Vector at = f(next);
      better = solved && squares(at) <= squares(r);  // not if it is NaN
      damping *= better ? 0.3 : 4;
      if (!better) continue;
      settled = squares(r) - squares(at) <= 1e-14 * squares(r);
      p = next, r = at;
    }
    if (!better || settled) break;
  }
  if (!std::isfinite(squares(r))) return std::nullopt;
  return with_intervals(f, p);
}

static double middle(const Vector& values) {
  double sum = 0;
  for (const double x : values) sum += std::log(x);
  return std::exp(sum / double(values.size()));
}

static Estimate exponential(const Estimate& e) {
  return {std::exp(e.value), std::exp(e.low), std::exp(e.high)};
}

double Scaling::at(double weights) const {
  return floor.value + height * std::pow(weights / middle, -exponent.value);
}

// Parameters: log height, exponent, floor.
std::optional<Scaling> fit_scaling(const std::vector<Sized>& points) {
  std::set<double> sizes;
  Vector weights;
  double least = INFINITY;
  for (const Sized& p : points)
    sizes.insert(p.weights), weights.push_back(p.weights), least = std::min(least, p.loss);
  if (sizes.size() < 3) return std::nullopt;
  const double centre = middle(weights);
  const bool has_floor = sizes.size() >= 4;
  const Residuals residuals = [&](const Vector& p) {
    Vector out;
    for (const Sized& each : points) {
      const double y =
          std::exp(p[0]) * std::pow(each.weights / centre, -p[1]) + (has_floor ? p[2] : 0);
      out.push_back(y / each.loss - 1);
    }
    return out;
  };
  std::optional<Fit> best;
  for (const double share : {0.0, 0.3, 0.6, 0.9, 0.99}) {
    Vector start = {std::log(least * (1.05 - share)), 0.1};
    if (has_floor) start.push_back(least * share);
    const auto fit = least_squares(residuals, start);
    if (fit && (!best || fit->error < best->error)) best = fit;
    if (!has_floor) break;
  }
  if (!best) return std::nullopt;
  return Scaling{has_floor ? best->at[2] : Estimate{0, 0, 0},
                 best->at[1],
                 std::exp(best->at[0].value),
                 centre,
                 best->error,
                 points.size(),
                 sizes.size(),
                 has_floor};
}

double Capacity::at(double numbers) const {
  return pairs.value * std::pow(numbers / state, exponent.value);
}

// Parameters: log C at the middle state, log steepness, exponent.
std::optional<Capacity> fit_capacity(const std::vector<Recalled>& points, double guessing) {
  std::set<double> states, pairs;
  Vector all, numbers;
  for (const Recalled& p : points) {
    states.insert(p.state), pairs.insert(p.pairs);
    all.push_back(p.pairs), numbers.push_back(p.state);
  }
  if (points.size() < 4 || (states.size() < 2 && pairs.size() < 2)) return std::nullopt;
  const double centre = middle(numbers);
  const bool has_exponent = states.size() > 1;
  const Residuals residuals = [&](const Vector& p) {
    Vector out;
    for (const Recalled& each : points) {
      const double log_C = p[0] + (has_exponent ? p[2] * std::log(each.state / centre) : 0);
      const double x = std::exp(p[1]) * (std::log(each.pairs) - log_C);
      out.push_back(guessing + (1 - guessing) / (1 + std::exp(x)) - each.accuracy);
    }
    return out;
  };
  std::optional<Fit> best;
  for (const double times : {0.1, 1.0, 10.0}) {
    Vector start = {std::log(times * middle(all)), std::log(2.0)};
    if (has_exponent) start.push_back(1);
    const auto fit = least_squares(residuals, start);
    if (fit && (!best || fit->error < best->error)) best = fit;
  }
  if (!best) return std::nullopt;
  return Capacity{has_exponent ? best->at[2] : Estimate{1, 1, 1},
                  exponential(best->at[0]),
                  centre,
                  std::exp(best->at[1].value),
                  best->error,
                  points.size(),
                  has_exponent};
}

}  // namespace horner::study
