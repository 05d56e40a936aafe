#include "diag/jacobian.h"

#include <algorithm>
#include <cmath>

#include "attn/math.h"
#include "attn/plan.h"
#include "core/check.h"

namespace horner::attn {
template <>
struct Maths<double> {
  static double exp(double x) { return std::exp(x); }
};
}  // namespace horner::attn

namespace horner::diag {

static constexpr Pointwise kNormalisers[] = {
    {"softmax", "softmax"},
    {"softmax1", "softmax1"},
    {"ssmax", "ssmax"},
    {"taylor2", "taylor2"},
    {"taylor4", "taylor4"},
    {"taylor10", "taylor10"},
    {"power2", "power2"},
    {"sigmoid / sum", "softmax:weight=sigmoid"},
    {"sigmoid / count", "softmax:weight=sigmoid,denominator=count"},
};
std::span<const Pointwise> pointwise_normalisers() {
  return kNormalisers;
}

std::string why_no_jacobian(const attn::Spec& s) {
  if (!attn::facts(s.weight).of_one_score || s.centred || attn::is<attn::Adaptive>(s.sharpness))
    return "its weights depend on the whole row";
  if (attn::may_be_negative(s)) return "its weights may be negative";
  if (!attn::is<attn::Sum>(s.denominator) && !attn::is<attn::Count>(s.denominator))
    return "it divides by neither its sum nor a count";
  return "";
}

namespace {

// J = (I - coupled a 1^T) diag(d), d = F' / Z; Z is a constant if `coupled` is 0.
struct Row {
  std::vector<double> a, d;
  double coupled = 1, a_square = 0, a_sum = 0, steepest = 0;  // |a|^2, sum a, max|d|
  double least_Z = 0;                                         // n min F / Z
};

Row row_of(const attn::Spec& spec, std::span<const double> scores, double factor) {
  const size_t n = scores.size();
  Row r{std::vector<double>(n), std::vector<double>(n)};
  const double clamp = spec.clamp;
  double shift = 0;  // e^-shift is a factor of F and of Z
  if (attn::is<attn::Exp>(spec.weight))
    shift =
        std::min(clamp, factor * *(factor > 0 ? std::max_element(scores.begin(), scores.end())
                                              : std::min_element(scores.begin(), scores.end())));
  double W = 0, least = INFINITY;
  std::visit(
      [&](const auto& F) {
        for (size_t i = 0; i < n; ++i) {
          const double x = factor * scores[i];
          const auto y = weight(F, std::min(x, clamp) - shift);
          r.a[i] = y.w, r.d[i] = x > clamp ? 0 : y.dw * factor;
          W += y.w, least = std::min(least, y.w);
        }
      },
      attn::one_score<double>(spec.weight));
  double Z = double(n) * std::exp(-shift);  // a count
  r.coupled = 0;
  if (const auto* sum = std::get_if<attn::Sum>(&spec.denominator)) {
    Z = W + sum->plus * std::exp(-shift);
    const double floor = sum->least * std::exp(-shift);
    r.coupled = Z >= floor, Z = std::max(Z, floor);
    r.least_Z = double(n) * least / Z;
  } else {
    r.least_Z = 1;
  }
  for (size_t i = 0; i < n; ++i) {
    r.a[i] /= Z, r.d[i] /= Z;
    r.a_square += r.a[i] * r.a[i], r.a_sum += r.a[i];
    r.steepest = std::max(r.steepest, std::abs(r.d[i]));
  }
  return r;
}

// |I - coupled a 1^T|: its two singular values that are not 1 have the product |1 - c sum a| and
// the sum of squares 2 - 2 c sum a + c^2 n |a|^2.
double spread(const Row& r) {
  const double c = r.coupled, det = 1 - c * r.a_sum;
  const double sum = 2 - 2 * c * r.a_sum + c * c * double(r.a.size()) * r.a_square;
  return std::sqrt((sum + std::sqrt(std::max(0., sum * sum - 4 * det * det))) / 2);
}

// Whether J^T J = D^2 + U C U^T has an eigenvalue above t, with U = [d, d a] and
// C = [[|a|^2, -1], [-1, 0]]. By the inertia of [[D^2 - t, U], [U^T, -C^-1]], whose two Schur
// complements are J^T J - t and M, it has #(d^2 > t) + #(positive eigenvalues of M) - 1.
bool exceeds(const Row& r, double t) {
  const double *a = r.a.data(), *d = r.d.data();
  const size_t n = r.a.size();
  double p = 0, q = 0, s = 0, above = 0;
#pragma omp simd reduction(+ : p, q, s, above)
  for (size_t i = 0; i < n; ++i) {
    const double square = d[i] * d[i], gap = square - t;
    const double ratio = square / (gap == 0 ? 1e-300 : gap), weighted = ratio * a[i];
    p += ratio, q += weighted, s += weighted * a[i];
    above += square > t ? 1. : 0.;
  }
  const double m00 = -p, m01 = 1 - q, m11 = r.a_square - s, det = m00 * m11 - m01 * m01;
  const double positive = det < 0 ? 1 : m00 + m11 > 0 ? 2 : 0;
  return above + positive > 1;
}

// The largest singular value of J, by bisection between its longest column and its Frobenius norm.
double norm(Row& r) {
  if (r.coupled == 0 || r.steepest == 0) return r.steepest;
  const double unit = r.steepest;
  double low = 0, high = 0;
  for (size_t i = 0; i < r.a.size(); ++i) {
    r.d[i] /= unit;
    const double column = r.d[i] * r.d[i] * std::max(0., 1 - 2 * r.a[i] + r.a_square);
    low = std::max(low, column), high += column;
  }
  while (high - low > 1e-9 * high) {
    const double t = (low + high) / 2;
    (exceeds(r, t) ? low : high) = t;
  }
  return unit * std::sqrt((low + high) / 2);
}

}  // namespace

Jacobian jacobian(const attn::Spec& spec, std::span<const double> scores, double factor) {
  const std::string why = why_no_jacobian(spec);
  check(why.empty() && !scores.empty(), "no Jacobian of ", scores.size(), " scores: ", why);
  Row r = row_of(spec, scores, factor);
  const double wide = spread(r), two = 1 + r.coupled * std::sqrt(double(r.a.size()) * r.a_square);
  const double steepest = r.steepest;
  return {norm(r), steepest * wide, steepest / r.least_Z * wide, steepest / r.least_Z * two};
}

}  // namespace horner::diag
