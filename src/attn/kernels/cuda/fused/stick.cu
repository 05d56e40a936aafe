// Launches of stick.cuh, compiled once per dtype (HORNER_DTYPE).
#include "attn/kernels/cuda/common/launch.cuh"
#include "attn/kernels/cuda/fused/stick.cuh"

namespace horner::attn::kernels::cuda {

using T = HORNER_DTYPE;

template <>
void StickLaunch<T>::forward(const Sticks& p, Stream stream) {
  with_channels(p.f, [&]<int C>(std::integral_constant<int, C>) {
    using Shape = QueriesShape<T, C>;
    const Grid grid{heads(p.f), ceil_div(p.f.T, Shape::kQueries), Shape::kThreads, Shape::kBytes};
    launch(stick_forward_kernel<T, C>, grid, stream, p);
  });
}

template <>
void StickLaunch<T>::backward(const Sticks& given, Stream stream) {
  with_channels(given.f, [&]<int C>(std::integral_constant<int, C>) {
    using Shape = StickKeysShape<T, C>;
    Sticks p = given;
    const Fused& f = p.f;
    const Grid queries{heads(f), ceil_div(f.T, Shape::kQueries), Shape::kThreads,
                       QueriesShape<T, C>::kBytes};
    const int64_t tiles = ceil_div(f.S, Shape::kKeys);
    for (p.first = 0; p.first < tiles; p.first += kStickTiles) {
      launch(stick_dq_kernel<T, C>, queries, stream, p);
      const int64_t some = tiles - p.first < kStickTiles ? tiles - p.first : kStickTiles;
      launch(stick_keys_kernel<T, C>,
             {int64_t(f.B) * f.G, some * Shape::kParts, Shape::kThreads, Shape::kBytes}, stream, p);
    }
  });
}

}  // namespace horner::attn::kernels::cuda
