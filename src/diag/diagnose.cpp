#include "diag/diagnose.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/names.h"
#include "diag/softmax_rows.h"

namespace horner::diag {

static constexpr const char* kEmbeddings[] = {"tokens", "inputs", "values"};

Embedding embedding_of(const std::string& name) {
  for (size_t i = 0; i < std::size(kEmbeddings); ++i)
    if (name == kEmbeddings[i]) return Embedding(i);
  fail("no embedding '", name,
       "'; possible: ", quoted({std::begin(kEmbeddings), std::end(kEmbeddings)}));
}
const char* name_of(Embedding e) {
  return kEmbeddings[size_t(e)];
}

at::Tensor token_points(const nn::Model& m, const at::Tensor& tokens) {
  const nn::ModelConfig& c = m.config;
  at::Tensor x = at::embedding(m.embedding, tokens.reshape({-1})).to(at::kFloat);
  if (c.family->scaled_embedding) x = x * std::sqrt(double(c.C));
  if (!c.family->rotary()) x = x + m.positions.narrow(0, 0, x.size(0));
  return x;
}

// The requested N and powers of two; with `fine`, the candidates for the critical N, each a seventh
// larger than the previous one.
static std::vector<int64_t> grid_of(const Settings& s, int64_t T, bool fine) {
  std::vector<int64_t> out = s.tops;
  if (fine)
    for (int64_t n = 1; n <= T / 2 && n <= 512; n += std::max<int64_t>(1, n / 7)) out.push_back(n);
  else
    for (int64_t n = 1; n <= 64; n *= 2) out.push_back(n);
  std::erase_if(out, [&](int64_t n) { return n >= T; });
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

namespace {

// The points of a layer: one set for all heads, or one per key head.
struct Clouds {
  std::vector<Points> plain, unit;  // `plain` is empty if unit points serve for both
};

struct Pass {
  Diagnosis& out;
  const std::vector<nn::Query> queries, few;
  at::Generator random;
  const Say& say;
  Clouds clouds = {};
  std::vector<std::map<std::string, Crossed>> crossed = {};  // [H]
};

bool wanted(const std::vector<int64_t>& list, int64_t i) {
  return list.empty() || std::find(list.begin(), list.end(), i) != list.end();
}

void set_clouds(Pass& p, const std::vector<at::Tensor>& x) {
  p.clouds = {};
  for (const at::Tensor& points : x) {
    p.clouds.unit.push_back(make_points(points, true));
    if (!p.out.settings.unit) p.clouds.plain.push_back(make_points(points, false));
  }
}

void count(Crossed& c, bool crossed, int64_t of = 1) {
  c.of += of;
  c.times += crossed;
}

// Rounding of float32 sums: less than this above a bound is not a violation.
constexpr double kRounding = 1e-5;

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
      s.lower_printed += w * m.lower_printed, s.upper_printed += w * m.upper_printed;
      s.upper_mean += w * m.upper_mean;
      count(crossed["Theorem 2, lower as printed"], m.share < m.lower_printed - e);
      count(crossed["Theorem 2, lower, sharp"], m.share < m.lower - e);
      count(crossed["Theorem 2, upper as printed"], m.share > m.upper_printed + e);
      count(crossed["Theorem 2, upper, in expectation"], m.share > m.upper_mean + e);
      count(crossed["Theorem 2, upper, certain"], m.share > m.upper + e);
    }
}

// Distances and separability of every head.
void geometry(Pass& p, std::vector<Head*>& heads, const nn::Rows& rows) {
  Asked far{.tops = p.out.grid, .separations = false},
      near{.tops = p.out.separable, .distances = false};
  for (int64_t N : far.tops) {
    const auto& tops = p.out.settings.tops;
    far.bounded.push_back(std::find(tops.begin(), tops.end(), N) != tops.end());
  }
  std::vector<std::vector<Seen>> seen[2];
  const std::vector<Points>* clouds[2] = {&p.clouds.unit, &p.clouds.plain};
  for (int i = 0; i < 2; ++i)
    for (const Points& points : *clouds[i]) {
      auto& list = seen[i].emplace_back();
      for (size_t r = 0; r < rows.count.size(); ++r) list.push_back({rows.begin[r], rows.count[r]});
      measure_seen(points, list);
    }
  const int64_t H = rows.weights.size(0);
  at::parallel_for(0, H, 1, [&](int64_t from, int64_t to) {
    const c10::InferenceMode none;
    for (int64_t h = from; h < to; ++h) {
      if (!heads[size_t(h)]) continue;
      const at::Tensor w = rows.weights[h].to(at::kFloat).contiguous();
      const size_t cloud = size_t(h) * p.clouds.unit.size() / size_t(H);
      const bool unit = p.clouds.plain.empty();
      const Points &one = p.clouds.unit[cloud], &any = unit ? one : p.clouds.plain[cloud];
      Head& head = *heads[size_t(h)];
      auto& crossed = p.crossed[size_t(h)];
      add_distances(p, head, crossed, rows,
                    measure(any, w, seen[unit ? 0 : 1][cloud], far).distances);
      add_separations(p, head, crossed, rows, measure(one, w, seen[0][cloud], near).separations);
    }
  });
}

// Entropy and the other row metrics, the 1/L law, and the picture.
void numbers(Pass& p, std::vector<Head*>& heads, const nn::Rows& rows, bool softmax) {
  const RowNumbers n = row_numbers(rows);
  const auto get = [](const at::Tensor& x) { return x.to(at::kDouble).contiguous(); };
  const at::Tensor entropy = get(n.entropy), support = get(n.support), first = get(n.first),
                   reach = get(n.reach), largest = get(n.largest), spread = get(n.spread),
                   high = get(n.log_high), low = get(n.log_low), most = get(n.most),
                   product = get(rows.largest_product);
  const int64_t R = entropy.size(1), S = rows.weights.size(-1);
  const at::Tensor place = (at::arange(S) * kPicture).floor_divide(p.out.tokens);
  const at::Tensor part = at::one_hot(place, kPicture).to(rows.weights.scalar_type());
  const at::Tensor parts = get(at::matmul(rows.weights, part));  // [H, R, kPicture]
  for (size_t h = 0; h < heads.size(); ++h) {
    if (!heads[h]) continue;
    Head& head = *heads[h];
    for (int64_t r = 0; r < R; ++r) {
      const size_t at = h * size_t(R) + size_t(r);
      const auto of = [&](const at::Tensor& x) { return x.data_ptr<double>()[at]; };
      const nn::Query& q = rows.queries[size_t(r)];
      const double w = q.weight, count_seen = double(rows.count[size_t(r)]);
      if (count_seen < 2) continue;  // a row of one token carries no information
      head.rows += w, head.entropy += w * of(entropy), head.support += w * of(support);
      head.entropy_ratio += w * of(entropy) / std::log(count_seen);
      head.first += w * of(first), head.reach += w * of(reach);
      head.largest += w * of(largest), head.spread += w * of(spread);
      if (count_seen >= 8) head.law.add(std::log(count_seen), std::log(of(largest)), w);
      for (size_t l = 0; l < head.log_high.size(); ++l)
        if (q.t < p.out.settings.lengths[l]) {
          head.log_high[l] = std::max(head.log_high[l], of(high));
          head.log_low[l] = std::min(head.log_low[l], of(low));
        }
      for (int64_t k = 0; k < kPicture; ++k)
        head.picture[size_t(q.t * kPicture / p.out.tokens * kPicture + k)] +=
            w * parts.data_ptr<double>()[int64_t(at) * kPicture + k];
      if (!softmax) continue;
      const double size = std::max(of(high), -of(low)), e = 1e-4 + kRounding * of(product);
      count(p.crossed[h]["Lemma 1, with the constants e^-2a and e^2a"], size > 2 * of(most) + e);
      count(p.crossed[h]["Corollary 1"], size > 2 * of(product) + e);
    }
  }
}

void gradients(Pass& p, std::vector<Head*>& heads, const nn::Rows& rows) {
  const Settings& s = p.out.settings;
  const at::Tensor v = directions(rows, p.random);
  std::vector<double> weight;
  for (const nn::Query& q : rows.queries)
    weight.push_back(rows.count[weight.size()] < 2 ? 0 : q.weight);
  const at::Tensor w = at::tensor(weight, at::kDouble);
  for (size_t i = 0; i < s.temperatures.size(); ++i)
    for (size_t j = 0; j < s.epsilons.size(); ++j) {
      const double T = s.temperatures[i], eps = s.epsilons[j];
      const at::Tensor g = sensitivity(rows.scores, rows.hidden, v, T, eps).to(at::kDouble);
      const at::Tensor sum = at::matmul(g, w), most = g.amax(-1);
      const at::Tensor over = (g > sensitivity_bound(T, eps) * (1 + kRounding)).sum(-1),
                       printed = (g > sensitivity_printed(T) * (1 + kRounding)).sum(-1);
      for (size_t h = 0; h < heads.size(); ++h) {
        if (!heads[h]) continue;
        heads[h]->sensitivity[i][j] += sum[int64_t(h)].item<double>();
        double& largest = heads[h]->sensitivity_most[i][j];
        largest = std::max(largest, most[int64_t(h)].item<double>());
        auto& crossed = p.crossed[h];
        Crossed &bound = crossed["Corollary 3, min{1/(2T), √2/ε}"],
                &as_printed = crossed["Corollary 3 as printed, min{1/(4T), √2}"];
        bound.of += g.size(1), as_printed.of += g.size(1);
        bound.times += over[int64_t(h)].item<int64_t>();
        as_printed.times += printed[int64_t(h)].item<int64_t>();
      }
    }
}

void layer(Pass& p, int64_t i, const attn::Spec& spec, const attn::Inputs& in) {
  const Settings& s = p.out.settings;
  if (!wanted(s.layers, i)) return;
  if (p.say) p.say("layer " + std::to_string(i));
  const std::string why = nn::why_no_rows(spec);
  check(why.empty(), "layer ", i, " has no attention weights to analyse: ", why);
  const int64_t H = in.q.size(1);
  std::vector<Head*> heads(size_t(H), nullptr);
  for (Head& h : p.out.heads)
    if (h.layer == i) heads[size_t(h.head)] = &h;
  if (s.embedding == Embedding::values) {
    std::vector<at::Tensor> values;
    for (int64_t g = 0; g < in.v.size(1); ++g) values.push_back(in.v[0][g]);
    set_clouds(p, values);
  }
  const bool softmax = attn::is<attn::Exp>(spec.weight) && spec.clamp == attn::kNoClamp &&
                       !spec.centred && !attn::is<attn::Adaptive>(spec.sharpness);
  nn::for_rows(spec, in, p.queries, [&](const nn::Rows& rows) {
    numbers(p, heads, rows, softmax);
    gradients(p, heads, rows);
    geometry(p, heads, rows);
  });
  const std::vector<HeadSeries> orders = series(spec, in, p.few);
  for (int64_t h = 0; h < H; ++h)
    if (heads[size_t(h)]) heads[size_t(h)]->series = orders[size_t(h)];
}

void make_heads(Diagnosis& d, int64_t layers, int64_t H) {
  const Settings& s = d.settings;
  for (int64_t i : s.layers)
    check(i >= 0 && i < layers, "no layer ", i, "; the model has 0 to ", layers - 1);
  for (int64_t i : s.heads) check(i >= 0 && i < H, "no head ", i, "; the model has 0 to ", H - 1);
  for (int64_t i = 0; i < layers; ++i)
    for (int64_t h = 0; h < H; ++h) {
      if (!wanted(s.layers, i) || !wanted(s.heads, h)) continue;
      Head head{.layer = i, .head = h};
      head.distances.assign(s.lengths.size(), std::vector<DistanceSums>(d.grid.size()));
      head.separations.resize(d.separable.size());
      head.sensitivity.assign(s.temperatures.size(), std::vector<double>(s.epsilons.size()));
      head.sensitivity_most = head.sensitivity;
      head.log_high.assign(s.lengths.size(), -INFINITY);
      head.log_low.assign(s.lengths.size(), INFINITY);
      head.picture.assign(size_t(kPicture * kPicture), 0);
      d.heads.push_back(std::move(head));
    }
}

void finish(Pass& p) {
  std::vector<double> stands(size_t(kPicture), 0);  // queries per row of a picture
  for (const nn::Query& q : p.queries)
    if (q.t > 0) stands[size_t(q.t * kPicture / p.out.tokens)] += q.weight;
  for (Head& h : p.out.heads) {
    for (double* x :
         {&h.entropy, &h.entropy_ratio, &h.support, &h.first, &h.reach, &h.largest, &h.spread})
      *x /= h.rows;
    for (auto& row : h.sensitivity)
      for (double& g : row) g /= h.rows;
    for (size_t i = 0; i < h.picture.size(); ++i)
      h.picture[i] /= std::max(1., stands[i / kPicture]);
  }
  for (const auto& of_head : p.crossed)
    for (const auto& [name, c] : of_head) {
      p.out.crossed[name].times += c.times;
      p.out.crossed[name].of += c.of;
    }
}

}  // namespace

Diagnosis diagnose(const nn::Model& m, const at::Tensor& tokens, const Settings& s,
                   const Say& say) {
  check(!s.lengths.empty() && !s.tops.empty(), "at least one length and one top N are required");
  const int64_t T = s.lengths.back();
  check(tokens.numel() >= T, "the text has ", tokens.numel(), " tokens, fewer than the length ", T);
  check(s.lengths.front() >= 2, "a length must be at least 2, not ", s.lengths.front());
  check(s.tops.front() >= 1 && s.tops.front() < T, "a top N must be from 1 to ", T - 1, ", not ",
        s.tops.front());
  Diagnosis out{.settings = s, .tokens = T};
  out.grid = grid_of(s, T, T <= kMostApart), out.separable = grid_of(s, T, false);
  make_heads(out, int64_t(m.layers.size()), m.config.H);
  const c10::InferenceMode none;
  const at::Tensor used = tokens.reshape({1, -1}).narrow(1, 0, T);
  Pass p{out, nn::sample_queries(T), nn::few_queries(T, 32),
         at::make_generator<at::CPUGeneratorImpl>(s.seed), say};
  p.crossed.resize(size_t(m.config.H));
  if (s.embedding == Embedding::tokens) set_clouds(p, {token_points(m, used)});
  nn::Probe probe{[&](int64_t i, const attn::Spec& spec, const attn::Inputs& in,
                      const at::Tensor&) { layer(p, i, spec, in); }};
  if (s.embedding == Embedding::inputs)
    probe.input = [&](int64_t i, const at::Tensor& x) {
      if (wanted(s.layers, i)) set_clouds(p, {x});
    };
  nn::hidden(m, used, {.probe = &probe});
  finish(p);
  return out;
}

std::vector<Critical> critical(const Diagnosis& d, Reading reading, double level) {
  std::vector<Critical> out;
  for (size_t l = 0; l < d.settings.lengths.size(); ++l) {
    Critical c{d.settings.lengths[l], -1, 0};
    for (size_t k = 0; k < d.grid.size() && c.N < 0; ++k) {
      std::vector<double> seen, expected;
      for (const Head& h : d.heads) {
        const DistanceSums& s = h.distances[l][k];
        if (s.rows == 0) continue;
        seen.push_back(s.distance / s.rows);
        expected.push_back((reading == Reading::A ? s.expected : s.permuted) / s.rows);
      }
      if (seen.empty()) break;
      const double p = kolmogorov_smirnov(seen, expected).p;
      if (p >= level) c.N = d.grid[k], c.p = p;
    }
    out.push_back(c);
  }
  return out;
}

}  // namespace horner::diag
