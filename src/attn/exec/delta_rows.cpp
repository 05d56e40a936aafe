// The delta rule by forward substitution over blocks of keys: matrix products with the blocks
// before, a triangular system inside a block. Its gradients are the same in reverse (delta.cpp);
// those of the weights come from torch's operators, one block of rows at a time.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "attn/exec/autograd.h"
#include "attn/exec/delta.h"
#include "attn/inputs.h"
#include "attn/stages.h"

namespace horner::attn::exec {

namespace {

constexpr int64_t kRows = 128;

struct RowsJob {
  Spec spec;
  double scale;
  at::Tensor keep, slope;
};
struct RowsTensors {  // of one sequence
  at::Tensor k, v, beta, decay;

  static auto fields(auto& x) { return std::array{&x.k, &x.v, &x.beta, &x.decay}; }
};
struct RowsResult {
  at::Tensor u, rest;  // u_t = share_t rest_t

  static auto outputs(auto& r) { return std::array{&r.u}; }
  static auto saved(auto& r) { return std::array{&r.u, &r.rest}; }
};

// Rows from <= t < to. u_t = share_t (e^-shift_t v_t - sum_{s < t} w_ts u_s)
struct Block {
  int64_t from, n;
  at::Tensor w, shift, nothing, share;  // [B, G, n, to], [.., n or 1, 1], [B, G, n, 1]

  Block(const RowsJob& job, const RowsTensors& x, int64_t from)
      : from(from), n(std::min(kRows, x.k.size(2) - from)) {
    constexpr double kTiny = 1e-6;
    Inputs in;
    in.k = in.v = in.q = x.k, in.decay = x.decay, in.slope = job.slope, in.keep = job.keep;
    w = key_rows(job.spec, in, job.scale, from, from + n, shift);
    const at::Tensor own = inside().diagonal(0, -2, -1).unsqueeze(-1);
    nothing = own.detach().abs() < kTiny;
    const at::Tensor b =
        std::get<Delta>(job.spec.values).most * x.beta.narrow(2, from, n).unsqueeze(-1);
    share = (b / own.masked_fill(nothing, 1)).masked_fill(nothing, 0);
  }
  at::Tensor before() const { return w.narrow(3, 0, from); }
  at::Tensor inside() const { return w.narrow(3, from, n); }
  at::Tensor rows(const at::Tensor& x) const { return x.narrow(2, from, n); }
  // What is solved inside a block is in double: there values and answers cancel.
  static at::Tensor exact(const at::Tensor& x) { return x.to(at::kDouble); }
  at::Tensor system() const { return (exact(share) * exact(inside())).tril(-1); }
};

// Writes the rows from `first` on, after the others of u; `rest` may be undefined, and u be x.v.
void correct(const RowsJob& job, const RowsTensors& x, int64_t first, const RowsResult& r) {
  for (int64_t from = first; from < x.k.size(2); from += kRows) {
    const Block b(job, x, from);
    const at::Tensor given = (-b.shift).exp() * b.rows(x.v);
    const at::Tensor left = b.exact(given - at::matmul(b.before(), r.u.narrow(2, 0, from)))
                                .masked_fill(b.nothing, 0);  // of a hidden key: not NaN
    const at::Tensor u =
        at::linalg_solve_triangular(b.system(), b.exact(b.share) * left, /*upper=*/false,
                                    /*left=*/true, /*unitriangular=*/true);
    b.rows(r.u).copy_(u);
    if (r.rest.defined()) b.rows(r.rest).copy_(left - at::matmul(b.exact(b.inside()).tril(-1), u));
  }
}

RowsResult forward(const RowsJob& job, const RowsTensors& x, bool) {
  const RowsResult r{at::empty_like(x.v), at::empty_like(x.v)};
  correct(job, x, 0, r);
  return r;
}

// Adds the gradients of the inputs through the weights and shares of one block of rows.
void add_gradients(const RowsJob& job, const RowsTensors& x, int64_t from, const at::Tensor& d_w,
                   const at::Tensor& d_share, const RowsTensors& d) {
  const at::AutoGradMode enabled(true);
  RowsTensors leaf = x;
  leaf.v = at::Tensor();
  for (at::Tensor* y : RowsTensors::fields(leaf))
    if (y->defined()) *y = y->detach().requires_grad_(true);
  const Block b(job, leaf, from);
  const at::Tensor sum = (b.w.tril(from - 1) * d_w).sum() + (b.share * d_share).sum();
  sum.backward();
  const auto leaves = RowsTensors::fields(leaf);
  for (size_t i = 0; i < leaves.size(); ++i)
    if (leaves[i]->defined() && leaves[i]->grad().defined())
      RowsTensors::fields(d)[i]->add_(leaves[i]->grad());
}

RowsTensors backward(const RowsJob& job, const RowsTensors& x, const RowsResult& r,
                     const RowsResult& grads) {
  RowsTensors d{at::zeros_like(x.k), at::zeros_like(x.v), at::zeros_like(x.beta)};
  if (x.decay.defined()) d.decay = at::zeros_like(x.decay);
  const at::Tensor du = grads.u.clone();  // less what later blocks take
  for (int64_t from = (x.k.size(2) - 1) / kRows * kRows; from >= 0; from -= kRows) {
    const Block b(job, x, from);
    const at::Tensor back =
        at::linalg_solve_triangular(b.system().transpose(-1, -2), b.exact(b.rows(du)),
                                    /*upper=*/true, /*left=*/true,
                                    /*unitriangular=*/true);
    const at::Tensor p = (b.exact(b.share) * back).to(du.scalar_type());
    du.narrow(2, 0, from).sub_(at::matmul(b.before().transpose(-1, -2), p));
    b.rows(d.v).copy_((-b.shift).exp() * p);
    const at::Tensor d_w = -at::matmul(p, r.u.narrow(2, 0, from + b.n).transpose(-1, -2));
    add_gradients(job, x, from, d_w, (back * b.rows(r.rest)).sum(-1, true).to(d_w.scalar_type()),
                  d);
  }
  return d;
}

// What the rows are made of, `v` the values that they have.
RowsTensors rows_of(const Spec& spec, const Inputs& in, const at::Tensor& v) {
  const auto to = [&](const at::Tensor& x) {
    return x.defined() ? x.to(wide(in.q.scalar_type())).contiguous() : x;
  };
  return {to(mapped(spec.features, in.k, in.key_projection, in.q.size(1) / in.k.size(1))), to(v),
          to(in.beta), to(in.decay)};
}

}  // namespace

// u as a result and for backward, and what is left of the values, for each packed sequence.
c10::SymInt kept_corrected(const Spec& spec, const Inputs& in) {
  if (!is<Delta>(spec.values)) return 0;
  const c10::SymInt each = in.cu_seqlens.defined() ? in.cu_seqlens.sym_size(0) : c10::SymInt(1);
  return 3 * (kept_bytes(in.v.sym_numel(), sizeof(float)) + each * kept_bytes(0, 1));
}

std::pair<Spec, Inputs> with_corrected_values(std::string_view execution, const Spec& spec,
                                              const Inputs& in) {
  const at::Tensor gates = value_gates(spec, in);
  const RowsTensors x = rows_of(spec, in, gates.defined() ? in.v * gates.unsqueeze(-1) : in.v);
  RowsJob job{spec, scale_factor(spec, in), {}, in.slope};
  std::vector<int64_t> cuts{0, in.k.size(2)};
  if (in.cu_seqlens.defined()) {
    const at::Tensor c = in.cu_seqlens.to(at::kCPU, at::kLong).contiguous();
    cuts.assign(c.data_ptr<int64_t>(), c.data_ptr<int64_t>() + c.numel());
  }
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const int64_t from = cuts[i], n = cuts[i + 1] - from;
    if (n == 0) continue;
    RowsTensors one = x;
    for (at::Tensor* y : RowsTensors::fields(one))
      if (y->defined()) *y = y->narrow(2, from, n);
    if (in.keep.defined()) job.keep = in.keep.narrow(1, from, n);
    parts.push_back(differentiable(execution, job, one, forward, backward).u);
  }
  std::pair<Spec, Inputs> changed{spec, in};
  changed.first.values = AsGiven{}, changed.first.input_gate = false;
  changed.second.v = parts.size() == 1 ? parts[0] : at::cat(parts, 2);
  changed.second.beta = changed.second.input_gate = at::Tensor();
  return changed;
}

void correct_values(const Spec& spec, const Inputs& in, int64_t first, const at::Tensor& v) {
  RowsTensors x = rows_of(spec, in, {});
  x.v = v, x.beta = at::constant_pad_nd(x.beta, {first, 0});
  // The gates make the rows NaN that see them: not those before, by 0 times a value that is NaN.
  if (x.decay.defined()) x.decay = x.decay.masked_fill(x.decay.isnan(), 0);
  correct({spec, scale_factor(spec, in), in.keep, in.slope}, x, first, {v, {}});
}

}  // namespace horner::attn::exec
