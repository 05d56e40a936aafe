#include "attn/exec/features.h"

#include <ATen/ATen.h>

#include <cmath>

#include "attn/inputs.h"
#include "core/check.h"

namespace horner::attn::exec {

static double choose(double n, int k) {
  double c = 1;
  for (int i = 1; i <= k; ++i) c = c * (n - k + i) / i;
  return c;
}

// All monomials of degree n of x, from those of degree n - 1, which stand in the order of their
// last variable: x_i takes those that use no variable after i, a prefix.
static at::Tensor next_degree(const at::Tensor& x, const at::Tensor& previous, int n) {
  std::vector<at::Tensor> parts;
  for (int64_t i = 0; i < x.size(-1); ++i) {
    const int64_t prefix = std::llround(choose(double(i) + n - 1, n - 1));
    parts.push_back(x.narrow(-1, i, 1) * previous.narrow(-1, 0, prefix));
  }
  return at::cat(parts, -1);
}

// 1/a! of the same monomials, in the same order.
struct Factorials {
  std::vector<double> inverse{1};
  std::vector<int> last_power{0};  // the exponent of the last variable

  void next_degree(int64_t D, int n) {
    Factorials next{{}, {}};
    for (int64_t i = 0; i < D; ++i) {
      const int64_t fresh = i == 0 ? 0 : std::llround(choose(double(i) + n - 2, n - 1));
      const int64_t prefix = std::llround(choose(double(i) + n - 1, n - 1));
      for (int64_t j = 0; j < prefix; ++j) {
        const int power = j < fresh || n == 1 ? 1 : last_power[j] + 1;
        next.inverse.push_back(inverse[j] / power);
        next.last_power.push_back(power);
      }
    }
    *this = std::move(next);
  }
};

// sum_{i <= n} x^i / i!
static at::Tensor series(int n, const at::Tensor& x) {
  at::Tensor y = at::ones_like(x);
  for (; n > 0; --n) y = 1 + y * x / n;
  return y;
}

// The features of a weight: its orders one after the other. Those of the query take what the
// centre b makes of each order, e_N(x - b) = sum_n e_{N-n}(-b) x^n / n!; those of the key, 1/a!.
struct Features {
  const at::Tensor& x;  // [B, H, T, D]
  bool of_key;
  at::Tensor centre;  // b, [B, H, T, 1]; undefined for none

  at::Tensor operator()(Power w) const { return orders(w.degree, w.degree); }
  at::Tensor operator()(Taylor w) const { return orders(0, w.order); }
  template <class W>
  at::Tensor operator()(W) const {
    fail("no finite state");
  }

  at::Tensor orders(int from, int to) const {
    std::vector<at::Tensor> all;
    at::Tensor y = at::ones_like(x.narrow(-1, 0, 1));
    Factorials factorials;
    for (int n = 0; n <= to; ++n) {
      if (n > 0) y = next_degree(x, y, n), factorials.next_degree(x.size(-1), n);
      if (n < from) continue;
      all.push_back(y);
      if (of_key) all.back() = y * at::tensor(factorials.inverse, at::kDouble).to(y.options());
      if (centre.defined()) all.back() = y * series(to - n, -centre);
    }
    return at::cat(all, -1);
  }
};

Expanded expand(const Spec& spec, const Inputs& given) {
  Inputs in = one_key_head_each(given);
  for (at::Tensor* x : {&in.q, &in.k, &in.v}) *x = x->to(wide(x->scalar_type()));
  Expanded e;
  const at::Tensor keep = in.keep.defined() ? in.keep.to(in.q.scalar_type()).view({in.q.size(0), 1, -1, 1})
                                            : at::ones({1, 1, in.k.size(2), 1}, in.q.options());
  e.count = keep.cumsum(2);
  const at::Tensor k = mapped(spec.features, in.k, in.key_projection);
  const at::Tensor q = mapped(spec.features, in.q, in.query_projection) * scale(spec, in, e.count);
  at::Tensor centre;  // the mean score is the query times the mean key
  if (spec.centred) centre = (q * (k * keep).cumsum(2)).sum(-1, true) / e.count.clamp_min(1);
  e.q = std::visit(Features{q, false, centre}, spec.weight);
  e.k = std::visit(Features{k, true, {}}, spec.weight) * keep;
  const at::Tensor v = spec.input_gate ? in.v * in.input_gate.unsqueeze(-1) : in.v;
  e.v = at::cat({v, at::ones_like(v.narrow(-1, 0, 1))}, -1);
  e.decay = in.decay.defined() ? in.decay.to(v.scalar_type()) : at::zeros_like(v.select(-1, 0));
  return e;
}

at::Tensor finish_sums(const Spec& spec, const Inputs& given, const Expanded& e,
                       const at::Tensor& sums) {
  const Inputs in = one_key_head_each(given);
  const int64_t E = sums.size(-1) - 1;
  Sums out{sums.narrow(-1, 0, E), sums.narrow(-1, E, 1), at::zeros({1}, sums.options()), e.count, {}};
  if (is<CumulativeGate>(spec.denominator)) {
    at::Tensor share = in.denominator_gate.exp().unsqueeze(-1);
    if (in.keep.defined()) share = share * in.keep.view({in.q.size(0), 1, -1, 1});
    out.gates = share.cumsum(2);
  }
  return finish(spec, in, out);
}

struct FeatureCount {
  double D;

  double operator()(Power w) const { return choose(D + w.degree - 1, w.degree); }
  double operator()(Taylor w) const { return choose(D + w.order, w.order); }
  template <class W>
  double operator()(W) const {
    return INFINITY;
  }
};

double feature_count(const Spec& spec, int64_t D) {
  if (spec.clamp != kNoClamp) return INFINITY;
  const auto* projected = std::get_if<Project>(&spec.features);
  return std::visit(FeatureCount{double(projected ? projected->dim : D)}, spec.weight);
}

std::string why_no_state(const Spec& spec, const Inputs& in) {
  constexpr double kMost = 2e5;
  if (spec.clamp != kNoClamp) return "a clamped score has no finite state";
  const double F = feature_count(spec, in.q.size(-1));
  if (F == INFINITY) return "its weight has no finite state";
  if (F > kMost) return "its state would have too many features at this head dimension";
  if (is<Adaptive>(spec.sharpness)) return "its temperature needs the whole row";
  if (!is<Causal>(spec.mask)) return "only a causal mask has a running state";
  if (in.q.size(2) != in.k.size(2)) return "it needs as many keys as queries";
  if (in.cu_seqlens.defined()) return "it takes no packed sequences";
  return "";
}

}  // namespace horner::attn::exec
