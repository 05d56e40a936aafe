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

// What a GPU has kernels for in streams: every kind of state, of cache and of gate.
inline const char* const kStreamsOnGpu[] = {"softmax",
                                            "softmax_window",
                                            "l2",
                                            "gated_decay",
                                            "forgetting",
                                            "alibi",
                                            "sink",
                                            "softcap",
                                            "softpick",
                                            "sigmoid",
                                            "stick_breaking",
                                            "streaming",
                                            "entmax15",
                                            "cumulative_gate",
                                            "ssmax",
                                            "delta_exp",
                                            "linear_elu",
                                            "linear_decay",
                                            "retention",
                                            "hedgehog",
                                            "taylor2",
                                            "taylor3",
                                            "taylor4",
                                            "centred_taylor2",
                                            "near_taylor2",
                                            "near_centred_taylor2",
                                            "lolcats",
                                            "gla",
                                            "hgrn2",
                                            "delta",
                                            "delta_negative",
                                            "gated_delta",
                                            "kda",
                                            "delta_taylor2"};

// A prompt, a second one, then tokens one by one, beyond the room of the first buffer or cache: by
// the rule of verify.h, as if all were attended to at once.
inline void expect_stream(const Spec& spec, Case c, const std::string& name) {
  State state = make_state(spec, {c.B, c.G, c.D, c.E}, c.dtype, kWaiting, c.device);
  c.T = c.S = state.finite ? 130 : 90, c.gradients = false;
  const Trial t = trial(spec, c);
  std::vector<int64_t> ends{40, 60};
  while (ends.back() < c.T) ends.push_back(ends.back() + 1);
  for (const Difference& d : judge(t, {stream(state, t.in, ends), {}}).differences)
    EXPECT_LE(d.error, d.allowed) << name << " " << d.of << ", " << text(c);
}

// KV caches of bfloat16 inputs: those in float32 take twice the bytes and give the same bits.
inline void expect_kept_as_given(const Spec& spec, at::Device device, const std::string& name) {
  const Case c{.T = 90,
               .S = 90,
               .D = 24,
               .E = 40,
               .dtype = at::kBFloat16,
               .device = device,
               .seed = name.size(),
               .padded = name.size() % 2 == 0};
  const Inputs in = random_inputs(spec, c);
  State as_given = make_state(spec, {c.B, c.G, c.D, c.E}, c.dtype, 0, device), as_sums = as_given;
  as_sums.kept = at::kFloat;
  EXPECT_EQ(as_given.kept, at::kBFloat16) << name;
  std::vector<int64_t> ends{23, 26, 50};
  while (ends.back() < c.T) ends.push_back(ends.back() + 1);
  for (at::Tensor* x : {&as_sums.carry.count, &as_sums.carry.keys, &as_sums.carry.gates})
    if (x->defined()) *x = x->clone();
  EXPECT_TRUE(at::equal(stream(as_given, in, ends), stream(as_sums, in, ends))) << name;
  for (at::Tensor Inputs::* x : {&Inputs::k, &Inputs::v})
    EXPECT_EQ(2 * (as_given.recent.*x).nbytes(), (as_sums.recent.*x).nbytes()) << name;
}

inline Case small(uint64_t seed) {
  return {.T = 53, .S = 53, .D = 5, .E = 6, .dtype = at::kDouble, .seed = seed};
}

}  // namespace horner::attn
