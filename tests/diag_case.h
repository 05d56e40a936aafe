// What the tests of the diagnosis share: a row and its points, in double, by the definitions.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "diag/geometry.h"

namespace horner::diag {

inline at::Tensor random(at::IntArrayRef shape, uint64_t seed) {
  return at::randn(shape, at::make_generator<at::CPUGeneratorImpl>(seed), at::kFloat);
}

// A row of n weights and its points, in double.
struct Case {
  std::vector<double> a;
  std::vector<std::vector<double>> x;

  size_t n() const { return a.size(); }
  std::vector<size_t> top(size_t N) const {
    std::vector<size_t> i(n());
    std::iota(i.begin(), i.end(), 0);
    std::stable_sort(i.begin(), i.end(), [&](size_t p, size_t q) { return a[p] > a[q]; });
    i.resize(N);
    return i;
  }
  std::vector<double> sum(const std::vector<size_t>& chosen) const {
    std::vector<double> s(x[0].size());
    for (size_t i : chosen)
      for (size_t c = 0; c < s.size(); ++c) s[c] += a[i] * x[i][c];
    return s;
  }
  double off(size_t i, const std::vector<double>& s) const {
    double e = 0;
    for (size_t c = 0; c < s.size(); ++c) e += std::pow(a[i] * x[i][c] - s[c], 2);
    return std::sqrt(e);
  }
  double distance(const std::vector<size_t>& chosen) const {
    const std::vector<double> s = sum(chosen);
    double d = 0;
    for (size_t i = 0; i < n(); ++i)
      if (std::find(chosen.begin(), chosen.end(), i) == chosen.end()) d += off(i, s);
    return d;
  }
};
inline double length(const std::vector<double>& v) {
  return std::sqrt(std::inner_product(v.begin(), v.end(), v.begin(), 0.));
}

inline Case make_case(const Points& p, const at::Tensor& row, const Seen& seen) {
  Case c;
  for (int64_t i = seen.begin; i < seen.begin + seen.count; ++i) {
    c.a.push_back(row[i].item<double>());
    const at::Tensor x = p.x[i].to(at::kDouble).contiguous();
    c.x.emplace_back(x.data_ptr<double>(), x.data_ptr<double>() + x.numel());
  }
  return c;
}

}  // namespace horner::diag
