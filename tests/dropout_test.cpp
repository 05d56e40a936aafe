// Dropout: every execution drops the pairs that the reference drops, forward and backward; the
// pairs are those of attn/dropout.h, as many as they should be, and independent of each other.
#include "attn/dropout.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "attn/catalog.h"
#include "attn/state.h"
#include "core/check.h"
#include "instruments/verify.h"

namespace horner::attn {

using namespace instruments;
namespace {

const char* const kVariants[] = {"softmax:dropout=0.25",       "softmax:dropout=0.9,mask=full",
                                 "taylor4:dropout=0.1",        "l2:dropout=0.3",
                                 "gated_decay:dropout=0.2",    "softmax1:dropout=0.5",
                                 "sink:dropout=0.1",           "bias:dropout=0.1",
                                 "streaming:dropout=0.2",      "sigmoid:dropout=0.2",
                                 "near_taylor2:dropout=0.2",   "delta:dropout=0.2",
                                 "entmax15:dropout=0.2",       "topk32:dropout=0.2",
                                 "sa_softmax:dropout=0.2",     "softpick:dropout=0.5",
                                 "stick_breaking:dropout=0.2", "forgetting:dropout=0.2"};

TEST(Dropout, EveryExecutionMatchesTheReference) {
  for (const char* name : kVariants)
    for (at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      size_t ran = 0;
      for (const Case& c : standard_cases(dtype)) {
        if (c.T > 200) continue;
        const Trial t = trial(find(name).spec, c);
        for (const Execution* e : executions()) {
          const Verdict v = verify(t, *e);
          ran += v.why_not.empty() && e->name == "fused_cpu";
          for (const Difference& d : v.differences)
            EXPECT_LE(d.error, d.allowed)
                << name << " " << e->name << " " << d.of << " " << text(c);
        }
      }
      EXPECT_EQ(ran > 5, dtype != at::kDouble) << name;
    }
}

// Zero scores and the values of an identity: a row's weights, 1 / S each, after dropout.
at::Tensor dropped(double p, int64_t seed, int64_t B, int64_t H, int64_t T, int64_t S) {
  Inputs in;
  in.q = at::zeros({B, H, T, 4}), in.k = at::zeros({B, H, S, 4});
  in.v = at::eye(S).expand({B, H, S, S}), in.seed = at::full({1}, seed, at::kLong);
  return attend({.mask = Full{}, .dropout = p}, in, "reference") * S;
}

TEST(Dropout, IsTheFunctionOfTheHeader) {
  constexpr int64_t B = 2, H = 3, T = 5, S = 70;
  for (const int64_t seed : {0L, 7L, -1L, 1L << 40, INT64_MIN})
    for (const double p : {0.1, 0.5, 0.999}) {
      const at::Tensor left = dropped(p, seed, B, H, T, S);
      for (int64_t b = 0; b < B; ++b)
        for (int64_t h = 0; h < H; ++h)
          for (int64_t t = 0; t < T; ++t) {
            const DropoutRow row = dropout_row(uint64_t(seed), b, h, t);
            for (int64_t s = 0; s < S; ++s) {
              const bool stays = dropout_bits(row, uint32_t(s)) >= dropped_below(p);
              EXPECT_NEAR(left[b][h][t][s].item<double>(), stays ? 1 / (1 - p) : 0, 1e-3)
                  << seed << " " << p << " " << b << h << t << " " << s;
            }
          }
    }
}

// Of n independent pairs, a share q of which is kept, the mean lies within 5 standard deviations;
// neighbours in every direction, and other seeds, agree as often as independent ones do.
TEST(Dropout, KeepsItsShareIndependently) {
  constexpr int64_t B = 3, H = 4, T = 128, S = 130;
  for (const double p : {0.1, 0.5}) {
    const auto kept = [&](int64_t seed) {
      return (dropped(p, seed, B, H, T, S) > 0).to(at::kDouble);
    };
    const at::Tensor x = kept(1);
    const double n = double(x.numel()), q = 1 - p;
    EXPECT_NEAR(x.mean().item<double>(), q, 5 * std::sqrt(p * q / n));
    for (const int64_t axis : {0, 1, 2, 3}) {
      const at::Tensor rows = x.mean(axis);  // each a mean of few: its variance is that of them
      EXPECT_NEAR(rows.var().item<double>() / (p * q / double(x.size(axis))), 1, 0.15) << axis;
    }
    const double both = 5 * std::sqrt(q * q * (1 - q * q) / n);
    for (const int64_t axis : {0, 1, 2, 3})
      EXPECT_NEAR((x * x.roll(1, axis)).mean().item<double>(), q * q, both) << axis;
    for (const int64_t seed : {2L, 3L, 1L << 32, -1L})
      EXPECT_NEAR((x * kept(seed)).mean().item<double>(), q * q, both) << seed;
    EXPECT_TRUE(at::equal(x, kept(1)));
  }
}

TEST(Dropout, IsRefusedWithAReasonWhereNoPairHasAWeight) {
  const Spec spec = find("linear:dropout=0.1").spec;
  const Inputs in = random_inputs(spec, {});
  for (const char* name : {"chunked", "recurrent"})
    EXPECT_NE(execution(name).why_not(spec, in).find("dropout of single pairs"), std::string::npos);
  try {
    make_state(spec, {1, 1, 8, 8}, at::kFloat);
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("dropout"), std::string::npos) << e.what();
  }
  EXPECT_THROW(find("softmax:dropout=1"), Error);
  EXPECT_THROW(find("softmax:dropout=-0.1"), Error);
  Inputs without = in;
  without.seed = at::Tensor();
  EXPECT_THROW(attend(spec, without), Error);
}

}  // namespace
}  // namespace horner::attn
