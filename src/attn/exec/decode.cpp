// A State as the problem of the decode kernels.
#include "attn/exec/decode.h"

#include <ATen/ATen.h>

#include "attn/exec/cpu.h"
#include "attn/exec/decode_cuda.h"
#include "attn/exec/isa.h"
#include "attn/parallel.h"

namespace horner::attn::exec {

using kernels::Decode;

template <class R>
static const kernels::DecodeKernels<R>& kernels_for() {
  return *std::get<const kernels::DecodeKernels<R>*>(isa().states);
}

template <class R>
static Decode<R> problem(const State& s) {
  Decode<R> c{};
  c.B = s.shape.B, c.G = s.shape.G, c.D = key_channels(s);
  c.width = s.recent.k.size(3), c.E = s.recent.v.size(3);
  c.weight = one_score<R>(s.spec.weight), c.clamp = R(s.spec.clamp);
  c.softcap = R(s.spec.softcap), c.first_keys = reach(s.spec.mask).first;
  const auto words = [](const at::Tensor& x) {
    return static_cast<const uint16_t*>(x.const_data_ptr());
  };
  if (s.recent.k.scalar_type() == at::kBFloat16)
    c.k16 = words(s.recent.k), c.v16 = words(s.recent.v);
  else
    c.k = pointer<R>(s.recent.k), c.v = pointer<R>(s.recent.v);
  c.decay = pointer<double>(s.decay_sums);
  c.keep = reinterpret_cast<const uint8_t*>(pointer<bool>(s.recent.keep));
  c.room = s.room, c.to = s.held, c.near = near_keys(s.spec);
  c.count = pointer<double>(s.carry.count), c.keys = pointer<double>(s.carry.keys);
  if (!s.finite) return c;
  c.S = pointer<R>(s.carry.S), c.z = pointer<R>(s.carry.z), c.F = s.carry.z.size(2);
  const Orders o = facts(s.spec.weight).orders.value();
  c.first = o.first, c.last = o.last;
  return c;
}

enum class Task { apply_state, fold };
// In parallel where there is enough work for that.
template <class R>
static void run(const State& s, const Decode<R>& c, Task which) {
  if constexpr (std::is_same_v<R, float>)
    if (s.carry.count.is_cuda())
      return which == Task::apply_state ? apply_state_on_gpu(c, s.carry.count)
                                        : fold_on_gpu(c, s.carry.count);
  const auto task = which == Task::apply_state ? kernels_for<R>().forward : kernels_for<R>().fold;
  constexpr int64_t kWorth = 1 << 18;  // numbers to read
  const int64_t heads = c.B * c.G, each = c.F * c.E + (c.to - c.from) * (c.width + c.E);
  for_each_task<R>(
      heads, kernels_for<R>().scratch(c), [&](int64_t i, R* own) { task(c, i, own); },
      heads * each >= kWorth ? heads : 1);
}

template <class R>
static Sums apply(const State& s, const Inputs& in, const at::Tensor& q, const at::Tensor& factor,
                  const at::Tensor& centre) {
  const auto dtype = sums_dtype(s);
  const bool one_scale = factor.dim() == 0;
  const at::Tensor rows = padded(one_scale ? q : q * factor, dtype);
  const int64_t B = q.size(0), H = q.size(1);
  Decode<R> c = problem<R>(s);
  c.H = H;
  c.scale = one_scale ? factor.item<R>() : R(1);
  const at::Tensor N = at::empty({B, H, 1, c.E}, rows.options());
  const at::Tensor W = at::empty({B, H, 1, 1}, rows.options()), shift = at::empty_like(W);
  c.q = pointer<R>(rows), c.centre = pointer<R>(centre);
  c.gate = pointer<R>(s.recent.input_gate);
  const auto [first, end] = interval(s.spec.mask, s.tokens - 1, s.tokens, s.tokens);
  c.from = std::max<int64_t>(0, s.held - (end - first));
  c.N = pointer<R>(N), c.W = pointer<R>(W), c.shift = pointer<R>(shift);
  at::Tensor given;  // what near keys meet, where that is not the mapped query
  c.near_q = c.q, c.near_width = c.width, c.near_scale = c.scale;
  if (s.given_k.defined()) {
    given = padded(in.q, dtype);
    c.near_q = pointer<R>(given), c.near_k = pointer<R>(s.given_k);
    c.near_width = s.given_k.size(3);
    c.near_scale = R(scale_factor({.temperature = s.spec.temperature}, in));
  }
  const at::Tensor share =
      s.spec.near_share ? in.near_share.detach().to(dtype).sigmoid().contiguous() : at::Tensor();
  c.near_share = pointer<R>(share);
  run(s, c, Task::apply_state);
  return {N.narrow(-1, 0, s.shape.E), W, shift, {}, {}};
}

Sums apply_state(const State& s, const Inputs& in, const at::Tensor& q, const at::Tensor& factor,
                 const at::Tensor& centre) {
  return (sums_dtype(s) == at::kDouble ? apply<double> : apply<float>)(s, in, q, factor, centre);
}

template <class R>
static void fold_keys(const State& s, int64_t n) {
  Decode<R> c = problem<R>(s);
  c.H = c.G, c.to = n;  // no query
  run(s, c, Task::fold);
}

void fold(const State& s, int64_t n) {
  sums_dtype(s) == at::kDouble ? fold_keys<double>(s, n) : fold_keys<float>(s, n);
}

}  // namespace horner::attn::exec
