// Every variant of the catalog against its formula, written apart from the library: plain numbers,
// one (batch, head) and one query at a time.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <valarray>

#include "attn/catalog.h"
#include "attn/verify.h"

namespace horner::attn {
namespace {

using Vec = std::valarray<double>;

// What one (batch, head) sees. Undefined inputs are empty.
struct Head {
  int T, S, D, E;
  Vec q, k, v;                     // [T, D], [S, D], [S, E]
  Vec q_over_heads, k_over_heads;  // [T, D], [S, D]: the length of a channel over the heads
  Vec decay, in, share;            // [S]
  Vec out, post;                   // [T]
  Vec length_scale, count_exponent, log_power;  // [1], [1], [3]
  Vec weight, bias;                             // [E]
  Vec query_projection, key_projection;         // [D, F]
  std::vector<std::vector<int>> seen;           // the keys of each query
};

Vec slice(const Vec& x, int row, int length) {
  return x[std::slice(size_t(row) * length, length, 1)];
}
double dot(const Vec& a, const Vec& b) {
  return (a * b).sum();
}
double length(const Vec& x) {
  return std::sqrt(dot(x, x));
}

// One query and the keys that it sees.
struct Row {
  const Head& h;
  int t;
  const std::vector<int>& s = h.seen[t];
  double n = double(s.size());
  int at = t + h.S - h.T;  // where the query stands among the keys
  Vec q = slice(h.q, t, h.D);
  Vec A = scores([](const Vec& x) { return x; }, 1 / std::sqrt(double(h.D)));

  Vec k(int key) const { return slice(h.k, key, h.D); }
  // f(q).f(k) * scale
  template <class F>
  Vec scores(F f, double scale) const {
    Vec x(s.size());
    for (size_t i = 0; i < s.size(); ++i) x[i] = dot(f(q), f(k(s[i]))) * scale;
    return x;
  }
  // sum_s w_s v_s
  Vec V(const Vec& w) const {
    Vec o(0.0, h.E);
    for (size_t i = 0; i < s.size(); ++i) o += w[i] * slice(h.v, s[i], h.E);
    return o;
  }
  Vec of_seen(const Vec& x) const {
    Vec y(s.size());
    for (size_t i = 0; i < s.size(); ++i) y[i] = x[s[i]];
    return y;
  }
  Vec in() const { return of_seen(h.in); }
  Vec fade() const {  // the product of the gates of (s, t]
    Vec y(1.0, s.size());
    for (size_t i = 0; i < s.size(); ++i)
      for (int j = s[i] + 1; j <= at; ++j) y[i] *= std::exp(h.decay[j]);
    return y;
  }
  double out() const { return h.out[t]; }
  double post() const { return h.post[t]; }
  double count_power() const { return std::pow(n, 1 / (1 + std::exp(-h.count_exponent[0]))); }
  double shares() const { return Vec(exp(of_seen(h.share))).sum(); }
};
using Formula = std::function<Vec(const Row&)>;

Vec least(const Vec& x, double bound) {
  Vec y = x;
  for (double& z : y) z = std::min(z, bound);
  return y;
}
Vec E(const Row& r) {
  return exp(least(r.A, 5));
}
Vec series(const Vec& x, int order) {
  Vec sum(1.0, x.size()), term(1.0, x.size());
  for (int n = 1; n <= order; ++n) term *= x / double(n), sum += term;
  return sum;
}
Vec L2(const Vec& o) {
  return o / std::max(length(o), 1e-12);
}
Vec rms(const Row& r, const Vec& o) {
  return o / std::sqrt(dot(o, o) / o.size() + 1e-5) * r.h.weight;
}
Vec layer(const Row& r, const Vec& o) {
  const Vec x = o - o.sum() / o.size();
  return x / std::sqrt(dot(x, x) / x.size() + 1e-5) * r.h.weight + r.h.bias;
}
Vec softmax(const Vec& x) {
  const Vec w = exp(x - x.max());
  return w / w.sum();
}
Vec normalised(const Row& r, const Vec& w, double plus = 0) {
  return r.V(w) / (w.sum() + plus);
}

Vec relu(const Vec& x) {
  return x.apply([](double y) { return y > 0 ? y : 0; });
}
Vec elu1(const Vec& x) {
  return x.apply([](double y) { return y > 0 ? y + 1 : std::exp(y); });
}
Vec cosine(const Vec& x) {
  return x / length(x);
}

// max((alpha - 1) x - tau, 0)^(1 / (alpha - 1)), tau by bisection such that the sum is 1.
Vec entmax(const Vec& x, double alpha) {
  const Vec z = (alpha - 1) * x;
  double low = z.max() - 1, high = z.max();
  auto p = [&](double tau) { return Vec(pow(relu(z - tau), 1 / (alpha - 1))); };
  for (int i = 0; i < 100; ++i) (p((low + high) / 2).sum() >= 1 ? low : high) = (low + high) / 2;
  return p((low + high) / 2);
}

// The scores where they are among the k largest, elsewhere -inf.
Vec largest(const Vec& x, int k) {
  std::vector<double> sorted(begin(x), end(x));
  std::sort(sorted.rbegin(), sorted.rend());
  Vec y = x;
  for (double& z : y)
    if (int(x.size()) > k && z < sorted[k - 1]) z = -INFINITY;
  return y;
}

Vec self_adjusted(const Vec& x) {
  const double low = std::min(x.min(), 0.0), high = std::max(x.max(), 0.0);
  return (x - low) / (high - low) * softmax(x);
}

double adaptive(const Vec& x) {
  const Vec p = softmax(x);
  const double H = -dot(p, log(p + 1e-9));
  const double beta =
      -0.037 * std::pow(H, 4) + 0.481 * std::pow(H, 3) - 2.3 * H * H + 4.917 * H - 1.791;
  return H > 0.5 ? std::max(beta, 1.0) : 1.0;
}

Vec cosine_over_heads(const Row& r) {
  Vec x(r.s.size());
  for (size_t i = 0; i < r.s.size(); ++i)
    x[i] = dot(r.q / slice(r.h.q_over_heads, r.t, r.h.D),
               r.k(r.s[i]) / slice(r.h.k_over_heads, r.s[i], r.h.D));
  return x;
}

Vec projected(const Vec& x, const Vec& P) {
  const int F = int(P.size() / x.size());
  Vec y(0.0, F);
  for (size_t d = 0; d < x.size(); ++d) y += x[d] * slice(P, int(d), F);
  return y;
}
Vec based(const Row& r) {
  const Vec q = projected(r.q, r.h.query_projection);
  Vec w(r.s.size());
  for (size_t i = 0; i < r.s.size(); ++i) {
    const double u = dot(q, projected(r.k(r.s[i]), r.h.key_projection)) / std::sqrt(q.size());
    w[i] = 1 + u + u * u / 2;
  }
  return normalised(r, w, 1e-12);
}

Vec window(const Row& r, int size) {
  Vec w = exp(r.A);
  for (size_t i = 0; i < r.s.size(); ++i)
    if (r.s[i] <= r.at - size) w[i] = 0;
  return normalised(r, w);
}

Vec gated(const Row& r) {
  return layer(r, r.out() * r.V(E(r) * r.in()) / r.n);
}

#define ROW [](const Row& r) -> Vec
const std::map<std::string, Formula> kFormulas = {{"softmax", ROW{return r.V(softmax(r.A));
}  // namespace
}  // namespace horner::attn
, {"softmax_window", ROW{return window(r, 128);
}
}
, {"softmax_out_gate", ROW{return r.out() * r.V(softmax(r.A));
}
}
, {"clamped_sum", ROW{return r.V(E(r)) / std::max(E(r).sum(), 1.0);
}
}
, {"detached_sum", ROW{return r.V(E(r)) / std::max(E(r).sum(), 1.0);
}
}
, {"detached_sum_gate", ROW{return r.out() * r.V(E(r)) / (E(r).sum() + 1e-4);
}
}
, {"by_count", ROW{return r.V(E(r)) / r.n;
}
}
, {"gate", ROW{return r.out() * r.V(E(r));
}
}
, {"by_count_gate", ROW{return r.out() * r.V(E(r)) / r.n;
}
}
, {"by_count_rms", ROW{return rms(r, r.V(E(r)) / r.n);
}
}
, {"layer_norm", ROW{return layer(r, r.V(E(r)) / r.n);
}
}
, {"rms", ROW{return rms(r, r.V(E(r)));
}
}
, {"l2", ROW{return L2(r.V(exp(r.A)));
}
}
, {"l2_clamped", ROW{return L2(r.V(E(r)));
}
}
, {"l2_times_dim", ROW{return double(r.h.E) * L2(r.V(E(r)));
}
}
, {"l2_out_gate", ROW{return L2(r.out() * r.V(exp(r.A)));
}
}
, {"l2_out_gate@code", ROW{return L2(r.out() * r.V(exp(r.A)) / r.n);
}
}
, {"l2_post_gate", ROW{return r.post() * L2(r.V(exp(r.A)));
}
}
, {"l2_post_gate@code", ROW{return r.post() * L2(r.out() * r.V(exp(r.A)) / r.n);
}
}
, {"gated", gated}, {"gated_no_norm", ROW{return r.out() * r.V(E(r) * r.in()) / r.n;
}
}
, {"gated_no_in", ROW{return layer(r, r.out() * r.V(E(r)) / r.n);
}
}
, {"gated_no_out", ROW{return layer(r, r.V(E(r) * r.in()) / r.n);
}
}
, {"gated_in_only", ROW{return r.V(E(r) * r.in()) / r.n;
}
}
, {"gated_decay", ROW{return layer(r, r.out() * r.V(E(r) * r.fade() * r.in()) / r.n);
}
}
, {"gated_conv", gated}, {"cumulative_gate", ROW{return r.V(E(r)) / std::max(r.shares(), 1.0);
}
}
, {"cumulative_gate_count", ROW{return r.V(E(r)) / (r.n * r.shares());
}
}
, {"cumulative_gate_count@code", ROW{return r.out() * r.V(E(r)) / r.n;
}
}
, {"mamba_exp", ROW{return rms(r, r.V(E(r) * r.fade() * r.in()));
}
}
,

    {"relu_l2", ROW{return L2(r.V(r.scores(relu, 1 / std::sqrt(r.h.D))));
}
}
, {"relu_gate", ROW{return r.out() * r.V(least(r.scores(relu, 1 / std::sqrt(r.h.D)), 5)) / r.n;
}
}
, {"linear", ROW{return r.V(r.A) / r.n;
}
}
, {"linear_elu", ROW{return normalised(r, r.scores(elu1, 1));
}
}
, {"linear_relu", ROW{return normalised(r, r.scores(relu, 1), 1e-8);
}
}
, {"linear_cosine", ROW{return r.V(r.scores(cosine, 1)) / r.count_power();
}
}
, {"linear_cosine@code", ROW{return r.V(cosine_over_heads(r)) / r.count_power();
}
}
, {"linear_mamba", ROW{return rms(r, r.V(std::sqrt(r.h.D) * r.A * r.fade() * r.in()));
}
}
, {"retention", ROW{return rms(r, r.V(r.A* r.fade()));
}
}
, {"based", based}, {"taylor79@code", ROW{return r.V(series(r.A, 79));
}
}
, {"sigmoid", ROW{return r.V(1.0 / (1.0 + exp(-r.A))) / r.n;
}
}
,

    {"softmax1", ROW{return normalised(r, exp(r.A), 1);
}
}
, {"ssmax", ROW{return r.V(softmax(r.h.length_scale[0] * std::log(r.n) * r.A));
}
}
, {"sparsemax", ROW{return r.V(entmax(r.A, 2));
}
}
, {"entmax15", ROW{return r.V(entmax(r.A, 1.5));
}
}
, {"asentmax", ROW{const Vec& p = r.h.log_power;
return r.V(entmax((p[0] + p[1] * std::pow(std::log(r.n), p[2])) * r.A, 1.5));
}
}
, {"topk", ROW{return r.V(softmax(largest(r.A, 32)));
}
}
, {"sa_softmax", ROW{return r.V(self_adjusted(r.A));
}
}
, {"adaptive_temperature", ROW{return r.V(softmax(adaptive(r.A) * r.A));
}
}
,
}
;
#undef ROW

#define FAMILY [](const Row& r, int n) -> Vec
const std::map<std::string, std::function<Vec(const Row&, int)>> kFamilies = {
    {"taylor", FAMILY{return normalised(r, series(r.A, n));
}
}
, {"centred_taylor", FAMILY{return normalised(r, series(r.A - r.A.sum() / r.n, n));
}
}
, {"elu_taylor", FAMILY{return normalised(r, series(r.scores(elu1, 1), n));
}
}
, {"relu_taylor", FAMILY{return normalised(r, series(r.scores(relu, 1), n), 1e-8);
}
}
, {"cosine_taylor", FAMILY{return r.V(series(r.scores(cosine, 1), n)) / r.count_power();
}
}
, {"power", FAMILY{return normalised(r, pow(r.A, double(n)));
}
}
, {"topk", FAMILY{return r.V(softmax(largest(r.A, n)));
}
}
, {"topk_raw", FAMILY{return r.V(softmax(r.A) * exp(largest(r.A, n) - r.A));
}
}
,
}
;
#undef FAMILY

// Null when there is none.
Formula formula(const std::string& name) {
  if (const auto f = kFormulas.find(name); f != kFormulas.end()) return f->second;
  const size_t digits = name.find_last_not_of("0123456789") + 1;
  const auto f = kFamilies.find(name.substr(0, digits));
  if (f == kFamilies.end() || digits == name.size()) return nullptr;
  return [f, n = std::stoi(name.substr(digits))](const Row& r) { return f->second(r, n); };
}

Vec values(const at::Tensor& x) {
  const at::Tensor c = x.contiguous();
  return {c.const_data_ptr<double>(), size_t(c.numel())};
}
// x[i][j] of an input that may be absent.
template <class... Index>
Vec part(at::Tensor x, Index... i) {
  if (!x.defined()) return {};
  ((x = x[i]), ...);
  return values(x.dim() == 0 ? x.reshape(1) : x);
}

// The keys that are not after the query, are kept and are of the query's sequence.
std::vector<std::vector<int>> seen(const Inputs& in, int b, int T, int S) {
  std::vector<int> sequence(S, 0);
  if (in.cu_seqlens.defined())
    for (int s = 0; s < S; ++s) sequence[s] = (in.cu_seqlens <= s).sum().item<int>();
  std::vector<std::vector<int>> keys(T);
  for (int t = 0; t < T; ++t)
    for (int s = 0; s <= t + S - T; ++s)
      if (sequence[s] == sequence[t + S - T] && (!in.keep.defined() || in.keep[b][s].item<bool>()))
        keys[t].push_back(s);
  return keys;
}

// The length of every channel over the H heads, of which `times` share one row of x [heads, ...].
Vec over_heads(const Vec& x, int heads, double times) {
  Vec sum(0.0, x.size() / heads);
  for (int h = 0; h < heads; ++h) sum += pow(slice(x, h, int(sum.size())), 2.0) * times;
  return sqrt(sum);
}

Head head(const Inputs& in, int b, int h) {
  const int H = int(in.q.size(1)), G = int(in.k.size(1)), g = h / (H / G);
  Head x{.T = int(in.q.size(2)),
         .S = int(in.k.size(2)),
         .D = int(in.q.size(3)),
         .E = int(in.v.size(3))};
  x.q = part(in.q, b, h), x.k = part(in.k, b, g), x.v = part(in.v, b, g);
  x.q_over_heads = over_heads(part(in.q, b), H, 1);
  x.k_over_heads = over_heads(part(in.k, b), G, H / G);
  x.decay = part(in.decay, b, g), x.in = part(in.input_gate, b, g);
  x.share = part(in.denominator_gate, b, g);
  x.out = part(in.output_gate, b, h), x.post = part(in.post_gate, b, h);
  x.length_scale = part(in.length_scale, h), x.log_power = part(in.log_power, h);
  x.count_exponent = part(in.count_exponent, h);
  x.weight = part(in.norm_weight), x.bias = part(in.norm_bias);
  x.query_projection = part(in.query_projection, h), x.key_projection = part(in.key_projection, g);
  x.seen = seen(in, b, x.T, x.S);
  return x;
}

// The largest distance, relative to 1 + |what is right|; NaN counts as infinite.
double error(const Spec& spec, const Formula& f, const Inputs& in) {
  const at::Tensor found = attend(spec, in, "reference").contiguous();
  double worst = 0;
  for (int b = 0; b < in.q.size(0); ++b)
    for (int h = 0; h < in.q.size(1); ++h) {
      const Head x = head(in, b, h);
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

const std::vector<Case> kCases = {
    {.T = 11, .S = 11, .D = 4, .E = 3, .dtype = at::kDouble, .seed = 11},
    {.T = 5, .S = 12, .D = 4, .E = 3, .dtype = at::kDouble, .seed = 12},
    {.H = 6,
     .G = 3,
     .T = 13,
     .S = 13,
     .D = 3,
     .E = 5,
     .dtype = at::kDouble,
     .seed = 13,
     .padded = true},
    {.T = 17, .S = 17, .D = 5, .E = 2, .dtype = at::kDouble, .seed = 14, .packed = true},
    {.B = 1, .H = 2, .G = 1, .T = 140, .S = 140, .D = 4, .E = 3, .dtype = at::kDouble, .seed = 15},
};
constexpr double kAllowed = 1e-10;

TEST(Formulas, ThereIsOneForEveryVariant) {
  for (const Variant& v : variants()) EXPECT_TRUE(formula(v.name)) << v.name;
}

class OfVariant : public testing::TestWithParam<Variant> {};

TEST_P(OfVariant, Holds) {
  const Variant& v = GetParam();
  for (const Case& c : kCases)
    EXPECT_LT(error(v.spec, formula(v.name), inputs(v.spec, c)), kAllowed) << text(c);
}

std::string name(const Variant& v) {
  std::string s = v.name;
  std::replace(s.begin(), s.end(), '@', '_');
  return s;
}
INSTANTIATE_TEST_SUITE_P(Formulas, OfVariant, testing::ValuesIn(variants()),
                         [](const auto& info) { return name(info.param); });

// attention_type in the authors' configs, and the formula that is meant.
const std::pair<const char*, const char*> kAuthorsNames[] = {
    {"softmax", "softmax"},
    {"softmax_clamp_denom", "clamped_sum"},
    {"softmax_detach_denom", "detached_sum"},
    {"softmax_detach_denom_gate", "detached_sum_gate"},
    {"softmax_divs", "by_count"},
    {"gated_softmax_no_gate_no_norm", "by_count"},
    {"softmax_gate", "gate"},
    {"softmax_divS_gate", "by_count_gate"},
    {"softmax_divS_gatev2", "by_count_gate"},
    {"gated_softmax_no_in_gate_no_norm", "by_count_gate"},
    {"softmax_divS_norm", "by_count_rms"},
    {"gated_softmax_no_gate_rmsnorm", "by_count_rms"},
    {"gated_softmax", "gated"},
    {"gated_softmax_no_norm", "gated_no_norm"},
    {"gated_softmax_no_in_gate", "gated_no_in"},
    {"gated_softmax_no_out_gate", "gated_no_out"},
    {"gated_softmax_no_out_gate_no_norm", "gated_in_only"},
    {"gated_softmax_no_gate", "layer_norm"},
    {"gated_softmax_no_gate_rmsnorm_nodivS", "rms"},
    {"gated_softmax_no_gate_L2norm_nodivS", "l2_clamped"},
    {"gated_softmax_no_gate_L2norm_nodivS_noclamp", "l2"},
    {"gated_softmax_out_gate_L2norm_nodivS_noclamp", "l2_out_gate"},
    {"gated_softmax_out_gate_L2norm_nodivS_noclamp@code", "l2_out_gate@code"},
    {"gated_softmax_post_out_gate_L2norm_nodivS_noclamp", "l2_post_gate"},
    {"gated_softmax_post_out_gate_L2norm_nodivS_noclamp@code", "l2_post_gate@code"},
    {"gated_softmax_no_gate_customnorm", "l2_times_dim"},
    {"gated_ReLU_no_gate_L2norm_nodivS_noclamp", "relu_l2"},
    {"gated_relu_no_in_gate_no_norm", "relu_gate"},
    {"softmax_taylor_80terms", "taylor79"},
    {"softmax_taylor_80terms@code", "taylor79@code"},
    {"linear_elu", "linear_elu"},
    {"linear_relu", "linear_relu"},
    {"linear_cosine", "linear_cosine"},
    {"linear_cosine@code", "linear_cosine@code"},
    {"gated_softmax_plusplus", "gated_conv"},
    {"gated_softmax_plusplus_extratoks", "gated_conv"},
    {"gated_softmax_plusplus_mamba", "mamba_exp"},
    {"gated_softmax_plusplus_mamba2", "mamba_exp"},
    {"gated_softmax_decay", "gated_decay"},
    {"gated_softmax_cumgate", "cumulative_gate"},
    {"cumulative_gated_softmax", "cumulative_gate_count"},
    {"cumulative_gated_softmax@code", "cumulative_gate_count@code"},
    {"linear_mamba", "linear_mamba"},
};

TEST(AuthorsNames, AllResolveToTheirFormulas) {
  for (const auto& [authors, ours] : kAuthorsNames) {
    SCOPED_TRACE(authors);
    Variant v;
    ASSERT_NO_THROW(v = find(authors));
    EXPECT_LT(error(v.spec, formula(ours), inputs(v.spec, kCases[0])), kAllowed);
  }
}

// The weights of one row of scores.
Vec weights(const char* variant, const Vec& scores) {
  const int64_t S = int64_t(scores.size());
  Inputs in;
  in.q = at::ones({1, 1, 1, 1}, at::kDouble);
  in.k = at::tensor(at::ArrayRef<double>(begin(scores), scores.size())).reshape({1, 1, S, 1});
  in.v = at::eye(S, at::kDouble).reshape({1, 1, S, S});
  return values(attend(find(variant).spec, in, "reference"));
}

TEST(Published, ExamplesOfSparsemaxAndEntmax) {
  const Vec scores = {-2, 0, 0.5};
  const Vec sparse = weights("sparsemax", scores), between = weights("entmax15", scores);
  const double sparse_right[] = {0, 0.25, 0.75}, between_right[] = {0, 0.3260, 0.6740};
  for (int i = 0; i < 3; ++i) {
    EXPECT_NEAR(sparse[i], sparse_right[i], 1e-12);
    EXPECT_NEAR(between[i], between_right[i], 5e-5);
  }
}

}  // namespace
}  // namespace horner::attn
