// The sums N and W of attention in linear time, and the corrected values of the delta rule: what
// the executions through a state run on kernels. Forward and backward, as autograd.h takes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "attn/spec.h"

namespace horner::attn::exec {

// How the tokens are cut: chunks of C tokens, in segments of `length` tokens. A task is a segment.
struct Cut {
  int C;
  int64_t segments, length;
};

// What the kernels need besides the differentiable tensors.
struct ChunkJob {
  Orders orders;
  int64_t D;
  Cut cut;
  double scale;
  at::Tensor keep, begins;
  bool wanted, in_place;
  bool strict = false;  // a query does not see the key of its own token
};

// All but q, k and v may be undefined. `decay`: running sums of the log gates [B, G, T];
// `channels`: the log gates of each channel [B, G, T, width]; both in double.
struct ChunkTensors {
  at::Tensor q, k, v, decay, channels, centre, S, z;

  static auto fields(auto& x) {
    return std::array{&x.q, &x.k, &x.v, &x.decay, &x.channels, &x.centre, &x.S, &x.z};
  }
};

struct ChunkResult {
  at::Tensor N, W, S, z;    // S and z: the last state, [B, G, F, E] and [B, G, F]
  at::Tensor all_S, all_z;  // [B, G, segments + 1, F, E], [.., F]; of `channels`: the last state

  static auto outputs(auto& r) { return std::array{&r.N, &r.W, &r.S, &r.z}; }
  static auto saved(auto& r) { return std::array{&r.all_S, &r.all_z}; }
};

// The delta rule: u_t = share_t (v_t - what the tokens before t and the state S give for k_t).
struct DeltaTensors {
  at::Tensor k, v, share, decay, channels, S;

  static auto fields(auto& x) {
    return std::array{&x.k, &x.v, &x.share, &x.decay, &x.channels, &x.S};
  }
};
struct DeltaResult {
  at::Tensor u, rest;  // rest: u before it is multiplied by the share

  static auto outputs(auto& r) { return std::array{&r.u}; }
  static auto saved(auto& r) { return std::array{&r.rest}; }
};

template <class R>
ChunkResult chunk_sums(const ChunkJob&, const ChunkTensors&, bool for_backward);
template <class R>
ChunkTensors chunk_sums_backward(const ChunkJob&, const ChunkTensors&, const ChunkResult&,
                                 const ChunkResult& grads);
// Of x.rest, which holds the values, and x.u.
template <class R>
void solve_chunks(const ChunkJob&, const DeltaTensors&, const DeltaResult&);

// The same with `channels`.
template <class R>
ChunkResult channel_sums(const ChunkJob&, const ChunkTensors&, bool for_backward);
template <class R>
ChunkTensors channel_sums_backward(const ChunkJob&, const ChunkTensors&, const ChunkResult&,
                                   const ChunkResult& grads);
template <class R>
void solve_channels(const ChunkJob&, const DeltaTensors&, const DeltaResult&);

template <class R>
DeltaResult delta_values(const ChunkJob&, const DeltaTensors&, bool for_backward);
template <class R>
DeltaTensors delta_values_backward(const ChunkJob&, const DeltaTensors&, const DeltaResult&,
                                   const DeltaResult& grads);

// A backward pass in double, from tensors in float32. The gradient of a decay is a running sum of
// differences between what queries and keys take from the state. In float32 the two would be
// rounded apart, and the running sum would drift.
template <class Job, class Tensors, class Result,
          Tensors (*backward)(const Job&, const Tensors&, const Result&, const Result&)>
Tensors in_double(const Job& job, const Tensors& x, const Result& r, const Result& grads) {
  const auto convert = [](const auto& fields) {
    for (at::Tensor* y : fields)
      if (y->defined()) *y = y->to(at::kDouble);
  };
  Tensors exact = x;
  Result saved = r, given = grads;
  convert(Tensors::fields(exact));
  convert(Result::saved(saved)), convert(Result::outputs(given));
  Tensors d = backward(job, exact, saved, given);
  const auto inputs = Tensors::fields(x);
  for (size_t i = 0; i < inputs.size(); ++i)
    if (at::Tensor* y = Tensors::fields(d)[i]; y->defined()) *y = y->to(inputs[i]->scalar_type());
  return d;
}

}  // namespace horner::attn::exec
