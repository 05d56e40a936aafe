// Launches of queries.cuh and row_threshold.cuh, compiled once per dtype (HORNER_DTYPE).
#include "attn/kernels/cuda/common/launch.cuh"
#include "attn/kernels/cuda/fused/fused.h"
#include "attn/kernels/cuda/fused/queries.cuh"
#include "attn/kernels/cuda/fused/row_threshold.cuh"

namespace horner::attn::kernels::cuda {

using T = HORNER_DTYPE;

template <class Shape>
static Grid grid_of(const Fused& f) {
  return {heads(f), ceil_div(f.T, Shape::kQueries), Shape::kThreads, Shape::kBytes};
}

template <>
void FusedLaunch<T>::dq(const Fused& f, const Weights& weights, Stream stream) {
  with_channels(f, [&]<int C>(std::integral_constant<int, C>) {
    const Grid grid = grid_of<QueriesShape<T, C>>(f);
    std::visit([&]<class W>(const W& w) { launch(fused_dq_kernel<T, C, W>, grid, stream, f, w); },
               weights);
  });
}

template <>
void FusedLaunch<T>::statistics(const Fused& f, const Weights& weights, Stream stream) {
  with_channels(f, [&]<int C>(std::integral_constant<int, C>) {
    const Grid grid = grid_of<QueriesShape<T, C>>(f);
    std::visit(
        [&]<class W>(const W& w) { launch(fused_statistics_kernel<T, C, W>, grid, stream, f, w); },
        weights);
  });
}

template <>
void FusedLaunch<T>::thresholds(const Fused& f, const RuntimeWeight& w, bool adaptive,
                                Stream stream) {
  with_channels(f, [&]<int C>(std::integral_constant<int, C>) {
    launch(row_thresholds_kernel<T, C>, grid_of<QueriesShape<T, C>>(f), stream, f, w, adaptive);
  });
}

template <>
void FusedLaunch<T>::row_gradient_sums(const Fused& f, const RuntimeWeight& w, Stream stream) {
  with_channels(f, [&]<int C>(std::integral_constant<int, C>) {
    launch(row_gradient_sums_kernel<T, C>, grid_of<QueriesShape<T, C>>(f), stream, f, w);
  });
}

}  // namespace horner::attn::kernels::cuda
