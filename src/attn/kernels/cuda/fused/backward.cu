// Backward launches of the fused kernels, compiled once per dtype (HORNER_DTYPE).
#include <algorithm>

#include "attn/kernels/cuda/common/launch.cuh"
#include "attn/kernels/cuda/common/row_gradients.cuh"
#include "attn/kernels/cuda/fused/backward.cuh"
#include "attn/kernels/cuda/fused/forward.cuh"
#include "attn/kernels/cuda/fused/fused.h"
#include "attn/kernels/cuda/fused/queries.cuh"

namespace horner::attn::kernels::cuda {

using T = HORNER_DTYPE;

template <>
int FusedLaunch<T>::shared_memory(int channels) {
  Fused f{};
  f.D = f.E = channels;
  int bytes = 0;
  with_channels(f, [&]<int C>(std::integral_constant<int, C>) {
    bytes = std::max(
        {ForwardShape<T, C>::kBytes, QueriesShape<T, C>::kBytes, BackwardShape<T, C, Exp>::kBytes});
  });
  return bytes;
}

template <>
void FusedLaunch<T>::row_gradients(const Fused& f, bool is_exp, Stream stream) {
  with_channels(f, [&]<int C>(std::integral_constant<int, C>) {
    const auto start = [&]<bool has_rest>(std::bool_constant<has_rest>) {
      const auto kernel = f.epilogue.norm_weight
                              ? row_gradients_kernel<T, C, RowKind::learned, has_rest>
                          : f.epilogue.norm != Epilogue::none
                              ? row_gradients_kernel<T, C, RowKind::norm_row, has_rest>
                              : row_gradients_kernel<T, C, RowKind::plain, has_rest>;
      launch(kernel, {row_blocks(f), 1, kRowThreads, 0}, stream, f, is_exp);
    };
    if constexpr (std::is_same_v<T, fp16>) {
      start(std::true_type());
    } else if constexpr (std::is_same_v<T, bf16>) {
      f.rest ? start(std::true_type()) : start(std::false_type());
    } else {
      start(std::false_type());
    }
  });
}

template <>
void FusedLaunch<T>::unpack_dq(const Fused& f, Stream stream) {
  with_channels(f, [&]<int C>(std::integral_constant<int, C>) {
    if constexpr (sizeof(T) == 2 && C <= 128)
      launch(unpack_dq_kernel<T, C>, {heads(f) * ceil_div(f.T, kDqTile), 1, 128, 0}, stream, f);
  });
}

template <>
void FusedLaunch<T>::backward(const Fused& f, const Weights& weights, Stream stream) {
  with_channels(f, [&]<int C>(std::integral_constant<int, C>) {
    std::visit(
        [&]<class W>(const W& w) {
          using Shape = BackwardShape<T, C, W>;
          const Grid grid{int64_t(f.B) * f.G * ceil_div(f.S, Shape::kKeys) * Shape::kParts, 1,
                          Shape::kThreads, Shape::kBytes};
          const int degree = is_special(f) ? 0 : known_degree<T>(slope_degree_of(w));
          constexpr bool factored = kHasDecayFactors<T, W>;
          const auto kernel = is_special(f)
                                  ? fused_backward_kernel<T, C, W, factored, Special<Shape>>
                              : has_decay_or_centre(f) ? fused_backward_kernel<T, C, W, factored>
                                                       : fused_backward_kernel<T, C, W>;
          launch(kernel, grid, stream, f, fold_scale(w, f.scale, degree));
        },
        weights);
  });
}

}  // namespace horner::attn::kernels::cuda
