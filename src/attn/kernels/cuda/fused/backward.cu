// The backward kernels of one dtype.
#include <algorithm>

#include "attn/kernels/cuda/common/launch.cuh"
#include "attn/kernels/cuda/common/row_gradients.cuh"
#include "attn/kernels/cuda/fused/backward.cuh"
#include "attn/kernels/cuda/fused/forward.cuh"
#include "attn/kernels/cuda/fused/queries.cuh"

namespace horner::attn::kernels::cuda {

template <>
int Launch<HORNER_DTYPE>::shared_memory(int channels) {
  Fused f{};
  f.D = f.E = channels;
  int bytes = 0;
  with_channels(f, [&]<int C>(std::integral_constant<int, C>) {
    bytes = std::max({ForwardShape<HORNER_DTYPE, C>::kBytes, QueriesShape<HORNER_DTYPE, C>::kBytes,
                      BackwardShape<HORNER_DTYPE, C, Exp>::kBytes});
  });
  return bytes;
}

template <>
void Launch<HORNER_DTYPE>::rows(const Fused& f, bool is_exp, Stream stream) {
  with_channels(f, [&]<int C>(std::integral_constant<int, C>) {
    const auto kernel = f.epilogue.norm_weight ? rows_kernel<HORNER_DTYPE, C, RowKind::learned>
                        : f.epilogue.norm != Epilogue::none
                            ? rows_kernel<HORNER_DTYPE, C, RowKind::normed>
                            : rows_kernel<HORNER_DTYPE, C, RowKind::plain>;
    launch(kernel, {row_blocks(f), 1, kRowThreads, 0}, stream, f, is_exp);
  });
}

template <>
void Launch<HORNER_DTYPE>::dq_of_sums(const Fused& f, Stream stream) {
  with_channels(f, [&]<int C>(std::integral_constant<int, C>) {
    if constexpr (sizeof(HORNER_DTYPE) == 2 && C <= 128)
      launch(dq_kernel<HORNER_DTYPE, C>, {heads(f) * blocks(f.T, kDqTile), 1, 128, 0}, stream, f);
  });
}

template <>
void Launch<HORNER_DTYPE>::keys(const Fused& f, const Weights& weights, Stream stream) {
  with_channels(f, [&]<int C>(std::integral_constant<int, C>) {
    std::visit(
        [&]<class W>(const W& w) {
          using Shape = BackwardShape<HORNER_DTYPE, C, W>;
          const Grid grid{int64_t(f.B) * f.G * blocks(f.S, Shape::kKeys) * Shape::kParts, 1,
                          Shape::kThreads, Shape::kBytes};
          const int degree = known_degree<HORNER_DTYPE>(slope_degree_of(w));
          const auto kernel = is_careful(f)
                                  ? keys_kernel<HORNER_DTYPE, C, W, kHasFalls<HORNER_DTYPE, W>>
                                  : keys_kernel<HORNER_DTYPE, C, W>;
          launch(kernel, grid, stream, f, before_scale(w, f.scale, degree));
        },
        weights);
  });
}

}  // namespace horner::attn::kernels::cuda
