// NaN among the gates of a decay, on any device: NaN in the rows that see a key before such a gate
// and in what they are part of, and elsewhere what there is without it, by the rule of verify.h.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "attn/catalog.h"
#include "attn/inputs.h"
#include "attn/stages.h"
#include "attn/state.h"
#include "instruments/verify.h"

namespace horner::attn {

struct NanGates {
  instruments::Trial clean;
  Inputs in;         // with NaN in all heads but the first
  at::Tensor rows;   // [B, H, T], bool: that see a key before one
  at::Tensor keys;   // [B, G, S]: that such a row sees there
  at::Tensor heads;  // [B, G, 1]: of such rows
  instruments::Results reference;
  std::string of;

  NanGates(const std::string& variant, const instruments::Case& c)
      : clean(instruments::trial(find(variant).spec, c)), in(clean.in) {
    of = variant + " " + dtype_name(c.dtype) + " " + instruments::text(c);
    at::Tensor& gates = in.decay.defined() ? in.decay : in.channel_decay;
    gates = gates.clone();
    const at::Tensor to = gates.dim() == 4 ? gates.select(3, 1) : gates;
    to[0][1][0].fill_(NAN);
    for (const int64_t j : {c.S / 3, c.S / 2}) to[1][0][j].fill_(NAN);
    for (const int64_t j : {int64_t(2), c.S - 1}) to[1][1][j].fill_(NAN);
    // Of every pair, the gates that are NaN in (s, t].
    const at::Tensor nan = gates.dim() == 4 ? gates.isnan().any(-1) : gates.isnan();  // [B, G, S]
    const at::Tensor n = nan.to(at::kLong).cumsum(-1);
    const at::Tensor own = at::arange(c.S - c.T, c.S, n.options()).clamp_min(0);
    at::Tensor pairs = n.index_select(2, own).unsqueeze(-1) > n.unsqueeze(2);
    pairs = pairs & (at::arange(c.S, n.options()) < own.unsqueeze(-1)) &
            seen(clean.spec.mask, in).hidden.logical_not();
    rows = pairs.any(-1).repeat_interleave(c.H / c.G, 1), keys = pairs.any(2);
    heads = keys.any(-1, true);
    reference = gradients_of("reference", at::kDouble);
    const at::Tensor none = reference.out.isnan(), all = rows.unsqueeze(-1).expand_as(none);
    // The system of the delta rule has 0 * NaN in other rows.
    const bool corrected = is<Delta>(clean.spec.values);
    expect_same(corrected ? none & all : none, all, "reference");
  }
  // The elements of a gradient that must be NaN, and those that may be.
  std::pair<at::Tensor, at::Tensor> places(const Input& i, const at::Tensor& x) const {
    const std::string shape = attn::shape(i, clean.spec);
    const auto all = [&](at::Tensor y) {
      while (y.dim() < x.dim()) y = y.unsqueeze(-1);
      return y.expand_as(x);
    };
    if (shape.starts_with("BHT")) return {all(rows), all(rows)};
    const bool of_pairs = i.at == &Inputs::k || i.at == &Inputs::v;
    if (shape.starts_with("BGS"))
      return {of_pairs ? all(keys) : at::zeros_like(all(keys)), all(heads.expand_as(keys))};
    const at::Tensor any = heads.any().expand_as(x);  // shared by all rows
    return {at::zeros_like(any), any};
  }
  instruments::Results gradients_of(const std::string& execution, at::ScalarType dtype) const {
    Inputs leaf = in;
    for (const Input& i : input_table())
      if (at::Tensor& x = leaf.*i.at; x.defined() && i.role != Role::mask)
        x = x.detach().to(dtype, false, true).requires_grad_(has_gradient(i));
    instruments::Results r{attend(clean.spec, leaf, execution), {}};
    if (!clean.direction.defined()) return r;
    r.out.backward(clean.direction.to(r.out.options()));
    r.out = r.out.detach();
    for (const auto& [input, truth] : clean.truth.gradients) {
      const at::Tensor& x = leaf.*input->at;
      r.gradients.emplace_back(input, x.grad().defined() ? x.grad() : at::zeros_like(x));
    }
    return r;
  }
  bool run(const std::string& execution) const {
    const Execution& e = attn::execution(execution);
    if (!e.why_not(clean.spec, in).empty()) return false;
    instruments::Results r = gradients_of(execution, clean.on.dtype);
    for (size_t n = 0; n < clean.truth.gradients.size(); ++n) {
      auto& [input, d] = r.gradients[n];
      auto [must, may] = places(*input, d);
      must = must & reference.gradients[n].second.isnan();  // not in the other channels of a gate
      const std::string what = execution + " d " + input->name;
      expect_same(d.isnan() & must, must, what + " where a row is NaN");
      expect_same(d.isnan() & ~may, at::zeros_like(may), what + " elsewhere");
      d = at::where(may, clean.truth.gradients[n].second.to(d.scalar_type()), d);
    }
    expect_right(r, execution);
    if (e.statistics && clean.on.padded) expect_statistics(execution);
    return true;
  }
  // As a stream of several steps: tokens up to each of `cuts`, then one by one.
  void stream(std::vector<int64_t> cuts, int64_t buffer) const {
    const auto& c = clean.on;
    State state = make_state(clean.spec, {c.B, c.G, c.D, c.E}, c.dtype, buffer, c.device);
    while (cuts.empty() || cuts.back() < c.T) cuts.push_back(cuts.empty() ? 1 : cuts.back() + 1);
    std::vector<at::Tensor> results;
    for (int64_t from = 0; const int64_t to : cuts)
      results.push_back(step(state, tokens(in, from, to))), from = to;
    expect_right({at::cat(results, 2), {}}, "a stream");
  }
  void expect_right(instruments::Results r, const std::string& by) const {
    expect_same(r.out.isnan(), rows.unsqueeze(-1).expand_as(r.out), by + " output");
    r.out = at::where(r.out.isnan(), clean.truth.out.to(r.out.scalar_type()), r.out);
    for (const instruments::Difference& d : judge(clean, r).differences)
      EXPECT_LE(d.error, d.allowed) << by << " " << d.of << ", " << of;
  }
  void expect_statistics(const std::string& execution) const {
    Statistics all, log;
    log.only_log_sum = true;
    attend(clean.spec, in, execution, &all);
    for (const at::Tensor& x : {all.entropy, all.largest, all.first, all.negative})
      expect_same(x.isnan(), rows, execution + " statistics");
    if (!is<Exp>(clean.spec.weight) || !is<NoKeys>(clean.spec.near)) return;
    attend(clean.spec, in, execution, &log);
    expect_same(log.log_sum.isnan(), rows, execution + " log of the sum");
  }
  void expect_same(const at::Tensor& found, const at::Tensor& wanted,
                   const std::string& what) const {
    EXPECT_EQ((found != wanted).sum().item<int64_t>(), 0)
        << what << ", " << of << ": NaN in " << found.sum().item<int64_t>() << " elements, not "
        << wanted.sum().item<int64_t>();
  }
};

// Every kind of decay and of row, masked, packed, padded, with fewer queries than keys.
inline void expect_nan_where_defined(const std::vector<std::string>& executions,
                                     at::ScalarType dtype, at::Device device) {
  using instruments::Case;
  const Case plain{.T = 70, .S = 70, .D = 6, .E = 5, .dtype = dtype, .device = device, .seed = 3};
  Case packed = plain, padded = plain, late = plain;
  packed.packed = padded.padded = true, late.T = 20, late.padded = true;
  for (const char* variant :
       {"linear_decay", "linear_mamba", "gated_decay", "forgetting", "forgetting:mask=window(9)",
        "linear_decay:mask=window(9)", "gated_decay:mask=streaming(4,20)",
        "forgetting:mask=chunks(16)", "l2:decay=token_gate", "sigmoid:decay=token_gate", "gla",
        "hgrn2", "gla:norm=none", "gated_delta", "kda", "gated_delta:norm=none", "kda:norm=none",
        "delta_taylor2:decay=token_gate", "near_taylor2:near=window(9),decay=token_gate"}) {
    int ran = 0;
    for (const Case& c : {packed, padded, late}) {
      const NanGates nan(variant, c);
      for (const std::string& e : executions) ran += nan.run(e);
    }
    EXPECT_GT(ran, 0) << variant;
  }
  Case chunks = plain;  // several
  chunks.T = chunks.S = 150, chunks.H = 2;
  for (const char* variant : {"linear_decay", "gla", "gated_delta"})
    EXPECT_TRUE(NanGates(variant, chunks).run("chunked_cuda"));
}

// Streams of sums and of keys: prompts, single tokens, and several after others.
inline void expect_nan_in_streams(at::ScalarType dtype, at::Device device) {
  for (const char* variant :
       {"linear_decay", "gated_decay", "forgetting", "forgetting:mask=window(9)", "gla",
        "gated_delta", "kda", "delta_taylor2:decay=token_gate",
        "near_taylor2:near=window(9),decay=token_gate"})
    for (const bool padded : {false, true}) {
      const NanGates nan(variant, {.T = 40,
                                   .S = 40,
                                   .D = 6,
                                   .E = 5,
                                   .dtype = dtype,
                                   .device = device,
                                   .seed = 5,
                                   .padded = padded,
                                   .gradients = false});
      for (const std::vector<int64_t>& cuts :
           std::vector<std::vector<int64_t>>{{}, {20, 36}, {1, 18, 19, 38}})
        for (const int64_t buffer : {0, 16}) nan.stream(cuts, buffer);
    }
  for (const char* variant : {"gla", "gated_delta", "kda"})  // prompts of whole chunks
    NanGates(variant, {.T = 240, .S = 240, .dtype = dtype, .device = device, .gradients = false})
        .stream({70, 150, 238}, 16);
}

}  // namespace horner::attn
