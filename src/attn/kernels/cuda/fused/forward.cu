// The forward kernels of one dtype.
#include "attn/kernels/cuda/common/launch.cuh"
#include "attn/kernels/cuda/fused/forward.cuh"

namespace horner::attn::kernels::cuda {

// What has no input gate runs code without one, where that is code of its own.
template <class T, int C, class W>
static auto kernel_for(const Fused& f) {
  constexpr bool apart = kHasFalls<T, W>;
  const auto of = [&]<bool gated>(std::bool_constant<gated>) {
    return is_careful(f) ? forward_kernel<T, C, W, apart, gated>
                         : forward_kernel<T, C, W, false, gated>;
  };
  if constexpr (apart)
    if (!f.gate) return of(std::false_type());
  return of(std::true_type());
}

template <>
void Launch<HORNER_DTYPE>::forward(const Fused& f, const Weights& weights, Stream stream) {
  with_channels(f, [&]<int C>(std::integral_constant<int, C>) {
    using Shape = ForwardShape<HORNER_DTYPE, C>;
    const Grid grid{heads(f) * blocks(f.T, Shape::kQueries), 1, Shape::kThreads, Shape::kBytes};
    std::visit(
        [&]<class W>(const W& w) {
          const int degree = known_degree<HORNER_DTYPE>(degree_of(w));
          launch(kernel_for<HORNER_DTYPE, C, W>(f), grid, stream, f,
                 before_scale(w, f.scale, degree));
        },
        weights);
  });
}

}  // namespace horner::attn::kernels::cuda
