#include "diag/diagnose.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>

#include "attn/catalog.h"
#include "attn/stages.h"
#include "core/check.h"
#include "core/names.h"
#include "diag/layers.h"
#include "diag/pass.h"

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
void layer(Pass& p, const nn::Operated& o) {
  const Settings& s = p.out.settings;
  const int64_t i = o.layer;
  const attn::Spec& spec = o.part.attention;
  const attn::Inputs& in = o.in;
  const int64_t H = in.q.size(1);
  LayerHeads heads(size_t(H), nullptr);
  for (Head& h : p.out.heads)
    if (const auto at = std::ranges::find(o.part.heads, h.head);
        h.layer == i && at != o.part.heads.end())
      heads[size_t(at - o.part.heads.begin())] = &h, h.scale = attn::scale_factor(spec, in);
  if (std::ranges::count(heads, nullptr) == H) return;
  if (p.say) p.say("layer " + std::to_string(i));
  if (s.embedding == Embedding::values) {
    std::vector<at::Tensor> values;
    for (int64_t g = 0; g < in.v.size(1); ++g) values.push_back(in.v[0][g]);
    set_clouds(p, values);
  }
  const bool softmax = attn::is<attn::Exp>(spec.weight) && spec.clamp == attn::kNoClamp &&
                       !spec.centred && !attn::is<attn::Adaptive>(spec.sharpness);
  p.out.softmax &= softmax;
  nn::for_rows(spec, in, p.queries, [&](const nn::Rows& rows) {
    measure_rows(p, heads, rows, softmax);
    measure_sensitivity(p, spec, softmax, heads, rows);
    measure_points(p, i, heads, rows);
  });
  nn::for_rows(spec, in, p.growth, [&](const nn::Rows& rows) { measure_growth(p, heads, rows); });
  nn::for_rows(spec, in, p.few,
               [&](const nn::Rows& rows) { measure_jacobians(p, spec, heads, rows); });
  const std::vector<HeadSeries> orders = series(spec, in, p.few);
  for (int64_t h = 0; h < H; ++h)
    if (heads[size_t(h)]) heads[size_t(h)]->series = orders[size_t(h)];
}

void make_heads(Diagnosis& d, const nn::ModelConfig& c) {
  const Settings& s = d.settings;
  const int64_t layers = int64_t(c.layers.size()), H = c.H;
  const Heads can = heads_with_rows(c);
  if (s.layers.empty())
    for (const auto& [i, h] : can)
      if (d.settings.layers.empty() || d.settings.layers.back() != i)
        d.settings.layers.push_back(i);
  for (int64_t i : s.layers)
    check(i >= 0 && i < layers, "no layer ", i, "; the model has 0 to ", layers - 1);
  for (int64_t i : s.layers)
    check(std::ranges::find(can, i, &std::pair<int64_t, int64_t>::first) != can.end(), "layer ", i,
          " has no attention weights to analyse: ", why_no_rows(c.layers[size_t(i)], 0));
  for (int64_t i : s.heads) check(i >= 0 && i < H, "no head ", i, "; the model has 0 to ", H - 1);
  for (int64_t i = 0; i < layers; ++i)
    for (int64_t h = 0; h < H; ++h) {
      if (!wanted(s.layers, i) || !wanted(s.heads, h)) continue;
      if (std::ranges::find(can, std::pair(i, h)) == can.end()) continue;
      Head head{.layer = i, .head = h};
      head.distances.assign(s.lengths.size(), std::vector<DistanceSums>(d.grid.size()));
      head.separations.resize(d.separable.size());
      head.growth.assign(std::size(kFractions), {});
      for (Growth& g : head.growth) g.lengths.resize(s.lengths.size());
      for (Sensitivity* x : {&head.sensitivity, &head.raw_sensitivity}) {
        x->mean.assign(s.temperatures.size(), std::vector<double>(s.epsilons.size()));
        x->most = x->mean;
      }
      head.picture.assign(size_t(kPicture * kPicture), 0);
      d.heads.push_back(std::move(head));
    }
}

void make_coverage(Diagnosis& d) {
  std::map<int64_t, size_t> heads;
  for (const Head& h : d.heads) ++heads[h.layer];
  for (const auto& [layer, H] : heads)
    for (const int64_t N : d.separable) {
      const std::vector<double> none(H);
      d.coverage.push_back({.layer = layer, .N = N, .selected = none, .covered = none});
    }
}

void make_jacobians(Diagnosis& d) {
  d.jacobians.push_back({d.attention, {}});
  for (const Pointwise& p : pointwise_normalisers())
    if (p.name != d.attention) d.jacobians.push_back({p.name, attn::find(p.variant).spec});
}

void finish(Pass& p) {
  std::erase_if(p.out.jacobians, [](const JacobianRows& j) { return j.rows.empty(); });
  std::vector<double> stands(size_t(kPicture), 0);  // queries per row of a picture
  for (const nn::Query& q : p.queries)
    if (q.t > 0) stands[size_t(q.t * kPicture / p.out.tokens)] += q.weight;
  for (Head& h : p.out.heads) {
    for (double* x :
         {&h.entropy, &h.entropy_ratio, &h.support, &h.first, &h.reach, &h.largest, &h.spread})
      *x /= h.rows;
    for (Sensitivity* x : {&h.sensitivity, &h.raw_sensitivity})
      for (auto& row : x->mean)
        for (double& g : row) g /= x->rows;
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
  out.attention = attention_of(m.config);
  out.variants = nn::variants_of(m.config), out.layers_text = layers_text(m.config);
  make_heads(out, m.config);
  make_coverage(out), make_jacobians(out);
  const c10::InferenceMode none;
  const at::Tensor used = tokens.reshape({1, -1}).narrow(1, 0, T);
  Pass p{out,
         nn::sample_queries(T),
         nn::few_queries(T, 32),
         growth_queries(s.lengths),
         at::make_generator<at::CPUGeneratorImpl>(s.seed),
         say};
  p.crossed.resize(size_t(m.config.H));
  if (s.embedding == Embedding::tokens) set_clouds(p, {token_points(m, used)});
  nn::Probe probe{[&](const nn::Operated& o) { layer(p, o); }};
  if (s.embedding == Embedding::inputs)
    probe.input = [&](int64_t i, const at::Tensor& x) {
      if (std::ranges::find(out.heads, i, &Head::layer) != out.heads.end()) set_clouds(p, {x});
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
