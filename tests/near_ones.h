// Near keys and values of ones: every row is a mean of ones, whatever its gates have forgotten, and
// where the only key that it sees is a far one.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "attn/attend.h"
#include "attn/catalog.h"

namespace horner::attn {

inline void expect_means_of_ones(std::initializer_list<const char*> executions,
                                 at::ScalarType dtype, at::Device device) {
  const int64_t T = 8, D = 4;
  const auto on = at::TensorOptions(dtype).device(device);
  const at::Tensor q = at::zeros({1, 1, T, D}, on), k = at::zeros({1, 1, T, D}, on);
  q.select(3, 0).fill_(2), k.select(2, 3).select(1, 0).fill_(20);  // the score of key 3 is 20
  Inputs forgotten{.q = q, .k = k, .v = at::ones({1, 1, T, D}, on)}, far = forgotten;
  forgotten.decay = at::zeros({1, 1, T}, on.dtype(at::kFloat));
  forgotten.decay.select(2, 4).fill_(-30);
  far.keep = at::zeros({1, T}, on.dtype(at::kBool));
  far.keep.select(1, 0).fill_(true);
  const std::pair<const char*, Inputs> kCases[] = {
      {"near_taylor2:near=window(4),decay=token_gate", forgotten},
      {"near_taylor2:near=window(4)", far},
      {"near_taylor3:near=window(4)", far}};
  for (const auto& [variant, in] : kCases)
    for (const char* name : executions) {
      const Spec spec = find(variant).spec;
      const Execution& e = execution(name);
      ASSERT_EQ(e.why_not(spec, in), "") << name << ", " << variant;
      const at::Tensor o = e.run(spec, in, nullptr);
      EXPECT_LT((o - 1).abs().max().item<double>(), 1e-2) << name << ", " << variant << "\n" << o;
    }
}

}  // namespace horner::attn
