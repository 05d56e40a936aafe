// Fits against synthetic data with known parameters, and against a linear problem solved by hand.
#include "study/fits.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/random.h"
#include "study/statistics.h"

namespace horner::study {
namespace {

// Normal variates as a function of seed and index.
double normal(uint64_t seed, uint64_t i) {
  const auto uniform = [&](uint64_t k) {
    return (double(random_bits(seed, k, i) >> 11) + 0.5) / double(uint64_t(1) << 53);
  };
  return std::sqrt(-2 * std::log(uniform(0))) * std::cos(2 * M_PI * uniform(1));
}

// The line y = a + b x through four points: a, b and their standard errors by the textbook.
TEST(Fits, ALineHasTheTextbooksIntervals) {
  const std::vector<double> x = {0, 1, 2, 3}, y = {1.1, 2.9, 5.2, 6.8};
  const auto fit = least_squares(
      [&](const std::vector<double>& p) {
        std::vector<double> r;
        for (size_t i = 0; i < x.size(); ++i) r.push_back(p[0] + p[1] * x[i] - y[i]);
        return r;
      },
      {0, 0});
  ASSERT_TRUE(fit);
  // numpy.polyfit(x, y, 1, cov=True): slope 1.94, intercept 1.09.
  EXPECT_NEAR(fit->at[1].value, 1.94, 1e-6);
  EXPECT_NEAR(fit->at[0].value, 1.09, 1e-6);
  // Residuals -0.01, 0.13, -0.23, 0.11: their squares sum to 0.082; s^2 = 0.041, and the slope's
  // error is sqrt(s^2 / 5).
  const double half = t_quantile(0.975, 2) * std::sqrt(0.041 / 5);
  EXPECT_NEAR(fit->at[1].high - fit->at[1].value, half, 1e-5);
}

std::vector<Sized> scaled(uint64_t seed, double noise) {
  std::vector<Sized> out;
  uint64_t i = 0;
  for (const double weights : {1e5, 3e5, 1e6, 3e6, 1e7})
    for (int k = 0; k < 3; ++k, ++i)
      out.push_back(
          {weights, (1.5 + 2.0 * std::pow(weights / 1e6, -0.3)) * (1 + noise * normal(seed, i))});
  return out;
}

TEST(Fits, ScalingFindsItsParameters) {
  const auto exact = fit_scaling(scaled(0, 0));
  ASSERT_TRUE(exact && exact->has_floor);
  EXPECT_NEAR(exact->floor.value, 1.5, 1e-4);
  EXPECT_NEAR(exact->exponent.value, 0.3, 1e-4);
  EXPECT_NEAR(exact->at(2e7), 1.5 + 2.0 * std::pow(20, -0.3), 1e-4);
  // With noise the 95 % intervals hold the truth about 95 times of 100.
  int held = 0;
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    const auto fit = fit_scaling(scaled(seed, 0.003));
    ASSERT_TRUE(fit);
    held += fit->exponent.low < 0.3 && 0.3 < fit->exponent.high;
  }
  EXPECT_GE(held, 88);
}

TEST(Fits, ScalingOfThreeSizesHasNoFloor) {
  std::vector<Sized> points;
  for (const double weights : {1e5, 1e6, 1e7})
    points.push_back({weights, 3 * std::pow(weights / 1e6, -0.07)});
  const auto fit = fit_scaling(points);
  ASSERT_TRUE(fit && !fit->has_floor);
  EXPECT_NEAR(fit->exponent.value, 0.07, 1e-6);
  EXPECT_EQ(fit->floor.value, 0);
  points.pop_back();
  EXPECT_FALSE(fit_scaling(points));
}

// C = 0.05 state^0.8, steepness 3, guessing 1/32.
std::vector<Recalled> recalled(uint64_t seed, double noise, std::vector<double> states) {
  std::vector<Recalled> out;
  uint64_t i = 0;
  for (const double state : states)
    for (const double pairs : {8, 16, 32, 64, 128, 256}) {
      const double C = 0.05 * std::pow(state, 0.8);
      const double right = 1 / 32. + (1 - 1 / 32.) / (1 + std::pow(pairs / C, 3));
      out.push_back({pairs, state, right + noise * normal(seed, i++)});
    }
  return out;
}

TEST(Fits, CapacityFindsItsParameters) {
  const auto exact = fit_capacity(recalled(0, 0, {1024, 4096, 16384}), 1 / 32.);
  ASSERT_TRUE(exact && exact->has_exponent);
  EXPECT_NEAR(exact->exponent.value, 0.8, 1e-4);
  EXPECT_NEAR(exact->at(2048), 0.05 * std::pow(2048, 0.8), 0.01);
  EXPECT_NEAR(exact->steepness, 3, 1e-3);
  int held = 0;
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    const auto fit = fit_capacity(recalled(seed, 0.02, {1024, 4096, 16384}), 1 / 32.);
    ASSERT_TRUE(fit);
    held += fit->exponent.low < 0.8 && 0.8 < fit->exponent.high;
  }
  EXPECT_GE(held, 88);
}

TEST(Fits, CapacityOfOneState) {
  const auto fit = fit_capacity(recalled(0, 0, {4096}), 1 / 32.);
  ASSERT_TRUE(fit && !fit->has_exponent);
  EXPECT_NEAR(fit->pairs.value, 0.05 * std::pow(4096, 0.8), 0.01);
  EXPECT_FALSE(fit_capacity({{8, 64, 1}, {8, 64, 1}, {8, 64, 1}, {8, 64, 1}}, 0.1));
  EXPECT_FALSE(fit_capacity({{8, 64, 1}}, 0.1));
}

}  // namespace
}  // namespace horner::study
