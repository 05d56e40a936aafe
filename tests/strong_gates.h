// Gates down to e^-20 a token, and one of 0: what they leave is 0, and nothing overflows. Outputs
// and gradients, those of the gates too, beside the reference's own error.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "attn/attend.h"
#include "attn/catalog.h"
#include "attn/inputs.h"
#include "instruments/verify.h"

namespace horner::attn {

// The output and the gradients of all inputs that have one, in double, of inputs rounded to
// `dtype`.
inline std::vector<std::pair<std::string, at::Tensor>> results_of(const Spec& spec, Inputs x,
                                                                  const char* execution,
                                                                  at::ScalarType dtype,
                                                                  at::ScalarType type) {
  for (const Input& i : input_table())
    if (at::Tensor& y = x.*i.at; y.defined() && has_gradient(i))
      y = y.detach().to(dtype).to(type).clone().requires_grad_();
  const at::Tensor o = attend(spec, x, execution);
  o.backward((o.detach().sin() + 1).to(dtype).to(type));
  std::vector<std::pair<std::string, at::Tensor>> all{{"output", o.detach().to(at::kDouble)}};
  for (const Input& i : input_table())
    if (const at::Tensor& y = x.*i.at; y.defined() && y.grad().defined())
      all.emplace_back("d " + std::string(i.name), y.grad().to(at::kDouble));
  return all;
}

inline void expect_strong_gates_are_right(const char* execution, at::ScalarType dtype,
                                          at::Device device, int64_t channels) {
  for (const char* name : {"gated_delta", "gla", "hgrn2", "kda"}) {
    const Spec spec = find(name).spec;
    Inputs in = instruments::random_inputs(spec, {.B = 1,
                                                  .H = 2,
                                                  .G = 1,
                                                  .T = 200,
                                                  .S = 200,
                                                  .D = channels,
                                                  .E = channels,
                                                  .dtype = dtype,
                                                  .device = device});
    at::Tensor& logs = in.decay.defined() ? in.decay : in.channel_decay;
    logs = (logs * 20).clamp_min(-20).slice(2, 0, 150);
    logs = at::cat({logs, at::full_like(logs.slice(2, 0, 1), -INFINITY), logs.slice(2, 0, 49)}, 2);
    const auto truth = results_of(spec, in, "reference", dtype, at::kDouble),
               plain = results_of(spec, in, "reference", dtype, dtype),
               found = results_of(spec, in, execution, dtype, dtype);
    ASSERT_EQ(found.size(), truth.size()) << name;
    const double floor = dtype == at::kFloat ? 1e-6 : dtype == at::kHalf ? 0x1p-9 : 0x1p-6;
    for (size_t i = 0; i < truth.size(); ++i) {
      const auto& [of, right] = truth[i];
      const double own = (plain[i].second - right).norm().item<double>();
      EXPECT_LE((found[i].second - right).norm().item<double>(),
                2 * own + floor * right.norm().item<double>())
          << name << " " << c10::toString(dtype) << " " << of << ", reference: " << own;
      EXPECT_GT(right.norm().item<double>(), 0) << name << " " << of;
    }
  }
}

}  // namespace horner::attn
