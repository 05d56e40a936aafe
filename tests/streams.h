// What the tests of chunks and of states share.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "attn/catalog.h"
#include "attn/inputs.h"
#include "attn/plan.h"
#include "attn/state.h"
#include "instruments/verify.h"

namespace horner::attn {

using namespace instruments;

// Whose window is shorter than the tests' sequences, as those of the catalog are not.
inline std::vector<Variant> near_rows() {
  std::vector<Variant> out;
  for (const char* name :
       {"near_taylor2:near=window(9),decay=token_gate", "near_taylor2:near=window(20),decay=slope",
        "linear_elu:near=window(3),decay=token_gate,input_gate=yes", "near_taylor3:near=window(9)",
        "near_centred_taylor1:near=window(1)", "near_centred_taylor3:near=window(9)",
        "near_centred_taylor2:near=window(9),decay=token_gate",
        "near_centred_taylor4:near=window(20),decay=slope",
        "elu_taylor2:near=window(7),centred=yes"})
    out.push_back(find(name));
  return out;
}

inline std::vector<Variant> with_state() {
  std::vector<Variant> out = near_rows();
  for (const Variant& v : variants())
    if (feature_count(v.spec, 5) < 5000) out.push_back(v);
  return out;
}

// Those that a state can step through.
inline std::vector<Variant> streams() {
  std::vector<Variant> out = near_rows();
  for (const Variant& v : variants())
    if (!sees_future(v.spec.mask) && !v.spec.bias &&
        (!why_no_state(v.spec).empty() || feature_count(v.spec, 5) < 5000))
      out.push_back(v);
  return out;
}

// As a decoder goes: a prompt, tokens one by one, a few at once.
inline at::Tensor stream(State& state, const Inputs& in, const std::vector<int64_t>& ends) {
  std::vector<at::Tensor> results;
  int64_t from = 0;
  for (int64_t to : ends) results.push_back(step(state, tokens(in, from, to))), from = to;
  return at::cat(results, 2);
}

inline StateShape shape_of(const Inputs& in) {
  return {in.k.size(0), in.k.size(1), in.k.size(3), in.v.size(3)};
}

inline double largest(const at::Tensor& x) {
  return x.numel() ? x.detach().abs().max().item<double>() : 0;
}

inline void expect_near(const at::Tensor& found, const at::Tensor& wanted, double tolerance,
                        const std::string& what) {
  ASSERT_EQ(found.sizes(), wanted.sizes()) << what;
  const double error = largest(found.to(at::kDouble) - wanted.to(at::kDouble));
  EXPECT_LE(error, tolerance * (1 + largest(wanted))) << what;
}

inline Case small(uint64_t seed) {
  return {.T = 53, .S = 53, .D = 5, .E = 6, .dtype = at::kDouble, .seed = seed};
}

}  // namespace horner::attn
