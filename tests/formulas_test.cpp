// Every variant of the catalog against its formula, written apart from the library: plain numbers,
// one (batch, head) and one query at a time.
#include "formulas.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <iomanip>
#include <map>
#include <valarray>

#include "attn/catalog.h"
#include "attn/formula.h"
#include "core/check.h"
#include "instruments/verify.h"

namespace horner::attn {

using namespace instruments;
namespace {

// clang-format off
Vec gated(R r) { return layer(r, r.out() * r.V(E(r) * r.in()) / r.n); }

const std::map<std::string, Formula> kFormulas = {
    {"softmax",           [](R r) -> Vec { return r.V(softmax(r.A)); }},
    {"cosine_softmax",    [](R r) -> Vec { return r.V(softmax(10 * r.scores(cosine))); }},
    {"softmax_window",    [](R r) -> Vec { return r.V(softmax(r.A)); }},
    {"softmax_out_gate",  [](R r) -> Vec { return r.out() * r.V(softmax(r.A)); }},
    {"clamped_sum",       [](R r) -> Vec { return r.V(E(r)) / std::max(E(r).sum(), 1.0); }},
    {"detached_sum",      [](R r) -> Vec { return r.V(E(r)) / std::max(E(r).sum(), 1.0); }},
    {"detached_sum_gate", [](R r) -> Vec { return r.out() * r.V(E(r)) / (E(r).sum() + 1e-4); }},
    {"by_count",          [](R r) -> Vec { return r.V(E(r)) / r.n; }},
    {"gate",              [](R r) -> Vec { return r.out() * r.V(E(r)); }},
    {"by_count_gate",     [](R r) -> Vec { return r.out() * r.V(E(r)) / r.n; }},
    {"by_count_rms",      [](R r) -> Vec { return rms(r, r.V(E(r)) / r.n); }},
    {"layer_norm",        [](R r) -> Vec { return layer(r, r.V(E(r)) / r.n); }},
    {"rms",               [](R r) -> Vec { return rms(r, r.V(E(r))); }},
    {"l2",                [](R r) -> Vec { return L2(r.V(exp(r.A))); }},
    {"l2_clamped",        [](R r) -> Vec { return L2(r.V(E(r))); }},
    {"l2_times_dim",      [](R r) -> Vec { return double(r.h.E) * L2(r.V(E(r))); }},
    {"l2_out_gate",       [](R r) -> Vec { return L2(r.out() * r.V(exp(r.A))); }},
    {"l2_out_gate@code",  [](R r) -> Vec { return L2(r.out() * r.V(exp(r.A)) / r.n); }},
    {"l2_post_gate",      [](R r) -> Vec { return r.post() * L2(r.V(exp(r.A))); }},
    {"l2_post_gate@code", [](R r) -> Vec { return r.post() * L2(r.out() * r.V(exp(r.A)) / r.n); }},
    {"gated",             gated},
    {"gated_no_norm",     [](R r) -> Vec { return r.out() * r.V(E(r) * r.in()) / r.n; }},
    {"gated_no_in",       [](R r) -> Vec { return layer(r, r.out() * r.V(E(r)) / r.n); }},
    {"gated_no_out",      [](R r) -> Vec { return layer(r, r.V(E(r) * r.in()) / r.n); }},
    {"gated_in_only",     [](R r) -> Vec { return r.V(E(r) * r.in()) / r.n; }},
    {"gated_decay",       [](R r) -> Vec { return layer(r, r.out() * r.V(E(r) * r.decay() * r.in()) / r.n); }},
    {"gated_decay@code",  [](R r) -> Vec { return r.out() * r.V(E(r) * r.raw_decay() * r.in()) / r.n; }},
    {"gated_conv",        gated},
    {"cumulative_gate",   [](R r) -> Vec { return r.V(E(r)) / std::max(r.shares(), 1.0); }},
    {"cumulative_gate_count",      [](R r) -> Vec { return r.V(E(r)) / (r.n * r.shares()); }},
    {"cumulative_gate_count@code", [](R r) -> Vec { return std::exp(-r.raw_gate()) * r.V(E(r)) / r.n; }},
    {"relu_l2",           [](R r) -> Vec { return L2(r.V(r.scores(relu) / r.root)); }},
    {"relu_gate",         [](R r) -> Vec { return r.out() * r.V(least(r.scores(relu) / r.root, 5)) / r.n; }},
    {"linear",            [](R r) -> Vec { return r.V(r.A) / r.n; }},
    {"linear_elu",        [](R r) -> Vec { return normalised(r, r.scores(elu1)); }},
    {"linear_relu",       [](R r) -> Vec { return normalised(r, r.scores(relu), 1e-8); }},
    {"linear_cosine",     [](R r) -> Vec { return r.V(r.scores(cosine) * r.per_count()); }},
    {"linear_cosine@code", [](R r) -> Vec { return r.V(cosine_over_heads(r) * r.per_count()); }},
    {"linear_mamba",      [](R r) -> Vec { return r.V(r.scores(same) * r.decay() * r.in()); }},
    {"linear_decay",      [](R r) -> Vec { return rms(r, r.V(r.A * r.decay())); }},
    {"retention",         [](R r) -> Vec { return rms(r, r.V(r.A * r.slope())); }},
    {"based",             based},
    {"taylor79@code",     [](R r) -> Vec { return r.V(series(r.A, 79)); }},
    {"sigmoid",           [](R r) -> Vec { return r.V(1.0 / (1.0 + exp(-(r.A - std::log(r.n))))); }},
    {"sigmoid_by_count",  [](R r) -> Vec { return r.V(1.0 / (1.0 + exp(-r.A))) / r.n; }},
    {"softmax1",          [](R r) -> Vec { return normalised(r, exp(r.A), 1); }},
    {"ssmax",             [](R r) -> Vec { return r.V(softmax(r.h.length_scale[0] * std::log(r.n) * r.A)); }},
    {"sparsemax",         [](R r) -> Vec { return r.V(entmax(r.A, 2)); }},
    {"entmax15",          [](R r) -> Vec { return r.V(entmax(r.A, 1.5)); }},
    {"asentmax",          [](R r) -> Vec { return r.V(entmax(r.log_power() * r.A, 1.5)); }},
    {"topk",              [](R r) -> Vec { return r.V(softmax(largest(r.A, 32))); }},
    {"sa_softmax",        [](R r) -> Vec { return r.V(self_adjusted(r.A)); }},
    {"softcap",           [](R r) -> Vec { return r.V(softmax(50.0 * tanh(r.A / 50.0))); }},
    {"sink",              sunk},
    {"bias",              [](R r) -> Vec { return r.V(softmax(r.A + r.each([&](int s) { return r.h.score_bias[r.t * r.h.S + s]; }))); }},
    {"alibi",             [](R r) -> Vec { return r.V(softmax(r.A - r.each([&](int s) { return r.h.slope * (r.at - s); }))); }},
    {"forgetting",        [](R r) -> Vec { return r.V(softmax(r.A + log(r.decay()))); }},
    {"channel_out_gate",  [](R r) -> Vec { return slice(r.h.out, r.t, r.h.E) * r.V(softmax(r.A)); }},
    {"softpick",          softpick},
    {"stick_breaking",    stick_breaking},
    {"two_way_window",    [](R r) -> Vec { return r.V(softmax(r.A)); }},
    {"chunk_window",      [](R r) -> Vec { return r.V(softmax(r.A)); }},
    {"streaming",         [](R r) -> Vec { return r.V(softmax(r.A)); }},
    {"prefix_lm",         [](R r) -> Vec { return r.V(softmax(r.A)); }},
    {"gla",               [](R r) -> Vec { return r.post_channels() * rms(r, recurrence(r, same) / r.root); }},
    {"hgrn2",             [](R r) -> Vec { return rms(r, recurrence(r, same)); }},
    {"delta",             [](R r) -> Vec { return rms(r, recurrence(r, cosine, 1)); }},
    {"delta_negative",    [](R r) -> Vec { return rms(r, recurrence(r, cosine, 2)); }},
    {"gated_delta",       [](R r) -> Vec { return r.post_channels() * rms(r, recurrence(r, cosine, 1)); }},
    {"kda",               [](R r) -> Vec { return r.post_channels() * rms(r, recurrence(r, cosine, 1)); }},
    {"delta_exp",         [](R r) -> Vec { return rms(r, delta(r, exp_of, 0)); }},
    {"hedgehog",          [](R r) -> Vec { return normalised(r, hedgehog_scores(r)); }},
    {"lolcats",           [](R r) -> Vec { return normalised(r, near_with_share(r, r.A, hedgehog_scores(r))); }},
    {"adaptive_temperature", [](R r) -> Vec { return r.V(softmax(adaptive(r.A) * r.A)); }},
};
const std::map<std::string, std::function<Vec(R, int)>> kFamilies = {
    {"taylor",         [](R r, int n) -> Vec { return bounded(r, series(r.A, n), n, r.n); }},
    {"raw_taylor",     [](R r, int n) -> Vec { return normalised(r, series(r.A, n)); }},
    {"centred_taylor", [](R r, int n) -> Vec { return bounded(r, series(r.A - r.A.sum() / r.n, n), n, r.n); }},
    {"elu_taylor",     [](R r, int n) -> Vec { return normalised(r, series(r.scores(elu1), n)); }},
    {"relu_taylor",    [](R r, int n) -> Vec { return normalised(r, series(r.scores(relu), n), 1e-8); }},
    {"cosine_taylor",  [](R r, int n) -> Vec { return r.V(series(r.scores(cosine), n) * r.per_count()); }},
    {"power",          [](R r, int n) -> Vec { return normalised(r, pow(r.A, double(n))); }},
    {"near_taylor",    [](R r, int n) -> Vec { return bounded(r, near(r, r.A, series(r.A, n)), n, far_count(r)); }},
    {"near_centred_taylor", [](R r, int n) -> Vec { const Vec x = r.A - far_mean(r); return bounded(r, near(r, x, series(x, n)), n, far_count(r)); }},
    {"delta_taylor",   [](R r, int n) -> Vec { return rms(r, delta(r, series_of, n)); }},
    {"topk",           [](R r, int n) -> Vec { return r.V(softmax(largest(r.A, n))); }},
    {"topk_raw",       [](R r, int n) -> Vec { return r.V(softmax(r.A) * exp(largest(r.A, n) - r.A)); }},
};
// clang-format on

// Whether a query at position t sees key s, both counted from the first token of their sequence,
// where that is not s <= t; the first p keys are its prefix.
using Sees = bool (*)(int s, int t, int p);
const std::map<std::string, Sees> kMasks = {
    {"softmax_window", [](int s, int t, int) { return s <= t && s > t - 128; }},
    {"two_way_window", [](int s, int t, int) { return s <= t + 64 && s > t - 64; }},
    {"chunk_window", [](int s, int t, int) { return s <= t && s / 128 == t / 128; }},
    {"streaming", [](int s, int t, int) { return s <= t && (s < 4 || s > t - 128); }},
    {"prefix_lm", [](int s, int t, int p) { return s <= t || s < p; }},
};
bool causal(int s, int t, int) {
  return s <= t;
}

// Null when there is none.
Formula formula(const std::string& name) {
  if (const auto f = kFormulas.find(name); f != kFormulas.end()) return f->second;
  const size_t digits = name.find_last_not_of("0123456789") + 1;
  const auto f = kFamilies.find(name.substr(0, digits));
  if (f == kFamilies.end() || digits == name.size()) return nullptr;
  return [f, n = std::stoi(name.substr(digits))](const Row& r) { return f->second(r, n); };
}

Vec values(const at::Tensor& x) {
  return {x.contiguous().const_data_ptr<double>(), size_t(x.numel())};
}
// x[i][j] of an input that may be absent.
template <class... Index>
Vec part(at::Tensor x, Index... i) {
  if (!x.defined()) return {};
  ((x = x[i]), ...);
  return values(x.dim() == 0 ? x.reshape(1) : x);
}

// The keys that the mask shows, that are kept and that are of the query's sequence.
std::vector<std::vector<int>> seen(Sees sees, const Inputs& in, int b, int T, int S) {
  std::vector<int> sequence(S, 0), begin(S, 0);
  const int prefix = in.prefix.defined() ? in.prefix[b].item<int>() : 0;
  if (in.cu_seqlens.defined())
    for (int s = 0; s < S; ++s) {
      sequence[s] = (in.cu_seqlens <= s).sum().item<int>();
      begin[s] = in.cu_seqlens[sequence[s] - 1].item<int>();
    }
  std::vector<std::vector<int>> keys(T);
  for (int t = 0; t < T; ++t)
    for (int s = 0; s < S; ++s)
      if (sequence[s] == sequence[t + S - T] && sees(s - begin[s], t + S - T - begin[s], prefix) &&
          (!in.keep.defined() || in.keep[b][s].item<bool>()))
        keys[t].push_back(s);
  return keys;
}

// The length of every channel over the H heads, of which `times` share one row of x [heads, ...].
Vec over_heads(const Vec& x, int heads, double times) {
  Vec sum(0.0, x.size() / heads);
  for (int h = 0; h < heads; ++h) sum += pow(slice(x, h, int(sum.size())), 2.0) * times;
  return sqrt(sum);
}

Head head(Sees sees, const Inputs& in, int b, int h) {
  const int H = int(in.q.size(1)), G = int(in.k.size(1)), g = h / (H / G);
  Head x;
  x.T = int(in.q.size(2)), x.S = int(in.k.size(2)), x.D = int(in.q.size(3)),
  x.E = int(in.v.size(3));
  x.q = part(in.q, b, h), x.k = part(in.k, b, g), x.v = part(in.v, b, g);
  x.q_over_heads = over_heads(part(in.q, b), H, 1);
  x.k_over_heads = over_heads(part(in.k, b), G, H / G);
  x.decay = part(in.decay, b, g), x.in = part(in.input_gate, b, g);
  x.out = part(in.output_gate, b, h), x.post = part(in.post_gate, b, h);
  x.beta = part(in.beta, b, g), x.channel_decay = part(in.channel_decay, b, g);
  if (in.sink.defined()) x.sink = part(in.sink, h)[0];
  if (in.bias.defined()) x.score_bias = part(in.bias.expand({in.q.size(0), H, -1, -1}), b, h);
  x.length_scale = part(in.length_scale, h), x.log_power = part(in.log_power, h);
  x.share = part(in.denominator_gate, b, g), x.count_exponent = part(in.count_exponent, g);
  x.near_share = part(in.near_share, h);
  if (in.slope.defined()) x.slope = part(in.slope, g)[0];
  x.weight = part(in.norm_weight), x.bias = part(in.norm_bias);
  x.query_projection = part(in.query_projection, h), x.key_projection = part(in.key_projection, g);
  x.seen = seen(sees, in, b, x.T, x.S);
  for (const std::vector<int>& keys : seen(sees, in, b, x.S, x.S))
    x.seen_at_key.push_back(int(keys.size()));
  return x;
}

// The largest distance, relative to 1 + |what is right|; NaN counts as infinite.
double error(const std::string& name, const Spec& spec, const Inputs& in) {
  const Formula f = formula(name);
  const auto mask = kMasks.find(name);
  const Sees sees = mask == kMasks.end() ? causal : mask->second;
  at::set_num_threads(1);  // tiny matrices: on a busy machine, threads cost 30 times the work
  const at::Tensor found = attend(spec, in, "reference");
  double worst = 0;
  for (int b = 0; b < in.q.size(0); ++b)
    for (int h = 0; h < in.q.size(1); ++h) {
      const Head x = head(sees, in, b, h);
      const Vec o = values(found[b][h]);
      for (int t = 0; t < x.T; ++t) {
        const Vec right = x.seen[t].empty() ? Vec(0.0, x.E) : f(Row{x, t});
        for (int e = 0; e < x.E; ++e) {
          const double d = std::abs(o[t * x.E + e] - right[e]) / (1 + std::abs(right[e]));
          worst = std::isnan(d) ? INFINITY : std::max(worst, d);
        }
      }
    }
  return worst;
}

// Scores of both signs, also where `random_inputs` gives only positive ones to keep sums from 0.
Inputs inputs(const Spec& spec, const Case& c) {
  Inputs in = random_inputs(spec, c);
  if (is<Relu>(spec.features) || is<Elu1>(spec.features))
    in.q = in.q * 2 - 0.5, in.k = in.k * 2 - 0.5;
  return in;
}

// clang-format off
const std::vector<Case> kCases = {
    {.T = 11, .S = 11, .D = 4, .E = 3, .dtype = at::kDouble, .seed = 11},
    {.T = 5, .S = 12, .D = 4, .E = 3, .dtype = at::kDouble, .seed = 12},
    {.H = 6, .G = 3, .T = 13, .S = 13, .D = 3, .E = 5, .dtype = at::kDouble, .seed = 13, .padded = true},
    {.T = 17, .S = 17, .D = 5, .E = 2, .dtype = at::kDouble, .seed = 14, .packed = true},
    {.B = 1, .H = 2, .G = 1, .T = 140, .S = 140, .D = 4, .E = 3, .dtype = at::kDouble, .seed = 15},
};
// clang-format on
constexpr double kAllowed = 1e-10;
TEST(Formulas, ThereIsOneForEveryVariant) {
  for (const Variant& v : variants()) EXPECT_TRUE(formula(v.name)) << v.name;
}

std::string name(const testing::TestParamInfo<Variant>& info) {
  std::string s = info.param.name;
  std::replace(s.begin(), s.end(), '@', '_');
  return s;
}

class OfVariant : public testing::TestWithParam<Variant> {};
TEST_P(OfVariant, Holds) {
  const Variant& v = GetParam();
  for (const Case& c : kCases)
    EXPECT_LT(error(v.name, v.spec, inputs(v.spec, c)), kAllowed) << text(c);
}

INSTANTIATE_TEST_SUITE_P(Formulas, OfVariant, testing::ValuesIn(variants()), name);

// Members of families that are not listed: a floor under the sum of near and far weights.
TEST(Formulas, OfNearKeysHoldForOddOrders) {
  for (const char* name : {"near_taylor1", "near_taylor3", "near_centred_taylor1",
                           "near_centred_taylor3", "near_centred_taylor5"})
    for (const Case& c : kCases) {
      const Spec spec = find(name).spec;
      EXPECT_LT(error(name, spec, inputs(spec, c)), kAllowed) << name << ", " << text(c);
    }
}

// Every attention_type of the authors' configs (arXiv 2507.23632), its equation as they have it,
// and our row. A = q.k / sqrt(d), E = exp(min(A, 5)), c = the number of keys seen, g = sigmoid(W x
// + b).
struct AuthorsRow {
  const char *name, *equation, *ours;
};
// clang-format off
const AuthorsRow kAuthorsRows[] = {
    {"softmax", "exp(A) V / Σ exp(A)", "softmax"},
    {"softmax_clamp_denom", "E V / max(Σ E, 1)", "clamped_sum"},
    {"softmax_detach_denom", "E V / stopgrad(max(Σ E, 1))", "detached_sum"},
    {"softmax_detach_denom_gate", "g_out E V / stopgrad(Σ E + 1e-4)", "detached_sum_gate"},
    {"softmax_divs", "E V / c", "by_count"},
    {"gated_softmax_no_gate_no_norm", "E V / c", "by_count"},
    {"softmax_gate", "g_out E V", "gate"},
    {"softmax_divS_gate", "g_out E V / c", "by_count_gate"},
    {"softmax_divS_gatev2", "g_out E V / c", "by_count_gate"},
    {"gated_softmax_no_in_gate_no_norm", "g_out E V / c", "by_count_gate"},
    {"softmax_divS_norm", "RMSNorm(E V / c)", "by_count_rms"},
    {"gated_softmax_no_gate_rmsnorm", "RMSNorm(E V / c)", "by_count_rms"},
    {"gated_softmax", "LayerNorm(g_out E (g_in V) / c)", "gated"},
    {"gated_softmax_no_norm", "g_out E (g_in V) / c", "gated_no_norm"},
    {"gated_softmax_no_in_gate", "LayerNorm(g_out E V / c)", "gated_no_in"},
    {"gated_softmax_no_out_gate", "LayerNorm(E (g_in V) / c)", "gated_no_out"},
    {"gated_softmax_no_out_gate_no_norm", "E (g_in V) / c", "gated_in_only"},
    {"gated_softmax_no_gate", "LayerNorm(E V / c)", "layer_norm"},
    {"gated_softmax_no_gate_rmsnorm_nodivS", "RMSNorm(E V)", "rms"},
    {"gated_softmax_no_gate_L2norm_nodivS", "L2(E V)", "l2_clamped"},
    {"gated_softmax_no_gate_L2norm_nodivS_noclamp", "L2(exp(A) V)", "l2"},
    {"gated_softmax_out_gate_L2norm_nodivS_noclamp", "L2(g_out exp(A) V)", "l2_out_gate"},
    {"gated_softmax_out_gate_L2norm_nodivS_noclamp@code", "L2(g_out exp(A) V / c)", "l2_out_gate@code"},
    {"gated_softmax_post_out_gate_L2norm_nodivS_noclamp", "g_post L2(exp(A) V)", "l2_post_gate"},
    {"gated_softmax_post_out_gate_L2norm_nodivS_noclamp@code", "g_post L2(g_out exp(A) V / c)", "l2_post_gate@code"},
    {"gated_softmax_no_gate_customnorm", "d L2(E V)", "l2_times_dim"},
    {"gated_ReLU_no_gate_L2norm_nodivS_noclamp", "L2((relu(Q) relu(K)ᵀ / √d) V)", "relu_l2"},
    {"gated_relu_no_in_gate_no_norm", "g_out min(relu(Q) relu(K)ᵀ / √d, 5) V / c", "relu_gate"},
    {"softmax_taylor_80terms", "Σₙ₌₀⁷⁹ Aⁿ/n!, divided by its sum, V", "taylor79"},
    {"softmax_taylor_80terms@code", "Σₙ₌₀⁷⁹ Aⁿ/n! V", "taylor79@code"},
    {"linear_elu", "φ(Q) φ(K)ᵀ V / Σ, φ = elu + 1", "linear_elu"},
    {"linear_relu", "relu(Q) relu(K)ᵀ V / (Σ + 1e-8)", "linear_relu"},
    {"linear_cosine", "N(Q) N(K)ᵀ (V_s / n_s^σ(m))", "linear_cosine"},
    {"linear_cosine@code", "the same, N over the heads", "linear_cosine@code"},
    {"gated_softmax_plusplus", "gated_softmax of SiLU(conv₄(q, k, v))", "gated_conv"},
    {"gated_softmax_plusplus_extratoks", "gated_softmax of SiLU(conv₄(q, k, v))", "gated_conv"},
    {"gated_softmax_decay", "LayerNorm(g_out E (∏ over (s, t] of g) (g_in V) / c)", "gated_decay"},
    {"gated_softmax_decay@code", "g_out E exp((Σ over [s, t) of a) / 1024) (g_in V) / c", "gated_decay@code"},
    {"gated_softmax_cumgate", "E V / max(Σ exp(W x + b), 1)", "cumulative_gate"},
    {"cumulative_gated_softmax", "E V / (c Σ exp(W x + b))", "cumulative_gate_count"},
    {"cumulative_gated_softmax@code", "exp(−(W x + b)) E V / c", "cumulative_gate_count@code"},
    {"linear_mamba", "Σ (C·B) ∏ exp(−Δ A) Δ x, inside a Mamba-2 block", "linear_mamba"},
};
// clang-format on

// HORNER_ROWS=FILE writes the table of docs/reproduction.md.
TEST(AuthorsRows, AllResolveToTheirFormulas) {
  std::ostringstream table;
  for (const AuthorsRow& row : kAuthorsRows) {
    SCOPED_TRACE(row.name);
    const Variant found = find(row.name);
    EXPECT_EQ(found.name, row.ours);
    double worst = 0;
    for (const Case& c : kCases)
      worst = std::max(worst, error(row.ours, found.spec, inputs(found.spec, c)));
    EXPECT_LT(worst, kAllowed);
    table << "| `" << row.name << "` | " << row.equation << " | `" << row.ours << "` | ";
    for (const auto& [label, line] : attn::formula(found.spec))
      if (label == "result") table << line;
    table << " | " << std::setprecision(1) << std::scientific << worst << " |\n";
  }
  if (const char* file = std::getenv("HORNER_ROWS")) std::ofstream(file) << table.str();
  EXPECT_THROW(find("gated_softmax_plusplus_mamba"), Error);
  EXPECT_THROW(find("gated_softmax_plusplus_mamba2"), Error);
}

TEST(Published, ExamplesOfSparsemaxAndEntmax) {
  Inputs in;
  in.q = at::ones({1, 1, 1, 1}, at::kDouble);
  in.k = at::tensor({-2.0, 0.0, 0.5}).reshape({1, 1, 3, 1});
  in.v = at::eye(3, at::kDouble).reshape({1, 1, 3, 3});
  const Vec sparse = values(attend(find("sparsemax").spec, in, "reference"));
  const Vec between = values(attend(find("entmax15").spec, in, "reference"));
  EXPECT_LT(abs(sparse - Vec{0, 0.25, 0.75}).max(), 1e-12);
  EXPECT_LT(abs(between - Vec{0, 0.3260, 0.6740}).max(), 5e-5);
}

}  // namespace
}  // namespace horner::attn
