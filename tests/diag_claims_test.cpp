// Lemma 2, several heads together, N in proportion to the length and the units of temperature,
// compared with the definitions in double.
#include <gtest/gtest.h>

#include <random>

#include "attn/catalog.h"
#include "attn/stages.h"
#include "diag/claims.h"
#include "diag/softmax_rows.h"
#include "diag_case.h"
#include "nn/slots.h"

namespace horner::diag {
namespace {

std::vector<double> to_vector(const at::Tensor& x) {
  const at::Tensor y = x.to(at::kDouble).contiguous();
  return {y.data_ptr<double>(), y.data_ptr<double>() + y.numel()};
}

// The weights of one row of scores [n] under a normaliser, by the reference.
at::Tensor weights(const attn::Spec& spec, const at::Tensor& x) {
  at::Tensor shift;
  const at::Tensor n = at::full({1, 1}, double(x.numel()), at::kDouble);
  const at::Tensor hidden = at::zeros({1, x.numel()}, at::kBool);
  const at::Tensor w = attn::weights(spec, x.unsqueeze(0), {hidden, n}, shift);
  const auto* sum = std::get_if<attn::Sum>(&spec.denominator);
  const at::Tensor Z =
      sum ? w.sum() + double(sum->plus) * (-shift.sum()).exp() : n.sum() * (-shift.sum()).exp();
  return (w / Z)[0];
}

at::Tensor jacobian_of(const attn::Spec& spec, const at::Tensor& x, double factor) {
  constexpr double kStep = 1e-5;
  std::vector<at::Tensor> columns;
  for (int64_t j = 0; j < x.numel(); ++j) {
    at::Tensor step = at::zeros_like(x);
    step[j] = kStep;
    columns.push_back((weights(spec, factor * (x + step)) - weights(spec, factor * (x - step))) /
                      (2 * kStep));
  }
  return at::stack(columns, 1);
}

TEST(Jacobian, IsTheDerivativeOfTheReferenceAndInsideItsBounds) {
  int rows = 0;
  for (const auto& [name, variant] : pointwise_normalisers()) {
    const attn::Spec spec = attn::find(variant).spec;
    ASSERT_EQ(why_no_jacobian(spec), "") << name;
    for (double sharp : {0.05, 1., 4.})
      for (int64_t n : {2, 3, 17, 40})
        for (double factor : {1., 0.5}) {
          at::Tensor x = random({n}, uint64_t(rows++)).to(at::kDouble) * sharp;
          if (n == 17) x[3] = x[5];  // equal scores
          const at::Tensor J = jacobian_of(spec, x, factor);
          const double want = at::linalg_svdvals(J).max().item<double>();
          const Jacobian got = jacobian(spec, to_vector(x), factor);
          EXPECT_NEAR(got.norm, want, 1e-5 * want + 1e-9) << name << " " << sharp << " " << n;
          EXPECT_LE(got.norm, got.derived * (1 + 1e-8));
          EXPECT_LE(got.derived, got.with_least * (1 + 1e-8));
          EXPECT_LE(got.with_least, got.two_terms * (1 + 1e-8));
        }
  }
}

// The derived bound is at most sqrt(n) |a| / (1 - a_j) times |J|, where j has the largest slope. It
// is attained by equal scores, and within 10 % by nearly equal ones.
TEST(Jacobian, TheDerivedBoundIsAttained) {
  for (const char* name : {"softmax", "taylor2", "taylor4", "softmax:weight=sigmoid"}) {
    const attn::Spec spec = attn::find(name).spec;
    for (int64_t n : {2, 50}) {
      const Jacobian even = jacobian(spec, std::vector<double>(size_t(n), 0.3));
      EXPECT_NEAR(even.norm, even.derived, 1e-8 * even.norm) << name;
    }
    for (uint64_t seed = 0; seed < 100; ++seed) {
      const double sharp = 0.04 * double(1 + seed);
      const at::Tensor x = random({24}, seed).to(at::kDouble) * sharp, a = weights(spec, x);
      const Jacobian got = jacobian(spec, to_vector(x));
      const at::Tensor slope = jacobian_of(spec, x, 1).diagonal() / (1 - a);  // F' / sum F
      const int64_t j = slope.abs().argmax().item<int64_t>();
      const double factor = std::sqrt(24.) * a.norm().item<double>() / (1 - a[j].item<double>());
      EXPECT_LE(got.derived, got.norm * factor * (1 + 1e-6)) << name << " " << seed;
      if (sharp > 0.05) continue;
      EXPECT_GE(got.norm, 0.9 * got.derived) << name;
    }
  }
  // the largest possible Jacobian of softmax: 1/2, twice what Corollary 3 prints
  EXPECT_NEAR(jacobian({}, std::vector<double>{1, 1}).norm, 0.5, 1e-9);
  EXPECT_NEAR(jacobian({}, std::vector<double>{1, 1}, 4).norm, 2, 1e-8);
}

TEST(Jacobian, SaysWhyItDoesNotApply) {
  for (const char* name : {"sparsemax", "topk8", "sa_softmax", "adaptive_temperature",
                           "centred_taylor2", "taylor3", "softmax:denominator=nothing"})
    EXPECT_NE(why_no_jacobian(attn::find(name).spec), "") << name;
  EXPECT_EQ(why_no_jacobian(attn::find("clamped_sum").spec), "");
}

TEST(Coverage, CountsTokensOfAnyHead) {
  Coverage c{.selected = {0, 0, 0}, .covered = {0, 0, 0}};
  std::vector<int32_t> count(10);
  std::vector<uint8_t> hit(10);
  // 7: two heads, one separates it; 2: all heads, none does; 0, 4: one head each; 5: two heads
  const std::vector<int32_t> a = {7, ~2, 4}, b = {~2, ~7, ~5}, d = {~0, ~5, ~2};
  const std::vector<std::span<const int32_t>> heads = {a, b, d};
  add_row(c, heads, 2, count, hit);
  EXPECT_EQ(c.selected, (std::vector<double>{4, 4, 2}));
  EXPECT_EQ(c.covered, (std::vector<double>{2, 2, 0}));
  EXPECT_NEAR(c.share(), 2. / 9, 1e-12);
  EXPECT_NEAR(c.measured(), 0.4, 1e-12);
  const auto one = [](double m) { return 1 - std::pow(7. / 9, m); };
  EXPECT_NEAR(c.expected(), (2 * one(1) + 2 * one(2) + one(3)) / 5, 1e-12);
  EXPECT_NEAR(c.paper(), one(3), 1e-12);
  EXPECT_EQ(count, std::vector<int32_t>(10));
  EXPECT_EQ(hit, std::vector<uint8_t>(10));
}

// Heads that select the same tokens and separate each with p = 0.8, independently: 0.992 with 3.
TEST(Coverage, OfIndependentHeadsIsThePapersFormula) {
  std::mt19937 random(1);
  std::bernoulli_distribution separates(0.8);
  Coverage c{.selected = std::vector<double>(3), .covered = std::vector<double>(3)};
  std::vector<int32_t> count(100);
  std::vector<uint8_t> hit(100);
  for (int row = 0; row < 400; ++row) {
    std::vector<std::vector<int32_t>> sets(3);
    for (auto& set : sets)
      for (int32_t i = 0; i < 100; ++i) set.push_back(separates(random) ? i : ~i);
    const std::vector<std::span<const int32_t>> heads(sets.begin(), sets.end());
    add_row(c, heads, 1, count, hit);
  }
  EXPECT_NEAR(c.measured(), 0.992, 0.002);
  EXPECT_NEAR(c.measured(), c.paper(), 0.002);
  EXPECT_NEAR(c.expected(), c.paper(), 1e-12);
}

TEST(Growth, RecoversAnExponent) {
  const std::vector<int64_t> lengths = {32, 64, 512};
  Growth g;
  g.lengths.resize(lengths.size());
  for (const nn::Query& q : growth_queries(lengths)) {
    const int64_t n = q.t + 1, N = top_of(0.25, n);
    add_row(g, lengths, q.t, n, N, 3 * std::pow(double(n), 0.7), 2 * std::pow(double(n), -0.5));
  }
  EXPECT_NEAR(g.distance.slope(), 0.7, 1e-9);
  EXPECT_NEAR(g.expected.slope(), -0.5, 1e-9);
  EXPECT_NEAR(g.each.slope(), -0.3, 0.02);  // N is a rounded fraction
  EXPECT_EQ(g.lengths[0].rows, 16);
  EXPECT_EQ(g.lengths[2].rows, 16);
  EXPECT_EQ(top_of(1, 40), 39);
  EXPECT_EQ(top_of(0.06, 8), 1);
}

TEST(Growth, AVerdictNeedsAnIntervalOnOneSideOfZero) {
  EXPECT_STREQ(verdict({0.5, 0.1, 0.9}, 6), "grows");
  EXPECT_STREQ(verdict({-0.5, -0.9, -0.1}, 6), "falls");
  EXPECT_STREQ(verdict({0.5, -0.1, 0.9}, 6), "undecided");
  EXPECT_STREQ(verdict({0.5, 0.1, 0.9}, 5), "too few heads");
  EXPECT_STREQ(verdict({NAN, NAN, NAN}, 6), "rows too short");
}

TEST(Statistics, BootstrapOfAMedian) {
  const Interval same = bootstrap_median({2, 2, 2, NAN});
  EXPECT_EQ(same.low, 2);
  EXPECT_EQ(same.high, 2);
  std::mt19937 random(3);
  std::normal_distribution<double> normal(1, 1);
  std::vector<double> sample(400);
  for (double& x : sample) x = normal(random);
  const Interval got = bootstrap_median(sample);
  EXPECT_EQ(got.middle, quantile(sample, 0.5));
  // the asymptotic width is 2 * 1.96 * sqrt(pi / 2) / sqrt(400) = 0.246
  EXPECT_NEAR(got.high - got.low, 0.246, 0.08);
  EXPECT_LT(got.low, got.middle);
  EXPECT_GT(got.high, got.middle);
  EXPECT_TRUE(std::isnan(bootstrap_median({}).middle));
}

// g = 1 / (T + 0.3) has the local exponent T / (T + 0.3), which is 1/2 at T = 0.3.
TEST(Law, BeginsWhereTheExponentPassesOneHalf) {
  std::vector<double> T, g, other;
  for (double t = 0.01; t < 20; t *= 1.2) T.push_back(t), g.push_back(1 / (t + 0.3));
  EXPECT_NEAR(law_from(T, g), 0.3, 0.005);
  for (double t : T) other.push_back(1 / t);
  EXPECT_EQ(law_from(T, other), T[0]);
  EXPECT_NEAR(local_exponents(T, other)[3], 1, 1e-12);
  EXPECT_TRUE(std::isnan(law_from(T, std::vector<double>(T.size(), 1.))));
  const double from = agree_from(T, {g, other});  // 1 + 0.3 / T <= 1.1 from T = 3
  EXPECT_GE(from, 3);
  EXPECT_LT(from, 3.6);
  EXPECT_TRUE(std::isnan(agree_from(T, {g, std::vector<double>(T.size(), 9.)})));
}

struct Block {
  nn::Model model;
  at::Tensor tokens;
};
Block block(const char* attention) {
  Block b{nn::random_model(nn::preset("tiny", attention), 1), {}};
  for (nn::Layer& l : b.model.layers) l.q = l.q * 20;  // sharp rows
  b.tokens = at::randint(0, b.model.config.V, {64}, at::make_generator<at::CPUGeneratorImpl>(2),
                         at::kLong);
  return b;
}

// T and eps of raw products are sqrt(D) times those of the scores, and g is 1 / sqrt(D) of it.
TEST(Sensitivity, ByRawProductsIsThePapersDefinition) {
  const double scale = 1 / std::sqrt(8.);
  const attn::Inputs in{.q = random({1, 4, 30, 8}, 1) * 3,
                        .k = random({1, 2, 30, 8}, 2),
                        .v = random({1, 2, 30, 8}, 3)};
  const std::vector<nn::Query> queries = {{5, 1}, {29, 1}};
  nn::for_rows({}, in, queries, [&](const nn::Rows& r) {
    const at::Tensor v = directions(r, at::make_generator<at::CPUGeneratorImpl>(5));
    const at::Tensor count = at::tensor(r.count).view({1, -1, 1}), wide = v.to(at::kDouble);
    const at::Tensor l =  // q.k
        at::matmul(in.q[0], in.k[0].repeat_interleave(2, 0).transpose(-1, -2))
            .index_select(1, at::tensor({5, 29}))
            .to(at::kDouble)
            .masked_fill(r.hidden, -INFINITY);
    for (double T : {0.1, 1., 10.})
      for (double eps : {1e-2, 1.}) {
        const at::Tensor want =
            (((l + eps * wide) / T).softmax(-1) - (l / T).softmax(-1)).norm(2, -1) / eps;
        const at::Tensor got =
            scale * sensitivity({}, true, {r.scores, r.hidden, count, v}, T * scale, eps * scale);
        EXPECT_TRUE(at::allclose(got.to(at::kDouble), want, 1e-3, 1e-6 / T)) << T << " " << eps;
      }
  });
}

// The same of a whole model: over every fourth row, so up to a sampling error.
TEST(Sensitivity, ByRawProductsOfAModel) {
  const Block b = block("softmax");
  const double scale = 0.25;  // 16 channels
  Settings s{.lengths = {64}, .tops = {1, 5}, .temperatures = {0.5, 40}, .epsilons = {0.1}};
  const Diagnosis raw = diagnose(b.model, b.tokens, s);
  s.temperatures = {0.5 * scale, 40 * scale}, s.epsilons = {0.1 * scale};
  const Diagnosis own = diagnose(b.model, b.tokens, s);
  for (size_t i : {0u, 1u}) {
    double sum = 0, want = 0;
    for (size_t h = 0; h < raw.heads.size(); ++h) {
      EXPECT_EQ(raw.heads[h].scale, scale);
      sum += raw.heads[h].raw_sensitivity.mean[i][0];
      want += own.heads[h].sensitivity.mean[i][0] * scale;
      EXPECT_LE(raw.heads[h].raw_sensitivity.most[i][0],
                own.heads[h].sensitivity.most[i][0] * scale * (1 + 1e-5));
    }
    EXPECT_NEAR(sum / want, 1, 0.25) << i;
  }
}

// Numbers of a model that is not softmax are about its own weights.
TEST(Sensitivity, OfAnotherOperatorIsOfItsOwnWeights) {
  const attn::Spec spec = attn::find("taylor4").spec;
  const attn::Inputs in{
      .q = random({1, 2, 20, 8}, 1), .k = random({1, 2, 20, 8}, 2), .v = random({1, 2, 20, 8}, 3)};
  const std::vector<nn::Query> queries = {{19, 1}};
  nn::for_rows(spec, in, queries, [&](const nn::Rows& r) {
    const at::Tensor v = directions(r, at::make_generator<at::CPUGeneratorImpl>(5));
    const at::Tensor count = at::tensor(r.count).view({1, -1, 1});
    const at::Tensor x = r.scores.to(at::kDouble);
    const auto w = [](const at::Tensor& y) {
      const at::Tensor e = 1 + y + y.pow(2) / 2 + y.pow(3) / 6 + y.pow(4) / 24;
      return e / e.sum(-1, true);
    };
    const at::Tensor want = (w((x + 0.1 * v) / 2) - w(x / 2)).norm(2, -1) / 0.1;
    const at::Tensor got = sensitivity(spec, false, {r.scores, r.hidden, count, v}, 2, 0.1);
    EXPECT_TRUE(at::allclose(got, want, 1e-6)) << got << want;
  });
  const std::vector<HeadSeries> errors = series(spec, in, queries);
  EXPECT_LT(errors[0].plain[4], 1e-12);  // order 4 is the model itself
  EXPECT_GT(errors[0].plain[2], 1e-4);
  const Block b = block("taylor4");
  const Diagnosis d = diagnose(b.model, b.tokens, {.lengths = {32, 64}, .tops = {1, 5}});
  EXPECT_EQ(d.attention, "taylor4");
  EXPECT_FALSE(d.softmax);
  EXPECT_EQ(d.jacobians[0].name, "taylor4");
  for (const auto& [name, c] : d.crossed) EXPECT_EQ(name.find("Corollary"), name.npos) << name;
  for (const Head& h : d.heads) EXPECT_LT(h.series.plain[4], 1e-9);
}

// Coverage and growth of a whole model, compared with its rows one by one.
TEST(Diagnose, CoverageAndGrowthAreTheDefinitions) {
  const Block b = block("softmax");
  const Settings s{.lengths = {32, 64}, .tops = {1, 5}, .unit = true};
  const Diagnosis d = diagnose(b.model, b.tokens, s);
  const int64_t H = b.model.config.H;
  const Points points = make_points(token_points(b.model, b.tokens), true);
  const nn::Probe probe{[&](const nn::Operated& o) {
    const int64_t layer = o.layer;
    const attn::Spec& spec = o.part.attention;
    const attn::Inputs& in = o.in;
    attn::Inputs whole = in;
    whole.v = at::eye(64).expand({1, in.k.size(1), 64, 64}).contiguous();
    const at::Tensor w = attn::attend(spec, whole, "reference")[0];
    std::vector<double> selected(size_t(H), 0), covered(size_t(H), 0);
    for (int64_t t = 5; t < 64; ++t) {
      std::vector<int> chosen(64), hit(64);
      for (int64_t h = 0; h < H; ++h) {
        const Case c = make_case(points, w[h][t], {0, t + 1});
        const std::vector<size_t> I = c.top(5);
        const std::vector<double> sum = c.sum(I);
        double radius = INFINITY;
        for (size_t i = 0; i < c.n(); ++i)
          if (std::find(I.begin(), I.end(), i) == I.end()) radius = std::min(radius, c.off(i, sum));
        for (size_t i : I) ++chosen[i], hit[i] |= c.off(i, sum) < radius;
      }
      for (size_t i = 0; i < 64; ++i)
        if (chosen[i]) ++selected[size_t(chosen[i] - 1)], covered[size_t(chosen[i] - 1)] += hit[i];
    }
    for (const Coverage& c : d.coverage)
      if (c.layer == layer && c.N == 5) {
        EXPECT_EQ(c.selected, selected);
        for (size_t m = 0; m < covered.size(); ++m) EXPECT_NEAR(c.covered[m], covered[m], 2);
      }
    for (const Head& head : d.heads) {
      if (head.layer != layer) continue;
      Line line;
      for (const nn::Query& q : growth_queries(s.lengths)) {
        const Case c = make_case(points, w[head.head][q.t], {0, q.t + 1});
        const auto N = size_t(std::llround(0.25 * double(q.t + 1)));
        line.add(std::log(double(q.t + 1)), std::log(c.distance(c.top(N))));
      }
      EXPECT_NEAR(head.growth[1].distance.slope(), line.slope(), 1e-3);
      EXPECT_NEAR(head.scale, 1 / std::sqrt(double(in.q.size(-1))), 1e-6);
    }
  }};
  nn::hidden(b.model, b.tokens.unsqueeze(0), {.probe = &probe});
  EXPECT_EQ(d.jacobians.size(), pointwise_normalisers().size());
  for (const JacobianRows& j : d.jacobians) EXPECT_EQ(j.rows.size(), d.heads.size() * 32) << j.name;
}

}  // namespace
}  // namespace horner::diag
