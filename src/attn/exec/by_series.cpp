#include "attn/exec/by_series.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>

#include "attn/exec/chunked.h"
#include "attn/exec/cpu.h"
#include "attn/exec/near.h"
#include "attn/exec/series.h"
#include "attn/plan.h"

namespace horner::attn::exec {

// How many keys each of the last T tokens sees: [1 or B, 1, T, 1], in double.
static at::Tensor counted(const Spec& spec, const Inputs& in, const Carry* before) {
  const KeysSeen keys = keys_seen(spec.mask, in);
  const at::Tensor n = in.keep.defined()
                           ? sums_over_keys(keys, in.keep.view({-1, 1, in.k.size(2), 1}))
                           : (keys.hi - keys.lo).to(at::kDouble).view({1, 1, -1, 1});
  return before && before->count.defined() ? n + before->count.view({-1, 1, 1, 1}) : n;
}

// The sums of the keys of the series up to each of the last T tokens, and after those before it:
// [B, G, T, D]; the mean of its scores with them, [B, H, T, 1]. q: of those tokens.
static std::pair<at::Tensor, at::Tensor> mean_scores(const Spec& spec, const Inputs& in,
                                                     const SeriesJob& job, const SeriesTensors& x,
                                                     const Carry* before) {
  const KeysSeen seen = keys_seen(spec.mask, in);
  at::Tensor keys = sums_over_keys(seen, x.k), count = sums_over_keys(seen, job.seen);
  if (before && before->count.defined()) count = count + before->count.view({-1, 1, 1, 1});
  if (before && before->near_keep.defined())
    count = count - before->near_keep.sum(1).view({-1, 1, 1, 1});
  if (before && before->keys.defined()) keys = keys + before->keys.unsqueeze(2);
  const at::Tensor mean = keys / count.clamp_min(1);
  const int64_t repeats = in.q.size(1) / in.k.size(1);
  return {keys, job.scale * (x.q * mean.repeat_interleave(repeats, 1)).sum(-1, true)};
}

Sums sums_by_series(const Spec& spec, const Inputs& in, const Carry* before, Carry* after) {
  const int64_t B = in.k.size(0), S = in.k.size(2), T = in.q.size(2), E = in.v.size(3);
  const at::Tensor gates = value_gates(spec, in, before ? before->count : at::Tensor());
  at::Tensor k = in.k, v = gates.defined() ? in.v * gates.unsqueeze(-1) : in.v, keep = in.keep;
  std::optional<Near> near;
  if (!is<NoKeys>(spec.near)) {
    near.emplace(spec, in, v, before);
    k = near->k, v = near->v, keep = near->keep;
  }
  const int64_t repeats = in.q.size(1) / in.k.size(1);
  SeriesTensors x{mapped(spec.features, in.q, in.query_projection).to(at::kDouble),
                  mapped(spec.features, k, in.key_projection, repeats).to(at::kDouble),
                  v.to(at::kDouble)};
  SeriesJob job{facts(spec.weight).orders.value(), scale_factor(spec, in),
                at::ones({B, 1, S, 1}, x.k.options()), after != nullptr};
  if (keep.defined()) {
    const at::Tensor hidden = keep.logical_not().view({B, 1, S, 1});
    x.k = x.k.masked_fill(hidden, 0), x.v = x.v.masked_fill(hidden, 0);
    job.seen = job.seen.masked_fill(hidden, 0);
  }
  at::Tensor keys, centre;
  if (spec.centred) std::tie(keys, centre) = mean_scores(spec, in, job, x, before);
  if (spec.less_log_count) {
    const at::Tensor log = log_count(counted(spec, in, before), in).unsqueeze(-1);
    centre = centre.defined() ? centre + log : log;
  }
  const auto front = [&](const at::Tensor& y) {  // unused queries for the first keys
    return T < S && y.defined() ? at::constant_pad_nd(y, {0, 0, S - T, 0}) : y;
  };
  x.q = front(x.q), x.centre = front(centre);
  if (is<Delta>(spec.values)) x.share = key_shares(spec, in, x.k);
  at::Tensor logs = log_gates(spec.decay, in);
  if (logs.defined())
    logs = logs.to(at::kDouble).clamp_min(2 * kNoDecayLeft).expand({B, in.k.size(1), S});
  x.logs = near ? near->logs : logs;
  if (before && before->S.defined())
    x.S = at::cat({before->S.narrow(3, 0, E), before->z.unsqueeze(-1)}, -1).to(at::kDouble);
  const SeriesResult r = series_sums(job, x);
  const at::Tensor N = r.N.narrow(2, S - T, T);
  Sums sums{N.narrow(3, 0, E), N.narrow(3, E, 1), at::zeros({1}, N.options()), {}, {}};
  if (near) sums = near->with(sums, in.q, counted(spec, in, before), centre);
  if (after) {
    after->S = r.S.narrow(3, 0, E), after->z = r.S.select(3, E);
    if (logs.defined()) {
      const bool follows = before && before->decay.defined();
      after->decay = follows ? before->decay + logs.sum(2) : logs.sum(2);
    }
    if (near) near->leave(*after);
    if (spec.centred) after->keys = keys.select(2, T - 1).contiguous();
  }
  for (at::Tensor* y : {&sums.N, &sums.W, &sums.shift, &sums.far})
    if (y->defined()) *y = y->to(wide(in.q.scalar_type()));
  return sums;
}

std::string why_no_series(const Spec& spec) {
  if (const std::string reason = why_no_state(spec); !reason.empty()) return reason;
  if (is<ChannelGate>(spec.decay)) return "gates of channels have kernels only";
  if (spec.less_log_count) return "its scores depend on the number of keys";
  if (!is<Flat>(spec.sharpness)) return "its temperature depends on the number of keys";
  if (is<CumulativeGate>(spec.denominator)) return "its denominator is a sum over all keys";
  return "";
}

at::Tensor attend_by_series(const Spec& spec, const Inputs& in, const Carry& before, Carry& after) {
  Sums sums = sums_by_series(spec, in, &before, &after);
  const at::Tensor count = counted(spec, in, &before);
  after.count = count.select(2, in.q.size(2) - 1).reshape({-1}).expand({in.k.size(0)});
  const auto dtype = sums_dtype(spec, in.q.scalar_type());
  after.S = padded(after.S, dtype), after.z = after.z.to(dtype);
  sums.count = count.to(wide(in.q.scalar_type()));
  return finish(spec, in, sums);
}

double work_by_series(const Spec& spec, const Inputs& in) {
  const int64_t D = mapped_channels(spec, in.q.size(3)), E = in.v.size(3) + 1;
  const double state = feature_count(spec, in.q.size(3)) * double(E), S = double(in.k.size(2));
  const auto C = double(series_chunk(in.k.size(0) * in.k.size(1), int64_t(state)));
  const double solved = is<Delta>(spec.values) ? 2 : 1;
  return S * (std::min(S, C) * double(D + E) + (S > C ? 2 * state : 0)) * solved;
}

}  // namespace horner::attn::exec
