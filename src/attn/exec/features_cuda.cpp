#include "attn/exec/features_cuda.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "attn/exec/cpu.h"
#include "attn/exec/cuda.h"
#include "attn/exec/cuda_stream.h"
#include "attn/kernels/cuda/prepare/features.h"
#include "attn/stages.h"

namespace horner::attn::exec {

namespace cuda = kernels::cuda;

// x [B, H, T, D]; factor [B, H, T, 1] in float32, expanded, or undefined.
static cuda::FeatureRows rows_of(cuda::Map map, double repeats, const at::Tensor& x,
                                 const at::Tensor& factor) {
  cuda::FeatureRows p{};
  p.map = map, p.dtype = dtype_of(x), p.repeats = float(repeats);
  p.B = int(x.size(0)), p.H = int(x.size(1)), p.T = int(x.size(2)), p.D = int(x.size(3));
  p.x = view(x);
  if (factor.defined()) p.factor = view(factor.expand({x.size(0), x.size(1), x.size(2), 1}));
  return p;
}

static at::Tensor side_by_side(const at::Tensor& x) {
  return x.stride(-1) == 1 ? x : x.contiguous();
}

static at::Tensor map(cuda::Map map, double repeats, const at::Tensor& x,
                      const at::Tensor& factor) {
  const c10::cuda::CUDAGuard guard(x.device());
  const int64_t channels = (x.size(3) + cuda::kPad - 1) / cuda::kPad * cuda::kPad;
  const at::Tensor y = at::empty({x.size(0), x.size(1), x.size(2), channels}, x.options());
  const at::Tensor given = side_by_side(x);
  cuda::FeatureRows p = rows_of(map, repeats, given, factor);
  p.y = view(y);
  cuda::map_rows(p, stream());
  return y;
}

struct MapRows : torch::autograd::Function<MapRows> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const std::optional<at::Tensor>& factor, int64_t kind, double repeats) {
    ctx->save_for_backward({x, factor.value_or(at::Tensor())});
    ctx->saved_data["kind"] = kind, ctx->saved_data["repeats"] = repeats;
    return map(cuda::Map(kind), repeats, x, factor.value_or(at::Tensor()));
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* ctx,
                                          const std::vector<at::Tensor>& grads) {
    check_first_order("the CUDA kernels");
    const auto saved = ctx->get_saved_variables();
    const at::Tensor x = side_by_side(saved[0]), &factor = saved[1];
    const c10::cuda::CUDAGuard guard(x.device());
    const auto kind = cuda::Map(ctx->saved_data["kind"].toInt());
    const at::Tensor dy = laid_out(grads[0]);
    cuda::FeatureRows p = rows_of(kind, ctx->saved_data["repeats"].toDouble(), x, factor);
    p.y = view(dy);
    // Only this function reads the gradient of y: y has one consumer, whose backward made it.
    const bool in_place = dy.size(3) == x.size(3) && dy.is_contiguous();
    const at::Tensor dx = in_place ? dy : at::empty(x.sizes(), x.options());
    p.dx = view(dx);
    at::Tensor d_factor;
    if (factor.defined() && factor.requires_grad())
      d_factor = at::empty({p.B, p.H, p.T, 1}, factor.options());
    p.d_factor = memory<float>(d_factor);
    cuda::map_rows_backward(p, stream());
    if (d_factor.defined()) d_factor = at::sum_to(d_factor, factor.sizes());
    return {dx, d_factor, at::Tensor(), at::Tensor()};
  }
};

// None: by tensor code.
struct MapOf {
  using Map = std::optional<cuda::Map>;
  Map operator()(Identity) const { return cuda::Map::identity; }
  Map operator()(Elu1) const { return cuda::Map::elu1; }
  Map operator()(Relu) const { return cuda::Map::relu; }
  Map operator()(Cosine f) const {
    return f.over_heads ? cuda::Map::cosine_over_heads : cuda::Map::cosine;
  }
  Map operator()(Project) const { return {}; }
};

at::Tensor mapped_on_gpu(const Features& features, const at::Tensor& x,
                         const at::Tensor& projection, int64_t repeats, const at::Tensor& factor) {
  const auto kind = std::visit(MapOf{}, features);
  const bool nothing = kind == cuda::Map::identity && !factor.defined();
  if (!kind || nothing) {
    const at::Tensor y = mapped(features, x, projection, repeats);
    return factor.defined() ? mapped_on_gpu(Identity{}, y, {}, 1, factor) : y;
  }
  if (factor.defined() && kind == cuda::Map::cosine_over_heads)
    return mapped_on_gpu(Identity{}, mapped_on_gpu(features, x, {}, repeats), {}, 1, factor);
  const at::Tensor by = factor.defined() ? factor.to(at::kFloat) : factor;
  const bool gradients = x.requires_grad() || (by.defined() && by.requires_grad());
  if (!gradients || !at::GradMode::is_enabled()) return map(*kind, double(repeats), x, by);
  return MapRows::apply(x, by.defined() ? std::optional(by) : std::nullopt, int64_t(*kind),
                        double(repeats));
}

}  // namespace horner::attn::exec
