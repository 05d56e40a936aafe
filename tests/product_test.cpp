// The products of a model: several weights at once, our own kernel, and the loss in slices.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <cstdlib>

#include "core/simd/isa.h"
#include "nn/model.h"
#include "nn/parts.h"

namespace horner::nn::parts {
namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor random(std::vector<int64_t> shape) {
  return at::randn(shape, at::kDouble);
}
double distance(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

TEST(Product, IsThatOfEachWeight) {
  at::manual_seed(3);
  const at::Tensor x = random({7, 12}).to(at::kFloat);
  const auto weights = [](bool leaves) {
    at::manual_seed(4);
    Tensors w;
    for (int64_t n : {5, 3, 4}) w.push_back(random({n, 12}).to(at::kFloat).requires_grad_(leaves));
    for (int64_t n : {5, 3, 4}) w.push_back(random({n}).to(at::kFloat).requires_grad_(leaves));
    return w;
  };
  const Tensors w = weights(true), fixed = weights(false);
  Tensors parts;
  for (size_t i = 0; i < 3; ++i) parts.push_back(at::linear(x, w[i], w[i + 3]));
  const at::Tensor wanted = at::cat(parts, 1), direction = at::randn_like(wanted);
  const at::Tensor got = product(x, {w[0], w[1], w[2]}, {w[3], w[4], w[5]});
  EXPECT_LT(distance(got, wanted), 1e-5);
  const Tensors a = torch::autograd::grad({wanted}, w, {direction}),
                b = torch::autograd::grad({got}, w, {direction});
  for (size_t i = 0; i < w.size(); ++i) EXPECT_LT(distance(a[i], b[i]), 1e-5);
  EXPECT_LT(
      distance(product(x, {fixed[0], fixed[1], fixed[2]}, {fixed[3], fixed[4], fixed[5]}), wanted),
      1e-5);
  const at::Tensor mixed = product(x.to(at::kBFloat16), {w[0], w[1], w[2]});
  EXPECT_EQ(mixed.scalar_type(), at::kBFloat16);
  const Tensors g = torch::autograd::grad({mixed}, {w[0], w[2]}, {direction.to(at::kBFloat16)});
  EXPECT_EQ(g[1].scalar_type(), at::kFloat);
  EXPECT_LT(distance(g[1], a[2]), 0.1);
}

TEST(Product, OfOurOwnIsRight) {
  at::manual_seed(6);
  const int64_t sizes[][3] = {{1, 1, 1}, {7, 5, 3}, {33, 64, 600}, {600, 129, 48}, {200, 50, 1100}};
  for (const simd::Isa set : simd::supported()) {
    setenv("HORNER_CPU", std::string(simd::name(set)).c_str(), 1);
    for (const auto& [M, N, K] : sizes)
      for (const bool turned : {false, true}) {
        const at::Tensor a = at::randn({M, K + 2}).narrow(1, 1, K);
        at::Tensor b = at::randn({K, N});
        const at::Tensor bias = turned ? at::randn({N}) : at::Tensor();
        if (turned) b = b.t().contiguous().t();
        const at::Tensor around = at::full({M, N + 3}, NAN), out = around.narrow(1, 1, N);
        times_by_own(out, a, b, bias);
        at::Tensor truth = at::mm(a.to(at::kDouble), b.to(at::kDouble));
        if (bias.defined()) truth = truth + bias;
        EXPECT_LT(distance(out, truth), 1e-6 * std::sqrt(double(K)) * 8) << simd::name(set);
        EXPECT_TRUE(around.select(1, 0).isnan().all().item<bool>());
        EXPECT_TRUE(around.select(1, N + 1).isnan().all().item<bool>());
      }
  }
  unsetenv("HORNER_CPU");
}

TEST(CrossEntropy, InSlicesIsThatOfTheWhole) {
  at::manual_seed(5);
  constexpr int64_t n = 150, C = 6, V = 140000;  // 2^24 / V: slices of 128 rows
  Model m{preset("tiny")};
  m.head = random({V, C}).to(at::kFloat).requires_grad_(true);
  const at::Tensor x = random({n, C}).to(at::kFloat).requires_grad_(true);
  at::Tensor targets = at::randint(V, {n}, at::kLong);
  targets[3] = -1;
  const at::Tensor loss = cross_entropy(m, x, targets);
  const Tensors got = torch::autograd::grad({loss * 3}, {x, m.head});
  const auto whole = [&](at::ScalarType t) -> Tensors {
    const at::Tensor y = x.detach().to(t, false, true).requires_grad_(true),
                     head = m.head.detach().to(t, false, true).requires_grad_(true);
    const at::Tensor l =
        at::cross_entropy_loss(at::linear(y, head), targets, {}, at::Reduction::Mean, -1);
    Tensors out = torch::autograd::grad({l * 3}, {y, head});
    out.push_back(l.detach());
    return out;
  };
  const Tensors truth = whole(at::kDouble), plain = whole(at::kFloat);
  EXPECT_LT(distance(loss, truth[2]), 1e-5);
  for (size_t i = 0; i < 2; ++i)
    EXPECT_LT(distance(got[i], truth[i]), 2 * distance(plain[i], truth[i]) + 1e-6);
}

}  // namespace
}  // namespace horner::nn::parts
