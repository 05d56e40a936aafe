// The kernels of one dtype that pass over the keys of a block of queries, beside forward.
#include "attn/kernels/cuda/common/launch.cuh"
#include "attn/kernels/cuda/fused/queries.cuh"
#include "attn/kernels/cuda/fused/row_threshold.cuh"

namespace horner::attn::kernels::cuda {

template <class Shape>
static Grid grid_of(const Fused& f) {
  return {heads(f), blocks(f.T, Shape::kQueries), Shape::kThreads, Shape::kBytes};
}

template <>
void Launch<HORNER_DTYPE>::queries(const Fused& f, const Weights& weights, Stream stream) {
  with_channels(f, [&]<int C>(std::integral_constant<int, C>) {
    const Grid grid = grid_of<QueriesShape<HORNER_DTYPE, C>>(f);
    std::visit([&]<class W>(
                   const W& w) { launch(queries_kernel<HORNER_DTYPE, C, W>, grid, stream, f, w); },
               weights);
  });
}

template <>
void Launch<HORNER_DTYPE>::statistics(const Fused& f, const Weights& weights, Stream stream) {
  with_channels(f, [&]<int C>(std::integral_constant<int, C>) {
    const Grid grid = grid_of<QueriesShape<HORNER_DTYPE, C>>(f);
    std::visit(
        [&]<class W>(const W& w) {
          launch(statistics_kernel<HORNER_DTYPE, C, W>, grid, stream, f, w);
        },
        weights);
  });
}

template <>
void Launch<HORNER_DTYPE>::find(const Fused& f, const Other& w, bool adaptive, Stream stream) {
  with_channels(f, [&]<int C>(std::integral_constant<int, C>) {
    launch(find_kernel<HORNER_DTYPE, C>, grid_of<QueriesShape<HORNER_DTYPE, C>>(f), stream, f, w,
           adaptive);
  });
}

template <>
void Launch<HORNER_DTYPE>::pulls(const Fused& f, const Other& w, Stream stream) {
  with_channels(f, [&]<int C>(std::integral_constant<int, C>) {
    launch(pulls_kernel<HORNER_DTYPE, C>, grid_of<QueriesShape<HORNER_DTYPE, C>>(f), stream, f, w);
  });
}

}  // namespace horner::attn::kernels::cuda
