// What a row selects among points, compared with the definitions in double.
#include <gtest/gtest.h>

#include "diag_case.h"

namespace horner::diag {
namespace {

// Rows of softmax weights over windows of 24 of 40 tokens.
struct Sample {
  Points points;
  at::Tensor weights;
  std::vector<Seen> seen;
};
Sample sample(uint64_t seed, double sharp, bool unit) {
  const int64_t S = 40;
  at::Tensor x = random({S, 6}, seed) + 0.5;
  x[7] = x[3];  // two equal tokens
  Sample s{make_points(x, unit), at::zeros({S, S}), {}};
  const at::Tensor scores = random({S, S}, seed + 1) * sharp;
  for (int64_t t = 0; t < S; ++t) {
    const int64_t begin = std::max<int64_t>(0, t - 23), n = t + 1 - begin;
    s.weights[t].narrow(0, begin, n).copy_(scores[t].narrow(0, begin, n).softmax(0));
    s.seen.push_back({begin, n});
  }
  measure_seen(s.points, s.seen);
  return s;
}

TEST(Geometry, DistancesAreTheDefinition) {
  for (double sharp : {0.1, 1., 4., 20.}) {
    const Sample s = sample(uint64_t(sharp * 10), sharp, false);
    const Asked asked{.tops = {1, 2, 5, 10, 20}, .separations = false};
    const Measured m = measure(s.points, s.weights, s.seen, asked);
    for (size_t t = 0; t < s.seen.size(); ++t) {
      const Case c = make_case(s.points, s.weights[int64_t(t)], s.seen[t]);
      for (size_t k = 0; k < asked.tops.size(); ++k) {
        const size_t N = size_t(asked.tops[k]), n = c.n();
        const Distance& d = m.distances[t * asked.tops.size() + k];
        if (N >= n) {
          EXPECT_TRUE(std::isnan(d.distance));
          continue;
        }
        const auto I = c.top(N);
        EXPECT_NEAR(d.distance, c.distance(I), 2e-5 * (1 + c.distance(I))) << t << " " << N;
        double abar = 0, longest = 0, d1 = 0;
        for (size_t j : I) {
          abar += c.a[j], longest = std::max(longest, length(c.x[j]));
          for (size_t i = 0; i < n; ++i) {
            if (std::find(I.begin(), I.end(), i) != I.end()) continue;
            double e = 0;
            for (size_t q = 0; q < 6; ++q) e += std::pow(c.x[i][q] - c.x[j][q], 2);
            d1 = std::max(d1, std::sqrt(e));
          }
        }
        const double bound = (1 - abar) * d1 + longest * (abar * double(n - N) - (1 - abar));
        EXPECT_NEAR(d.bound, bound, 1e-4 * bound);
        EXPECT_LE(d.distance, d.bound * (1 + 1e-5));
      }
    }
  }
}

TEST(Geometry, EqualPointsMeetTheBoundOfTheorem1) {
  Sample s = sample(3, 1, false);
  s.points = make_points(at::ones({40, 6}), false);
  measure_seen(s.points, s.seen);
  const Measured m = measure(s.points, s.weights, s.seen, {.tops = {1, 5}, .separations = false});
  for (const Distance& d : m.distances)
    if (!std::isnan(d.distance)) {
      EXPECT_NEAR(d.distance, d.bound, 1e-5 * d.bound);
    }
}

// Over all sets of N tokens the mean distance is between the main term and main term plus gap.
TEST(Geometry, ExpectationAIsBracketed) {
  const Sample s = sample(11, 1.5, false);
  for (size_t t : {4u, 6u, 9u}) {
    const Case c = make_case(s.points, s.weights[int64_t(t)], s.seen[t]);
    const size_t n = c.n();
    for (size_t N = 1; N < n; ++N) {
      double sum = 0, sets = 0;
      for (unsigned bits = 0; bits < 1u << n; ++bits) {
        if (size_t(__builtin_popcount(bits)) != N) continue;
        std::vector<size_t> I;
        for (size_t i = 0; i < n; ++i)
          if (bits >> i & 1) I.push_back(i);
        sum += c.distance(I), ++sets;
      }
      const at::Tensor w = s.weights.narrow(0, int64_t(t), 1);
      const Measured m = measure(s.points, w, std::span(s.seen).subspan(t, 1),
                                 {.tops = {int64_t(N)}, .separations = false});
      const Distance& d = m.distances[0];
      double main = 0;
      std::vector<size_t> every(n);
      std::iota(every.begin(), every.end(), 0);
      const std::vector<double> all = c.sum(every);
      for (size_t i = 0; i < n; ++i) {
        std::vector<double> s_i = all;
        for (size_t q = 0; q < s_i.size(); ++q)
          s_i[q] = (all[q] - c.a[i] * c.x[i][q]) * double(N) / double(n - 1);
        main += c.off(i, s_i) * double(n - N) / double(n);
      }
      EXPECT_NEAR(d.expected, main, 1e-5 * main);
      EXPECT_GE(sum / sets, d.expected * (1 - 1e-5));
      EXPECT_LE(sum / sets, d.expected + d.gap + 1e-5 * main) << n << " " << N;
    }
  }
}

// Over all permutations of the tokens: the root mean square of each rank's distance.
TEST(Geometry, ExpectationBIsThatOfPermutedTokens) {
  const Sample s = sample(12, 1.5, false);
  const size_t t = 5;
  const Case c = make_case(s.points, s.weights[t], s.seen[t]);
  for (size_t N = 1; N < c.n(); ++N) {
    const auto ranks = c.top(c.n());
    std::vector<double> squares(c.n());
    std::vector<size_t> order(c.n());
    std::iota(order.begin(), order.end(), 0);
    double orders = 0;
    do {
      Case p;
      for (size_t i = 0; i < c.n(); ++i) p.a.push_back(c.a[ranks[i]]), p.x.push_back(c.x[order[i]]);
      std::vector<size_t> I(N);
      std::iota(I.begin(), I.end(), 0);
      const auto s_N = p.sum(I);
      for (size_t i = N; i < c.n(); ++i) squares[i] += std::pow(p.off(i, s_N), 2);
      ++orders;
    } while (std::next_permutation(order.begin(), order.end()));
    double sum = 0;
    for (double q : squares) sum += std::sqrt(q / orders);
    const Measured m =
        measure(s.points, s.weights.narrow(0, int64_t(t), 1), std::span(s.seen).subspan(t, 1),
                {.tops = {int64_t(N)}, .separations = false});
    EXPECT_NEAR(m.distances[0].permuted, sum, 1e-5 * sum);
  }
}

TEST(Geometry, SeparabilityIsTheDefinitionAndInsideItsBounds) {
  for (double sharp : {0.1, 1., 4., 20.}) {
    const Sample s = sample(uint64_t(sharp * 10) + 50, sharp, true);
    const std::vector<int64_t> tops = {1, 2, 3, 5, 10, 20};
    const Measured m = measure(s.points, s.weights, s.seen, {.tops = tops, .distances = false});
    for (size_t t = 0; t < s.seen.size(); ++t) {
      const Case c = make_case(s.points, s.weights[int64_t(t)], s.seen[t]);
      for (size_t k = 0; k < tops.size(); ++k) {
        const size_t N = size_t(tops[k]);
        if (N >= c.n()) continue;
        const Separation& got = m.separations[t * tops.size() + k];
        const auto I = c.top(N);
        const auto s_N = c.sum(I);
        double r = INFINITY, least = INFINITY, inside = 0, abar = 0, squares = 0;
        // |a x - s|^2 - |s|^2: with weights of 1e-17 the squares themselves are equal in double
        const auto nearness = [&](size_t i) {
          const double g = std::inner_product(c.x[i].begin(), c.x[i].end(), c.x[i].begin(), 0.),
                       p = std::inner_product(c.x[i].begin(), c.x[i].end(), s_N.begin(), 0.);
          return c.a[i] * (c.a[i] * g - 2 * p);
        };
        for (size_t i = 0; i < c.n(); ++i)
          if (std::find(I.begin(), I.end(), i) == I.end())
            r = std::min(r, c.off(i, s_N)), least = std::min(least, nearness(i));
        for (size_t i : I)
          inside += nearness(i) < least, abar += c.a[i], squares += c.a[i] * c.a[i];
        EXPECT_NEAR(got.share, inside / double(N), 1e-9) << sharp << " " << t << " " << N;
        double lengths = 0, upper = 0, mean = 0;
        for (size_t i : I) {
          const double rest = abar - c.a[i], q = squares - c.a[i] * c.a[i];
          const double cut = s.points.least * s.points.least / 2 * std::max(0., rest * rest - q);
          const double xi = std::sqrt(std::max(0., rest * rest - cut));
          EXPECT_LE(c.off(i, s_N), xi * (1 + 1e-5) + 1e-7);  // the reason for the lower bounds
          lengths += xi;
          upper += std::exp(-std::pow(std::max(0., xi - r), 2) / 2) / double(N);
          const double over = std::max(0., std::sqrt(q / (1 + 2. / 6)) - r);
          mean += (over == 0 ? 1 : std::exp(-2 * over * over / (rest * rest))) / double(N);
        }
        EXPECT_NEAR(got.lower_markov, std::max(0., 1 - lengths / (r * double(N))), 1e-4);
        EXPECT_NEAR(got.upper_hoeffding, upper, 1e-4);
        EXPECT_NEAR(got.upper_mean, mean, 1e-3);
        EXPECT_LE(got.lower_markov, got.lower + 1e-9);
        EXPECT_LE(got.lower, got.share);
        EXPECT_GE(got.upper, got.share);
      }
    }
  }
}

}  // namespace
}  // namespace horner::diag
