// What the formulas of the tests are written in: plain numbers, one (batch, head) and one query at
// a time.
#pragma once

#include <cmath>
#include <functional>
#include <string>
#include <valarray>
#include <vector>

#include "attn/spec.h"  // first: a function here has the name of a struct there

namespace horner::attn {

namespace {

using Vec = std::valarray<double>;

// What one (batch, head) sees. Undefined inputs are empty.
struct Head {
  int T, S, D, E;
  Vec q, k, v;                     // [T, D], [S, D], [S, E]
  Vec q_over_heads, k_over_heads;  // [T, D], [S, D]: the length of a channel over the heads
  Vec decay, in, share, beta;      // [S]
  Vec channel_decay;               // [S, D]
  Vec score_bias;                  // [T, S]
  double slope = 0, sink = 0;
  std::vector<int> seen_at_key;  // [S], how many keys the position of a key sees
  Vec out, post;                 // [T], or [T, E] of channels
  Vec length_scale, count_exponent, near_share, log_power;  // [1], [1], [1], [3]
  Vec weight, bias;                                         // [E]
  Vec query_projection, key_projection;                     // [D, F]
  std::vector<std::vector<int>> seen;                       // the keys of each query
};

// clang-format off
Vec slice(const Vec& x, int row, int length) { return x[std::slice(size_t(row) * length, length, 1)]; }
double dot(const Vec& a, const Vec& b) { return (a * b).sum(); }
double length(const Vec& x) { return std::sqrt(dot(x, x)); }

// What a query and a key become.
Vec same(const Vec& x) { return x; }
Vec relu(const Vec& x) { return x.apply([](double y) { return y > 0 ? y : 0; }); }
Vec elu1(const Vec& x) { return x.apply([](double y) { return y > 0 ? y + 1 : std::exp(y); }); }
Vec cosine(const Vec& x) { return x / length(x); }
// clang-format on

// One query and the keys that it sees.
struct Row {
  const Head& h;
  int t;
  const std::vector<int>& seen = h.seen[t];
  double n = double(seen.size());
  int at = t + h.S - h.T;  // where the query stands among the keys
  double root = std::sqrt(double(h.D));
  Vec q = slice(h.q, t, h.D);
  Vec A = scores(same) / root;

  // f(s) for every key seen
  template <class F>
  Vec each(F f) const {
    Vec x(seen.size());
    for (size_t i = 0; i < x.size(); ++i) x[i] = f(seen[i]);
    return x;
  }
  Vec k(int s) const { return slice(h.k, s, h.D); }
  Vec V(const Vec& w) const {  // sum_s w_s v_s
    Vec o(0.0, h.E);
    for (size_t i = 0; i < w.size(); ++i) o += w[i] * slice(h.v, seen[i], h.E);
    return o;
  }
  Vec decay() const {  // the product of the gates of (s, t]
    return each([&](int s) {
      double product = 1;
      for (int j = s + 1; j <= at; ++j) product *= std::exp(h.decay[j]);
      return product;
    });
  }
  // exp(c_t - c_s), c_t the sum of the raw gates a of the tokens before t, over 1024, where the
  // model gives each token the a of the one before it.
  Vec raw_decay() const {
    Vec a(h.decay.size()), c(h.decay.size());
    for (size_t r = 0; r + 1 < a.size(); ++r) a[r] = 1024 * h.decay[r + 1];
    for (size_t t = 1; t < c.size(); ++t) c[t] = c[t - 1] + a[t - 1] / 1024;
    return each([&](int s) { return std::exp(c[size_t(at)] - c[size_t(s)]); });
  }
  // clang-format off
  double raw_gate() const { return -std::log(h.out[t]); }  // the model gives e^-gate
  Vec scores(Vec f(const Vec&)) const { return each([&](int s) { return dot(f(q), f(k(s))); }); }
  Vec in() const { return each([&](int s) { return h.in[s]; }); }
  double shares() const { return each([&](int s) { return std::exp(h.share[s]); }).sum(); }
  double out() const { return h.out[t]; }
  double post() const { return h.post[t]; }
  Vec per_count() const { return each([&](int s) { return std::pow(std::max(h.seen_at_key[s], 1), -1 / (1 + std::exp(-h.count_exponent[0]))); }); }
  Vec slope() const { return each([&](int s) { return std::pow(std::exp(-h.slope), at - s); }); }
  Vec post_channels() const { return slice(h.post, t, h.E); }
  double log_power() const { return h.log_power[0] + h.log_power[1] * std::pow(std::log(n), h.log_power[2]); }
  // clang-format on
};
using R = const Row&;
using Formula = std::function<Vec(R)>;

Vec least(Vec x, double bound) {
  for (double& y : x) y = std::min(y, bound);
  return x;
}
Vec series(const Vec& x, int order) {
  Vec sum(1.0, x.size()), term(1.0, x.size());
  for (int n = 1; n <= order; ++n) term *= x / double(n), sum += term;
  return sum;
}
Vec softmax(const Vec& x) {
  const Vec w = exp(x - x.max());
  return w / w.sum();
}
// clang-format off
Vec E(R r) { return exp(least(r.A, 5)); }
Vec normalised(R r, const Vec& w, double plus = 0) { return r.V(w) / (w.sum() + plus); }
// The least value of the polynomial of the next even order, for an odd order: it is where its
// derivative, which grows, is 0.
double least_mean(int order) {
  if (order % 2 == 0 || order > 20) return -INFINITY;
  Vec low{-20}, high{0};
  for (int i = 0; i < 100; ++i) (series((low + high) / 2.0, order)[0] < 0 ? low : high) = Vec((low + high) / 2.0);
  return series(low, order + 1)[0];
}
Vec bounded(R r, const Vec& w, int order, double n) { return r.V(w) / std::max(w.sum(), least_mean(order) * n); }

constexpr double kEps = 1e-5;  // of rms and layer
Vec L2(const Vec& o) { return o / std::max(length(o), 1e-12); }
Vec rms(R r, const Vec& o) { return o / std::sqrt(dot(o, o) / o.size() + kEps) * r.h.weight; }
// clang-format on
Vec layer(R r, const Vec& o) {
  const Vec x = o - o.sum() / o.size();
  return x / std::sqrt(dot(x, x) / x.size() + kEps) * r.h.weight + r.h.bias;
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
Vec largest(Vec x, int k) {
  std::vector<double> sorted(begin(x), end(x));
  std::sort(sorted.rbegin(), sorted.rend());
  for (double& y : x)
    if (int(x.size()) > k && y < sorted[k - 1]) y = -INFINITY;
  return x;
}

Vec self_adjusted(const Vec& x) {
  const double low = std::min(x.min(), 0.0), high = std::max(x.max(), 0.0);
  return (x - low) / (high - low + 1e-10) * softmax(x);
}
double adaptive(const Vec& x) {
  const Vec p = softmax(x);
  const double H = -dot(p, log(p + 1e-9));
  const double beta = (((-0.037 * H + 0.481) * H - 2.3) * H + 4.917) * H - 1.791;
  return H > 0.5 ? std::max(beta, 1.0) : 1.0;
}

Vec cosine_over_heads(R r) {
  const Vec q = r.q / slice(r.h.q_over_heads, r.t, r.h.D);
  return r.each([&](int s) { return dot(q, r.k(s) / slice(r.h.k_over_heads, s, r.h.D)); });
}

Vec projected(const Vec& x, const Vec& P) {
  const int F = int(P.size() / x.size());
  Vec y(0.0, F);
  for (size_t d = 0; d < x.size(); ++d) y += x[d] * slice(P, int(d), F);
  return y;
}
Vec based(R r) {
  const Vec q = projected(r.q, r.h.query_projection);
  const Vec u = r.each([&](int s) { return dot(q, projected(r.k(s), r.h.key_projection)) / 4; });
  return normalised(r, 1.0 + u + u * u / 2.0, 1e-12);
}

// A mean of values, with a share for no value.
Vec sunk(R r) {
  const double most = std::max(r.A.max(), r.h.sink);
  const Vec w = exp(r.A - most);
  return r.V(w) / (w.sum() + std::exp(r.h.sink - most));
}

Vec softpick(R r) {
  const Vec y = exp(r.A) - 1.0;
  return r.V(relu(y)) / (std::abs(y).sum() + 1e-6);
}

Vec stick_breaking(R r) {
  Vec w(r.A.size());
  double left = 1;
  for (int i = int(w.size()) - 1; i >= 0; --i) {
    const double share = 1 / (1 + std::exp(-r.A[i]));
    w[i] = left * share;
    left *= 1 - share;
  }
  return r.V(w);
}

// A linear RNN over the keys that the query sees: S <- g S + k u^T, o = q S. Gates of channels or
// of tokens, or none; u = v, or with the delta rule v less what S gives for k.
struct Recurrence {
  R r;
  Vec (*f)(const Vec&);
  double most = 0;  // of the delta rule; 0: without it
  Vec S = Vec(0.0, size_t(r.h.D) * size_t(r.h.E));

  Vec answer(const Vec& x) const {
    Vec o(0.0, r.h.E);
    for (int d = 0; d < r.h.D; ++d) o += x[d] * slice(S, d, r.h.E);
    return o;
  }
  void decay(int from, int to) {  // by the gates of the tokens in (from, to]
    for (int j = from + 1; j <= to; ++j)
      for (int d = 0; d < r.h.D; ++d) {
        double log = r.h.decay.size() ? r.h.decay[j] : 0;
        if (r.h.channel_decay.size()) log = r.h.channel_decay[j * r.h.D + d];
        for (int e = 0; e < r.h.E; ++e) S[d * r.h.E + e] *= std::exp(log);
      }
  }
  Vec operator()() {
    int last = r.seen[0];
    for (const int s : r.seen) {
      decay(last, s);
      const Vec k = f(r.k(s));
      Vec u = slice(r.h.v, s, r.h.E);
      if (most > 0) u = most * r.h.beta[s] / dot(k, k) * (u - answer(k));
      for (int d = 0; d < r.h.D; ++d)
        for (int e = 0; e < r.h.E; ++e) S[d * r.h.E + e] += k[d] * u[e];
      last = s;
    }
    decay(last, r.at);
    return answer(f(r.q));
  }
};
Vec recurrence(R r, Vec f(const Vec&), double most = 0) {
  return Recurrence{r, f, most}();
}

// The delta rule for any weight of a product, by substitution.
Vec delta(R r, double weight(double, int), int n) {
  std::vector<Vec> u;
  const auto w = [&](const Vec& a, int s) { return weight(dot(a, cosine(r.k(s))), n); };
  const auto answer = [&](const Vec& a) {
    Vec o(0.0, r.h.E);
    for (size_t i = 0; i < u.size(); ++i) o += w(a, r.seen[i]) * u[i];
    return o;
  };
  for (const int s : r.seen) {
    const Vec k = cosine(r.k(s));
    u.push_back(r.h.beta[s] / w(k, s) * (slice(r.h.v, s, r.h.E) - answer(k)));
  }
  return answer(cosine(r.q));
}
double series_of(double x, int n) {
  return series(Vec{x}, n)[0];
}
double exp_of(double x, int) {
  return std::exp(x);
}

Vec hedgehog(const Vec& x, const Vec& P) {
  const Vec y = projected(x, P), a = softmax(y), b = softmax(-y);
  Vec out(2 * y.size());
  for (size_t i = 0; i < y.size(); ++i) out[i] = a[i], out[y.size() + i] = b[i];
  return out;
}
Vec hedgehog_scores(R r) {
  const Vec q = hedgehog(r.q, r.h.query_projection);
  return r.each([&](int s) { return dot(q, hedgehog(r.k(s), r.h.key_projection)); });
}
// exp of the score for the last 64 positions, the weight `far` for the others.
bool is_near(R r, size_t i) {
  return r.seen[i] > r.at - 64;
}
Vec near(R r, const Vec& x, Vec far) {
  for (size_t i = 0; i < far.size(); ++i)
    if (is_near(r, i)) far[i] = std::exp(x[i]);
  return far;
}
// LoLCATs: softmax without its division, times a gate of the head.
Vec near_with_share(R r, const Vec& x, Vec far) {
  double top = -INFINITY;
  for (size_t i = 0; i < far.size(); ++i)
    if (is_near(r, i)) top = std::max(top, x[i]);
  for (size_t i = 0; i < far.size(); ++i)
    if (is_near(r, i)) far[i] = std::exp(x[i] - top) / (1 + std::exp(-r.h.near_share[0]));
  return far;
}
double far_sum(R r, const Vec& x) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += is_near(r, i) ? 0 : x[i];
  return sum;
}
double far_count(R r) {
  return far_sum(r, Vec(1.0, r.A.size()));
}
double far_mean(R r) {
  return far_count(r) == 0 ? 0 : far_sum(r, r.A) / far_count(r);
}

}  // namespace
}  // namespace horner::attn
