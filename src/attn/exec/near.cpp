#include "attn/exec/near.h"

#include <ATen/ATen.h>

#include <cmath>

#include "attn/exec/series.h"

namespace horner::attn::exec {

// With the tokens before them, of which there are n: at the beginning of a stream hidden ones.
static at::Tensor after(const at::Tensor& before, const at::Tensor& x, int64_t n, int64_t axis) {
  if (before.defined()) return at::cat({before.to(x.scalar_type()), x}, axis);
  std::vector<int64_t> shape = x.sizes().vec();
  shape[size_t(axis)] = n;
  return at::cat({at::zeros(shape, x.options()), x}, axis);
}

// Which of the packed sequences each token belongs to: [S], from 1 on.
static at::Tensor sequence_numbers(const Inputs& in) {
  const at::Tensor t = at::arange(in.k.size(2), in.k.options().dtype(at::kLong));
  if (!in.cu_seqlens.defined()) return at::ones_like(t);
  return at::searchsorted(in.cu_seqlens.to(at::kLong).contiguous(), t, /*out_int32=*/false,
                          /*right=*/true);
}

Near::Near(const Spec& spec, const Inputs& in, const at::Tensor& values, const Carry* before)
    : n_(std::get<Window>(spec.near).size) {
  const int64_t B = in.k.size(0), S = in.k.size(2);
  const Carry none;
  const Carry& last = before ? *before : none;
  Spec plain{.temperature = spec.temperature};
  if (is<Identity>(spec.features)) plain.scale = spec.scale;
  scale_ = scale_factor(plain, in);
  if (spec.near_share)
    share_ = in.near_share.to(wide(in.k.scalar_type())).sigmoid().view({-1, 1, 1});
  const at::Tensor seen =
      in.keep.defined() ? in.keep : at::ones({B, S}, in.k.options().dtype(at::kBool));
  all_k_ = after(last.near_k, in.k, n_, 2), all_v_ = after(last.near_v, values, n_, 2);
  all_keep_ = after(last.near_keep, seen, n_, 1);
  const at::Tensor own = sequence_numbers(in);
  sequence_ = at::cat({at::ones({n_}, own.options()), own});
  k = all_k_.narrow(2, 0, S), v = all_v_.narrow(2, 0, S);
  keep = all_keep_.narrow(1, 0, S).logical_and(sequence_.narrow(0, 0, S) == own).contiguous();
  if (const at::Tensor given = log_gates(spec.decay, in); given.defined()) {
    // a gate of 0 stays a number
    const at::Tensor own_logs = given.to(at::kDouble).clamp_min(2 * kNoDecayLeft);
    all_logs_ = after(last.near_decay, own_logs, n_, 2);
    sums_ = all_logs_.cumsum(2), logs = all_logs_.narrow(2, 0, S);
  }
}

void Near::leave(Carry& after) const {
  const int64_t from = all_k_.size(2) - n_;
  after.near_k = all_k_.narrow(2, from, n_).contiguous();
  after.near_v = all_v_.narrow(2, from, n_).to(wide(all_k_.scalar_type())).contiguous();
  after.near_keep = all_keep_.narrow(1, from, n_).contiguous();
  if (all_logs_.defined()) after.near_decay = all_logs_.narrow(2, from, n_).contiguous();
}

at::Tensor Near::decay_of_tokens() const {
  return sums_.select(2, sums_.size(2) - 1) - sums_.select(2, n_ - 1);
}

// Blocks of L queries and the n + L keys up to the last of them, those of query a being a < j <=
// a + n.
Sums Near::with(const Sums& far, const at::Tensor& q, const at::Tensor& count,
                const at::Tensor& centre) const {
  constexpr int64_t kLeast = 16;
  const int64_t B = q.size(0), H = q.size(1), G = all_k_.size(1), R = H / G, T = q.size(2);
  const int64_t L = std::min(std::max(n_, kLeast), std::max(T, kLeast)), m = (T + L - 1) / L;
  const auto dtype = far.N.scalar_type();
  if (B * H * T == 0) return {far.N, far.W, at::zeros({1}, far.N.options()), count, {}, count};
  const auto keys = [&](const at::Tensor& x,
                        int64_t axis) {  // [.., m, .., n + L] of the last n + T
    const int64_t late = x.size(axis) - n_ - T;
    std::vector<int64_t> shape = x.sizes().vec();
    shape[size_t(axis)] = m * L - T;
    const at::Tensor padded =
        at::cat({x.narrow(axis, late, n_ + T), at::zeros(shape, x.options())}, axis);
    return padded.unfold(axis, n_ + L, L);
  };
  const auto blocks = [&](const at::Tensor& x, at::ScalarType as) {
    // [B, H, T, C] -> [B, G, m, R * L, C]
    return at::constant_pad_nd(x.to(as), {0, 0, 0, m * L - T})
        .view({B, G, R, m, L, -1})
        .transpose(2, 3)
        .reshape({B, G, m, R * L, -1});
  };
  const auto rows = [&](const at::Tensor& x) {  // back
    return x.view({B, G, m, R, L, -1}).transpose(2, 3).reshape({B, H, m * L, -1}).narrow(2, 0, T);
  };
  at::Tensor x = at::matmul(blocks(q, dtype), keys(all_k_.to(dtype), 2)) * scale_;
  if (centre.defined()) x = x - blocks(centre, dtype);

  const at::Tensor a = at::arange(L, sequence_.options()).unsqueeze(-1);
  const at::Tensor j = at::arange(n_ + L, sequence_.options());
  const at::Tensor last = at::constant_pad_nd(sequence_.narrow(0, sequence_.size(0) - T, T),
                                              {0, m * L - T});  // of the queries
  at::Tensor seen = keys(sequence_, 0).unsqueeze(1) == last.view({m, L, 1});
  seen = seen.logical_and(j > a).logical_and(j <= a + n_);                // [m, L, n + L]
  seen = seen.logical_and(keys(all_keep_, 1).unsqueeze(2)).unsqueeze(1);  // [B, 1, m, L, n + L]
  const at::Tensor hidden = seen.logical_not().repeat({1, 1, 1, R, 1});   // [B, 1, m, R * L, n + L]

  at::Tensor decay;  // the logs, of near keys and of far ones
  at::Tensor rest_decay;
  if (sums_.defined()) {
    const int64_t S = sums_.size(2) - n_;
    const at::Tensor queries = sums_.narrow(2, n_ + S - T, T);  // up to each of the T last tokens
    const auto each_head = [&](const at::Tensor& y) {
      return y.repeat_interleave(R, 1).unsqueeze(-1);
    };
    const at::Tensor before = keys(sums_, 2).unsqueeze(-2);  // [B, G, m, 1, n + L]
    decay = blocks(each_head(queries), at::kDouble) - before;
    decay = decay.masked_fill(hidden, -INFINITY).to(dtype);
    rest_decay = each_head(queries - sums_.narrow(2, S - T, T)).exp().to(dtype);
    if (!share_.defined()) x = x + decay;
  }

  const at::Tensor near = seen.sum(-1).view({B, 1, m * L, 1}).narrow(2, 0, T);
  const at::Tensor scores = share_.defined() ? x : x.detach();
  at::Tensor shift = rows(scores.masked_fill(hidden, -INFINITY).amax(-1, true));
  if (!share_.defined()) shift = at::where(near < count, shift.clamp_min(0), shift);
  shift = shift.masked_fill(shift == -INFINITY, 0);
  at::Tensor P = (x - blocks(shift, dtype)).masked_fill(hidden, -INFINITY).exp();
  at::Tensor rest = (-shift).exp().masked_fill(near >= count, 0);  // 0 * inf where none are far
  if (share_.defined()) {  // the largest score is part of the weights
    P = P * blocks(share_.to(dtype).expand({B, H, T, 1}), dtype);
    shift = at::zeros({1}, x.options()), rest = at::ones({1}, x.options());
  }
  if (share_.defined() && decay.defined()) P = P * decay.exp();
  if (decay.defined()) rest = rest * rest_decay;
  Sums all = far;
  all.N = rows(at::matmul(P, keys(all_v_.to(dtype), 2).transpose(-1, -2))) + far.N * rest;
  all.W = rows(P.sum(-1, true)) + far.W * rest;
  all.shift = shift, all.far = count - near;
  return all;
}

std::string why_not_followed(const Spec& spec) {
  const auto* cosine = std::get_if<Cosine>(&spec.features);
  if (is<Project>(spec.features) || is<Hedgehog>(spec.features))
    return "its near keys have not been mapped yet, and the map is an input";
  return cosine && cosine->over_heads ? "its near keys have not been mapped yet, and their map "
                                        "depends on the number of query heads"
                                      : "";
}

// The first m near keys become far ones.
static void retire(const Spec& spec, Carry& c, int64_t m) {
  if (m == 0) return;
  const int64_t B = c.near_k.size(0), E = c.near_v.size(3);
  const at::Tensor seen = c.near_keep.narrow(1, 0, m).view({B, 1, m, 1}).to(at::kDouble);
  const auto first = [&](const at::Tensor& x) { return x.narrow(2, 0, m).to(at::kDouble) * seen; };
  SeriesTensors x{{}, first(mapped(spec.features, c.near_k, {})), first(c.near_v)};
  x.q = at::zeros_like(x.k);
  if (c.near_decay.defined()) x.logs = c.near_decay.narrow(2, 0, m);
  x.S = at::cat({c.S.narrow(3, 0, E), c.z.unsqueeze(-1)}, -1).to(at::kDouble);
  if (c.keys.defined()) c.keys = c.keys + x.k.sum(2);
  const SeriesResult r = series_sums({facts(spec.weight).orders.value(), 1, seen}, x);
  c.S.narrow(3, 0, E).copy_(r.S.narrow(3, 0, E)), c.z.copy_(r.S.select(3, E));
}

void follow_near(const Spec& spec, Carry& first, const Carry& later, int64_t tokens) {
  const int64_t n = first.near_k.size(2), m = std::min(n, tokens);
  retire(spec, first, m);
  const auto join = [&](at::Tensor& x, const at::Tensor& y, int64_t axis) {
    x = at::cat({x.narrow(axis, m, n - m), y.narrow(axis, n - m, m)}, axis);
  };
  join(first.near_k, later.near_k, 2), join(first.near_v, later.near_v, 2);
  join(first.near_keep, later.near_keep, 1);
  if (first.near_decay.defined()) join(first.near_decay, later.near_decay, 2);
}

}  // namespace horner::attn::exec
