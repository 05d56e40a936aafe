// Products with several weights at once.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "core/check.h"
#include "nn/parts.h"

namespace horner::nn::parts {

using torch::autograd::AutogradContext, torch::autograd::Function, torch::autograd::variable_list;

using Maybe = std::optional<at::Tensor>;

// Up to three tensors below each other, in a dtype.
struct Join : Function<Join> {
  static at::Tensor forward(AutogradContext* ctx, at::ScalarType dtype, const at::Tensor& a,
                            const Maybe& b, const Maybe& c) {
    std::vector<int64_t> shape = a.sizes().vec(), rows, dtypes;
    for (const Maybe& x : {Maybe(a), b, c}) {
      rows.push_back(x ? x->size(0) : 0);
      dtypes.push_back(int64_t(x ? x->scalar_type() : dtype));
    }
    shape[0] = rows[0] + rows[1] + rows[2];
    const at::Tensor out = at::empty(shape, a.options().dtype(dtype));
    int64_t from = 0;
    for (const Maybe& x : {Maybe(a), b, c})
      if (x) out.narrow(0, from, x->size(0)).copy_(*x), from += x->size(0);
    ctx->saved_data["rows"] = rows, ctx->saved_data["dtypes"] = dtypes;
    return out;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto rows = ctx->saved_data["rows"].toIntVector(),
               dtypes = ctx->saved_data["dtypes"].toIntVector();
    variable_list out{at::Tensor()};
    int64_t from = 0;
    for (size_t i = 0; i < 3; ++i) {
      const bool used = rows[i] > 0;
      out.push_back(used ? grads[0].narrow(0, from, rows[i]).to(at::ScalarType(dtypes[i]))
                         : at::Tensor());
      from += rows[i];
    }
    return out;
  }
};

static at::Tensor joined(const std::vector<at::Tensor>& x, at::ScalarType dtype) {
  if (x.size() == 1 && x[0].scalar_type() == dtype) return x[0];
  check(x.size() <= 3, "at most 3 weights are joined, not ", x.size());
  const auto at = [&](size_t i) { return i < x.size() ? Maybe(x[i]) : std::nullopt; };
  return Join::apply(dtype, x[0], at(1), at(2));
}

// Each product to its own columns: no weight is copied.
static at::Tensor one_by_one(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                             const std::vector<at::Tensor>& biases) {
  int64_t width = 0, from = 0;
  for (const at::Tensor& w : weights) width += w.size(0);
  const at::Tensor out = at::empty({x.size(0), width}, x.options());
  for (size_t i = 0; i < weights.size(); ++i) {
    at::Tensor to = out.narrow(1, from, weights[i].size(0));
    from += weights[i].size(0);
    if (biases.empty())
      at::mm_out(to, x, weights[i].t());
    else
      at::addmm_out(to, biases[i], x, weights[i].t());
  }
  return out;
}

at::Tensor product(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                   const std::vector<at::Tensor>& given_biases) {
  std::vector<at::Tensor> biases;
  for (const at::Tensor& b : given_biases)
    if (b.defined()) biases.push_back(b);
  check(biases.empty() || biases.size() == weights.size(), "a bias for each weight, or none");
  bool cast = false, gradients = x.requires_grad();
  std::vector<at::Tensor> all = weights;
  all.insert(all.end(), biases.begin(), biases.end());
  for (const at::Tensor& w : all)
    cast |= w.scalar_type() != x.scalar_type(), gradients |= w.requires_grad();
  gradients &= at::GradMode::is_enabled();
  if (weights.size() > 1 && !cast && !gradients) return one_by_one(x, weights, biases);
  const at::ScalarType dtype = x.scalar_type();
  return at::linear(x, joined(weights, dtype),
                    biases.empty() ? std::optional<at::Tensor>() : joined(biases, dtype));
}

}  // namespace horner::nn::parts
