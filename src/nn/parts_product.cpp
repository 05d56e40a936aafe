// Products with several weights at once, and our own product where it is faster than torch's.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "attn/parallel.h"
#include "core/check.h"
#include "core/simd/isa.h"
#include "nn/kernels/product.h"
#include "nn/parts.h"

namespace horner::nn::parts {

using torch::autograd::AutogradContext, torch::autograd::Function, torch::autograd::variable_list;

using Maybe = std::optional<at::Tensor>;

static const kernels::ProductKernels& product_kernels() {
  const simd::Isa isa = simd::isa();
  return isa >= simd::Isa::avx512 ? kernels::avx512::product_kernels
         : isa == simd::Isa::avx2 ? kernels::avx2::product_kernels
                                  : kernels::portable::product_kernels;
}

static bool is_rows(const at::Tensor& x) {
  return x.stride(1) == 1 || x.size(1) == 1;
}

void times_by_own(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                  const at::Tensor& bias) {
  for (const at::Tensor* x : {&out, &a, &b})
    check(x->is_cpu() && x->scalar_type() == at::kFloat && x->dim() == 2,
          "times_by_own: expected float32 matrices on the CPU");
  check(a.size(1) == b.size(0) && out.size(0) == a.size(0) && out.size(1) == b.size(1) &&
            a.size(1) > 0 && is_rows(a) && is_rows(out),
        "times_by_own: expected contiguous rows a [M, K], b [K, N] and out [M, N], got ", a.sizes(),
        ", ", b.sizes(), " and ", out.sizes());
  kernels::Product p{a.size(0), b.size(1), a.size(1)};
  p.a = a.const_data_ptr<float>(), p.a_row = a.stride(0);
  p.b = {b.const_data_ptr<float>(), b.stride(0), b.stride(1)};
  p.c = out.data_ptr<float>(), p.c_row = out.stride(0);
  const at::Tensor plain = bias.defined() ? bias.contiguous() : bias;
  if (plain.defined()) p.bias = plain.const_data_ptr<float>();
  p.rows = 512, p.columns = 2 * kernels::kProductColumns;
  const kernels::ProductKernels& k = product_kernels();
  attn::for_each_task(p.tasks(), k.scratch(p),
                      [&](int64_t i, float* scratch) { k.run(p, i, scratch); });
}

// torch's float32 products use AVX-512 only on Intel CPUs. On Zen 4 ours are faster for long sums
// (8 %) or wide results (28 %), and not faster otherwise.
static bool is_ours(const at::Tensor& a, const at::Tensor& b) {
  static const bool amd = __builtin_cpu_is("amd");
  constexpr int64_t kFewestRows = 32, kLong = 512, kWide = 8192;
  return amd && a.is_cpu() && a.scalar_type() == at::kFloat && b.scalar_type() == at::kFloat &&
         &product_kernels() == &kernels::avx512::product_kernels && is_rows(a) &&
         a.size(0) >= kFewestRows && (a.size(1) >= kLong || b.size(1) >= kWide);
}

void times_to(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias) {
  if (is_ours(a, b)) return times_by_own(out, a, b, bias);
  bias.defined() ? at::addmm_out(out, bias, a, b) : at::mm_out(out, a, b);
}
at::Tensor times(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias) {
  if (!is_ours(a, b)) return bias.defined() ? at::addmm(bias, a, b) : at::mm(a, b);
  const at::Tensor out = at::empty({a.size(0), b.size(1)}, a.options());
  times_by_own(out, a, b, bias);
  return out;
}

struct Linear : Function<Linear> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const Maybe& bias) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["bias"] = bias.has_value();
    return times(x, weight.t(), bias.value_or(at::Tensor()));
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &g = grads[0];
    variable_list d(3);
    if (ctx->needs_input_grad(0)) d[0] = times(g, weight);
    if (ctx->needs_input_grad(1)) d[1] = times(g.t(), x);
    if (ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(2)) d[2] = g.sum(0);
    return d;
  }
};

// Concatenates tensors along dimension 0, in one dtype.
struct Join : Function<Join> {
  static at::Tensor forward(AutogradContext* ctx, at::ScalarType dtype, at::TensorList parts) {
    std::vector<int64_t> shape = parts[0].sizes().vec(), rows, dtypes;
    shape[0] = 0;
    for (const at::Tensor& x : parts) {
      rows.push_back(x.size(0)), dtypes.push_back(int64_t(x.scalar_type()));
      shape[0] += x.size(0);
    }
    const at::Tensor out = at::empty(shape, parts[0].options().dtype(dtype));
    int64_t from = 0;
    for (const at::Tensor& x : parts) out.narrow(0, from, x.size(0)).copy_(x), from += x.size(0);
    ctx->saved_data["rows"] = rows, ctx->saved_data["dtypes"] = dtypes;
    return out;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto rows = ctx->saved_data["rows"].toIntVector(),
               dtypes = ctx->saved_data["dtypes"].toIntVector();
    variable_list out{at::Tensor()};
    int64_t from = 0;
    for (size_t i = 0; i < rows.size(); from += rows[i++])
      out.push_back(grads[0].narrow(0, from, rows[i]).to(at::ScalarType(dtypes[i])));
    return out;
  }
};

static at::Tensor joined(const std::vector<at::Tensor>& x, at::ScalarType dtype) {
  if (x.size() == 1 && x[0].scalar_type() == dtype) return x[0];
  return Join::apply(dtype, at::TensorList(x));
}

// Writes each product to its own columns, without copying a weight.
static at::Tensor one_by_one(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                             const std::vector<at::Tensor>& biases) {
  int64_t width = 0, from = 0;
  for (const at::Tensor& w : weights) width += w.size(0);
  const at::Tensor out = at::empty({x.size(0), width}, x.options());
  for (size_t i = 0; i < weights.size(); ++i) {
    at::Tensor to = out.narrow(1, from, weights[i].size(0));
    from += weights[i].size(0);
    times_to(to, x, weights[i].t(), biases.empty() ? at::Tensor() : biases[i]);
  }
  return out;
}

at::Tensor product(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                   const std::vector<at::Tensor>& given_biases) {
  std::vector<at::Tensor> biases;
  for (const at::Tensor& b : given_biases)
    if (b.defined()) biases.push_back(b);
  check(biases.empty() || biases.size() == weights.size(), "product: expected a bias for each of ",
        weights.size(), " weights or none, got ", biases.size());
  bool cast = false, gradients = x.requires_grad();
  std::vector<at::Tensor> all = weights;
  all.insert(all.end(), biases.begin(), biases.end());
  for (const at::Tensor& w : all)
    cast |= w.scalar_type() != x.scalar_type(), gradients |= w.requires_grad();
  gradients &= at::GradMode::is_enabled();
  if (weights.size() > 1 && !cast && !gradients) return one_by_one(x, weights, biases);
  const at::ScalarType dtype = x.scalar_type();
  return Linear::apply(x, joined(weights, dtype),
                       biases.empty() ? std::nullopt : Maybe(joined(biases, dtype)));
}

}  // namespace horner::nn::parts
