#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

#include "diag/pass.h"
#include "diag/softmax_rows.h"

namespace horner::diag {

// Lemma 2 for the model's own operator and other normalisers of the same scores.
void measure_jacobians(Pass& p, const attn::Spec& own, const LayerHeads& heads,
                       const nn::Rows& rows) {
  double logs = 0;
  for (const int64_t n : rows.count) logs += std::log(double(n)) / double(rows.count.size());
  const at::Tensor scores = rows.scores.to(at::kDouble).contiguous();
  const int64_t R = scores.size(1), S = scores.size(2);
  for (JacobianRows& j : p.out.jacobians) {
    const bool is_own = j.name == p.out.attention;
    attn::Spec spec = is_own ? own : j.spec;
    if (is_own) spec.denominator = attn::Sum{};  // the rows are divided by their sum
    if (!why_no_jacobian(spec).empty()) continue;
    std::vector<Jacobian> found(heads.size() * size_t(R));
    at::parallel_for(0, int64_t(found.size()), 1, [&](int64_t from, int64_t to) {
      for (int64_t at = from; at < to; ++at) {
        if (!heads[size_t(at / R)]) continue;
        const size_t r = size_t(at % R), n = size_t(rows.count[r]);
        const double* x = scores.const_data_ptr<double>() + at * S + rows.begin[r];
        double factor = is_own ? 1 : 1 / double(spec.temperature);
        if (!is_own && attn::is<attn::LogLength>(spec.sharpness))
          factor *= std::log(double(n)) / std::max(1e-6, logs);  // its mean over the rows is 1
        found[size_t(at)] = jacobian(spec, {x, n}, factor);
      }
    });
    for (size_t at = 0; at < found.size(); ++at) {
      const size_t h = at / size_t(R);
      if (!heads[h]) continue;
      const Jacobian& J = j.rows.emplace_back(found[at]);
      const auto test = [&](const char* name, double bound) {
        count(p.crossed[h][name], J.norm > bound * (1 + 1e-6) + 1e-300);
      };
      test("Lemma 2, derived: √n |a| max|F'| / ΣF", J.derived);
      test("Lemma 2, derived, with min F", J.with_least);
      test("Lemma 2, two terms, reconstructed", J.two_terms);
    }
  }
}

// Entropy and the other row metrics, the 1/L law, and the picture.
void measure_rows(Pass& p, const LayerHeads& heads, const nn::Rows& rows, bool softmax) {
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

// Adds g of rows [H, R] at one temperature and epsilon; weights [R].
static void add_sensitivity(Sensitivity& to, const at::Tensor& g, const at::Tensor& weights,
                            size_t i, size_t j) {
  to.mean[i][j] += at::dot(g, weights).item<double>();
  to.most[i][j] = std::max(to.most[i][j], g.max().item<double>());
}

// g(T, eps) by the model's scores, and, for every fourth row, by raw products q.k.
void measure_sensitivity(Pass& p, const attn::Spec& spec, bool softmax, const LayerHeads& heads,
                         const nn::Rows& rows) {
  const Settings& s = p.out.settings;
  const at::Tensor v = directions(rows, p.random);
  std::vector<double> weight;
  for (const nn::Query& q : rows.queries)
    weight.push_back(rows.count[weight.size()] < 2 ? 0 : q.weight);
  const int64_t R = int64_t(weight.size());
  const at::Tensor all = at::tensor(weight, at::kDouble), fourth = at::arange((R - 1) % 4, R, 4);
  const auto of = [&](const at::Tensor& x) { return x.index_select(1, fourth); };
  const at::Tensor count = at::tensor(rows.count).view({1, -1, 1});
  const RowScores whole{rows.scores, rows.hidden, count, v},
      part{of(rows.scores), of(rows.hidden), of(count), of(v)};
  const at::Tensor part_weights = all.index_select(0, fourth);
  double scale = 1;
  for (const Head* head : heads)
    if (head) scale = head->scale;
  const auto times = [](const at::Tensor& g, double bound) {
    return (g > bound * (1 + kRounding)).sum().item<int64_t>();
  };
  for (size_t i = 0; i < s.temperatures.size(); ++i)
    for (size_t j = 0; j < s.epsilons.size(); ++j) {
      const double T = s.temperatures[i], eps = s.epsilons[j];
      const at::Tensor g = sensitivity(spec, softmax, whole, T, eps).to(at::kDouble),
                       raw = sensitivity(spec, softmax, part, T * scale, eps * scale)
                                 .to(at::kDouble)
                                 .mul_(scale);
      for (size_t h = 0; h < heads.size(); ++h) {
        if (!heads[h]) continue;
        const at::Tensor of_head = g[int64_t(h)], of_raw = raw[int64_t(h)];
        add_sensitivity(heads[h]->sensitivity, of_head, all, i, j);
        add_sensitivity(heads[h]->raw_sensitivity, of_raw, part_weights, i, j);
        if (!softmax) continue;  // Corollary 3 is about softmax
        const auto add = [&](const char* name, const at::Tensor& seen, double bound) {
          Crossed& c = p.crossed[h][name];
          c.of += seen.size(0), c.times += times(seen, bound);
        };
        add("Corollary 3, min{1/(2T), √2/ε}", of_head, sensitivity_bound(T, eps));
        add("Corollary 3 as printed, min{1/(4T), √2}", of_head, sensitivity_printed(T));
        add("Corollary 3 as printed, T and ε of raw q·k", of_raw, sensitivity_printed(T));
      }
    }
  for (Head* head : heads)
    if (head) {
      head->sensitivity.rows += all.sum().item<double>();
      head->raw_sensitivity.rows += part_weights.sum().item<double>();
    }
}

}  // namespace horner::diag
