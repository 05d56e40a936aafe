#include "attn/exec/series.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <cmath>

#include "attn/exec/autograd.h"
#include "attn/kernels/cpu/chunked/chunked.h"

namespace horner::attn::exec {

using kernels::monomials;

int64_t series_chunk(int64_t heads, int64_t state) {
  constexpr int64_t kLeast = 64, kMost = 1024, kPairs = 1 << 24;
  int64_t C = kLeast;
  while (C < kMost && C * C < state && heads * 4 * C * C <= kPairs) C *= 2;
  return C;
}
namespace {

// The monomials of degree p are x_i times the first monomials of degree p - 1, for i = 0, 1, ..
int64_t prefix(int64_t i, int p) {
  return monomials(i + 1, p - 1);
}

// 1 / a! of each monomial x^a: [F, 1]. x_i has power e in those that stand behind the ones of lower
// powers.
at::Tensor coefficients(Orders orders, int64_t D, const at::TensorOptions& options) {
  at::Tensor lower = at::ones({1, 1}, options);
  TensorVector all;
  for (int p = 0; p <= orders.last; ++p) {
    TensorVector pieces;
    for (int64_t i = 0; i < D && p > 0; ++i)
      for (int64_t e = 1, from = 0; e <= p; ++e) {
        const int64_t count = monomials(i, p - e);
        if (count > 0) pieces.push_back(lower.narrow(0, from, count) / double(e));
        from += count;
      }
    if (p > 0) lower = at::cat(pieces, 0);
    if (p >= orders.first) all.push_back(lower);
  }
  return at::cat(all, 0);
}

// The monomials of degree p whose last variable is one of first <= i < end.
at::Tensor block(const at::Tensor& x, const at::Tensor& lower, int p, int64_t first, int64_t end) {
  if (p == 1) return x.narrow(-1, first, end - first);
  TensorVector parts;
  for (int64_t i = first; i < end; ++i)
    parts.push_back(lower.narrow(-1, 0, prefix(i, p)) * x.narrow(-1, i, 1));
  return at::cat(parts, -1);
}

// Calls use(first feature, monomials [.., T, n]) for all of x [.., T, D], a part at a time.
template <class F>
void for_each_block(Orders orders, const at::Tensor& x, const F& use) {
  constexpr int64_t kMost = 1 << 24;  // numbers
  const int64_t D = x.size(-1), rows = x.numel() / D;
  at::Tensor lower = at::ones_like(x.narrow(-1, 0, 1));
  int64_t at = 0;
  if (orders.first == 0) use(at, lower), at = 1;
  for (int p = 1; p <= orders.last; ++p) {
    TensorVector all;
    for (int64_t first = 0, end = 0; first < D; first = end) {
      int64_t n = 0;
      while (end < D && (n == 0 || (n + prefix(end, p)) * rows <= kMost)) n += prefix(end++, p);
      const at::Tensor phi = block(x, lower, p, first, end);
      if (p < orders.last) all.push_back(phi);
      if (p >= orders.first) use(at, phi), at += n;
    }
    if (p < orders.last) lower = at::cat(all, -1);
  }
}

at::Tensor apply(Orders orders, const at::Tensor& x, const at::Tensor& S) {
  at::Tensor y = at::zeros({x.size(0), x.size(1), x.size(2), S.size(-1)}, x.options());
  for_each_block(orders, x, [&](int64_t at, const at::Tensor& phi) {
    y.add_(at::matmul(phi, S.narrow(-2, at, phi.size(-1))));
  });
  return y;
}
at::Tensor sum(Orders orders, const at::Tensor& x, const at::Tensor& y) {
  TensorVector parts;
  for_each_block(orders, x, [&](int64_t, const at::Tensor& phi) {
    parts.push_back(at::matmul(phi.transpose(-1, -2), y));
  });
  return at::cat(parts, -2);
}
// The gradient of x where phi(x) S has the gradient y.
at::Tensor of_variables(Orders orders, const at::Tensor& x, const at::Tensor& S,
                        const at::Tensor& y) {
  const int64_t D = x.size(-1);
  TensorVector levels{at::ones_like(x.narrow(-1, 0, 1))}, d_levels;
  for (int p = 1; p < orders.last; ++p) levels.push_back(block(x, levels.back(), p, 0, D));
  int64_t at = 0;
  for (int p = 0; p < orders.last; ++p) {
    const int64_t n = levels[size_t(p)].size(-1);
    const bool there = p >= orders.first;
    d_levels.push_back(there ? at::matmul(y, S.narrow(-2, at, n).transpose(-1, -2))
                             : at::zeros_like(levels[size_t(p)]));
    if (there) at += n;
  }
  const at::Tensor dx = at::zeros_like(x);
  for (int p = orders.last; p > 0; --p) {
    int64_t first = p == orders.last ? at : 0;
    for (int64_t i = 0; i < D; ++i) {
      const int64_t n = prefix(i, p);
      const at::Tensor d = p == orders.last
                               ? at::matmul(y, S.narrow(-2, first, n).transpose(-1, -2))
                               : d_levels[size_t(p)].narrow(-1, first, n);
      dx.narrow(-1, i, 1).add_((d * levels[size_t(p) - 1].narrow(-1, 0, n)).sum(-1, true));
      if (p > 1) d_levels[size_t(p) - 1].narrow(-1, 0, n).add_(d * x.narrow(-1, i, 1));
      first += n;
    }
  }
  return dx;
}

// phi(x) y, or phi(x)^T y: nodes that keep no monomials.
struct Pair {
  at::Tensor x, y;

  static auto fields(auto& t) { return std::array{&t.x, &t.y}; }
};
at::Tensor applied(Orders orders, const at::Tensor& x, const at::Tensor& S) {
  return differentiable<Orders, Pair, Output>(
             "chunked_cuda", orders, {x, S},
             [](const Orders& o, const Pair& t, bool) { return Output{apply(o, t.x, t.y)}; },
             [](const Orders& o, const Pair& t, const Output&, const Output& d) {
               return Pair{of_variables(o, t.x, t.y, d.y), sum(o, t.x, d.y)};
             })
      .y;
}
at::Tensor summed(Orders orders, const at::Tensor& x, const at::Tensor& y) {
  return differentiable<Orders, Pair, Output>(
             "chunked_cuda", orders, {x, y},
             [](const Orders& o, const Pair& t, bool) { return Output{sum(o, t.x, t.y)}; },
             [](const Orders& o, const Pair& t, const Output&, const Output& d) {
               return Pair{of_variables(o, t.x, d.y, t.y), apply(o, t.x, d.y)};
             })
      .y;
}

at::Tensor polynomial(Orders orders, const at::Tensor& x) {
  const auto c = [&](int p) { return p < orders.first ? 0 : 1 / std::tgamma(p + 1.0); };
  at::Tensor y = at::full_like(x, c(orders.last));
  for (int p = orders.last - 1; p >= 0; --p) y = y * x + c(p);
  return y;
}

// phi(x) S, of scores less a centre c [.., T, 1]: with e_n the series of exp up to order n,
//   e_N(x - c) = sum_p x^p / p! e_(N - p)(-c)
at::Tensor applied(Orders orders, const at::Tensor& x, const at::Tensor& centre,
                   const at::Tensor& S) {
  if (!centre.defined()) return applied(orders, x, S);
  TensorVector parts;
  for (int64_t p = 0, at = 0; p <= orders.last; ++p) {
    const int64_t n = monomials(x.size(-1), p);
    parts.push_back(applied({int(p), int(p)}, x, S.narrow(-2, at, n)) *
                    polynomial({0, int(orders.last - p)}, -centre));
    at += n;
  }
  return at::stack(parts).sum(0);
}

// N and the sums after the tokens of one chunk, of x and `seen` [B, 1, C, 1]; no sums without the
// coefficients `each`.
std::pair<at::Tensor, at::Tensor> chunk(const SeriesJob& job, const SeriesTensors& x,
                                        const at::Tensor& seen, const at::Tensor& each) {
  const int64_t B = x.k.size(0), G = x.k.size(1), C = x.k.size(2), D = x.k.size(3);
  const int64_t E = x.v.size(3);
  const auto scores = [&](const at::Tensor& rows) {
    return at::matmul(rows, x.k.transpose(-1, -2));
  };
  at::Tensor decay = at::ones({C, C}, x.k.options()).tril(), from_start, to_end, left, whole;
  if (x.logs.defined()) {
    const at::Tensor nan = x.logs.isnan();  // NaN from there on, and not before: 0 * NaN
    whole = at::where(nan.cumsum(-1).gt(0), NAN, at::ones({1}, x.k.options())).unsqueeze(-1);
    const at::Tensor b = x.logs.masked_fill(nan, 0).cumsum(-1).unsqueeze(-1);
    const at::Tensor last = b.narrow(2, C - 1, 1);
    decay = (b - b.transpose(-1, -2)).masked_fill(decay == 0, -INFINITY).exp();
    from_start = b.exp(), to_end = (last - b).exp(), left = last.exp();
  }
  const auto by = [](const at::Tensor& y, const at::Tensor& factor) {
    return factor.defined() ? y * factor : y;
  };
  at::Tensor u = x.v;
  if (x.share.defined()) {
    const at::Tensor keys = job.scale * x.k;
    const at::Tensor A =
        (polynomial(job.orders, scores(keys)) * decay * x.share.unsqueeze(-2)).tril(-1);
    if (x.S.defined()) u = u - by(applied(job.orders, keys, x.S.narrow(-1, 0, E)), from_start);
    u = at::linalg_solve_triangular(A, u, /*upper=*/false, /*left=*/true,
                                    /*unitriangular=*/true) *
        x.share.unsqueeze(-1);
  }
  const at::Tensor y = at::cat({u, seen.expand({B, G, C, 1})}, -1);
  const at::Tensor q = job.scale * x.q.reshape({B, G, -1, D});  // of all heads of a group
  const auto heads = [&](const at::Tensor& z) { return z.view({B, G, -1, C, z.size(-1)}); };
  const at::Tensor centre = x.centre.defined() ? x.centre.reshape({B, G, -1, 1}) : x.centre;
  const at::Tensor centred = centre.defined() ? scores(q) - centre : scores(q);
  const at::Tensor inside = heads(polynomial(job.orders, centred)) * decay.unsqueeze(-3);
  at::Tensor N = at::matmul(inside, y.unsqueeze(2)), S;
  if (x.S.defined()) {
    const at::Tensor before = heads(applied(job.orders, q, centre, x.S));
    N = N + (from_start.defined() ? before * from_start.unsqueeze(2) : before);
  }
  if (each.defined()) {
    S = each * summed(job.orders, x.k, by(y, to_end));
    if (x.S.defined()) S = S + by(x.S, left);
  }
  if (whole.defined()) {
    N = N * whole.unsqueeze(2);
    if (S.defined()) S = S * whole.narrow(2, C - 1, 1);
  }
  return {N.reshape({B, -1, C, E + 1}), S};
}

// How many chunks of how many tokens, and that the states before every so many of them are kept:
// backward computes the others again.
struct Cuts {
  int64_t F, tokens, chunks, every;
  bool has_state;

  Cuts(const SeriesJob& job, const SeriesTensors& x)
      : F(job.orders.first == 0 ? monomials(x.k.size(3) + 1, job.orders.last) : 0) {
    for (int p = job.orders.first; p <= job.orders.last && job.orders.first > 0; ++p)
      F += monomials(x.k.size(3), p);
    const int64_t heads = x.k.size(0) * x.k.size(1), state = F * (x.v.size(3) + 1);
    tokens = series_chunk(heads, state), chunks = (x.k.size(2) + tokens - 1) / tokens;
    const double bytes = double(chunks) * double(heads) * double(state) * sizeof(double);
    every = bytes <= job.most_bytes ? 1 : int64_t(std::ceil(std::sqrt(double(chunks))));
    has_state = chunks > 1 || job.wanted || x.S.defined();
  }
};

SeriesTensors narrowed(const SeriesTensors& x, int64_t from, int64_t n, const at::Tensor& S) {
  SeriesTensors y = x;
  for (at::Tensor* t : {&y.q, &y.k, &y.v, &y.share, &y.logs, &y.centre})
    if (t->defined()) *t = t->narrow(2, from, n);
  y.S = S;
  return y;
}

// What the chunk i computes with: its tokens, those that are seen, and the coefficients of the
// state after it unless nobody needs that.
struct Part {
  int64_t from, n;
  SeriesTensors x;
  at::Tensor seen, each;

  Part(const SeriesJob& job, const SeriesTensors& all, const Cuts& cuts, int64_t i,
       const at::Tensor& S, const at::Tensor& coefficients)
      : from(i * cuts.tokens), n(std::min(cuts.tokens, all.k.size(2) - from)) {
    x = narrowed(all, from, n, S), seen = job.seen.narrow(2, from, n);
    if (i + 1 < cuts.chunks || job.wanted) each = coefficients;
  }
};

at::Tensor coefficients_of(const SeriesJob& job, const SeriesTensors& x, const Cuts& cuts) {
  return cuts.has_state ? coefficients(job.orders, x.k.size(3), x.k.options()) : at::Tensor();
}

SeriesResult forward(const SeriesJob& job, const SeriesTensors& x, bool for_backward) {
  const Cuts cuts(job, x);
  const at::Tensor each = coefficients_of(job, x, cuts);
  at::Tensor S = x.S;
  if (cuts.has_state && !S.defined())
    S = at::zeros({x.k.size(0), x.k.size(1), cuts.F, x.v.size(3) + 1}, x.k.options());
  TensorVector rows, states;
  for (int64_t i = 0; i < cuts.chunks; ++i) {
    if (for_backward && S.defined() && i % cuts.every == 0) states.push_back(S);
    const Part part(job, x, cuts, i, S, each);
    auto [N, next] = chunk(job, part.x, part.seen, part.each);
    rows.push_back(N), S = next;
  }
  return {at::cat(rows, 2), S.defined() ? S : at::empty({0}, x.k.options()),
          states.empty() ? at::Tensor() : at::stack(states)};
}

// From the last chunk to the first, each computed again with its graph.
SeriesTensors backward(const SeriesJob& job, const SeriesTensors& x, const SeriesResult& r,
                       const SeriesResult& grads) {
  const Cuts cuts(job, x);
  const at::Tensor each = coefficients_of(job, x, cuts);
  SeriesTensors d;
  const auto all = SeriesTensors::fields(x);
  const auto to = SeriesTensors::fields(d);
  for (size_t i = 0; i + 1 < all.size(); ++i)
    if (all[i]->defined()) *to[i] = at::empty_like(*all[i]);
  if (job.wanted) d.S = grads.S;
  TensorVector states;  // since the last one that is kept
  for (int64_t i = cuts.chunks - 1; i >= 0; --i) {
    const int64_t kept = i / cuts.every;
    if (states.empty()) {
      const c10::AutoGradMode none(false);
      states.push_back(r.states.defined() ? r.states[kept] : at::Tensor());
      for (int64_t j = kept * cuts.every; j < i; ++j) {
        const Part part(job, x, cuts, j, states.back(), each);
        states.push_back(chunk(job, part.x, part.seen, part.each).second);
      }
    }
    Part part(job, x, cuts, i, states.back(), each);
    states.pop_back();
    TensorVector leaves;
    for (at::Tensor* y : SeriesTensors::fields(part.x))
      if (y->defined()) *y = y->detach().requires_grad_(), leaves.push_back(*y);
    const c10::AutoGradMode graph(true);
    const auto [N, next] = chunk(job, part.x, part.seen, part.each);
    at::Tensor loss = (N * grads.N.narrow(2, part.from, part.n)).sum();
    if (next.defined()) loss = loss + (next * d.S).sum();
    loss.backward({}, std::nullopt, false, leaves);
    const c10::AutoGradMode none(false);
    const auto parts = SeriesTensors::fields(part.x);
    for (size_t j = 0; j + 1 < all.size(); ++j)
      if (all[j]->defined()) to[j]->narrow(2, part.from, part.n).copy_(parts[j]->grad());
    if (part.x.S.defined()) d.S = part.x.S.grad();
  }
  return d;
}

}  // namespace

SeriesResult series_sums(const SeriesJob& job, const SeriesTensors& x) {
  return differentiable("chunked_cuda", job, x, forward, backward);
}

}  // namespace horner::attn::exec
