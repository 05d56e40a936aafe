#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>

#include "diag/pass.h"

namespace horner::diag {

namespace {

void add_distances(Pass& p, Head& head, std::map<std::string, Crossed>& crossed,
                   const nn::Rows& rows, const std::vector<Distance>& measured) {
  const auto& lengths = p.out.settings.lengths;
  const size_t K = p.out.grid.size();
  for (size_t r = 0; r < rows.queries.size(); ++r)
    for (size_t k = 0; k < K; ++k) {
      const Distance& d = measured[r * K + k];
      if (std::isnan(d.distance)) continue;
      const double w = rows.queries[r].weight;
      for (size_t l = 0; l < lengths.size(); ++l) {
        if (rows.queries[r].t >= lengths[l]) continue;
        DistanceSums& s = head.distances[l][k];
        s.rows += w, s.distance += w * d.distance, s.expected += w * d.expected;
        s.permuted += w * d.permuted, s.bound += w * d.bound, s.gap += w * d.gap;
      }
      if (std::isnan(d.bound)) continue;
      count(crossed["Theorem 1"], d.distance > d.bound * (1 + kRounding));
      count(crossed["Theorem 1 with a root, as printed in a summary"],
            d.distance > d.root_bound * (1 + kRounding));
    }
}

void add_separations(Pass& p, Head& head, std::map<std::string, Crossed>& crossed,
                     const nn::Rows& rows, const std::vector<Separation>& measured) {
  const size_t K = p.out.separable.size();
  for (size_t r = 0; r < rows.queries.size(); ++r)
    for (size_t k = 0; k < K; ++k) {
      const Separation& m = measured[r * K + k];
      if (std::isnan(m.share)) continue;
      const double w = rows.queries[r].weight, e = 1e-9;
      SeparationSums& s = head.separations[k];
      s.rows += w, s.share += w * m.share, s.lower += w * m.lower, s.upper += w * m.upper;
      s.lower_markov += w * m.lower_markov, s.upper_hoeffding += w * m.upper_hoeffding;
      s.upper_mean += w * m.upper_mean;
      count(crossed["Theorem 2, lower, reconstructed"], m.share < m.lower_markov - e);
      count(crossed["Theorem 2, lower, sharp"], m.share < m.lower - e);
      count(crossed["Theorem 2, upper, reconstructed (not a bound)"],
            m.share > m.upper_hoeffding + e);
      count(crossed["Theorem 2, upper, in expectation"], m.share > m.upper_mean + e);
      count(crossed["Theorem 2, upper, certain"], m.share > m.upper + e);
    }
}

// The visible tokens of each row, with the statistics of every cloud.
std::vector<std::vector<Seen>> seen_of(const std::vector<Points>& clouds, const nn::Rows& rows) {
  std::vector<std::vector<Seen>> out;
  for (const Points& points : clouds) {
    auto& list = out.emplace_back();
    for (size_t r = 0; r < rows.count.size(); ++r) list.push_back({rows.begin[r], rows.count[r]});
    measure_seen(points, list);
  }
  return out;
}

// look(h, weights [R, S] of the head, the index of its cloud) for every head to measure.
template <class Look>
void for_heads(const Pass& p, const LayerHeads& heads, const nn::Rows& rows, Look look) {
  const int64_t H = rows.weights.size(0);
  at::parallel_for(0, H, 1, [&](int64_t from, int64_t to) {
    const c10::InferenceMode none;
    for (int64_t h = from; h < to; ++h)
      if (heads[size_t(h)])
        look(size_t(h), rows.weights[h].to(at::kFloat).contiguous(),
             size_t(h) * p.clouds.unit.size() / size_t(H));
  });
}

// The tokens that the heads of a layer select and separate, together.
void add_coverage(Pass& p, int64_t layer, const nn::Rows& rows,
                  const std::vector<std::vector<int32_t>>& tokens) {
  const auto& tops = p.out.separable;
  const size_t K = tops.size(), stride = tokens[0].size() / rows.queries.size();
  Coverage* of_layer = nullptr;
  for (Coverage& c : p.out.coverage)
    if (c.layer == layer && !of_layer) of_layer = &c;
  std::vector<int32_t> selected(size_t(rows.weights.size(-1)));
  std::vector<uint8_t> separated(selected.size());
  for (size_t r = 0; r < rows.queries.size(); ++r)
    for (size_t k = 0, at = r * stride; k < K && tops[k] < rows.count[r]; at += size_t(tops[k++])) {
      std::vector<std::span<const int32_t>> sets;
      for (const auto& of_head : tokens)
        sets.push_back(std::span(of_head).subspan(at, size_t(tops[k])));
      add_row(of_layer[k], sets, rows.queries[r].weight, selected, separated);
    }
}

}  // namespace

// Distances and separability of every head.
void measure_points(Pass& p, int64_t layer, const LayerHeads& heads, const nn::Rows& rows) {
  Asked far{.tops = p.out.grid, .separations = false},
      near{.tops = p.out.separable, .distances = false, .tokens = true};
  for (int64_t N : far.tops) {
    const auto& tops = p.out.settings.tops;
    far.bounded.push_back(std::find(tops.begin(), tops.end(), N) != tops.end());
  }
  const bool unit = p.clouds.plain.empty();
  const auto seen = seen_of(p.clouds.unit, rows), seen_plain = seen_of(p.clouds.plain, rows);
  std::vector<std::vector<int32_t>> tokens(heads.size());
  for_heads(p, heads, rows, [&](size_t h, const at::Tensor& w, size_t cloud) {
    Head& head = *heads[h];
    const Points &one = p.clouds.unit[cloud], &any = unit ? one : p.clouds.plain[cloud];
    add_distances(p, head, p.crossed[h], rows,
                  measure(any, w, (unit ? seen : seen_plain)[cloud], far).distances);
    Measured m = measure(one, w, seen[cloud], near);
    add_separations(p, head, p.crossed[h], rows, m.separations);
    tokens[h] = std::move(m.tokens);
  });
  std::erase_if(tokens, [](const auto& of_head) { return of_head.empty(); });
  add_coverage(p, layer, rows, tokens);
}

// Distances with N in proportion to the tokens that a row sees.
void measure_growth(Pass& p, const LayerHeads& heads, const nn::Rows& rows) {
  const std::vector<Points>& clouds = p.clouds.plain.empty() ? p.clouds.unit : p.clouds.plain;
  const auto seen = seen_of(clouds, rows);
  for_heads(p, heads, rows, [&](size_t h, const at::Tensor& w, size_t cloud) {
    for (size_t r = 0; r < rows.count.size(); ++r) {
      const int64_t n = rows.count[r];
      if (n < 2) continue;
      Asked asked{.separations = false};
      for (const double f : kFractions) asked.tops.push_back(top_of(f, n));
      asked.tops.erase(std::unique(asked.tops.begin(), asked.tops.end()), asked.tops.end());
      asked.bounded.assign(asked.tops.size(), false);
      const auto d = measure(clouds[cloud], w.narrow(0, int64_t(r), 1),
                             std::span(seen[cloud]).subspan(r, 1), asked)
                         .distances;
      for (size_t i = 0; i < std::size(kFractions); ++i) {
        const int64_t N = top_of(kFractions[i], n);
        const Distance& at =
            d[size_t(std::find(asked.tops.begin(), asked.tops.end(), N) - asked.tops.begin())];
        add_row(heads[h]->growth[i], p.out.settings.lengths, rows.queries[r].t, n, N, at.distance,
                at.expected);
      }
    }
  });
}

}  // namespace horner::diag
