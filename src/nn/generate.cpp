#include "nn/generate.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/check.h"
#include "core/stopwatch.h"
#include "nn/join.h"

namespace horner::nn {

using Tokens = std::vector<int64_t>;

// The most likely tokens that top_k and top_p leave, with their probabilities p [V].
static std::pair<at::Tensor, at::Tensor> likeliest(const at::Tensor& p, const Sampling& s) {
  const int64_t V = p.size(0);
  at::Tensor best, tokens;
  // As many as top_p needs, which are few: more until they suffice.
  for (int64_t n = s.top_k > 0 ? s.top_k : 64;; n *= 8) {
    std::tie(best, tokens) = p.topk(std::min(n, V));
    if (s.top_k > 0 || n >= V || best.sum().item<double>() >= s.top_p) break;
  }
  if (s.top_p < 1) {  // tokens preceded by less than top_p; always the first
    const int64_t n = ((best.cumsum(0) - best) < s.top_p).sum().item<int64_t>();
    best = best.narrow(0, 0, std::max<int64_t>(1, n));
  }
  return {best, tokens};
}

// A token from logits [V].
static int64_t sample(const at::Tensor& given, const Sampling& s, const at::Generator& random) {
  const at::Tensor logits = given.to(at::kDouble);
  const double largest = logits.max().item<double>();
  check(std::isfinite(largest),
        "the model's output is not a number: its weights are damaged, or "
        "overflow in this dtype (try another --dtype)");
  if (s.temperature == 0) return logits.argmax().item<int64_t>();
  // Differences first: any temperature above 0 is one that can be divided by.
  at::Tensor p = ((logits - largest) / s.temperature).softmax(-1), tokens;
  if ((s.top_k > 0 && s.top_k < p.size(0)) || s.top_p < 1) std::tie(p, tokens) = likeliest(p, s);
  const at::Tensor sums = p.cumsum(0);  // a token takes what it adds to them
  const at::Tensor place = at::rand({1}, random, sums.options()) * sums.narrow(0, -1, 1);
  const at::Tensor i = at::searchsorted(sums, place, /*out_int32=*/false, /*right=*/true);
  return (tokens.defined() ? tokens.index_select(0, i) : i).item<int64_t>();
}

static void check_all(const Model& m, const std::vector<Prompt>& prompts, const Sampling& s) {
  check(s.temperature >= 0, "temperature must be 0 or more, got ", s.temperature);
  check(s.top_p > 0 && s.top_p <= 1, "top-p must be above 0 and at most 1, got ", s.top_p);
  for (const Prompt& p : prompts) {
    check(!p.tokens.empty(), "the prompt must have at least one token");
    for (const int64_t t : p.tokens)
      check(t >= 0 && t < m.config.V, "prompt token ", t, " is out of range: the vocabulary has ",
            m.config.V, " tokens");
  }
}

// How many tokens at the beginning of all prompts are read once. Every prompt has others after
// them; for few tokens, a pass over the weights of its own takes longer than it saves.
static size_t shared_tokens(const std::vector<Prompt>& prompts) {
  constexpr size_t kLeast = 16;
  if (prompts.size() < 2) return 0;
  const Tokens& first = prompts[0].tokens;
  size_t n = first.size() - 1;
  for (const Prompt& p : prompts) {
    n = std::min(n, p.tokens.size() - 1);
    n = size_t(std::mismatch(first.begin(), first.begin() + int64_t(n), p.tokens.begin()).first -
               first.begin());
  }
  return n < kLeast ? 0 : n;
}

// Which prompts run together.
static std::vector<std::vector<size_t>> batches(const Model& m, const std::vector<Prompt>& prompts,
                                                size_t most) {
  const bool any_length = why_not_joined(m.config).empty();
  const auto length = [&](size_t i) { return any_length ? 0 : prompts[i].tokens.size(); };
  std::vector<size_t> order(prompts.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, length);
  std::vector<std::vector<size_t>> out;
  for (const size_t i : order) {
    if (out.empty() || out.back().size() == most || length(out.back()[0]) != length(i))
      out.emplace_back();
    out.back().push_back(i);
  }
  return out;
}

struct Row {
  size_t prompt;
  at::Generator random;
};

// Reads tokens [B, T]: the last row of each text, [B, C].
static at::Tensor read(const Model& m, std::vector<LayerState>& states, const at::Tensor& tokens,
                       const at::Tensor& positions = {}) {
  const at::Device device = m.embedding.device();
  return hidden(m, tokens.to(device),
                {.states = &states,
                 .positions = positions.defined() ? positions.to(device) : positions})
      .select(1, -1);
}

// A batch of texts after their prompts.
struct Running {
  const Model& m;
  std::vector<Row> rows;
  std::vector<LayerState> states = {};
  at::Tensor x = {};  // [rows, C]: the last row of each

  // What follows the first n tokens of each prompt, which are in `before`.
  void read_prompts(const std::vector<Prompt>& prompts, const std::vector<LayerState>& before,
                    size_t n) {
    std::vector<std::vector<LayerState>> layers(before.size());
    std::vector<at::Tensor> last;
    for (const Row& r : rows) {
      std::vector<LayerState> own;
      for (const LayerState& l : before) own.push_back(snapshot(l));
      const Tokens& all = prompts[r.prompt].tokens;
      const Tokens rest(all.begin() + int64_t(n), all.end());
      last.push_back(read(m, own, at::tensor(rest, at::kLong).unsqueeze(0)));
      for (size_t i = 0; i < own.size(); ++i) layers[i].push_back(std::move(own[i]));
    }
    for (std::vector<LayerState>& l : layers) {
      states.push_back(l.size() == 1 ? l[0] : joined(l));
      l.clear();
    }
    x = at::cat(last);
  }

  int64_t bytes() const {
    int64_t n = 0;
    for (const LayerState& l : states) n += nn::bytes(l);
    return n;
  }

  // Goes on with one token, of those rows only.
  void go_on(const std::vector<int64_t>& which, const Tokens& tokens, const Tokens& positions) {
    if (which.size() < rows.size()) {
      const at::Tensor index = at::tensor(which, at::kLong);
      for (LayerState& l : states) l = select(l, index);
      std::vector<Row> left;
      for (const int64_t i : which) left.push_back(rows[size_t(i)]);
      rows = left;
    }
    x = read(m, states, at::tensor(tokens, at::kLong).unsqueeze(1),
             at::tensor(positions, at::kLong));
  }
};

double Texts::rate() const {
  int64_t n = 0;
  for (const Generated& g : each) n += std::max<int64_t>(0, int64_t(g.tokens.size()) - 1);
  return seconds > 0 ? double(n) / seconds : 0;
}

Texts generate(const Model& m, const std::vector<Prompt>& prompts, const Sampling& s, int64_t most,
               const std::function<bool(size_t, const Generated&)>& use) {
  const c10::NoGradGuard without_gradients;
  check_all(m, prompts, s);
  Texts out{.each = std::vector<Generated>(prompts.size())};
  Stopwatch watch;
  const auto lap = [&](double& seconds) { seconds += watch.ms() / 1e3, watch = Stopwatch(); };
  const size_t shared = shared_tokens(prompts);
  std::vector<LayerState> before = empty_states(m, 1);
  if (shared > 0) {
    const Tokens& first = prompts[0].tokens;
    read(
        m, before,
        at::tensor(Tokens(first.begin(), first.begin() + int64_t(shared)), at::kLong).unsqueeze(0));
    out.shared_tokens = int64_t(shared);
  }
  bool stop = false;
  // Samples the next token of a row; whether others follow.
  const auto add = [&](const Row& r, const at::Tensor& logits) {
    Generated& g = out.each[r.prompt];
    g.tokens.push_back(sample(logits, s, r.random));
    g.ended = std::ranges::find(m.config.ends, g.tokens.back()) != m.config.ends.end();
    g.finished = g.ended || int64_t(g.tokens.size()) == prompts[r.prompt].count;
    stop = !use(r.prompt, g);
    return !g.finished;
  };
  for (const std::vector<size_t>& batch : batches(m, prompts, size_t(most))) {
    if (stop) break;
    Running b{m, {}};
    for (const size_t i : batch)
      b.rows.push_back({i, at::make_generator<at::CPUGeneratorImpl>(s.seed + i)});
    b.read_prompts(prompts, before, shared);
    for (bool first = true;; first = false) {
      const at::Tensor all = logits(m, b.x).cpu();
      Tokens which, tokens, positions;
      for (size_t i = 0; i < b.rows.size() && !stop; ++i) {
        if (!add(b.rows[i], all[int64_t(i)])) continue;
        const size_t p = b.rows[i].prompt;
        const Tokens& now = out.each[p].tokens;
        which.push_back(int64_t(i)), tokens.push_back(now.back());
        positions.push_back(int64_t(prompts[p].tokens.size() + now.size()) - 1);
      }
      lap(first ? out.prompt_seconds : out.seconds);
      if (stop || which.size() < b.rows.size())
        out.state_bytes = std::max(out.state_bytes, b.bytes());
      if (stop || which.empty()) break;
      b.go_on(which, tokens, positions);
    }
  }
  return out;
}

}  // namespace horner::nn
