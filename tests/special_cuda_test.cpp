// The special kernels of fused_cuda: dropout, masks that are not one interval, and packed sequences
// with numbers of keys of their own, against the reference, outputs and gradients. Without a GPU
// every test is skipped.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include "attn/catalog.h"
#include "attn/inputs.h"
#include "instruments/verify.h"

namespace horner::attn {

using namespace instruments;
namespace {

const at::ScalarType kDtypes[] = {at::kBFloat16, at::kHalf, at::kFloat};

class SpecialCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  }
  void TearDown() override { at::globalContext().setDeterministicAlgorithms(false, false); }

  // torch.use_deterministic_algorithms(True): no atomic additions, dq by a kernel of its own.
  static void be_deterministic(bool on) { at::globalContext().setDeterministicAlgorithms(on, on); }
};

void expect_right(const std::string& name, const Case& c) {
  const Spec spec = find(name).spec;
  const Trial t = trial(spec, c);
  const Verdict v = verify(t, execution("fused_cuda"));
  EXPECT_EQ(v.why_not, "") << name;
  for (const Difference& d : v.differences)
    EXPECT_LE(d.error, d.allowed) << name << " " << d.of << " " << text(c) << " "
                                  << dtype_name(c.dtype);
  for (const char* other : {"hopper_cuda", "chunked_cuda"})
    EXPECT_NE(execution(other).why_not(spec, t.in), "") << name;
}

const char* const kDropped[] = {
    "softmax:dropout=0.25",
    "softmax:dropout=0.9,mask=full",
    "taylor2:dropout=0.2",
    "taylor4:dropout=0.1",
    "centred_taylor4:dropout=0.1",
    "l2:dropout=0.3",
    "gated_decay:dropout=0.2",
    "linear_decay:dropout=0.2",
    "retention:dropout=0.2",
    "forgetting:dropout=0.2",
    "softmax1:dropout=0.5",
    "sink:dropout=0.1",
    "softcap:dropout=0.1",
    "bias:dropout=0.1",
    "gated:dropout=0.2",
    "sigmoid:dropout=0.2",
    "entmax15:dropout=0.2",
    "topk8:dropout=0.2",
    "sa_softmax:dropout=0.2",
    "ssmax:dropout=0.2",
    "rms:dropout=0.2",
    "streaming:dropout=0.2",
    "prefix_lm:dropout=0.2",
    "softmax_window:dropout=0.2",
    "by_count:dropout=0.2",
    "linear_elu:dropout=0.2",
    "cumulative_gate:dropout=0.2",
    "clamped_sum:dropout=0.25",
    "alibi:dropout=0.2",
    "softpick:dropout=0.5",
    "stick_breaking:dropout=0.2",
    "near_taylor2:dropout=0.2",
    "lolcats:no_near_share,dropout=0.2",
};

TEST_F(SpecialCuda, DropoutIsRight) {
  for (const char* name : kDropped)
    for (const at::ScalarType dtype : kDtypes)
      for (const Case& c : standard_cases(dtype, at::kCUDA))
        if (c.T <= 200) expect_right(name, c);
}

// The first keys, and those of a prefix, of every stage that has code for masks.
const char* const kVariants[] = {"softmax", "taylor2",  "taylor4",  "l2",
                                 "sigmoid", "entmax15", "topk8",    "sa_softmax",
                                 "ssmax",   "by_count", "gated",    "adaptive_temperature",
                                 "bias",    "sink",     "softcap",  "cumulative_gate_count",
                                 "taylor3", "asentmax", "softmax1", "centred_taylor4",
                                 "rms",     "relu_l2",  "softpick", "stick_breaking"};
const char* const kMasks[] = {"streaming(first=4,size=20)", "streaming(first=70,size=33)",
                              "prefix"};

TEST_F(SpecialCuda, MasksOfMoreThanOneIntervalAreRight) {
  for (const char* variant : kVariants)
    for (const char* mask : kMasks)
      for (const at::ScalarType dtype : kDtypes)
        for (const Case& c : standard_cases(dtype, at::kCUDA)) {
          if (c.T > 200) continue;
          expect_right(std::string(variant) + ":mask=" + mask, c);
        }
}

// Blocks that skip the tiles between the first keys and the last.
TEST_F(SpecialCuda, SkippedTilesAreRight) {
  for (const bool deterministic : {false, true}) {
    be_deterministic(deterministic);
    for (const char* name :
         {"softmax:mask=streaming(first=4,size=64)", "softmax:mask=streaming(first=100,size=64)",
          "taylor2:mask=streaming(first=4,size=64),dropout=0.2",
          "gated_decay:mask=streaming(first=4,size=100)", "prefix_lm"})
      for (const at::ScalarType dtype : kDtypes)
        for (const int64_t D : {64, 128, 256})
          for (const bool packed : {false, true})
            expect_right(name, {.B = packed ? 1 : 2,
                                .H = 2,
                                .G = 1,
                                .T = 700,
                                .S = 700,
                                .D = D,
                                .E = D,
                                .dtype = dtype,
                                .device = at::kCUDA,
                                .seed = 4,
                                .packed = packed});
  }
}

TEST_F(SpecialCuda, EveryWidthOfHeadsIsRight) {
  for (const bool deterministic : {false, true}) {
    be_deterministic(deterministic);
    for (const char* name : {"softmax:dropout=0.25", "taylor4:dropout=0.1", "entmax15:dropout=0.2",
                             "gated_decay:dropout=0.2", "l2:dropout=0.2"})
      for (const at::ScalarType dtype : kDtypes)
        for (const int64_t D : {33, 64, 80, 128, 160, 256})
          expect_right(name, {.T = 150,
                              .S = 170,
                              .D = D,
                              .E = 64 + D / 2,
                              .dtype = dtype,
                              .device = at::kCUDA,
                              .seed = 2});
  }
}

TEST_F(SpecialCuda, OtherNumbersOfKeysAreRight) {
  for (const char* name : {"softmax",
                           "softmax:mask=full",
                           "softmax:mask=window(9)",
                           "softmax:mask=window(2,ahead=2)",
                           "softmax_window",
                           "l2",
                           "taylor4",
                           "sink",
                           "bias",
                           "gated",
                           "entmax15",
                           "ssmax",
                           "by_count",
                           "softpick",
                           "stick_breaking",
                           "streaming",
                           "softmax:mask=streaming(first=3,size=9)",
                           "softmax:mask=chunks(5)",
                           "topk32",
                           "centred_taylor4",
                           "softmax:dropout=0.2"})
    for (const at::ScalarType dtype : kDtypes)
      for (const auto& [T, S] : {std::pair(29, 37), std::pair(200, 330), std::pair(90, 40)})
        for (const bool padded : {false, true})
          for (const bool deterministic : {false, true}) {
            be_deterministic(deterministic);
            expect_right(name, {.T = T,
                                .S = S,
                                .D = 40,
                                .E = 24,
                                .dtype = dtype,
                                .device = at::kCUDA,
                                .seed = 3,
                                .padded = padded,
                                .packed = true});
          }
}

// Those of the weights before dropout.
TEST_F(SpecialCuda, StatisticsAreThoseOfTheReferenceInDouble) {
  for (const char* name : {"softmax:dropout=0.25", "streaming", "taylor2:mask=prefix",
                           "entmax15:mask=streaming(first=4,size=20)"})
    for (const Case& c : standard_cases(at::kFloat, at::kCUDA)) {
      if (c.T > 200 || c.hot) continue;
      const Spec spec = find(name).spec;
      const Inputs in = random_inputs(spec, c);
      Inputs exact = in;
      for (at::Tensor* x : {&exact.q, &exact.k, &exact.v}) *x = x->to(at::kDouble);
      Statistics found, truth;
      attend(spec, in, "fused_cuda", &found), attend(spec, exact, "reference", &truth);
      const std::pair<at::Tensor, at::Tensor> pairs[] = {{found.entropy, truth.entropy},
                                                         {found.largest, truth.largest},
                                                         {found.first, truth.first},
                                                         {found.negative, truth.negative}};
      for (const auto& [x, y] : pairs)
        EXPECT_LT((x - y).abs().max().item<double>(), 2e-5) << name << " " << text(c);
    }
}

TEST_F(SpecialCuda, TheSameBitsComeOutWhenTorchAsks) {
  be_deterministic(true);
  for (const char* name : {"softmax:dropout=0.25", "streaming", "prefix_lm"}) {
    const Spec spec = find(name).spec;
    std::vector<at::Tensor> first;
    for (int run = 0; run < 3; ++run) {
      Inputs in = random_inputs(
          spec,
          {.T = 700, .S = 700, .D = 64, .E = 64, .dtype = at::kBFloat16, .device = at::kCUDA});
      for (at::Tensor* x : {&in.q, &in.k, &in.v}) x->requires_grad_();
      const at::Tensor o = attend(spec, in);
      o.backward(at::ones_like(o));
      const std::vector<at::Tensor> now = {o.detach(), in.q.grad(), in.k.grad(), in.v.grad()};
      if (first.empty()) first = now;
      for (size_t i = 0; i < now.size(); ++i) EXPECT_TRUE(at::equal(now[i], first[i])) << name << i;
    }
  }
}

// Each special kernel once, for the sanitizers.
TEST_F(SpecialCuda, FewRunsAreFinite) {
  for (const char* name :
       {"softmax:dropout=0.25", "taylor4:mask=streaming(first=4,size=20)", "entmax15:mask=prefix"})
    for (const at::ScalarType dtype : kDtypes)
      for (const int64_t D : {64, 128}) {
        const Spec spec = find(name).spec;
        Inputs in = random_inputs(spec, {.B = 1,
                                         .H = 2,
                                         .G = 1,
                                         .T = 150,
                                         .S = 150,
                                         .D = D,
                                         .E = D,
                                         .dtype = dtype,
                                         .device = at::kCUDA});
        for (at::Tensor* x : {&in.q, &in.k, &in.v}) x->requires_grad_();
        const at::Tensor o = attend(spec, in, "fused_cuda");
        o.backward(at::ones_like(o));
        for (const at::Tensor& x : {o.detach(), in.q.grad(), in.k.grad(), in.v.grad()})
          EXPECT_TRUE(x.isfinite().all().item<bool>()) << name;
      }
}

}  // namespace
}  // namespace horner::attn
