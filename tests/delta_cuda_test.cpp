// The delta rule and gates of channels in linear time on an NVIDIA GPU. Without one every test is
// skipped.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "attn/catalog.h"
#include "attn/inputs.h"
#include "attn/state.h"
#include "instruments/verify.h"
#include "nan_gates.h"
#include "near_ones.h"

namespace horner::attn {

using namespace instruments;
namespace {

const at::ScalarType kDtypes[] = {at::kBFloat16, at::kHalf, at::kFloat};

class CudaDelta : public testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  }
};

const char* const kCorrectedOrGated[] = {"delta", "delta_negative", "gated_delta",
                                         "gla",   "hgrn2",          "kda"};

void expect_right_in_linear_time(const char* name, const Case& c) {
  const Spec spec = find(name).spec;
  const Verdict v = verify(spec, execution("chunked_cuda"), c);
  EXPECT_TRUE(v.why_not.empty()) << v.why_not;
  EXPECT_TRUE(v.ok()) << name << " " << c10::toString(c.dtype) << " " << v.worst()->of << ": "
                      << v.worst()->error << ", allowed " << v.worst()->allowed << ", on "
                      << text(c);
}

TEST_F(CudaDelta, TheDeltaRuleAndGatesOfChannelsAreRight) {
  for (const char* name : kCorrectedOrGated)
    for (at::ScalarType dtype : kDtypes) {
      for (const Case& c : standard_cases(dtype, at::kCUDA))
        if (!c.packed) expect_right_in_linear_time(name, c);
      for (int64_t D : {16, 64, 100, 128})
        for (int64_t T : {1, 63, 64, 65, 150, 257})
          expect_right_in_linear_time(name, {.B = 1,
                                             .H = 4,
                                             .G = 2,
                                             .T = T,
                                             .S = T,
                                             .D = D,
                                             .E = 144 - D,
                                             .dtype = dtype,
                                             .device = at::kCUDA,
                                             .seed = uint64_t(T + D),
                                             .padded = T == 150});
    }
}

TEST_F(CudaDelta, SeriesAreRight) {
  for (const char* name : {"delta_taylor1", "delta_taylor2", "delta_taylor3", "near_taylor2",
                           "lolcats", "near_taylor2:near=window(9),decay=token_gate"})
    for (at::ScalarType dtype : kDtypes) {
      for (const Case& c : standard_cases(dtype, at::kCUDA))
        if (!c.packed) expect_right_in_linear_time(name, c);
      for (int64_t T : {64, 65, 300})
        expect_right_in_linear_time(name, {.B = 1,
                                           .H = 4,
                                           .G = 2,
                                           .T = T - 1,
                                           .S = T,
                                           .D = 20,
                                           .E = 12,
                                           .dtype = dtype,
                                           .device = at::kCUDA,
                                           .seed = uint64_t(T),
                                           .padded = T == 300});
    }
}

// Gates down to e^-20 a token, and gates of 0: what they leave is 0, and nothing overflows.
TEST_F(CudaDelta, StrongGatesAreRight) {
  for (const char* name : {"gated_delta", "gla", "kda"})
    for (at::ScalarType dtype : kDtypes) {
      const Spec spec = find(name).spec;
      Inputs in = random_inputs(
          spec, {.T = 200, .S = 200, .D = 64, .E = 64, .dtype = dtype, .device = at::kCUDA});
      at::Tensor& logs = in.decay.defined() ? in.decay : in.channel_decay;
      logs = (logs * 20).clamp_min(-20).slice(2, 0, 150);
      logs =
          at::cat({logs, at::full_like(logs.slice(2, 0, 1), -INFINITY), logs.slice(2, 0, 49)}, 2);
      const auto results = [&](const char* name, at::ScalarType type) {
        Inputs x = in;
        for (const Input& i : input_table())
          if (at::Tensor& y = x.*i.at; y.defined() && i.role != Role::mask)
            y = y.detach().to(dtype).to(type);
        for (at::Tensor* y : {&x.q, &x.k, &x.v}) *y = y->clone().requires_grad_();
        const at::Tensor o = attend(spec, x, name);
        o.backward((o.detach().sin() + 1).to(dtype).to(type));
        std::vector<at::Tensor> all{o.detach(), x.q.grad(), x.k.grad(), x.v.grad()};
        for (at::Tensor& y : all) y = y.to(at::kDouble);
        return all;
      };
      const auto truth = results("reference", at::kDouble), plain = results("reference", dtype),
                 found = results("chunked_cuda", dtype);
      const double floor = dtype == at::kFloat ? 1e-6 : dtype == at::kHalf ? 0x1p-9 : 0x1p-6;
      for (size_t i = 0; i < truth.size(); ++i) {
        const double own = (plain[i] - truth[i]).norm().item<double>();
        EXPECT_LE((found[i] - truth[i]).norm().item<double>(),
                  2 * own + floor * truth[i].norm().item<double>())
            << name << " " << c10::toString(dtype) << " " << i << ", reference: " << own;
      }
    }
}

TEST_F(CudaDelta, GivesMeansOfOnesWithNearKeys) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat})
    expect_means_of_ones({"fused_cuda", "chunked_cuda"}, dtype, at::kCUDA);
}

TEST_F(CudaDelta, NanAmongGatesIsWhereTheDefinitionHasIt) {
  for (at::ScalarType dtype : kDtypes) {
    expect_nan_where_defined({"fused_cuda", "hopper_cuda", "chunked_cuda"}, dtype, at::kCUDA);
    expect_nan_in_streams(dtype, at::kCUDA);
  }
}

// Prompts in whole chunks, from a state and to it, and single tokens behind each.
TEST_F(CudaDelta, PromptsInBfloat16GiveWhatTheReferenceGives) {
  for (const char* name : kCorrectedOrGated)
    for (int64_t D : {24, 64, 128}) {
      constexpr int64_t T = 260;
      const Case c{.H = 4,
                   .G = 2,
                   .T = T,
                   .S = T,
                   .D = D,
                   .E = D,
                   .dtype = at::kBFloat16,
                   .device = at::kCUDA,
                   .seed = uint64_t(D),
                   .padded = D == 64,
                   .gradients = false};
      const Spec spec = find(name).spec;
      const Trial t = trial(spec, c);
      State state = make_state(spec, {c.B, c.G, D, D}, c.dtype, 64, at::kCUDA);
      std::vector<at::Tensor> results;
      int64_t from = 0;
      for (int64_t to : {100L, 101L, 102L, 230L, 240L, T}) {
        results.push_back(step(state, tokens(t.in, from, to)));
        from = to;
      }
      const Verdict v = judge(t, {at::cat(results, 2), {}});
      EXPECT_TRUE(v.ok()) << name << " " << v.worst()->of << ": " << v.worst()->error
                          << ", allowed " << v.worst()->allowed << ", on " << text(c);
    }
}

}  // namespace
}  // namespace horner::attn
