#include "nn/parts.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>

#include "core/check.h"
#include "nn/parts_launch.h"

namespace horner::nn::parts {

using torch::autograd::AutogradContext, torch::autograd::Function, torch::autograd::variable_list;

static bool fits_norm(const at::Tensor& x) {
  return x.is_cpu() || x.size(1) <= kernels::cuda::kMostChannels;
}
// Null if there is no kernel for these dtypes on this device.
static const Launch* launch_for(std::initializer_list<at::ScalarType> dtypes, const at::Tensor& x) {
  for (const at::ScalarType t : dtypes)
    if (t != at::kFloat && t != at::kBFloat16 && (t != at::kHalf || !x.is_cuda())) return nullptr;
  return x.is_cpu() ? &cpu_launch() : x.is_cuda() ? cuda_launch() : nullptr;
}

static kernels::Dtype kind_of(at::ScalarType t) {
  return t == at::kFloat      ? kernels::Dtype::float32
         : t == at::kBFloat16 ? kernels::Dtype::bfloat16
                              : kernels::Dtype::float16;
}
// Tasks long enough to pay for a thread, and few, because each has its own sums.
static kernels::Rows rows_of(const at::Tensor& x) {
  const int64_t n = x.size(0), least = x.is_cuda() ? 4 : 16, most = x.is_cuda() ? 1024 : 256;
  return {n, std::max<int64_t>(least, (n + most - 1) / most)};
}
static at::Tensor contiguous_rows(const at::Tensor& x) {
  return x.size(-1) <= 1 || x.stride(-1) == 1 ? x : x.contiguous();
}
static const float* floats(const at::Tensor& x) {
  return x.defined() ? x.const_data_ptr<float>() : nullptr;
}
static at::Tensor plain(const at::Tensor& x) {  // float32, contiguous
  return x.defined() ? x.detach().to(at::kFloat).contiguous() : x;
}
static std::optional<at::Tensor> maybe(const at::Tensor& x) {
  return x.defined() ? std::optional(x) : std::nullopt;
}
static void check_first_order() {
  check(!c10::GradMode::is_enabled(),
        "double backward through norms, heads and activations is supported only in double");
}
// The gradient of a weight, from the sums of the tasks, [tasks, C].
static at::Tensor sum_of(const at::Tensor& tasks, at::ScalarType as) {
  return tasks.defined() ? tasks.sum(0).to(as) : tasks;
}

struct Options : torch::CustomClassHolder {  // what backward needs besides tensors
  Norm norm;
  Heads heads;
  bool gelu, gated;
  at::ScalarType narrow, weight_dtype;  // of the norm's output; of weights
};
static c10::intrusive_ptr<Options> options(AutogradContext* ctx) {
  return c10::static_intrusive_pointer_cast<Options>(ctx->saved_data["options"].toCapsule());
}

static kernels::Norm norm_problem(const Norm& n, const at::Tensor& x, at::ScalarType narrow,
                                  const at::Tensor& weight, const at::Tensor& bias) {
  kernels::Norm p{};
  p.rows = rows_of(x), p.C = x.size(1);
  p.wide = kind_of(x.scalar_type()), p.narrow = kind_of(narrow);
  p.layer = n.layer, p.plus = float(n.plus), p.eps = float(n.eps);
  p.weight = floats(weight), p.bias = floats(bias);
  p.x = x.const_data_ptr(), p.x_row = x.stride(0);
  return p;
}

struct AddNorm : Function<AddNorm> {
  // Returns the norm and, if something is added, the sum.
  static variable_list forward(AutogradContext* ctx, c10::intrusive_ptr<Options> k,
                               const at::Tensor& given,
                               const std::optional<at::Tensor>& given_added,
                               const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
    const c10::OptionalDeviceGuard on(given.device());
    const at::Tensor x = contiguous_rows(given), w = plain(weight);
    const at::Tensor b = plain(bias.value_or(at::Tensor()));
    const at::ScalarType narrow = k->narrow;
    kernels::Norm p = norm_problem(k->norm, x, narrow, w, b);
    const auto fresh = [&](at::ScalarType t) { return at::empty(x.sizes(), x.options().dtype(t)); };
    const auto number = [&] { return at::empty({x.size(0)}, x.options().dtype(at::kFloat)); };
    at::Tensor added, sum, y = fresh(narrow), rstd = number(), mean;
    if (given_added) {
      added = contiguous_rows(*given_added), sum = fresh(x.scalar_type());
      p.added = added.const_data_ptr(), p.added_row = added.stride(0), p.sum = sum.data_ptr();
    }
    if (k->norm.layer) mean = number(), p.mean = mean.data_ptr<float>();
    p.y = y.data_ptr(), p.rstd = rstd.data_ptr<float>();
    launch_for({x.scalar_type(), narrow}, x)->norm(p);
    k->weight_dtype = weight.scalar_type();
    ctx->save_for_backward({added.defined() ? sum : x, w, b, rstd, mean});
    ctx->saved_data["options"] = c10::IValue::make_capsule(k);
    ctx->set_materialize_grads(false);
    return added.defined() ? variable_list{y, sum} : variable_list{y};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_first_order();
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &w = saved[1], &b = saved[2];
    const c10::OptionalDeviceGuard on(x.device());
    const auto k = options(ctx);
    const at::ScalarType narrow = k->narrow, as = k->weight_dtype;
    const bool adds = grads.size() > 1;
    kernels::Norm p = norm_problem(k->norm, x, narrow, w, b);
    const at::Tensor d_y = grads[0].defined() ? contiguous_rows(grads[0])
                                              : at::zeros(x.sizes(), x.options().dtype(narrow));
    const at::Tensor d_sum = adds && grads[1].defined() ? contiguous_rows(grads[1]) : at::Tensor();
    p.d_y = d_y.const_data_ptr(), p.d_y_row = d_y.stride(0);
    if (d_sum.defined()) p.d_sum = d_sum.const_data_ptr(), p.d_sum_row = d_sum.stride(0);
    const at::Tensor d_x = at::empty(x.sizes(), x.options());
    at::Tensor d_added = d_x, d_weight, d_bias;
    if (adds && narrow != x.scalar_type()) {
      d_added = at::empty(x.sizes(), x.options().dtype(narrow));
      p.d_added = d_added.data_ptr();
    }
    const auto sums = [&] { return at::empty({p.rows.tasks(), p.C}, w.options()); };
    d_weight = sums(), p.d_weight = d_weight.data_ptr<float>();
    if (b.defined()) d_bias = sums(), p.d_bias = d_bias.data_ptr<float>();
    p.d_x = d_x.data_ptr();
    p.rstd = saved[3].data_ptr<float>();
    if (saved[4].defined()) p.mean = saved[4].data_ptr<float>();
    launch_for({x.scalar_type(), narrow}, x)->norm_backward(p);
    return {{}, d_x, adds ? d_added : at::Tensor(), sum_of(d_weight, as), sum_of(d_bias, as)};
  }
};

static void check_rows(const char* what, const at::Tensor& x, const at::Tensor& weight) {
  check(x.dim() == 2 && weight.dim() == 1 && weight.size(0) == x.size(1), what,
        ": expected rows [N, C] and a weight [C], got ", x.sizes(), " and ", weight.sizes());
}

at::Tensor norm(const Norm& n, const at::Tensor& x, const at::Tensor& weight,
                const at::Tensor& bias, at::ScalarType out) {
  check_rows("norm", x, weight);
  if (!launch_for({x.scalar_type(), out}, x) || !fits_norm(x))
    return reference::norm(n, x, weight, bias, out);
  auto k = c10::make_intrusive<Options>();
  k->norm = n, k->narrow = out;
  return AddNorm::apply(k, x, std::optional<at::Tensor>(), weight, maybe(bias))[0];
}

std::pair<at::Tensor, at::Tensor> add_norm(const Norm& n, const at::Tensor& x,
                                           const at::Tensor& added, const at::Tensor& weight,
                                           const at::Tensor& bias) {
  check_rows("norm", x, weight);
  check(x.sizes() == added.sizes(), "add_norm: expected two tensors of the same shape, got ",
        x.sizes(), " and ", added.sizes());
  const at::ScalarType out = added.scalar_type();
  if (!launch_for({x.scalar_type(), out}, x) || !fits_norm(x)) {
    const at::Tensor sum = (x + added).to(x.scalar_type());
    return {sum, reference::norm(n, sum, weight, bias, out)};
  }
  auto k = c10::make_intrusive<Options>();
  k->norm = n, k->narrow = out;
  const variable_list both = AddNorm::apply(k, x, maybe(added), weight, maybe(bias));
  return {both[1], both[0]};
}

static kernels::Heads heads_problem(const Heads& h, const at::Tensor& rows,
                                    const at::Tensor& q_norm, const at::Tensor& k_norm,
                                    const Rotation& by) {
  kernels::Heads p{};
  p.rows = rows_of(rows);
  p.T = h.T, p.H = h.H, p.G = h.G, p.D = h.D;
  p.dtype = kind_of(rows.scalar_type());
  p.plus = float(h.norm.plus), p.eps = float(h.norm.eps);
  p.q_norm = floats(q_norm), p.k_norm = floats(k_norm);
  p.cos = floats(by.cos), p.sin = floats(by.sin);
  return p;
}
static kernels::Heads4 view4(const at::Tensor& x) {
  return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

struct SplitHeads : Function<SplitHeads> {
  static variable_list forward(AutogradContext* ctx, c10::intrusive_ptr<Options> k,
                               const at::Tensor& given, const std::optional<at::Tensor>& q_weight,
                               const std::optional<at::Tensor>& k_weight,
                               const std::optional<at::Tensor>& cos,
                               const std::optional<at::Tensor>& sin) {
    const c10::OptionalDeviceGuard on(given.device());
    const Heads& h = k->heads;
    const at::Tensor x = contiguous_rows(given);
    const at::Tensor q_norm = plain(q_weight.value_or(at::Tensor())),
                     k_norm = plain(k_weight.value_or(at::Tensor()));
    const Rotation by{plain(cos.value_or(at::Tensor())), plain(sin.value_or(at::Tensor()))};
    kernels::Heads p = heads_problem(h, x, q_norm, k_norm, by);
    p.x = x.const_data_ptr(), p.x_row = x.stride(0);
    at::Tensor rstd;
    if (p.q_norm) {
      rstd = at::empty({h.B * h.T, h.H + h.G}, x.options().dtype(at::kFloat));
      p.rstd = rstd.data_ptr<float>();
    }
    const at::Tensor q = at::empty({h.B, h.H, h.T, h.D}, x.options()),
                     key = at::empty({h.B, h.G, h.T, h.D}, x.options()), v = at::empty_like(key);
    p.q = view4(q), p.k = view4(key), p.v = view4(v);
    launch_for({x.scalar_type()}, x)->heads(p);
    if (p.q_norm) k->weight_dtype = q_weight->scalar_type();
    ctx->save_for_backward({p.q_norm ? x : at::Tensor(), q_norm, k_norm, by.cos, by.sin, rstd});
    ctx->saved_data["options"] = c10::IValue::make_capsule(k);
    return {q, key, v};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_first_order();
    const auto saved = ctx->get_saved_variables();
    const auto k = options(ctx);
    const Heads& h = k->heads;
    const c10::OptionalDeviceGuard on(grads[0].device());
    const at::Tensor d_x = at::empty({h.B * h.T, (h.H + 2 * h.G) * h.D}, grads[0].options());
    kernels::Heads p = heads_problem(h, d_x, saved[1], saved[2], {saved[3], saved[4]});
    for (at::Tensor& g : grads) g = contiguous_rows(g);
    p.q = view4(grads[0]), p.k = view4(grads[1]), p.v = view4(grads[2]);
    p.d_x = d_x.data_ptr();
    at::Tensor d_q, d_k;
    if (p.q_norm) {
      p.x = saved[0].const_data_ptr(), p.x_row = saved[0].stride(0);
      p.rstd = saved[5].data_ptr<float>();
      d_q = at::empty({p.rows.tasks(), h.D}, saved[1].options()), d_k = at::empty_like(d_q);
      p.d_q_norm = d_q.data_ptr<float>(), p.d_k_norm = d_k.data_ptr<float>();
    }
    launch_for({d_x.scalar_type()}, d_x)->heads_backward(p);
    const at::ScalarType as = k->weight_dtype;
    return {{}, d_x, sum_of(d_q, as), sum_of(d_k, as), {}, {}};
  }
};

std::array<at::Tensor, 3> heads(const Heads& h, const at::Tensor& x, const at::Tensor& q_norm,
                                const at::Tensor& k_norm, const Rotation& by) {
  check(x.dim() == 2 && x.size(0) == h.B * h.T && x.size(1) == (h.H + 2 * h.G) * h.D,
        "heads: expected rows [", h.B * h.T, ", ", (h.H + 2 * h.G) * h.D, "], got ", x.sizes());
  check(q_norm.defined() == k_norm.defined(),
        "heads: expected the norms of both q and k, or of neither");
  check(!by.cos.defined() || (h.D % 2 == 0 && by.cos.size(0) == h.T && by.cos.size(1) == h.D / 2),
        "heads: expected angles [", h.T, ", ", h.D / 2, "] and an even D, got ", by.cos.sizes());
  const bool fits = h.D <= kernels::kMostHeadChannels && (x.is_cpu() || h.D % 2 == 0);
  if (!launch_for({x.scalar_type()}, x) || !fits) return reference::heads(h, x, q_norm, k_norm, by);
  auto k = c10::make_intrusive<Options>();
  k->heads = h;
  const variable_list out =
      SplitHeads::apply(k, x, maybe(q_norm), maybe(k_norm), maybe(by.cos), maybe(by.sin));
  return {out[0], out[1], out[2]};
}

static kernels::Gated gated_problem(const Options& k, const at::Tensor& x) {
  kernels::Gated p{};
  p.rows = rows_of(x), p.M = x.size(1) / (k.gated ? 2 : 1);
  p.dtype = kind_of(x.scalar_type());
  p.gelu = k.gelu, p.gated = k.gated;
  p.x = x.const_data_ptr(), p.x_row = x.stride(0);
  return p;
}

struct Activate : Function<Activate> {
  static at::Tensor forward(AutogradContext* ctx, c10::intrusive_ptr<Options> k,
                            const at::Tensor& given) {
    const c10::OptionalDeviceGuard on(given.device());
    const at::Tensor x = contiguous_rows(given);
    kernels::Gated p = gated_problem(*k, x);
    const at::Tensor y = at::empty({x.size(0), p.M}, x.options());
    p.y = y.data_ptr();
    launch_for({x.scalar_type()}, x)->gated(p);
    ctx->save_for_backward({x});
    ctx->saved_data["options"] = c10::IValue::make_capsule(k);
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_first_order();
    const at::Tensor x = ctx->get_saved_variables()[0], d_y = contiguous_rows(grads[0]);
    const c10::OptionalDeviceGuard on(x.device());
    kernels::Gated p = gated_problem(*options(ctx), x);
    const at::Tensor d_x = at::empty(x.sizes(), x.options());
    p.d_y = d_y.const_data_ptr(), p.d_y_row = d_y.stride(0), p.d_x = d_x.data_ptr();
    launch_for({x.scalar_type()}, x)->gated_backward(p);
    return {{}, d_x};
  }
};

static at::Tensor activate(Activation f, const at::Tensor& x, bool gated) {
  check(x.dim() == 2 && (!gated || x.size(1) % 2 == 0), "activation: expected rows ",
        gated ? "[N, 2 M], got " : "[N, M], got ", x.sizes());
  if (f == Activation::gelu_erf || !launch_for({x.scalar_type()}, x))
    return gated ? reference::gated(f, x) : reference::activated(f, x);
  auto k = c10::make_intrusive<Options>();
  k->gelu = f == Activation::gelu, k->gated = gated;
  return Activate::apply(k, x);
}
at::Tensor activated(Activation f, const at::Tensor& x) {
  return activate(f, x, false);
}
at::Tensor gated(Activation f, const at::Tensor& x) {
  return activate(f, x, true);
}

at::Tensor losses_(const at::Tensor& logits, const at::Tensor& given, const at::Tensor& scale,
                   bool gradient) {
  check(logits.dim() == 2 && given.dim() == 1 && given.size(0) == logits.size(0),
        "losses: expected logits [N, V] and targets [N], got ", logits.sizes(), " and ",
        given.sizes());
  const c10::NoGradGuard by_hand;
  const at::Tensor targets = given.to(at::kLong).contiguous();
  const int64_t n = logits.size(0), V = logits.size(1);
  if (targets.is_cpu() && n > 0) {  // on a GPU the loss of a target beyond V is NaN
    const int64_t largest = targets.max().item<int64_t>();
    check(largest < V, "losses: target ", largest, " is out of range for ", V, " logits");
  }
  const Launch* launch = launch_for({logits.scalar_type()}, logits);
  if (!launch) {
    const at::Tensor loss = reference::losses(logits, targets);
    if (!gradient) return loss;
    const at::Tensor wanted = targets.clamp_min(0).unsqueeze(1);
    at::Tensor p = logits.softmax(-1);
    p.scatter_add_(1, wanted, at::full_like(wanted, -1, p.scalar_type()));
    p.mul_(scale).masked_fill_((targets < 0).unsqueeze(1), 0);
    logits.copy_(p);
    return loss;
  }
  check(logits.stride(1) == 1 || V == 1, "losses: expected logits with contiguous rows");
  const c10::OptionalDeviceGuard on(logits.device());
  const at::Tensor loss = at::empty({n}, logits.options().dtype(at::kFloat));
  const at::Tensor factor = scale.to(at::kFloat);
  kernels::Loss p{};
  p.rows = rows_of(logits), p.V = V, p.dtype = kind_of(logits.scalar_type());
  p.logits = logits.data_ptr(), p.row = logits.stride(0);
  p.targets = targets.const_data_ptr<int64_t>(), p.scale = floats(factor);
  p.loss = loss.data_ptr<float>(), p.gradient = gradient;
  launch->loss(p);
  return loss;
}

}  // namespace horner::nn::parts
