// How exact the gradients of the CUDA kernels are where sums cancel, by the RMS over several draws;
// `horner check` looks at one draw. And of sticks, picks and near keys among other stages. Without
// a GPU every test is skipped.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>

#include "attn/catalog.h"
#include "attn/inputs.h"
#include "instruments/verify.h"

namespace horner::attn {

using namespace instruments;
namespace {

const at::ScalarType kDtypes[] = {at::kBFloat16, at::kHalf, at::kFloat};

class CudaGradients : public testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  }
};

// The gradients of all inputs, in double.
using Gradients = std::vector<std::pair<std::string, at::Tensor>>;
Gradients gradients(const Spec& spec, const char* name, Inputs in, at::ScalarType dtype) {
  for (const Input& i : input_table())
    if (at::Tensor& x = in.*i.at; x.defined() && i.role != Role::mask)
      x = x.to(dtype, false, true).requires_grad_(has_gradient(i));
  const at::Tensor o = execution(name).run(spec, in, nullptr);
  const auto random = at::make_generator<at::CPUGeneratorImpl>(uint64_t(1));
  o.backward(at::randn(o.sizes(), random, at::TensorOptions(at::kDouble))
                 .to(at::kBFloat16)
                 .to(o.options()));
  Gradients all;
  for (const Input& i : input_table())
    if (const at::Tensor& x = in.*i.at; x.defined() && x.requires_grad())
      all.emplace_back(i.name, x.grad().defined() ? x.grad().to(at::kDouble) : at::zeros_like(x));
  return all;
}

// Sums of squares over several draws: of the error, of the reference's error, of the truth.
struct Squares {
  double error = 0, own = 0, truth = 0;

  static double sum(const at::Tensor& x) { return x.square().sum().item<double>(); }
  void add(const at::Tensor& found, const at::Tensor& plain, const at::Tensor& right) {
    error += sum(found - right), own += sum(plain - right), truth += sum(right);
  }
  double ratio() const { return std::sqrt(error / own); }
};

// The RMS error of each gradient is at most twice the reference's. In float16 the reference keeps
// the gradient of the sums in float32, where the kernels round it: there, two ulps more. Draws with
// a gradient that the dtype has no value for are left out. Returns the largest ratio of d decay.
double expect_as_exact_as_the_reference(
    const std::string& name, const Spec& spec, Case c,
    const std::function<void(Inputs&)>& change = [](Inputs&) {}) {
  std::map<std::pair<std::string, std::string>, Squares> all;  // by execution and input
  for (c.seed = 1; c.seed <= 3; ++c.seed) {
    Inputs in = random_inputs(spec, c);
    change(in);
    const Gradients truth = gradients(spec, "reference", in, at::kDouble);
    const auto fits = [&](const auto& g) { return in_range(g.second, c.dtype); };
    if (!std::ranges::all_of(truth, fits)) continue;
    const Gradients plain = gradients(spec, "reference", in, c.dtype);
    for (const char* kernels : {"fused_cuda", "hopper_cuda", "chunked_cuda"}) {
      if (!execution(kernels).why_not(spec, in).empty()) continue;
      const Gradients found = gradients(spec, kernels, in, c.dtype);
      for (size_t i = 0; i < truth.size(); ++i)
        all[{kernels, truth[i].first}].add(found[i].second, plain[i].second, truth[i].second);
    }
  }
  double worst = 0;
  for (const auto& [of, squares] : all) {
    const auto& [error, own, truth] = squares;
    const double floor = c.dtype == at::kHalf ? 0x1p-9 : 1e-7;
    EXPECT_LE(std::sqrt(error), 2 * std::sqrt(own) + floor * std::sqrt(truth))
        << of.first << " " << name << " " << c10::toString(c.dtype) << " d " << of.second
        << ": ratio " << squares.ratio() << ", relative error of the reference "
        << std::sqrt(own / truth) << ", on " << text(c);
    if (of.second == "decay") worst = std::max(worst, squares.ratio());
  }
  return worst;
}

// The gradient of a decay is a difference of large sums: they must sum the same numbers.
TEST_F(CudaGradients, OfDecayAreAsExactAsTheReferences) {
  std::vector<std::pair<std::string, Spec>> rows = {
      {"softmax with decay", {.decay = TokenGate{}}},
      {"mamba with exp",
       {.clamp = 5,
        .decay = TokenGate{},
        .input_gate = true,
        .denominator = Nothing{},
        .norm = Rms{}}},
      {"centred", {.centred = true, .decay = TokenGate{}, .denominator = Count{}}},
      {"sigmoid", {.weight = Sigmoid{}, .decay = TokenGate{}, .denominator = Count{}}},
      {"near keys", {.weight = Taylor{2}, .near = Window{64}, .decay = TokenGate{}}},
      {"1 + x", {.weight = Taylor{1}, .decay = TokenGate{}, .denominator = Count{}}},
      {"order 2",
       {.weight = Taylor{2}, .decay = TokenGate{}, .denominator = Nothing{}, .norm = Rms{}}}};
  for (const char* name : {"gated_decay", "gated_decay@code", "linear_mamba", "linear_decay"})
    rows.emplace_back(name, find(name).spec);
  for (at::ScalarType dtype : kDtypes) {
    double worst = 0;
    for (const auto& [name, spec] : rows) {
      std::vector<Case> cases = {
          {.T = 37, .S = 37},
          {.T = 37, .S = 37, .D = 6, .E = 7, .padded = true},
          {.T = 37, .S = 37, .D = 7, .E = 4, .packed = true},
          {.T = 200, .S = 200},
          {.B = 1, .H = 2, .G = 1, .T = 150, .S = 170, .D = 64, .E = 64},
          {.B = 1, .H = 2, .G = 1, .T = 520, .S = 520, .D = 64, .E = 64, .padded = true},
          {.B = 1, .H = 2, .G = 2, .T = 1024, .S = 1024, .D = 64, .E = 64},
          {.B = 1, .H = 2, .G = 1, .T = 1024, .S = 1024, .D = 128, .E = 128}};
      // A hot row with a sum may have only weights so small that the sum is replaced by 1e-6.
      if (!is<Sum>(spec.denominator))
        cases.push_back(
            {.B = 1, .H = 2, .G = 1, .T = 300, .S = 300, .D = 64, .E = 64, .hot = true});
      for (Case c : cases) {
        c.dtype = dtype, c.device = at::kCUDA;
        worst = std::max(worst, expect_as_exact_as_the_reference(name, spec, c));
      }
    }
    std::printf("%s: d decay has at most %.2f times the reference's error\n", c10::toString(dtype),
                worst);
  }
}

// Log gates of either sign and input gates above 1.
TEST_F(CudaGradients, GatesMayBeAboveOne) {
  for (const char* name :
       {"gated_decay", "linear_mamba", "linear_decay", "softmax:decay=token_gate"})
    for (at::ScalarType dtype : kDtypes)
      for (int64_t D : {64, 128})
        expect_as_exact_as_the_reference(name, find(name).spec,
                                         {.B = 1,
                                          .H = 2,
                                          .G = 1,
                                          .T = 300,
                                          .S = 300,
                                          .D = D,
                                          .E = D,
                                          .dtype = dtype,
                                          .device = at::kCUDA},
                                         [](Inputs& in) {
                                           in.decay = (in.decay + 0.2) * 0.25;
                                           if (in.input_gate.defined())
                                             in.input_gate = in.input_gate * 4;
                                         });
}

void expect_right(const char* name, const Spec& spec, const Case& c) {
  const Verdict v = verify(spec, execution("fused_cuda"), c);
  EXPECT_EQ(v.why_not, "") << name;
  EXPECT_TRUE(v.ok()) << name << " " << c10::toString(c.dtype) << " " << v.worst()->of << ": "
                      << v.worst()->error << ", allowed " << v.worst()->allowed << ", on "
                      << text(c);
}

// Stages that no row of the catalog puts together.
TEST_F(CudaGradients, SticksPicksAndNearKeysAreRightWithOtherStages) {
  const std::pair<const char*, Spec> rows[] = {
      {"sticks, capped", {.softcap = 2, .weight = StickBreaking{}, .denominator = Nothing{}}},
      {"sticks, clamped, by their sum", {.clamp = 0.5, .weight = StickBreaking{}}},
      {"sticks in a window",
       {.weight = StickBreaking{}, .mask = Window{40}, .denominator = Nothing{}, .norm = Rms{}}},
      {"sticks in chunks", {.weight = StickBreaking{}, .mask = Chunks{48}, .denominator = Count{}}},
      {"picks with a norm", {.weight = Softpick{}, .denominator = Nothing{}, .norm = L2{}}},
      {"near with decay", {.weight = Taylor{2}, .near = Window{64}, .decay = TokenGate{}}},
      {"near with gates",
       {.weight = Taylor{2},
        .near = Window{20},
        .input_gate = true,
        .denominator = Count{},
        .output_gate = true,
        .norm = Rms{},
        .post_gate = true}},
      {"near features", {.features = Elu1{}, .weight = Taylor{2}, .near = Window{70}}}};
  for (const auto& [name, spec] : rows)
    for (at::ScalarType dtype : kDtypes)
      for (int64_t D : {24, 128})
        for (bool padded : {false, true})
          expect_right(name, spec,
                       {.T = 150,
                        .S = 170,
                        .D = D,
                        .E = D + 8,
                        .dtype = dtype,
                        .device = at::kCUDA,
                        .padded = padded});
}

// Several sweeps of backward.
TEST_F(CudaGradients, LongSticksAreRight) {
  for (at::ScalarType dtype : {at::kBFloat16, at::kFloat})
    expect_right("stick_breaking", find("stick_breaking").spec,
                 {.B = 1,
                  .H = 2,
                  .G = 1,
                  .T = 2500,
                  .S = 2700,
                  .D = 64,
                  .E = 64,
                  .dtype = dtype,
                  .device = at::kCUDA});
}

}  // namespace
}  // namespace horner::attn
