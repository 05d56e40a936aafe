// The torch side that the CPU kernels share: masks as intervals, and the tensor code before a
// kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include "attn/attend.h"
#include "attn/kernels/cpu/fused/fused.h"

namespace horner::attn::exec {

// The keys that each query sees, without `keep`: intervals whose ends never decrease with t.
struct Intervals {
  at::Tensor lo, hi;    // [T], int32: lo <= s < hi; hi is [B, T] under a prefix mask
  at::Tensor from, to;  // [T]: from <= s < to <= lo, the first keys of a streaming mask

  Intervals(const Mask&, const Inputs&);
  kernels::SeenKeys pointers() const;
  Intervals before_last(int64_t n) const;  // of one interval for each query: without its n last
  // The same queries and the keys from <= s < from + S, counted from the first of these.
  Intervals of_keys(int64_t from, int64_t S) const;
  // The sums of x [..., S, C] over each query's keys: [..., T, C].
  at::Tensor sums(const at::Tensor& x) const;
};

// The inputs as the kernels take them, differentiable.
struct Prepared {
  Intervals seen;
  int64_t repeats;                   // query heads per key head
  at::Tensor ones;                   // [1 or B, 1, S, 1]: 0 for a key that `keep` hides
  at::Tensor count;                  // [1 or B, 1, T, 1]
  at::Tensor q, k;                   // f(q), f(k)
  at::Tensor factor;                 // of q.k: one number, or [1 or B, H, T, 1]
  std::optional<double> one_factor;  // of q.k, where it is one number
  at::Tensor decay;                  // [B, G, S], running sums in double, or undefined

  // `before` [B]: how many keys precede these; undefined for none. `ones` and `count` are left
  // undefined where the caller does not count keys and the factor does not need it; so is `factor`.
  Prepared(const Spec&, const Inputs&, const at::Tensor& before = {}, bool counted = true);
  // The keys are one block of those seen, of which each query sees `count`.
  Prepared(const Spec&, const Inputs&, const Intervals& seen, const at::Tensor& count);
  at::Tensor kept_keys() const;  // f(k), 0 for a key that `keep` hides
  // The sums of e^denominator_gate over the keys seen: [B, H, T, 1].
  at::Tensor gates(const Inputs&) const;

 private:
  void map(const Spec&, const Inputs&);
  void sharpen(const Spec&, const Inputs&);
};

// [B, G, S, C] -> [B, G, blocks, C, kTile], of 32-bit words: floats, or pairs of bfloat16.
at::Tensor transposed(const at::Tensor& x);
inline bool is_paired(const at::Tensor& x) {  // bfloat16, for the kernels of pairs
  return x.scalar_type() == at::kBFloat16;
}

// With channels of zeros up to a multiple of kernels::kPad, contiguous.
at::Tensor padded(const at::Tensor& x, at::ScalarType = at::kFloat);
c10::SymInt padded(const c10::SymInt& channels);

// The memory of a tensor; null for none.
template <class T>
T* pointer(const at::Tensor& x) {
  return x.defined() ? x.data_ptr<T>() : nullptr;
}

// A bias [B or 1, H or 1, T, S] in a problem of the kernels, and zeros for its gradient, undefined
// where none is needed.
template <class Problem>
void set_bias(Problem& f, const at::Tensor& bias) {
  if (!bias.defined()) return;
  f.bias = pointer<float>(bias);
  f.bias_head = bias.size(1) == 1 ? 0 : f.T * f.S;
  f.bias_batch = bias.size(0) == 1 ? 0 : bias.size(1) * f.T * f.S;
}
at::Tensor bias_gradient(const at::Tensor& bias);

// What a spec drops, by the seed of its inputs.
Dropout dropout(const Spec&, const Inputs&);

// The B * G key heads of a backward pass, in turns: those that add to the same gradient of a bias
// run one after another.
struct KeyHeads {
  int64_t B, G;
  bool one_batch, one_head;  // of the bias

  KeyHeads(int64_t B, int64_t G, const at::Tensor& d_bias)
      : B(B),
        G(G),
        one_batch(d_bias.defined() && d_bias.size(0) == 1),
        one_head(d_bias.defined() && d_bias.size(1) == 1) {}
  int64_t turns() const { return (one_batch ? B : 1) * (one_head ? G : 1); }
  int64_t at_once() const { return (one_batch ? 1 : B) * (one_head ? 1 : G); }
  int64_t head(int64_t turn, int64_t i) const {
    const int64_t heads = one_head ? 1 : G, g = one_head ? turn % G : i % heads;
    return (one_batch ? turn / (one_head ? G : 1) : i / heads) * G + g;
  }
};

}  // namespace horner::attn::exec
