// Launches of the Hopper kernels of one dtype: TMA tensor maps, then the kernel. Compiled once per
// dtype (HORNER_DTYPE).
#include "attn/kernels/cuda/common/launch.cuh"
#include "attn/kernels/cuda/hopper/backward.cuh"
#include "attn/kernels/cuda/hopper/hopper.h"

namespace horner::attn::kernels::cuda {

using Encode = decltype(&cuTensorMapEncodeTiled);

static Encode encode() {  // from the driver, without linking to it
  static const Encode function = [] {
    void* at = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &at, 12000,
                                                               cudaEnableDefault, &result);
    check(error == cudaSuccess && result == cudaDriverEntryPointSuccess,
          "the CUDA driver has no cuTensorMapEncodeTiled (TMA); requires CUDA 12.0 or newer");
    return reinterpret_cast<Encode>(at);
  }();
  return function;
}

// TMA boxes of `rows` rows and 64 channels, zero-filled outside.
static CUtensorMap tensor_map(const View& x, int channels, int64_t total_rows, int heads, int batch,
                              int rows) {
  if (total_rows * heads * batch == 0) return {};  // never loaded
  const auto dtype = std::is_same_v<HORNER_DTYPE, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                        : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto bytes = [](int64_t stride, int64_t n) { return n > 1 ? cuuint64_t(stride) * 2 : 16; };
  const cuuint64_t sizes[] = {cuuint64_t(channels), cuuint64_t(total_rows), cuuint64_t(heads),
                              cuuint64_t(batch)};
  const cuuint64_t strides[] = {bytes(x.row, total_rows), bytes(x.head, heads),
                                bytes(x.batch, batch)};
  const cuuint32_t box[] = {64, cuuint32_t(rows), 1, 1}, steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode()(&map, dtype, 4, x.at, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, "TMA does not support strides (batch, head, row) ", x.batch, ", ",
        x.head, ", ", x.row, " (error ", int(result), ")");
  return map;
}

// Calls f(weight, channels), channels being 64 or 128 as a constant.
template <class W, class F>
static void with_channels(const Fused& p, const W& w, const F& f) {
  if (p.D <= 64 && p.E <= 64) return f(w, std::integral_constant<int, 64>());
  f(w, std::integral_constant<int, 128>());
}
// The same with Exp or Polynomial, or these with decay or a centre, or Exp with a soft cap.
template <class F>
static void with_kernel(const Fused& p, const Weights& weights, const float* factors, const F& f) {
  const auto with = [&]<class W>(const W& w) {
    if (p.decay) return with_channels(p, WithDecay<W>{w, factors}, f);
    p.centre ? with_channels(p, WithCentre<W>{w}, f) : with_channels(p, w, f);
  };
  if (const Exp* w = std::get_if<Exp>(&weights))
    return p.softcap != 0 ? with_channels(p, with_cap<HORNER_DTYPE>(*w, p), f) : with(*w);
  with(std::get<Polynomial>(weights));
}

// The problem that kernels of this weight get.
template <class W>
static Fused problem_of(Fused f) {
  if (kHasCap<W>) f.scale = f.softcap;
  return f;
}

// Folds the scale into the coefficients, where the kernel is specialized by degree.
static WithDecay<Polynomial> fold_scale(const WithDecay<Polynomial>& w, float scale, int degree) {
  return {fold_scale(w.of, scale, degree), w.factors};
}
static WithCentre<Polynomial> fold_scale(const WithCentre<Polynomial>& w, float scale, int degree) {
  return {fold_scale(w.of, scale, degree)};
}

template <>
void HopperLaunch<HORNER_DTYPE>::forward(const Fused& f, const Weights& weights,
                                         const float* factors, Stream stream) {
  if (f.B * f.T == 0) return;
  const auto start = [&]<class W, int C>(const W& w, std::integral_constant<int, C>) {
    using Shape = HopperForwardShape<C>;
    const ForwardMaps maps{tensor_map(f.q, f.D, f.T, f.H, f.B, Shape::kQueries),
                           tensor_map(f.k, f.D, f.S, f.G, f.B, Shape::kKeys),
                           tensor_map(f.v, f.E, f.S, f.G, f.B, Shape::kKeys)};
    const int bytes = kHasDecay<W> ? Shape::kBytesWithDecay : Shape::kBytes;
    const Grid grid{heads(f) * ceil_div(f.T, Shape::kQueries), 1, Shape::kThreads, bytes};
    launch(hopper_forward_kernel<HORNER_DTYPE, C, W>, grid, stream, problem_of<W>(f),
           fold_scale(w, f.scale, degree_of(w)), maps);
  };
  if constexpr (std::is_same_v<HORNER_DTYPE, bf16>)
    if (factors && is_clamped_exp(f, weights))
      return with_channels(f, WithDecay<ClampedExp>{{}, factors}, start);
  with_kernel(f, weights, factors, start);
}

template <>
void HopperLaunch<HORNER_DTYPE>::backward(const Fused& f, const Weights& weights, Stream stream) {
  if (f.B * f.S == 0) return;
  with_kernel(f, weights, nullptr, [&]<class W, int C>(const W& w, std::integral_constant<int, C>) {
    using Shape = HopperBackwardShape<C>;
    const BackwardMaps maps{tensor_map(f.q, f.D, f.T, f.H, f.B, Shape::kQueries),
                            tensor_map(f.k, f.D, f.S, f.G, f.B, Shape::kKeys),
                            tensor_map(f.v, f.E, f.S, f.G, f.B, Shape::kKeys),
                            tensor_map(f.d_o, f.E, f.T, f.H, f.B, Shape::kQueries)};
    const Grid grid{f.B * f.G * ceil_div(f.S, Shape::kKeys), 1, Shape::kThreads,
                    kSumsDx<W> ? BackwardMemory<C>::kBytesWithSums : BackwardMemory<C>::kBytes};
    launch(hopper_backward_kernel<HORNER_DTYPE, C, W>, grid, stream, problem_of<W>(f),
           fold_scale(w, f.scale, slope_degree_of(w)), maps);
  });
}

}  // namespace horner::attn::kernels::cuda
