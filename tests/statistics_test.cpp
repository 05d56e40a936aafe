// Quantiles, intervals and corrections against values of scipy 1.17.
#include "study/statistics.h"

#include <gtest/gtest.h>

#include <cmath>

namespace horner::study {
namespace {

TEST(Statistics, QuantilesOfT) {
  const struct {
    double p, df, wanted;  // scipy.stats.t.ppf(p, df)
  } cases[] = {{0.975, 1, 12.706204736174694},   {0.975, 2, 4.302652729749462},
               {0.975, 4, 2.7764451051977934},   {0.95, 9, 1.833112932656237},
               {0.995, 2, 9.924843200918287},    {0.975, 29, 2.045229642132703},
               {0.6, 3, 0.2766706623326898},     {0.025, 7, -2.3646242515927844},
               {0.975, 1000, 1.9623390808264083}};
  for (const auto& c : cases)
    EXPECT_NEAR(t_quantile(c.p, c.df) / c.wanted, 1, 1e-9) << c.p << " " << c.df;
  EXPECT_EQ(t_quantile(0.5, 3), 0);
}

TEST(Statistics, ProbabilitiesOfT) {
  const struct {
    double t, df, wanted;  // scipy.stats.t.cdf(t, df)
  } cases[] = {{0, 5, 0.5},
               {1, 1, 0.75},
               {2.5, 2, 0.9351941398892446},
               {-3.3, 4, 0.014966710042063033},
               {12, 2, 0.9965635331614208},
               {0.01, 30, 0.5039562537134111},
               {-40, 3, 1.7190340394579253e-05}};
  for (const auto& c : cases)
    EXPECT_NEAR(t_cdf(c.t, c.df) / c.wanted, 1, 1e-10) << c.t << " " << c.df;
  for (const double df : {1., 2., 7., 40.})
    for (const double p : {0.001, 0.2, 0.7, 0.999})
      EXPECT_NEAR(t_cdf(t_quantile(p, df), df), p, 1e-12);
}

// scipy.stats.ttest_1samp(x, 0) and its confidence_interval(0.95).
TEST(Statistics, IntervalsOfSmallSamples) {
  const Interval three = t_interval({0.012, 0.019, 0.008});
  EXPECT_NEAR(three.mean, 0.013, 1e-15);
  EXPECT_NEAR(three.low, -0.0008310934238456025, 1e-12);
  EXPECT_NEAR(three.high, 0.0268310934238456, 1e-12);
  EXPECT_NEAR(three.p, 0.05605248723558254, 1e-12);
  const Interval five = t_interval({-1.5, 2.25, 0.5, 0.75, -0.125});
  EXPECT_NEAR(five.low, -1.3181193874390524, 1e-10);
  EXPECT_NEAR(five.high, 2.0681193874390527, 1e-10);
  EXPECT_NEAR(five.p, 0.5718544368266678, 1e-10);
  for (const std::vector<double>& few : {std::vector<double>{}, {0.3}}) {
    const Interval one = t_interval(few);
    EXPECT_EQ(one.p, 1);
    EXPECT_TRUE(std::isinf(one.low) && std::isinf(one.high));
  }
  EXPECT_EQ(t_interval({0, 0, 0}).p, 1);
  EXPECT_EQ(t_interval({2, 2, 2}).p, 0);
}

// By hand: 0.01 * 4, 0.02 * 3, 0.03 * 2, then 0.04, raised to the one before.
TEST(Statistics, HolmsCorrection) {
  const std::vector<double> all = holm({0.04, 0.01, NAN, 0.03, 0.02});
  const double wanted[] = {0.06, 0.04, NAN, 0.06, 0.06};
  for (size_t i = 0; i < all.size(); ++i)
    if (std::isnan(wanted[i]))
      EXPECT_TRUE(std::isnan(all[i]));
    else
      EXPECT_NEAR(all[i], wanted[i], 1e-15) << i;
  EXPECT_EQ(holm({0.6, 0.7}), (std::vector<double>{1, 1}));
}

}  // namespace
}  // namespace horner::study
