// The forward kernels of one dtype.
#include "attn/exec/kernels/fused_cuda_forward.cuh"
#include "attn/exec/kernels/fused_cuda_launch.cuh"

namespace horner::attn::kernels::cuda {

template <>
void Launch<HORNER_DTYPE>::forward(const Fused& f, const Weights& weights, Stream stream) {
  with_channels(f, [&]<int C>(std::integral_constant<int, C>) {
    using Shape = ForwardShape<HORNER_DTYPE, C>;
    const Grid grid{heads(f) * blocks(f.T, Shape::kQueries), 1, Shape::kThreads, Shape::kBytes};
    std::visit(
        [&]<class W>(const W& w) {
          const int degree = known_degree<HORNER_DTYPE>(f, degree_of(w));
          const auto kernel = is_careful(f)
                                  ? forward_kernel<HORNER_DTYPE, C, W, kHasFalls<HORNER_DTYPE, W>>
                                  : forward_kernel<HORNER_DTYPE, C, W>;
          launch(kernel, grid, stream, f, before_scale(w, f.scale, degree));
        },
        weights);
  });
}

}  // namespace horner::attn::kernels::cuda
