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
#include "strong_gates.h"

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

TEST_F(CudaDelta, StrongGatesAreRight) {
  for (at::ScalarType dtype : kDtypes)
    expect_strong_gates_are_right("chunked_cuda", dtype, at::kCUDA, 64);
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
