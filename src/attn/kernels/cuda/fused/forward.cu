// Forward launches of the fused kernels, compiled once per dtype (HORNER_DTYPE).
#include "attn/kernels/cuda/common/launch.cuh"
#include "attn/kernels/cuda/fused/forward.cuh"
#include "attn/kernels/cuda/fused/fused.h"

namespace horner::attn::kernels::cuda {

using T = HORNER_DTYPE;

// Kernels with decay factors (16-bit Exp and Polynomial) omit the input gate's code if unused.
template <class T, int C, class W>
static auto kernel_for(const Fused& f) {
  constexpr bool factored = kHasDecayFactors<T, W>;
  if (is_special(f))
    return fused_forward_kernel<T, C, W, factored, true, Special<ForwardShape<T, C>>>;
  const auto of = [&]<bool gated>(std::bool_constant<gated>) {
    return has_decay_or_centre(f) ? fused_forward_kernel<T, C, W, factored, gated>
                                  : fused_forward_kernel<T, C, W, false, gated>;
  };
  if constexpr (factored)
    if (!f.gate) return of(std::false_type());
  return of(std::true_type());
}

template <>
void FusedLaunch<T>::forward(const Fused& f, const Weights& weights, Stream stream) {
  with_channels(f, [&]<int C>(std::integral_constant<int, C>) {
    using Shape = ForwardShape<T, C>;
    const Grid grid{heads(f) * ceil_div(f.T, Shape::kQueries), 1, Shape::kThreads, Shape::kBytes};
    std::visit(
        [&]<class W>(const W& w) {
          const int degree = is_special(f) ? 0 : known_degree<T>(degree_of(w));
          launch(kernel_for<T, C, W>(f), grid, stream, f, fold_scale(w, f.scale, degree));
        },
        weights);
  });
}

}  // namespace horner::attn::kernels::cuda
