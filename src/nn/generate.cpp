#include "nn/generate.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/stopwatch.h"

namespace horner::nn {

// A token from logits [V].
static int64_t sample(const at::Tensor& given, const Sampling& s, const at::Generator& random) {
  const at::Tensor logits = given.to(at::kDouble);
  const double largest = logits.max().item<double>();
  check(std::isfinite(largest),
        "the model's output is not a number: its weights are damaged, or "
        "overflow in this dtype (try another --dtype)");
  if (s.temperature == 0) return logits.argmax().item<int64_t>();
  // Differences first: any temperature above 0 is one that can be divided by.
  auto [p, tokens] = ((logits - largest) / s.temperature).softmax(-1).sort(-1, /*descending=*/true);
  if (s.top_k > 0 && s.top_k < p.size(0)) p = p.narrow(0, 0, s.top_k);
  if (s.top_p < 1) {  // tokens preceded by less than top_p; always the first
    const int64_t n = ((p.cumsum(0) - p) < s.top_p).sum().item<int64_t>();
    p = p.narrow(0, 0, std::max<int64_t>(1, n));
  }
  return tokens[at::multinomial(p, 1, false, random).item<int64_t>()].item<int64_t>();
}

Generated generate(const Model& m, const std::vector<int64_t>& prompt, int64_t count,
                   const Sampling& s, const std::function<bool(int64_t)>& use) {
  const c10::NoGradGuard without_gradients;
  check(!prompt.empty(), "the prompt must have at least one token");
  check(s.temperature >= 0, "temperature must be 0 or more, got ", s.temperature);
  check(s.top_p > 0 && s.top_p <= 1, "top-p must be above 0 and at most 1, got ", s.top_p);
  for (int64_t t : prompt)
    check(t >= 0 && t < m.config.V, "prompt token ", t, " is out of range: the vocabulary has ",
          m.config.V, " tokens");
  const at::Generator random = at::make_generator<at::CPUGeneratorImpl>(s.seed);
  std::vector<LayerState> states = empty_states(m, 1);
  Generated out;
  const auto on = at::TensorOptions(m.embedding.device()).dtype(at::kLong);
  at::Tensor tokens = at::tensor(prompt, at::kLong).unsqueeze(0).to(on.device());
  Stopwatch watch;
  while (int64_t(out.tokens.size()) < count) {
    const at::Tensor x = hidden(m, tokens, {.states = &states}).select(1, -1);
    const int64_t next = sample(logits(m, x).view({-1}).cpu(), s, random);
    if (out.tokens.empty()) out.prompt_seconds = watch.ms() / 1e3, watch = Stopwatch();
    out.tokens.push_back(next);
    const bool ends = std::ranges::find(m.config.ends, next) != m.config.ends.end();
    if (ends || !use(next)) break;
    tokens = at::full({1, 1}, next, on);
  }
  out.seconds = watch.ms() / 1e3;
  for (const LayerState& state : states) out.state_bytes += bytes(state);
  return out;
}

}  // namespace horner::nn
