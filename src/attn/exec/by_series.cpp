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

// How many keys each of the last T tokens sees: [1 or B, 1, T, 1].
static at::Tensor counted(const Inputs& in, const Carry* before) {
  const int64_t S = in.k.size(2), T = in.q.size(2);
  const auto exact = in.k.options().dtype(at::kDouble);
  const at::Tensor n = in.keep.defined() ? in.keep.to(at::kDouble).cumsum(1)
                                         : at::arange(1, S + 1, exact).unsqueeze(0);
  const bool follows = before && before->count.defined();
  const at::Tensor all = follows ? n + before->count.unsqueeze(1) : n;
  return all.narrow(1, S - T, T).view({-1, 1, T, 1});
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
  if (T < S) x.q = at::constant_pad_nd(x.q, {0, 0, S - T, 0});  // unused queries
  SeriesJob job{facts(spec.weight).orders.value(), scale_factor(spec, in),
                at::ones({B, 1, S, 1}, x.k.options()), after != nullptr};
  if (keep.defined()) {
    const at::Tensor hidden = keep.logical_not().view({B, 1, S, 1});
    x.k = x.k.masked_fill(hidden, 0), x.v = x.v.masked_fill(hidden, 0);
    job.seen = job.seen.masked_fill(hidden, 0);
  }
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
  if (near) sums = near->with(sums, in.q, counted(in, before));
  if (after) {
    after->S = r.S.narrow(3, 0, E), after->z = r.S.select(3, E);
    if (logs.defined()) {
      const bool follows = before && before->decay.defined();
      after->decay = follows ? before->decay + logs.sum(2) : logs.sum(2);
    }
    if (near) near->leave(*after);
  }
  for (at::Tensor* y : {&sums.N, &sums.W, &sums.shift, &sums.far})
    if (y->defined()) *y = y->to(wide(in.q.scalar_type()));
  return sums;
}

std::string why_no_series(const Spec& spec) {
  if (const std::string reason = why_no_state(spec); !reason.empty()) return reason;
  if (is<ChannelGate>(spec.decay)) return "gates of channels have kernels only";
  if (spec.centred || spec.less_log_count) return "its scores depend on all keys before them";
  if (!is<Flat>(spec.sharpness)) return "its temperature depends on the number of keys";
  if (is<CumulativeGate>(spec.denominator)) return "its denominator is a sum over all keys";
  return "";
}

at::Tensor attend_by_series(const Spec& spec, const Inputs& in, const Carry& before, Carry& after) {
  Sums sums = sums_by_series(spec, in, &before, &after);
  const at::Tensor count = counted(in, &before);
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
