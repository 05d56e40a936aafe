#include "attn/exec/features_cuda.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include <optional>

#include "attn/exec/autograd.h"
#include "attn/exec/cuda.h"
#include "attn/exec/cuda_stream.h"
#include "attn/kernels/cuda/prepare/features.h"
#include "attn/stages.h"

namespace horner::attn::exec {

namespace cuda = kernels::cuda;

static at::Tensor contiguous_channels(const at::Tensor& x) {
  return x.stride(-1) == 1 ? x : x.contiguous();
}

struct MapJob {
  cuda::Map map;
  float repeats;
};
struct MapTensors {
  at::Tensor x, factor;  // factor: [B, H, T, 1] in float32, may broadcast, or undefined

  static auto fields(auto& t) { return std::array{&t.x, &t.factor}; }
};

static cuda::FeatureRows problem(const MapJob& job, const at::Tensor& x, const at::Tensor& factor) {
  cuda::FeatureRows p{};
  p.map = job.map, p.dtype = dtype_of(x), p.repeats = job.repeats;
  p.B = int(x.size(0)), p.H = int(x.size(1)), p.T = int(x.size(2)), p.D = int(x.size(3));
  p.x = view(x);
  if (factor.defined()) p.factor = view(factor.expand({x.size(0), x.size(1), x.size(2), 1}));
  return p;
}

static Output forward(const MapJob& job, const MapTensors& given, bool) {
  const at::Tensor x = contiguous_channels(given.x);
  const int64_t channels = (x.size(3) + cuda::kPad - 1) / cuda::kPad * cuda::kPad;
  const at::Tensor y = at::empty({x.size(0), x.size(1), x.size(2), channels}, x.options());
  cuda::FeatureRows p = problem(job, x, given.factor);
  p.y = view(y);
  cuda::map_rows(p, stream());
  return {y};
}

static MapTensors backward(const MapJob& job, const MapTensors& given, const Output&,
                           const Output& grads) {
  const at::Tensor x = contiguous_channels(given.x), &factor = given.factor;
  const at::Tensor dy = laid_out(grads.y);
  cuda::FeatureRows p = problem(job, x, factor);
  p.y = view(dy);
  // Only this function reads the gradient of y: y has one consumer, whose backward made it.
  const bool in_place = dy.size(3) == x.size(3) && dy.is_contiguous();
  MapTensors d{in_place ? dy : at::empty(x.sizes(), x.options()), {}};
  if (factor.defined() && factor.requires_grad())
    d.factor = at::empty({p.B, p.H, p.T, 1}, factor.options());
  p.dx = view(d.x), p.d_factor = memory<float>(d.factor);
  cuda::map_rows_backward(p, stream());
  if (d.factor.defined()) d.factor = at::sum_to(d.factor, factor.sizes());
  return d;
}

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
  Map operator()(Hedgehog) const { return {}; }
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
  const MapTensors given{x, factor.defined() ? factor.to(at::kFloat) : factor};
  return differentiable("the CUDA kernels", MapJob{*kind, float(repeats)}, given, forward, backward)
      .y;
}

}  // namespace horner::attn::exec
