#include "attn/exec/delta_cuda.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>

#include "attn/exec/autograd.h"
#include "attn/exec/by_series.h"
#include "attn/exec/cuda.h"
#include "attn/exec/cuda_stream.h"
#include "attn/exec/delta_chunks_cuda.h"
#include "attn/exec/exec.h"
#include "attn/exec/features_cuda.h"
#include "attn/kernels/cuda/delta/chunks.h"
#include "attn/kernels/cuda/delta/tokens.h"

namespace horner::attn::exec {

namespace cuda = kernels::cuda;

namespace {

struct TokensJob {
  float scale;
};
// share and logs may be undefined. logs: of the gates, [B, G, T] or [B, G, T, D], in double.
struct TokensInputs {
  at::Tensor q, k, v, share, logs;

  static auto fields(auto& x) { return std::array{&x.q, &x.k, &x.v, &x.share, &x.logs}; }
};
struct TokensResult {
  at::Tensor N, rest;  // rest: u before it is multiplied by the share

  static auto outputs(auto& r) { return std::array{&r.N}; }
  static auto saved(auto& r) { return std::array{&r.rest}; }
};

cuda::Tokens problem(const TokensJob& job, const TokensInputs& x, const at::Tensor& gates) {
  cuda::Tokens p{};
  p.B = int(x.q.size(0)), p.H = int(x.q.size(1)), p.G = int(x.k.size(1)), p.T = int(x.q.size(2));
  p.D = int(x.q.size(3)), p.E = int(x.v.size(3));
  p.scale = job.scale;
  p.q = memory<float>(x.q), p.k = memory<float>(x.k), p.v = memory<float>(x.v);
  p.share = memory<float>(x.share), p.gates = memory<double>(gates);
  p.channels = gates.defined() && gates.dim() == 4;
  return p;
}
at::Tensor exp_of(const at::Tensor& logs) {
  return logs.defined() ? logs.exp() : logs;
}

TokensResult forward(const TokensJob& job, const TokensInputs& x, bool for_backward) {
  const at::Tensor gates = exp_of(x.logs);
  cuda::Tokens p = problem(job, x, gates);
  TokensResult r{at::empty({p.B, p.H, p.T, p.E}, x.q.options())};
  if (for_backward && p.share) r.rest = at::empty_like(x.v);
  p.N = memory<float>(r.N), p.rest = memory<float>(r.rest);
  cuda::tokens_forward(p, stream());
  return r;
}

TokensInputs backward(const TokensJob& job, const TokensInputs& x, const TokensResult& r,
                      const TokensResult& grads) {
  const at::Tensor gates = exp_of(x.logs), dN = grads.N.contiguous();
  cuda::Tokens p = problem(job, x, gates);
  TokensInputs d{at::empty_like(x.q), at::empty_like(x.k)};
  const at::Tensor du = at::empty_like(x.v);
  at::Tensor sums;
  if (p.gates) sums = at::empty(x.k.sizes(), x.logs.options());
  p.rest = memory<float>(r.rest), p.dN = memory<float>(dN), p.du = memory<float>(du);
  p.dq = memory<float>(d.q), p.dk = memory<float>(d.k), p.d_sums = memory<double>(sums);
  cuda::tokens_backward(p, stream());
  d.v = x.share.defined() ? x.share.unsqueeze(-1) * du : du;
  if (x.share.defined()) d.share = (du * r.rest).sum(-1);
  // A gate is part of the running sums of its own token and the later ones.
  if (p.gates) d.logs = (p.channels ? sums : sums.sum(-1)).flip(2).cumsum(2).flip(2);
  return d;
}

// What the kernels take: differentiable, and without the values of hidden keys.
struct Prepared {
  TokensJob job;
  TokensInputs x;

  Prepared(const Spec& spec, const Inputs& in, const at::Tensor& before = {}) {
    const int64_t repeats = in.q.size(1) / in.k.size(1), D = mapped_channels(spec, in.q.size(3));
    const auto rows = [&](const at::Tensor& y) {
      return y.narrow(-1, 0, D).to(at::kFloat).contiguous();
    };
    job.scale = float(scale_factor(spec, in));
    x.q = rows(mapped_on_gpu(spec.features, in.q, in.query_projection));
    x.k = rows(mapped_on_gpu(spec.features, in.k, in.key_projection, repeats));
    const at::Tensor gates = value_gates(spec, in, before);
    x.v = (gates.defined() ? in.v * gates.unsqueeze(-1) : in.v).to(at::kFloat).contiguous();
    if (in.keep.defined()) {
      const at::Tensor hidden = in.keep.logical_not().unsqueeze(1).unsqueeze(3);
      x.k = x.k.masked_fill(hidden, 0), x.v = x.v.masked_fill(hidden, 0);
    }
    if (is<Delta>(spec.values)) x.share = key_shares(spec, in, x.k).contiguous();
    x.logs = is<ChannelGate>(spec.decay) ? channel_logs(in) : log_gates(spec.decay, in);
    if (x.logs.defined()) x.logs = x.logs.to(at::kDouble).contiguous();
    const int64_t late = in.k.size(2) - in.q.size(2);  // keys before the first query
    if (late > 0) x.q = at::constant_pad_nd(x.q, {0, 0, late, 0});
  }
  // The sum of the weights is that of values 1.
  TokensInputs of_ones() const {
    TokensInputs ones = x;
    ones.v = at::ones({x.v.size(0), x.v.size(1), x.v.size(2), 1}, x.v.options());
    ones.share = at::Tensor();
    return ones;
  }
};

// Whether a weight or near keys have no kernels here.
bool has_series(const Spec& spec) {
  const auto* power = std::get_if<Power>(&spec.weight);
  return !power || power->degree != 1 || !is<NoKeys>(spec.near);
}

// 64 or 128, where the kernels in chunks run these inputs; else 0.
int64_t chunk_channels(const Spec& spec, const Inputs& in) {
  if (in.q.scalar_type() != at::kBFloat16 || has_series(spec)) return 0;
  const int64_t most = std::max(mapped_channels(spec, in.q.size(3)), in.v.size(3));
  const int64_t C = most <= 64 ? 64 : 128;
  if (most > C) return 0;
  const bool delta = is<Delta>(spec.values), channels = is<ChannelGate>(spec.decay) || !delta;
  const bool fits = has_room_for_chunks(C, channels, delta, in.q.device().index());
  return fits ? C : 0;
}

// N [B, H, S, C] in chunks, with queries for all keys; after `count` keys and a state, or none.
at::Tensor in_chunks(const Spec& spec, const Inputs& in, int64_t C, const at::Tensor& count = {},
                     const DeltaState& state = {}) {
  const int64_t repeats = in.q.size(1) / in.k.size(1), late = in.k.size(2) - in.q.size(2);
  const auto rows = [&](const at::Tensor& x, int64_t channels, int64_t before = 0) {
    const at::Tensor y = x.size(3) > channels ? x.narrow(3, 0, channels) : x;
    return channels == C && before == 0 ? y : at::constant_pad_nd(y, {0, C - channels, before, 0});
  };
  const auto each_head = [&](const at::Tensor& x) {
    return repeats == 1 ? x : x.repeat_interleave(repeats, 1);
  };
  const int64_t D = mapped_channels(spec, in.q.size(3));
  at::Tensor k = mapped_on_gpu(spec.features, in.k, in.key_projection, repeats), v = in.v;
  if (const at::Tensor by = value_gates(spec, in, count); by.defined())
    v = (v * by.unsqueeze(-1)).to(at::kBFloat16);
  if (in.keep.defined()) {
    const at::Tensor hidden = in.keep.logical_not().unsqueeze(1).unsqueeze(3);
    k = k.masked_fill(hidden, 0), v = v.masked_fill(hidden, 0);
  }
  const at::Tensor q = mapped_on_gpu(spec.features, in.q, in.query_projection);
  DeltaInputs x{laid_out(rows(q, D, late)), laid_out(each_head(rows(k, D))),
                laid_out(each_head(rows(v, in.v.size(3))))};
  const auto* delta = std::get_if<Delta>(&spec.values);
  DeltaGates own{{}, in.keep.defined() ? in.keep.contiguous() : in.keep};
  if (delta) x.beta = plain(each_head(in.beta));
  if (is<ChannelGate>(spec.decay)) {
    own.logs = gates(in.channel_decay.detach().amax(-1));
    const bool as_given = in.channel_decay.scalar_type() == at::kBFloat16;
    const at::Tensor logs = as_given ? in.channel_decay : in.channel_decay.to(at::kFloat);
    x.channel_logs = each_head(rows(logs, D)).contiguous();
  } else {
    const at::Tensor logs = log_gates(spec.decay, in);
    if (logs.defined()) own.logs = gates(logs.detach());
    if (delta && logs.defined()) x.logs = plain(each_head(logs));
    if (!delta)  // the kernels of gates of channels, all of a token alike
      x.channel_logs =
          logs.defined()
              ? each_head(logs.to(at::kFloat).unsqueeze(-1).expand({-1, -1, -1, C})).contiguous()
              : at::zeros_like(x.q);
  }
  return delta_in_chunks(x, scale_factor(spec, in), delta ? delta->most : 1, own, state);
}

// z after the tokens of x.
at::Tensor sum_of_keys(const TokensInputs& x, const at::Tensor& z) {
  at::Tensor k = x.k.to(at::kDouble), before = z.to(at::kDouble);
  if (x.logs.defined()) {
    const at::Tensor logs = x.logs.clamp_min(2 * kNoDecayLeft);
    const at::Tensor sums = (logs.dim() == 4 ? logs : logs.unsqueeze(-1)).cumsum(2);
    const at::Tensor last = sums.narrow(2, sums.size(2) - 1, 1);
    k = k * (last - sums).exp(), before = before * last.squeeze(2).exp();
  }
  return before + k.sum(2);
}

// N [B, H, T, E] is NaN from the first gate on that is, and so is the state after it.
void spoil(const at::Tensor& logs, const at::Tensor& N, const at::Tensor& S) {
  const at::Tensor nan = logs.dim() == 4 ? logs.isnan().any(-1) : logs.isnan();  // [B, G, T]
  const at::Tensor spoiled = nan.cumsum(2).gt(0), last = spoiled.select(2, spoiled.size(2) - 1);
  const int64_t repeats = N.size(1) / nan.size(1);
  N.masked_fill_(spoiled.repeat_interleave(repeats, 1).unsqueeze(-1), NAN);
  S.masked_fill_(last.view({S.size(0), S.size(1), 1, 1}), NAN);
}

// Whether the result depends on W. A norm's bias is not added where a row sees nothing.
bool needs_sum(const Spec& spec) {
  return is<Sum>(spec.denominator) || is<Layer>(spec.norm);
}

}  // namespace

std::pair<Spec, Inputs> with_forgetting(const Spec& given, const Inputs& inputs) {
  if (!inputs.cu_seqlens.defined()) return {given, inputs};
  // e^-128 is 0 in float32. Far below, the running sums of a chunk, which are floats, would lose
  // digits of the gates after it.
  constexpr double kForgets = -128;
  Spec spec = given;
  Inputs in = inputs;
  const at::Tensor begin = sequences(in).first;
  const at::Tensor first = begin == at::arange(begin.size(0), begin.options());  // [T]
  if (is<ChannelGate>(spec.decay)) {
    in.channel_decay = in.channel_decay.masked_fill(first.unsqueeze(-1), kForgets);
    return {spec, in};
  }
  at::Tensor logs = log_gates(spec.decay, in);
  if (!logs.defined())
    logs = at::zeros({in.k.size(0), in.k.size(1), in.k.size(2)}, in.k.options().dtype(at::kFloat));
  in.decay = logs.masked_fill(first, kForgets);
  spec.decay = TokenGate{};
  return {spec, in};
}

bool is_by_series(const Spec& spec, const Inputs& in) {
  if (has_other_sums(spec)) return has_series(spec);
  return chunk_channels(spec, in) == 0 ||
         needs_sum(spec);  // kernels token by token would be slower
}

std::string why_no_linear(const Spec& spec, const StateShape& s) {
  const bool series = has_series(spec) || !has_other_sums(spec);
  if (series && is<ChannelGate>(spec.decay))
    return "supports decay=channel_gate only with the weight power(1)";
  if (spec.less_log_count && facts(spec.weight).orders->first > 0)
    return "does not support a power of scores less log n";
  if (!is<Flat>(spec.sharpness)) return "does not support sharpness with these stages";
  if (is<CumulativeGate>(spec.denominator))
    return "does not support denominator=cumulative_gate with these stages";
  if (series) return why_too_large(spec, s);
  if (std::max(mapped_channels(spec, s.D), s.E) > cuda::kMaxTokenChannels)
    return "supports head dimensions up to " + std::to_string(cuda::kMaxTokenChannels);
  return "";
}

static at::Tensor attend_sequence(const Spec& spec, const Inputs& given) {
  const int64_t C = chunk_channels(spec, given);
  const Inputs in = C == 0 || needs_sum(spec) ? without_idle_gates(given) : given;
  const int64_t T = in.q.size(2), late = in.k.size(2) - T, E = in.v.size(3);
  const auto newest = [&](const at::Tensor& x) { return late == 0 ? x : x.narrow(2, late, T); };
  const auto* rms = std::get_if<Rms>(&spec.norm);
  if (C > 0 && rms && is<Nothing>(spec.denominator) && WithoutChannelGates::why_not(spec).empty()) {
    const WithoutChannelGates rest(spec, in);
    if (!rest.spec.output_gate && !rest.spec.post_gate)
      return rest.finish(
          rms_of_rows(newest(in_chunks(rest.spec, rest.in, C)), plain(in.norm_weight), rms->eps));
  }
  const auto token_by_token = [&](const TokensJob& job, const TokensInputs& x) {
    return newest(differentiable("chunked_cuda", job, x, forward, backward).N);
  };
  Sums sums;
  if (is_by_series(spec, in)) {
    sums = sums_by_series(spec, in, nullptr, nullptr);
    if (!is<Nothing>(spec.denominator)) sums.count = CountedKeys(spec.mask, in).count();
    return finish(spec, in, sums);
  }
  sums.W = at::zeros({in.q.size(0), in.q.size(1), T, 1}, in.q.options().dtype(at::kFloat));
  if (C > 0) sums.N = newest(in_chunks(spec, in, C)).narrow(3, 0, E).to(at::kFloat);
  if (C == 0 || needs_sum(spec)) {
    const Prepared p(spec, in);
    if (C == 0) sums.N = token_by_token(p.job, p.x);
    if (needs_sum(spec)) sums.W = token_by_token(p.job, p.of_ones());
  }
  sums.shift = at::zeros({1}, sums.N.options());
  if (!is<Nothing>(spec.denominator)) sums.count = CountedKeys(spec.mask, in).count();
  return finish(spec, in, sums);
}

// A NaN among the gates would stay in the sums of later sequences: it is left out, and its rows are
// made NaN afterwards.
at::Tensor attend_linear(const Spec& given, const Inputs& inputs) {
  const c10::cuda::CUDAGuard guard(inputs.q.device());
  if (!inputs.cu_seqlens.defined()) return attend_sequence(given, inputs);
  const auto [clean, factor] = without_nan_gates(given, inputs);
  const auto [spec, in] = with_forgetting(given, clean);
  const at::Tensor o = attend_sequence(spec, in);
  return factor.defined() ? (o * factor).to(o.scalar_type()) : o;
}

Sums step_linear(const Spec& spec, const Inputs& in, Carry& carry) {
  const c10::cuda::CUDAGuard guard(in.q.device());
  if (has_series(spec)) {
    Carry after = carry;
    const Sums sums = sums_by_series(spec, in, &carry, &after);
    carry.S.narrow(3, 0, after.S.size(3)).copy_(after.S), carry.z.copy_(after.z);
    if (carry.decay.defined()) carry.decay.copy_(after.decay);
    if (carry.keys.defined()) carry.keys.copy_(after.keys);
    after.S = carry.S, after.z = carry.z, after.decay = carry.decay, after.keys = carry.keys;
    carry = after;
    return sums;
  }
  const Prepared p(spec, in, carry.count);
  const at::Tensor gates = exp_of(p.x.logs);
  const auto step = [&](const TokensInputs& x, const at::Tensor& state, int64_t row) {
    const at::Tensor N =
        at::empty({x.q.size(0), x.q.size(1), x.q.size(2), x.v.size(3)}, x.q.options());
    cuda::Tokens c = problem(p.job, x, gates);
    c.before = c.after = state.data_ptr(), c.state_row = int(row);
    c.state_in_double = state.scalar_type() == at::kDouble;
    c.N = memory<float>(N);
    cuda::tokens_forward(c, stream());
    return N;
  };
  Sums sums;
  const int64_t C = chunk_channels(spec, in), T = in.q.size(2), E = in.v.size(3);
  const bool in_whole_chunks = C > 0 && T >= cuda::kChunkTokens;
  if (in_whole_chunks) {
    const DeltaState state{carry.S, at::zeros_like(carry.S), E};
    sums.N = in_chunks(spec, in, C, carry.count, state).narrow(3, 0, E).to(at::kFloat);
    carry.S.copy_(state.after);
    if (p.x.logs.defined()) spoil(p.x.logs, sums.N, carry.S);
  } else {
    sums.N = step(p.x, carry.S, carry.S.size(3));
  }
  if (in_whole_chunks && !needs_sum(spec)) {
    sums.W = at::zeros({in.q.size(0), in.q.size(1), T, 1}, sums.N.options());
    carry.z.copy_(sum_of_keys(p.x, carry.z));
  } else {
    sums.W = step(p.of_ones(), carry.z, 1);
  }
  sums.shift = at::zeros({1}, sums.N.options());
  if (p.x.logs.defined()) carry.decay.add_(p.x.logs.sum(2));
  return sums;
}

}  // namespace horner::attn::exec
