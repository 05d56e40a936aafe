// Packed sequences whose numbers of keys are not those of their queries: every execution that runs
// them matches the reference, outputs and gradients. packing_test.py compares with each sequence
// alone.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "attn/catalog.h"
#include "core/check.h"
#include "instruments/verify.h"

namespace horner::attn {

using namespace instruments;
namespace {

const char* const kVariants[] = {"softmax",
                                 "softmax:mask=full",
                                 "softmax:mask=window(9)",
                                 "softmax_window",
                                 "l2",
                                 "taylor4",
                                 "sink",
                                 "bias",
                                 "gated",
                                 "entmax15",
                                 "stick_breaking",
                                 "ssmax",
                                 "by_count",
                                 "streaming",
                                 "softmax:mask=chunks(5)",
                                 "topk32",
                                 "centred_taylor4",
                                 "softmax:dropout=0.2"};

TEST(Packing, WithOtherNumbersOfKeysMatchesTheReference) {
  for (const char* name : kVariants)
    for (at::ScalarType dtype : {at::kFloat, at::kBFloat16})
      for (const auto& [T, S] : {std::pair(29, 37), std::pair(200, 330), std::pair(90, 40)})
        for (const bool padded : {false, true}) {
          const Case c{.T = T,
                       .S = S,
                       .D = 7,
                       .E = 5,
                       .dtype = dtype,
                       .seed = 3,
                       .padded = padded,
                       .packed = true};
          const Trial t = trial(find(name).spec, c);
          EXPECT_TRUE(t.in.cu_seqlens_k.defined());
          size_t ran = 0;
          for (const Execution* e : executions()) {
            const Verdict v = verify(t, *e);
            ran += v.why_not.empty();
            for (const Difference& d : v.differences)
              EXPECT_LE(d.error, d.allowed)
                  << name << " " << e->name << " " << d.of << " " << text(c);
          }
          EXPECT_EQ(ran, 2u) << name;  // fused_cpu and the reference
        }
}

TEST(Packing, OthersRefuseItWithTheReason) {
  const Spec spec = find("taylor2").spec;
  const Inputs in = random_inputs(spec, {.T = 29, .S = 37, .packed = true});
  for (const char* name : {"chunked", "recurrent"})
    EXPECT_NE(execution(name).why_not(spec, in).find("cu_seqlens_k"), std::string::npos) << name;
  const Spec decayed = find("linear_decay").spec;
  Inputs wrong = random_inputs(decayed, {.T = 37, .S = 37, .packed = true});
  wrong.cu_seqlens_k = wrong.cu_seqlens;
  EXPECT_THROW(attend(decayed, wrong), Error);
  Inputs other = in;
  other.cu_seqlens_k = at::tensor({0, 37}, at::kInt);
  EXPECT_THROW(attend(spec, other), Error);
  other.cu_seqlens = at::Tensor();
  EXPECT_THROW(attend(spec, other), Error);
}

}  // namespace
}  // namespace horner::attn
