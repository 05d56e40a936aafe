// How many of its largest weights a head needs, measured by the loss: every head truncated to one
// N, each head alone, and all heads together, each to its own N.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <ranges>

#include "attn/stages.h"
#include "diag/what_if.h"

namespace horner::diag {

static constexpr double kMore[] = {0.01, 0.05};  // allowed increase of the loss

// The least good i < n by bisection, assuming that all above a good one are good; else n - 1.
template <class Good>
static size_t first_good(size_t n, Good good) {
  const auto all = std::views::iota(size_t(0), n - 1);
  const auto bad = [&](size_t i) { return !good(i); };
  return size_t(std::ranges::partition_point(all, bad) - all.begin());
}

Truncated truncate(const nn::Model& m, const at::Tensor& tokens, double base, bool renormalise,
                   const Say& say) {
  Truncated out{.renormalised = renormalise};
  std::map<int64_t, double> known;
  const auto at = [&](int64_t N) {
    if (!known.count(N)) {
      if (say) say("top " + std::to_string(N));
      const Cut all{N, renormalise, heads_with_rows(m.config)};
      known[N] = loss(m, tokens, {}, {&all, 1});
    }
    return known[N];
  };
  const auto first = [&](double more) {  // a larger N costs less
    return 1 + int64_t(first_good(size_t(tokens.numel()), [&](size_t i) {
             return at(int64_t(i) + 1) <= base * (1 + more);
           }));
  };
  out.within_5 = first(kMore[1]), out.within_1 = first(kMore[0]);
  out.losses.assign(known.begin(), known.end());
  return out;
}

static std::vector<int64_t> grid_to(int64_t T) {
  std::vector<int64_t> out;
  for (int64_t n = 1; n < T; n = std::max(n + 1, n * 7 / 5)) out.push_back(n);
  out.push_back(T);
  return out;
}

// [heads][grid]: the relative error of a head's output over 16 queries, truncated to its top N.
static std::vector<std::vector<double>> output_errors(const nn::Model& m, const at::Tensor& tokens,
                                                      const std::vector<int64_t>& grid) {
  std::vector<std::vector<double>> out;
  const Heads can = heads_with_rows(m.config);
  const nn::Probe probe{[&](const nn::Operated& o) {
    const attn::Spec& spec = o.part.attention;
    const attn::Inputs& in = o.in;
    if (std::ranges::find(can, std::pair(o.layer, o.part.heads[0])) == can.end()) return;
    const at::Tensor v = attn::one_key_head_each(in).v[0].to(at::kCPU, at::kDouble);
    const size_t from = out.size(), H = size_t(v.size(0));
    out.resize(from + H);
    const std::vector<nn::Query> queries = nn::few_queries(tokens.numel(), 16);
    const at::Tensor squares = at::zeros({int64_t(H), int64_t(grid.size()) + 1}, at::kDouble);
    nn::for_rows(spec, in, queries, [&](const nn::Rows& rows) {
      const int64_t S = rows.weights.size(-1);
      const auto [w, order] = rows.weights.to(at::kDouble).sort(-1, /*descending=*/true);
      const auto add = [&](int64_t column, int64_t N) {  // the weights after the first N
        const at::Tensor rest =
            at::zeros_like(w).scatter_(-1, order.narrow(-1, N, S - N), w.narrow(-1, N, S - N));
        squares.select(1, column) += at::matmul(rest, v.narrow(1, 0, S)).square().sum({1, 2});
      };
      add(int64_t(grid.size()), 0);
      for (size_t k = 0; k < grid.size(); ++k)
        if (grid[k] < S) add(int64_t(k), grid[k]);
    });
    for (size_t h = 0; h < H; ++h)
      for (size_t k = 0; k < grid.size(); ++k)
        out[from + h].push_back(
            std::sqrt((squares[int64_t(h)][int64_t(k)] / squares[int64_t(h)][-1].clamp_min(1e-300))
                          .item<double>()));
  }};
  const c10::InferenceMode none;
  nn::hidden(m, tokens.reshape({1, -1}), {.probe = &probe});
  return out;
}

// Finds the largest relative output error, common to all heads, that the loss allows.
static void cut_together(const nn::Model& m, const at::Tensor& tokens, double base,
                         const std::vector<int64_t>& grid, const Say& say, Tops& out) {
  const std::vector<std::vector<double>> errors = output_errors(m, tokens, grid);
  const Heads heads = heads_with_rows(m.config);
  std::vector<double> levels;  // descending
  for (int i = 0; i <= 32; ++i) levels.push_back(std::exp2(-double(i) / 4));
  levels.push_back(0);
  const auto N_of = [&](size_t head, double level) {
    size_t k = 0;
    while (k + 1 < grid.size() && errors[head][k] > level) ++k;
    return grid[k];
  };
  std::map<size_t, double> known;
  const auto at = [&](size_t i) {
    if (known.count(i)) return known[i];
    if (say) say("one N per head");
    std::map<int64_t, Heads> by_N;
    for (size_t h = 0; h < heads.size(); ++h) by_N[N_of(h, levels[i])].push_back(heads[h]);
    std::vector<Cut> cuts;
    for (const auto& [N, some] : by_N)
      if (N < tokens.numel()) cuts.push_back({N, false, some});
    return known[i] = loss(m, tokens, {}, cuts);
  };
  for (size_t j = 0; j < std::size(kMore); ++j) {
    const size_t i =
        first_good(levels.size(), [&](size_t n) { return at(n) <= base * (1 + kMore[j]); });
    out.level[j] = levels[i], out.loss[j] = at(i);
    for (size_t h = 0; h < heads.size(); ++h) out.heads[h].together[j] = N_of(h, levels[i]);
  }
}

Tops tops_of_heads(const nn::Model& m, const at::Tensor& tokens, double base, const Say& say) {
  const std::vector<int64_t> grid = grid_to(tokens.numel());
  Tops out{};
  for (const auto& [layer, head] : heads_with_rows(m.config)) {
    if (say) say("top N of head " + std::to_string(layer) + "." + std::to_string(head));
    std::map<size_t, double> known;
    const auto at = [&](size_t k) {
      if (!known.count(k)) {
        const Cut one{grid[k], false, {{layer, head}}};
        known[k] = k + 1 < grid.size() ? loss(m, tokens, {}, {&one, 1}) : base;
      }
      return known[k];
    };
    HeadTop& h = out.heads.emplace_back(HeadTop{layer, head, {}, {}});
    for (size_t j = 0; j < std::size(kMore); ++j) {
      const auto good = [&](size_t k) { return at(k) <= base * (1 + kMore[j]); };
      // Most heads need only one weight alone: try that first.
      h.alone[j] = grid[good(0) ? 0 : first_good(grid.size(), good)];
    }
  }
  cut_together(m, tokens, base, grid, say, out);
  return out;
}

}  // namespace horner::diag
