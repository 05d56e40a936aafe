#include "train/batch.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>

#include "attn/stages.h"
#include "core/check.h"
#include "nn/rows.h"

namespace horner::train {

Batch make_batch(const Source& source, Split split, uint64_t first, int64_t count,
                 int64_t micro_batch, int64_t T, int64_t V) {
  const int64_t parts = count / micro_batch;
  Batch out{at::empty({parts, micro_batch, T}, at::kLong),
            at::empty({parts, micro_batch, T}, at::kLong), std::vector<int64_t>(size_t(parts))};
  int64_t* const tokens = out.tokens.data_ptr<int64_t>();
  int64_t* const targets = out.targets.data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    const std::span<int64_t> x(tokens + i * T, size_t(T)), y(targets + i * T, size_t(T));
    source.fill(split, first + uint64_t(i), x, y);
    for (const std::span<int64_t> all : {x, y}) {
      const int64_t most = *std::max_element(all.begin(), all.end());
      check(most < V, source.name, " has token ", most, ", but the model's vocabulary has ", V,
            " tokens; pack the text with the model's tokenizer");
    }
    out.counts[size_t(i / micro_batch)] +=
        std::count_if(y.begin(), y.end(), [](int64_t t) { return t >= 0; });
  }
  return out;
}

Batch part_of(const Batch& b, int part, int parts) {
  if (parts == 1) return b;
  const int64_t T = b.tokens.size(2) / parts;
  Batch out{b.tokens.narrow(2, part * T, T).contiguous(),
            b.targets.narrow(2, part * T, T).contiguous(),
            {}};
  for (const at::Tensor& y : out.targets.unbind())
    out.counts.push_back(y.ge(0).sum().item<int64_t>());
  return out;
}

Score evaluate(const nn::Model& m, const nn::Run& run, const Source& source, const Settings& s,
               int64_t first, int64_t last) {
  constexpr int64_t kSlice = 2048;  // tokens whose logits are in memory together
  const c10::NoGradGuard without_gradients;
  const at::Device device = m.embedding.device();
  const int64_t T = s.length, C = m.config.C, most = s.micro_batch > 0 ? s.micro_batch : s.batch;
  at::Tensor sums = at::zeros({3}, at::TensorOptions(device).dtype(at::kDouble));
  for (int64_t i = first; i < last; i += most) {
    const int64_t b = std::min(most, last - i);
    const Batch all = make_batch(source, Split::validation, uint64_t(i), b, b, T, m.config.V);
    const Batch batch = run.split ? part_of(all, run.split->rank, run.split->ranks) : all;
    const at::Tensor x = nn::hidden(m, batch.tokens[0].to(device), run).reshape({-1, C});
    const at::Tensor y = batch.targets.reshape({-1}).to(device);
    for (int64_t t = 0; t < y.size(0); t += kSlice) {
      const int64_t n = std::min(kSlice, y.size(0) - t);
      const at::Tensor wanted = y.narrow(0, t, n), counted = wanted.ge(0);
      const at::Tensor z = nn::logits(m, x.narrow(0, t, n)).to(at::kFloat);
      const at::Tensor loss =
          z.logsumexp(-1) - z.gather(1, wanted.clamp_min(0).unsqueeze(1)).squeeze(1);
      const at::Tensor right = z.argmax(-1).eq(wanted).logical_and(counted);
      sums += at::stack({loss.masked_fill(counted.logical_not(), 0).sum(at::kDouble),
                         right.sum().to(at::kDouble), counted.sum().to(at::kDouble)});
    }
  }
  const at::Tensor all = sums.cpu();
  const double* const p = all.data_ptr<double>();
  return {p[0], p[1], p[2]};
}

// Mean over the rows of the first sequence of `all`.
static double separability(const attn::Spec& spec, const attn::Inputs& all) {
  if (!nn::why_no_rows(spec).empty()) return NAN;
  attn::Inputs in = all;
  for (at::Tensor* x : {&in.q, &in.k, &in.v}) *x = x->narrow(0, 0, 1);
  const int64_t T = in.q.size(2), N = std::clamp<int64_t>(T / 4, 1, 16);
  const at::Tensor v = attn::one_key_head_each(in).v[0].cpu();
  at::Tensor sum = at::zeros({2}, at::kDouble);  // sum of the shares, their count
  nn::for_rows(spec, in, nn::few_queries(T, kMostQueries), [&](const nn::Rows& rows) {
    const int64_t S = rows.weights.size(-1);
    const at::Tensor share = nn::separable_share(rows, rows.weights, v.narrow(1, 0, S), N);
    sum += at::stack({share.nansum(), share.isnan().logical_not().sum().to(at::kDouble)});
  });
  return (sum[0] / sum[1]).item<double>();
}

RowMeans row_means(const nn::Model& m, const nn::Run& run, const at::Tensor& tokens) {
  const c10::NoGradGuard without_gradients;
  RowMeans out;
  std::vector<at::Tensor> means;
  const nn::Probe probe{[&](const nn::Operated& o) {
    attn::Statistics statistics;
    attn::attend(o.part.attention, o.in, "auto", &statistics);
    means.push_back(statistics.entropy.mean().to(at::kDouble));
    out.separability.push_back(separability(o.part.attention, o.in));
  }};
  nn::Run watched = run;
  watched.probe = &probe;
  watched.split = nullptr;  // this rank's tokens alone
  nn::hidden(m, tokens, watched);
  const at::Tensor all = at::stack(means).cpu();
  out.entropy.assign(all.data_ptr<double>(), all.data_ptr<double>() + all.numel());
  return out;
}

int64_t first_broken_layer(const nn::Model& m, const nn::Run& run, const at::Tensor& tokens) {
  const c10::NoGradGuard without_gradients;
  int64_t broken = -1;
  const nn::Probe probe{[&](const nn::Operated& o) {
    if (broken < 0 && !o.result.isfinite().all().item<bool>()) broken = o.layer;
  }};
  nn::Run watched = run;
  watched.probe = &probe;
  watched.split = nullptr;  // this rank's tokens alone
  nn::hidden(m, tokens, watched);
  return broken;
}

}  // namespace horner::train
