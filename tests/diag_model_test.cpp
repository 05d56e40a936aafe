// The diagnosis of rows and of whole models, compared with the definitions in double.
#include <gtest/gtest.h>

#include "attn/catalog.h"
#include "core/check.h"
#include "diag/diagnose.h"
#include "diag/softmax_rows.h"
#include "diag/what_if.h"
#include "diag_case.h"
#include "nn/slots.h"

namespace horner::diag {

using namespace nn;  // Rows and queries

namespace {

// The share of all splits of n + m values into two samples with a distance of at least D.
TEST(Statistics, KolmogorovSmirnovCountsEverySplit) {
  const size_t n = 5, m = 4;
  const std::vector<double> a = {0.1, 0.5, 0.9, 1.3, 2.0}, b = {0.6, 1.5, 1.9, 2.5};
  const KolmogorovSmirnov got = kolmogorov_smirnov(a, b);
  double as_far = 0, all = 0;
  for (unsigned bits = 0; bits < 1u << (n + m); ++bits) {
    if (size_t(__builtin_popcount(bits)) != n) continue;
    double F = 0, G = 0, D = 0;
    for (size_t i = 0; i < n + m; ++i) {
      (bits >> i & 1 ? F : G) += bits >> i & 1 ? 1. / n : 1. / m;
      D = std::max(D, std::abs(F - G));
    }
    as_far += D > got.D - 1e-9, ++all;
  }
  EXPECT_NEAR(got.D, 0.55, 1e-12);  // after 1.3: four of five, one of four
  EXPECT_NEAR(got.p, as_far / all, 1e-12);
  EXPECT_EQ(kolmogorov_smirnov(a, a).p, 1);
  std::vector<double> low(144), high(144);
  for (size_t i = 0; i < 144; ++i) low[i] = double(i), high[i] = double(i) + 500;
  EXPECT_LT(kolmogorov_smirnov(low, high).p, 1e-9);
  // 1.36 is the asymptotic 5 % quantile
  for (size_t i = 0; i < 144; ++i) high[i] = double(i) + 23.5;
  EXPECT_NEAR(kolmogorov_smirnov(low, high).p, 0.039, 0.012);
}

TEST(Statistics, ALineThroughPoints) {
  Line l;
  for (double x : {1., 2., 5.}) l.add(x, 3 - 2 * x, x);
  EXPECT_NEAR(l.slope(), -2, 1e-12);
  EXPECT_NEAR(l.offset(), 3, 1e-12);
  EXPECT_NEAR(l.r2(), 1, 1e-12);
}

attn::Inputs inputs(int64_t T, double size) {
  return {.q = random({1, 4, T, 8}, 1) * size,
          .k = random({1, 2, T, 8}, 2),
          .v = random({1, 2, T, 8}, 3)};
}

TEST(Rows, AreThoseOfTheReference) {
  for (const attn::Spec& spec :
       {attn::Spec{}, attn::Spec{.mask = attn::Window{7}},
        attn::Spec{.centred = true, .weight = attn::Taylor{2}},
        attn::Spec{.weight = attn::Entmax{1.5f}, .denominator = attn::Nothing{}}}) {
    attn::Inputs in = inputs(30, 2);
    in.v = at::eye(30).expand({1, 2, 30, 30}).contiguous();
    const at::Tensor want = attn::attend(spec, in, "reference");
    const std::vector<Query> queries = {{0, 1}, {3, 1}, {17, 1}, {29, 1}};
    size_t rows = 0;
    for_rows(spec, in, queries, [&](const Rows& r) {
      for (size_t i = 0; i < r.queries.size(); ++i, ++rows) {
        const int64_t S = r.weights.size(-1), t = r.queries[i].t;
        EXPECT_TRUE(at::allclose(r.weights.select(1, int64_t(i)),
                                 want[0].select(1, t).narrow(-1, 0, S), 1e-4, 1e-6));
        EXPECT_EQ(r.begin[i] + r.count[i], t + 1);
      }
    });
    EXPECT_EQ(rows, queries.size());
  }
}

TEST(Rows, TheirSeparableShareIsTheDefinition) {
  attn::Inputs in = inputs(60, 3);
  in.k = at::cat({in.k, in.k}, 1), in.v = at::cat({in.v, in.v + 1}, 1);
  for (const attn::Spec& spec :
       {attn::Spec{}, attn::Spec{.mask = attn::Window{9}},
        attn::Spec{.weight = attn::Entmax{1.5f}, .denominator = attn::Nothing{}}}) {
    const std::vector<Query> queries = {{5, 1}, {6, 1}, {31, 1}, {59, 1}};
    const size_t N = 6;
    for_rows(spec, in, queries, [&](const Rows& r) {
      const int64_t S = r.weights.size(-1);
      const at::Tensor got = separable_share(r, r.weights, in.v[0].narrow(1, 0, S), int64_t(N));
      for (int64_t h = 0; h < 4; ++h)
        for (int64_t i = 0; i < 4; ++i) {
          const int64_t begin = r.begin[size_t(i)], count = r.count[size_t(i)];
          const double share = got[h][i].item<double>();
          ASSERT_EQ(std::isnan(share), count <= int64_t(N));
          if (std::isnan(share)) continue;
          const Case c = make_case(make_points(in.v[0][h], true), r.weights[h][i], {begin, count});
          const std::vector<size_t> top = c.top(N);
          const std::vector<double> s = c.sum(top);
          double radius = INFINITY, inside = 0;
          for (size_t j = 0; j < c.n(); ++j)
            if (std::find(top.begin(), top.end(), j) == top.end())
              radius = std::min(radius, c.off(j, s));
          for (size_t j : top) inside += c.off(j, s) < radius;
          EXPECT_NEAR(share, inside / double(N), 1e-12) << h << " " << i;
        }
    });
  }
}

TEST(Rows, QueriesStandForAllOfThem) {
  for (int64_t T : {2, 1000, 1024, 1500, 5000}) {
    double sum = 0;
    int64_t last = -1;
    for (const Query& q : sample_queries(T)) {
      EXPECT_GT(q.t, last);
      sum += q.weight, last = q.t;
    }
    EXPECT_LT(last, T);
    EXPECT_NEAR(sum, double(T), 1e-6);
  }
}

TEST(SoftmaxRows, SensitivityIsTheDefinitionInDouble) {
  const attn::Inputs in = inputs(50, 3);
  const std::vector<Query> queries = {{1, 1}, {10, 1}, {49, 1}};
  for_rows({}, in, queries, [&](const Rows& r) {
    const at::Tensor v = directions(r, at::make_generator<at::CPUGeneratorImpl>(5));
    const at::Tensor x = r.scores.to(at::kDouble).masked_fill(r.hidden, -INFINITY);
    EXPECT_TRUE(at::allclose(v.norm(2, -1), at::ones({4, 3}), 1e-5));
    for (double T : {0.01, 0.1, 1., 10.})
      for (double eps : {1e-3, 0.1, 10.}) {
        const at::Tensor want =
            (((x + eps * v.to(at::kDouble)) / T).softmax(-1) - (x / T).softmax(-1)).norm(2, -1) /
            eps;
        const at::Tensor got = sensitivity(r.scores, r.hidden, v, T, eps).to(at::kDouble);
        EXPECT_TRUE(at::allclose(got, want, 1e-3, 1e-7 / T)) << T << " " << eps << got << want;
        EXPECT_LE(got.max().item<double>(), sensitivity_bound(T, eps) * (1 + 1e-5));
      }
  });
}

// At a = (1/2, 1/2) the norm is 1 / (2 T): the printed 1 / (4 T) is not a bound.
TEST(SoftmaxRows, ThePrintedBoundOfCorollary3IsCrossed) {
  const at::Tensor x = at::zeros({1, 1, 2}), hidden = at::zeros({1, 1, 2}, at::kBool);
  const at::Tensor v = at::tensor({std::sqrt(0.5), -std::sqrt(0.5)}).to(at::kFloat).view({1, 1, 2});
  const double g = sensitivity(x, hidden, v, 1, 1e-3).item<double>();
  EXPECT_NEAR(g, 0.5, 1e-5);
  EXPECT_GT(g, sensitivity_printed(1));
}

TEST(SoftmaxRows, NumbersAreTheirDefinitions) {
  const attn::Inputs in = inputs(40, 2);
  const std::vector<Query> queries = {{6, 1}, {39, 1}};
  for_rows({.mask = attn::Window{20}}, in, queries, [&](const Rows& r) {
    const RowNumbers n = row_numbers(r);
    for (int64_t h = 0; h < 4; ++h)
      for (int64_t i = 0; i < 2; ++i) {
        const auto at = [&](const at::Tensor& x) { return x[h][i].item<double>(); };
        double H = 0, squares = 0, reach = 0, mean = 0, var = 0, Z = 0, most = 0, high = 0, low = 1;
        const int64_t b = r.begin[size_t(i)], c = r.count[size_t(i)];
        std::vector<double> x;
        for (int64_t s = b; s < b + c; ++s) x.push_back(r.scores[h][i][s].item<double>());
        for (double v : x)
          Z += std::exp(v), mean += v / double(c), most = std::max(most, std::abs(v));
        for (size_t s = 0; s < x.size(); ++s) {
          const double a = std::exp(x[s]) / Z;
          H -= a * std::log(a), squares += a * a, var += std::pow(x[s] - mean, 2) / double(c);
          reach += a * double(queries[size_t(i)].t - b - int64_t(s));
          high = std::max(high, a), low = std::min(low, a);
        }
        EXPECT_NEAR(at(n.entropy), H, 1e-5);
        EXPECT_NEAR(at(n.support), 1 / squares, 1e-4 / squares);
        EXPECT_NEAR(at(n.reach), reach, 1e-4);
        EXPECT_NEAR(at(n.spread), std::sqrt(var), 1e-4);
        EXPECT_NEAR(at(n.largest), high, 1e-6);
        EXPECT_NEAR(at(n.log_high), std::log(high * double(c)), 1e-4);
        EXPECT_NEAR(at(n.log_low), std::log(low * double(c)), 1e-4);
        EXPECT_NEAR(at(n.most), most, 1e-5);
        EXPECT_LE(at(n.most), at(r.largest_product) * (1 + 1e-5));
        EXPECT_NEAR(at(n.first), b == 0 ? std::exp(x[0]) / Z : 0, 1e-6);
      }
  });
}

TEST(Series, ErrorsAreThoseOfTheVariants) {
  const attn::Inputs in = inputs(33, 3);
  const std::vector<Query> queries = {{5, 1}, {20, 1}, {32, 1}};
  const std::vector<HeadSeries> got = series({}, in, queries);
  attn::Inputs wide = in;
  wide.q = in.q.to(at::kDouble), wide.k = in.k.to(at::kDouble), wide.v = in.v.to(at::kDouble);
  const at::Tensor rows = at::tensor({5, 20, 32}, at::kLong);
  const auto out = [&](const attn::Spec& s) {
    return attn::attend(s, wide, "reference")[0].index_select(1, rows);
  };
  const at::Tensor o = out({});
  for (int order : {1, 2, 5, 8})
    for (bool centred : {false, true}) {
      const std::string name = (centred ? "centred_taylor" : "taylor") + std::to_string(order);
      const at::Tensor e = out(attn::find(name).spec) - o;
      for (int64_t h = 0; h < 4; ++h) {
        const HeadSeries& s = got[size_t(h)];
        const double want = (e[h].norm() / o[h].norm()).item<double>();
        EXPECT_NEAR((centred ? s.centred : s.plain)[size_t(order)], want, 1e-8 * (1 + want));
      }
    }
  EXPECT_EQ(enough({0.5, 0.001, 0.2, 0.005, 0.001}), 3);
  EXPECT_EQ(enough({0.5, 0.02}), kMostOrder + 1);
}

// Near keys have other scores than the rest: a head that has them has no rows to cut or switch.
TEST(WhatIf, RefusesHeadsWithoutRows) {
  const nn::Model m = nn::random_model(
      nn::preset("tiny", "softmax^2|lolcats:features=hedgehog(8),near=window(5)^2"), 1);
  const at::Tensor tokens =
      at::randint(0, m.config.V, {24}, at::make_generator<at::CPUGeneratorImpl>(2), at::kLong);
  for (const int64_t head : {1, 2}) {
    const Cut cut{3, true, {{1, head}}};
    const Switch other{attn::find("l2").spec, {{1, head}}};
    if (head == 1) {
      EXPECT_TRUE(std::isfinite(loss(m, tokens, {&other, 1})));
      EXPECT_TRUE(std::isfinite(loss(m, tokens, {}, {&cut, 1})));
    } else {
      EXPECT_THROW(loss(m, tokens, {&other, 1}), Error);
      EXPECT_THROW(loss(m, tokens, {}, {&cut, 1}), Error);
    }
  }
}

// One pass over a whole model, compared with its rows one by one; only bounds that are wrong as
// printed are violated.
TEST(Diagnose, AWholeModel) {
  for (const char* preset : {"tiny"}) {
    nn::Model m = nn::random_model(nn::preset(preset), 1);
    for (nn::Layer& l : m.layers) l.q = l.q * 20;  // sharp rows
    const at::Tensor tokens =
        at::randint(0, m.config.V, {1, 96}, at::make_generator<at::CPUGeneratorImpl>(2), at::kLong);
    for (Embedding e : {Embedding::tokens, Embedding::inputs, Embedding::values}) {
      const Diagnosis d =
          diagnose(m, tokens, {.lengths = {32, 96}, .tops = {1, 5, 20}, .embedding = e});
      ASSERT_EQ(d.heads.size(), m.layers.size() * size_t(m.config.H));
      for (const auto& [name, c] : d.crossed) {
        EXPECT_GT(c.of, 0);
        const bool loose = name.find("print") != name.npos ||
                           name.find("expectation") != name.npos ||
                           name.find("not a bound") != name.npos;
        EXPECT_TRUE(loose || c.times == 0) << name << ": " << c.times;
      }
      const size_t five = size_t(std::find(d.grid.begin(), d.grid.end(), 5) - d.grid.begin());
      std::vector<double> want(d.heads.size());
      size_t layer = 0;
      at::Tensor input;
      nn::Probe probe{[&](const nn::Operated& o) {
        const attn::Spec& s = o.part.attention;
        const attn::Inputs& in = o.in;
        attn::Inputs whole = in;
        whole.v = at::eye(96).expand({1, in.k.size(1), 96, 96}).contiguous();
        const at::Tensor w = attn::attend(s, whole, "reference")[0];
        for (int64_t h = 0; h < m.config.H; ++h) {
          const Points p =
              make_points(e == Embedding::tokens   ? token_points(m, tokens)
                          : e == Embedding::inputs ? input
                                                   : in.v[0][h * in.v.size(1) / m.config.H],
                          false);
          double sum = 0;
          for (int64_t t = 5; t < 32; ++t) {
            const Case c = make_case(p, w[h][t], {0, t + 1});
            sum += c.distance(c.top(5));
          }
          want[layer * size_t(m.config.H) + size_t(h)] = sum / 27;
        }
        ++layer;
      }};
      probe.input = [&](int64_t, const at::Tensor& x) { input = x; };
      nn::hidden(m, tokens, {.probe = &probe});
      for (size_t i = 0; i < want.size(); ++i) {
        const DistanceSums& s = d.heads[i].distances[0][five];
        EXPECT_EQ(s.rows, 27);
        EXPECT_NEAR(s.distance / s.rows, want[i], 1e-4 * want[i]) << name_of(e) << i;
      }
    }
  }
}

TEST(Diagnose, SaysWhatIsWrong) {
  const nn::Model m = nn::random_model(nn::preset("tiny"), 1);
  const at::Tensor tokens = at::zeros({50}, at::kLong);
  EXPECT_THROW(diagnose(m, tokens, {}), Error);  // shorter than 1,024
  EXPECT_THROW(diagnose(m, tokens, {.lengths = {32}, .layers = {99}}), Error);
  const nn::Model odd = nn::random_model(nn::preset("tiny", "taylor3"), 1);
  EXPECT_THROW(diagnose(odd, tokens, {.lengths = {32}}), Error);
  EXPECT_THROW(embedding_of("token"), Error);
}

}  // namespace
}  // namespace horner::diag
