#include "diag/geometry.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/check.h"

namespace horner::diag {

static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

Points make_points(const at::Tensor& given, bool unit) {
  at::Tensor x = given.detach().to(at::kCPU, at::kFloat);
  check(x.dim() == 2 && x.size(0) > 0, "points must be [S, d], not ", given.sizes());
  if (unit) x = x / x.norm(2, -1, true).clamp_min(1e-30);
  Points p{.x = x.contiguous()};
  const int64_t S = x.size(0);
  // In blocks: a long text in double would dominate memory.
  const at::Tensor mean = p.x.sum(0, false, at::kDouble) / double(S);
  for (int64_t from = 0; from < S; from += kMostApart) {
    const at::Tensor part = p.x.narrow(0, from, std::min(kMostApart, S - from)).to(at::kDouble);
    const at::Tensor square = part.square().sum(-1);
    p.square.insert(p.square.end(), square.data_ptr<double>(),
                    square.data_ptr<double>() + square.numel());
    p.across = std::max(p.across, 2 * (part - mean).norm(2, -1).max().item<double>());
  }
  if (S <= kMostApart && S > 1) {
    const at::Tensor wide = p.x.to(at::kDouble), square = at::tensor(p.square, at::kDouble);
    const at::Tensor g = at::matmul(wide, wide.t());
    at::Tensor d = (square.unsqueeze(0) + square.unsqueeze(1) - 2 * g).clamp_min(0);
    p.apart = d.to(at::kFloat).contiguous();
    d.fill_diagonal_(INFINITY);
    // The distance of equal tokens is rounding.
    const double least = d.min().item<double>(), scale = square.max().item<double>();
    p.least = least < 1e-12 * scale ? 0 : std::sqrt(least) * (1 - 1e-6);
  }
  return p;
}

void measure_seen(const Points& p, std::span<Seen> rows) {
  const int64_t d = p.x.size(1);
  const float* x = p.x.data_ptr<float>();
  std::vector<double> sum(static_cast<size_t>(d));
  double squares = 0;
  int64_t begin = 0, end = 0;
  const auto add = [&](int64_t i, double sign) {
    for (int64_t c = 0; c < d; ++c) sum[size_t(c)] += sign * x[i * d + c];
    squares += sign * p.square[size_t(i)];
  };
  for (Seen& r : rows) {
    while (end < r.begin + r.count) add(end++, 1);
    while (begin < r.begin) add(begin++, -1);
    const double n = double(r.count);
    const double all = std::inner_product(sum.begin(), sum.end(), sum.begin(), 0.);
    r.square = squares / n;
    r.product = r.count > 1 ? (all - squares) / (n * (n - 1)) : 0;
  }
}

namespace {

// One row: a and rank start at its first visible token. rank[i] is the rank of weight i, or at
// least the last of `tops`.
struct Row {
  const Points& points;
  const float* a;
  const int32_t* rank;
  const int32_t* order;  // the tokens of the largest weights, largest first
  Seen seen;

  const float* x(int64_t i) const {
    return points.x.data_ptr<float>() + (seen.begin + i) * points.x.size(1);
  }
  double square(int64_t i) const { return points.square[size_t(seen.begin + i)]; }
};

// For one N: abar and the sum of squares of I's weights, s and its products with the points.
struct Top {
  int64_t N;
  double abar, squares;
  const float* s;  // [d]
  const float* p;  // [n], x_i.s
  double s_square;
};

// |a_i x_i - s|^2 - |s|^2 = a_i (a_i |x_i|^2 - 2 x_i.s): decides which of two tokens is nearer to s
// without cancellation, however small its weight.
double nearness(const Row& r, const Top& t, int64_t i) {
  const double a = r.a[i];
  return a * (a * r.square(i) - 2 * double(t.p[i]));
}

// s in double, and the same quantities computed from it.
std::vector<double> exact_sum(const Row& r, const Top& t) {
  std::vector<double> s(size_t(r.points.x.size(1)));
  for (int64_t j = 0; j < t.N; ++j)
    for (size_t c = 0; c < s.size(); ++c)
      s[c] += double(r.a[r.order[j]]) * double(r.x(r.order[j])[c]);
  return s;
}
double exact_nearness(const Row& r, const std::vector<double>& s, int64_t i) {
  const double a = r.a[i];
  double product = 0;
  for (size_t c = 0; c < s.size(); ++c) product += double(r.x(i)[c]) * s[c];
  return a * (a * r.square(i) - 2 * product);
}
double exact_distance(const Row& r, const std::vector<double>& s, int64_t i) {
  double sum = 0;
  for (size_t c = 0; c < s.size(); ++c) {
    const double e = double(r.a[i]) * double(r.x(i)[c]) - s[c];
    sum += e * e;
  }
  return std::sqrt(sum);
}

struct Outside {
  double sum, least;  // sum of |a_i x_i - s| over i not in I; least nearness
};
Outside outside(const Row& r, const Top& t) {
  const int64_t n = r.seen.count;
  const double* square = r.points.square.data() + r.seen.begin;
  const float *a = r.a, *p = t.p;
  const int32_t *rank = r.rank, N = int32_t(t.N);
  const double s = t.s_square;
  double sum = 0, least = INFINITY;
#pragma omp simd reduction(+ : sum) reduction(min : least)
  for (int64_t i = 0; i < n; ++i) {
    const double ai = a[i], e = ai * (ai * square[i] - 2 * double(p[i]));
    sum += rank[i] >= N ? std::sqrt(e + s > 0 ? e + s : 0) : 0.;
    least = std::min(least, rank[i] >= N ? e : INFINITY);
  }
  return {sum, least};
}

// Reading A: the main term, and the bound of its error from the variance.
struct Expected {
  double main, gap;
};
Expected expected(const Row& r, const Top& t, const Top& all, bool with_gap) {
  const int64_t n = r.seen.count;
  const double* square = r.points.square.data() + r.seen.begin;
  const float *a = r.a, *p = all.p;
  const double c = double(t.N) / double(n - 1), s = all.s_square;
  double main = 0, squares = 0, gap = 0;
#pragma omp simd reduction(+ : main, squares)
  for (int64_t i = 0; i < n; ++i) {
    const double ai = a[i], own = ai * ai * square[i];
    const double e = (1 + c) * ((1 + c) * own - 2 * c * ai * double(p[i])) + c * c * s;
    main += std::sqrt(e > 0 ? e : 0);
    squares += own;
  }
  const double share = double(n - t.N) / double(n);
  if (!with_gap || n < 3) return {share * main, with_gap ? 0 : kNone};
  const double spread = double(t.N) * double(n - 1 - t.N) / (double(n - 1) * double(n - 2));
#pragma omp simd reduction(+ : gap)
  for (int64_t i = 0; i < n; ++i) {
    const double ai = a[i], own = ai * ai * square[i];
    const double rest = s - 2 * ai * double(p[i]) + own;  // |sum_{j != i} a_j x_j|^2
    const double e = spread * (squares - own - rest / double(n - 1));
    gap += std::sqrt(e > 0 ? e : 0);
  }
  return {share * main, share * gap};
}

// Reading B.
double permuted(const Row& r, const Top& t) {
  const int64_t n = r.seen.count;
  const float* a = r.a;
  const int32_t *rank = r.rank, N = int32_t(t.N);
  const double m2 = r.seen.square, c = r.seen.product;
  const double base = t.squares * m2 + (t.abar * t.abar - t.squares) * c, cross = 2 * t.abar * c;
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const double ai = a[i], e = ai * (ai * m2 - cross) + base;
    sum += rank[i] >= N ? std::sqrt(e > 0 ? e : 0) : 0.;
  }
  return sum;
}

double furthest(const Row& r, const Top& t) {  // d1
  if (!r.points.apart.defined()) return r.points.across;
  const int64_t n = r.seen.count, S = r.points.x.size(0);
  float most = 0;
  for (int64_t j = 0; j < t.N; ++j) {
    const float* d =
        r.points.apart.data_ptr<float>() + (r.seen.begin + r.order[j]) * S + r.seen.begin;
    const int32_t *rank = r.rank, N = int32_t(t.N);
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < n; ++i) most = std::max(most, rank[i] >= N ? d[i] : 0.f);
  }
  return std::sqrt(double(most)) * (1 + 1e-6);
}

Distance distance(const Row& r, const Top& t, const Top& all, bool bounded) {
  const Expected e = expected(r, t, all, bounded);
  Distance out{outside(r, t).sum, kNone, kNone, e.main, e.gap, permuted(r, t)};
  if (!bounded) return out;
  double longest = 0;
  for (int64_t j = 0; j < t.N; ++j) longest = std::max(longest, r.square(r.order[j]));
  // The weights of a row sum to 1 up to rounding: use their actual sum.
  const double left = std::max(0., all.abar - t.abar), n = double(r.seen.count);
  const double bracket = t.abar * (n - double(t.N)) - left, d1 = left * furthest(r, t);
  out.bound = d1 + std::sqrt(longest) * bracket;
  out.root_bound = d1 + std::sqrt(longest) * std::sqrt(std::max(0., bracket));
  if (out.distance > out.bound * (1 - 1e-4)) {  // near the bound: recompute without cancellation
    const std::vector<double> s = exact_sum(r, t);
    out.distance = 0;
    for (int64_t i = 0; i < r.seen.count; ++i)
      if (r.rank[i] >= t.N) out.distance += exact_distance(r, s, i);
  }
  return out;
}

// The share of I that is nearer to s than every token outside I; in double if float is too coarse.
// `tokens`, if not null, receives I.
double share(const Row& r, const Top& t, double& radius, int32_t* tokens) {
  double least = outside(r, t).least;
  const double unsure = 2e-5 * std::sqrt(t.s_square);  // times a_i, the larger of the two weights
  bool exact = false;
  for (int64_t j = 0; j < t.N && !exact; ++j) {
    const int64_t i = r.order[j];
    exact = std::abs(nearness(r, t, i) - least) < unsure * double(r.a[i]) * std::sqrt(r.square(i));
  }
  std::vector<double> s;
  if (exact) {
    s = exact_sum(r, t);
    least = INFINITY;
    for (int64_t i = 0; i < r.seen.count; ++i)
      if (r.rank[i] >= t.N) least = std::min(least, exact_nearness(r, s, i));
  }
  int64_t inside = 0;
  for (int64_t j = 0; j < t.N; ++j) {
    const int64_t i = r.order[j];
    const bool near = (exact ? exact_nearness(r, s, i) : nearness(r, t, i)) < least;
    inside += near;
    if (tokens) tokens[j] = near ? int32_t(r.seen.begin + i) : ~int32_t(r.seen.begin + i);
  }
  radius = std::sqrt(std::max(0., least + t.s_square));
  return double(inside) / double(t.N);
}

Separation separation(const Row& r, const Top& t, int32_t* tokens) {
  constexpr double kSlack = 1e-5;  // lengths are 1 up to rounding
  double radius = 0;
  Separation out{.share = share(r, t, radius, tokens)};
  const double delta = r.points.least, d = double(r.points.x.size(1)), N = double(t.N);
  double lengths = 0;
  int64_t sure = 0, possible = 0;
  for (int64_t j = 0; j < t.N; ++j) {
    const double a = r.a[r.order[j]], rest = std::max(0., t.abar - a);
    const double squares = std::max(0., t.squares - a * a);
    const double xi = std::sqrt(
        std::max(0., rest * rest - delta * delta / 2 * std::max(0., rest * rest - squares)));
    const double largest = t.N == 1 ? 0 : r.a[r.order[j == 0 ? 1 : 0]];
    lengths += xi;
    sure += xi * (1 + kSlack) < radius;
    possible += (2 * largest - rest) * (1 - kSlack) < radius || t.N == 1;
    const auto decay = [](double over, double scale) {
      return over <= 0 ? 1 : scale <= 0 ? 0 : std::exp(-over * over / scale);
    };
    out.upper_hoeffding += decay(xi - radius, 2) / N;
    out.upper_mean += decay(std::sqrt(squares / (1 + 2 / d)) - radius, rest * rest / 2) / N;
  }
  out.lower_markov = radius > 0 ? std::max(0., 1 - lengths * (1 + kSlack) / (radius * N)) : 0;
  out.lower = double(sure) / N;
  out.upper = double(possible) / N;
  return out;
}

}  // namespace

// The k largest weights of a row in descending order; ties by position.
static void select(const float* a, int64_t n, int64_t k, int32_t* order, int32_t* rank,
                   std::vector<int32_t>& work) {
  work.resize(size_t(n));
  std::iota(work.begin(), work.end(), 0);
  const auto larger = [&](int32_t i, int32_t j) { return a[i] > a[j] || (a[i] == a[j] && i < j); };
  const int64_t kept = std::min(n, k);
  if (kept < n) std::nth_element(work.begin(), work.begin() + kept, work.end(), larger);
  std::sort(work.begin(), work.begin() + kept, larger);
  std::fill(rank, rank + n, int32_t(k));
  for (int64_t j = 0; j < kept; ++j) order[j] = work[size_t(j)], rank[order[j]] = int32_t(j);
}

namespace {

// A chunk of rows: their ranks and the sums s for every N; the last sum is over all tokens.
struct Chunk {
  int64_t K, most, S;
  std::vector<int32_t> order, rank;   // [rows, most], [rows, S]
  std::vector<double> abar, squares;  // [rows, K + 1]
  at::Tensor s, p;                    // [rows, K + 1, d], [rows, K + 1, S]
  std::vector<double> s_square;       // [rows, K + 1]
};

void add(float* s, const float* x, float a, int64_t d) {
#pragma omp simd
  for (int64_t c = 0; c < d; ++c) s[c] += a * x[c];
}

Chunk prepare(const Points& points, const at::Tensor& weights, std::span<const Seen> rows,
              const std::vector<int64_t>& tops) {
  const int64_t R = weights.size(0), S = weights.size(1), d = points.x.size(1);
  Chunk c{.K = int64_t(tops.size()), .most = tops.back(), .S = S};
  const int64_t K1 = c.K + 1;
  c.order.resize(size_t(R * c.most)), c.rank.resize(size_t(R * S));
  for (auto* v : {&c.abar, &c.squares, &c.s_square}) v->assign(size_t(R * K1), 0);
  c.s = at::zeros({R, K1, d});
  c.s.select(1, c.K).copy_(at::matmul(weights, points.x.narrow(0, 0, S)));
  std::vector<int32_t> work;
  std::vector<float> s(static_cast<size_t>(d));
  for (int64_t r = 0; r < R; ++r) {
    const Seen& seen = rows[size_t(r)];
    const float* a = weights.const_data_ptr<float>() + r * S + seen.begin;
    int32_t* order = c.order.data() + r * c.most;
    select(a, seen.count, c.most, order, c.rank.data() + r * S, work);
    std::fill(s.begin(), s.end(), 0.f);
    double abar = 0, squares = 0;
    float* out = c.s.data_ptr<float>() + r * K1 * d;
    for (int64_t k = 0, j = 0; k < c.K; ++k) {
      if (tops[size_t(k)] >= seen.count) break;
      for (; j < tops[size_t(k)]; ++j) {
        const float aj = a[order[j]];
        abar += aj, squares += double(aj) * aj;
        add(s.data(), points.x.const_data_ptr<float>() + (seen.begin + order[j]) * d, aj, d);
      }
      std::copy(s.begin(), s.end(), out + k * d);
      c.abar[size_t(r * K1 + k)] = abar, c.squares[size_t(r * K1 + k)] = squares;
    }
    for (int64_t i = 0; i < seen.count; ++i) c.abar[size_t(r * K1 + c.K)] += a[i];
  }
  c.p = at::matmul(c.s, points.x.narrow(0, 0, S).t()).contiguous();
  const at::Tensor squares = c.s.to(at::kDouble).square().sum(-1);
  std::copy_n(squares.data_ptr<double>(), R * K1, c.s_square.begin());
  return c;
}

}  // namespace

Measured measure(const Points& points, const at::Tensor& weights, std::span<const Seen> rows,
                 const Asked& asked) {
  const int64_t R = weights.size(0), S = weights.size(1), K = int64_t(asked.tops.size());
  check(R == int64_t(rows.size()) && S <= points.x.size(0) && K > 0, "weights ", weights.sizes(),
        " of ", rows.size(), " rows and ", points.x.size(0), " points");
  Measured out;
  if (asked.distances)
    out.distances.assign(size_t(R * K), {kNone, kNone, kNone, kNone, kNone, kNone});
  if (asked.separations)
    out.separations.assign(size_t(R * K), {kNone, kNone, kNone, kNone, kNone, kNone});
  const int64_t chosen = std::accumulate(asked.tops.begin(), asked.tops.end(), int64_t(0));
  if (asked.tokens) out.tokens.resize(size_t(R * chosen));
  constexpr int64_t kMostNumbers = 2 << 20;
  const int64_t each = std::max<int64_t>(1, kMostNumbers / ((K + 1) * S));
  for (int64_t first = 0; first < R; first += each) {
    const int64_t size = std::min(each, R - first);
    const at::Tensor w = weights.narrow(0, first, size).contiguous();
    const Chunk c = prepare(points, w, rows.subspan(size_t(first), size_t(size)), asked.tops);
    const int64_t d = points.x.size(1);
    for (int64_t r = 0; r < size; ++r) {
      const Seen& seen = rows[size_t(first + r)];
      const Row row{points, w.const_data_ptr<float>() + r * S + seen.begin, c.rank.data() + r * S,
                    c.order.data() + r * c.most, seen};
      const auto top = [&](int64_t k, int64_t N) {
        const int64_t at = r * (K + 1) + k;
        return Top{N,
                   c.abar[size_t(at)],
                   c.squares[size_t(at)],
                   c.s.const_data_ptr<float>() + at * d,
                   c.p.const_data_ptr<float>() + at * S + seen.begin,
                   c.s_square[size_t(at)]};
      };
      const Top all = top(K, seen.count);
      int32_t* tokens = asked.tokens ? out.tokens.data() + (first + r) * chosen : nullptr;
      for (int64_t k = 0; k < K && asked.tops[size_t(k)] < seen.count; ++k) {
        const Top t = top(k, asked.tops[size_t(k)]);
        const size_t at = size_t((first + r) * K + k);
        if (asked.distances)
          out.distances[at] =
              distance(row, t, all, asked.bounded.empty() || asked.bounded[size_t(k)]);
        if (asked.separations) out.separations[at] = separation(row, t, tokens);
        if (tokens) tokens += t.N;
      }
    }
  }
  return out;
}

}  // namespace horner::diag
