// Curves fitted to results by least squares, each parameter with its 95 % interval.
//   scaling    loss = floor + height (weights / middle)^-exponent, on relative residuals
//   capacity   accuracy = guessing + (1 - guessing) / (1 + (pairs / C)^steepness),
//              C = factor state^exponent: the pairs at which half of the rest is right
#pragma once

#include <functional>
#include <optional>
#include <vector>

namespace horner::study {

struct Estimate {
  double value, low, high;  // low and high are infinite if there are no more points than parameters
};
struct Fit {
  std::vector<Estimate> at;  // the parameters
  double error;              // root mean square of the residuals
  size_t points;
};

// Minimises the sum of squared residuals from `start` by Levenberg's and Marquardt's method. The
// intervals are those of the linearised problem, with Student's t. Nothing if it does not converge.
using Residuals = std::function<std::vector<double>(const std::vector<double>& parameters)>;
std::optional<Fit> least_squares(const Residuals&, std::vector<double> start);

struct Sized {
  double weights, loss;
};
struct Scaling {
  Estimate floor, exponent;
  double height, middle;  // middle: the geometric mean of the weights
  double error;           // relative
  size_t points, sizes;
  bool has_floor;  // with fewer than 4 sizes the floor is 0
  double at(double weights) const;
};
// Nothing with fewer than 3 sizes.
std::optional<Scaling> fit_scaling(const std::vector<Sized>&);

struct Recalled {
  double pairs, state, accuracy;  // state: numbers
};
struct Capacity {
  Estimate exponent;  // of the state; 1 and exact if all states have one size
  Estimate pairs;     // C at the geometric mean of the states
  double state, steepness, error;
  size_t points;
  bool has_exponent;
  double at(double state) const;  // C
};
// Nothing with fewer than 4 points or with one number of pairs and one state.
std::optional<Capacity> fit_capacity(const std::vector<Recalled>&, double guessing);

}  // namespace horner::study
