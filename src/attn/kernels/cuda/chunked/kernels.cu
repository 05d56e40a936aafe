// Launches of the chunked kernels, compiled once per dtype (HORNER_DTYPE).
#include <algorithm>

#include "attn/kernels/cuda/chunked/chunk_backward.cuh"
#include "attn/kernels/cuda/chunked/kernels.cuh"
#include "attn/kernels/cuda/chunked/scan_states.cuh"
#include "attn/kernels/cuda/chunked/states.cuh"
#include "attn/kernels/cuda/common/launch.cuh"

namespace horner::attn::kernels::cuda {

using T = HORNER_DTYPE;
static constexpr bool kWide = sizeof(T) == 4;
template <bool decay>
using ForwardOf = ChunkShape<T, 1, 4, kWide ? 1 : 4, decay>;
template <bool decay>
using QueriesOf = ChunkShape<T, 1, kWide ? 4 : 8, kWide ? 1 : 2, decay>;
template <bool decay>
using KeysOf = ChunkKeysShape<T, 1, 4, kWide ? 1 : 3, decay>;
using Sums1 = SumsShape<1, 5>;  // order 1: up to four tiles and the constant
using Sums2 = SumsShape<2, 4>;
static constexpr int kSumsBytes = SummedTokens<T, kPairThreads, true>::kBytes;

template <class Shape, bool of_queries>
static void sums(const Chunks& p, Stream stream) {
  const int64_t parts = ceil_div(p.tiles() + 1, Shape::kOwn * Shape::kWarps);
  const Grid grid{int64_t(p.f.B) * p.f.G * parts, p.chunks(), Shape::kThreads, kSumsBytes};
  launch(chunk_states_kernel<T, Shape, of_queries>, grid, stream, p);
}
template <bool of_queries>
static void states(const Chunks& p, Stream stream) {
  if constexpr (!kWide)
    if (p.scans()) {
      const int64_t heads = int64_t(p.f.B) * p.f.G, record = int64_t(p.tiles() + 1) * kTileSums;
      launch(scan_states_kernel<of_queries>,
             {heads, p.segments(), ScanShape::kThreads, ScanShape::kBytes}, stream, p);
      return launch(scan_segments_kernel<of_queries>, {ceil_div(record, 128), heads, 128, 0},
                    stream, p);
    }
  if constexpr (kWide) {
    p.w.c[2] != 0 ? sums<Sums2, of_queries>(p, stream) : sums<Sums1, of_queries>(p, stream);
  } else {
    const int64_t parts = (p.tiles() - p.blocks()) / 16 + 1;
    launch(chunk_pair_states_kernel<of_queries>,
           {int64_t(p.f.B) * p.f.G * parts, p.chunks(), kPairThreads, kSumsBytes}, stream, p);
  }
  const Grid grid{ceil_div(scan_parts(p), kScanThreads), int64_t(p.f.B) * p.f.G, kScanThreads, 0};
  launch(chunk_scan_kernel<T, of_queries>, grid, stream, p);
}

template <>
int ChunkedLaunch<T>::shared_memory() {
  return std::max({ForwardOf<true>::kForwardBytes, QueriesOf<true>::kQueriesBytes,
                   KeysOf<true>::kBytes, kSumsBytes, kWide ? 0 : LinearBackward<true>::kBytes});
}
template <>
void ChunkedLaunch<T>::states(const Chunks& p, bool of_queries, Stream stream) {
  of_queries ? cuda::states<true>(p, stream) : cuda::states<false>(p, stream);
}
template <bool decay>
static void forward_of(const Chunks& p, Stream stream) {
  using Shape = ForwardOf<decay>;
  const Grid grid{heads(p.f), ceil_div(p.f.T, Shape::kQueries), Shape::kThreads,
                  Shape::kForwardBytes};
  launch(chunk_forward_kernel<T, Shape>, grid, stream, p);
}
template <bool decay>
static void keys_of(const Chunks& p, Stream stream) {
  using Shape = KeysOf<decay>;
  const Grid grid{int64_t(p.f.B) * p.f.G, ceil_div(p.f.S, Shape::kKeys), Shape::kThreads,
                  Shape::kBytes};
  launch(chunk_backward_keys_kernel<T, Shape>, grid, stream, p);
}
template <bool decay>
static void queries_of(const Chunks& p, Stream stream) {
  using Shape = QueriesOf<decay>;
  const Grid grid{heads(p.f), ceil_div(p.f.T, Shape::kQueries), Shape::kThreads,
                  Shape::kQueriesBytes};
  launch(chunk_backward_queries_kernel<T, Shape>, grid, stream, p);
}

// Launches the one-pass kernel of order 1; false if it does not apply.
template <class Type>
static bool launch_linear(const Chunks& p, bool backward, Stream stream) {
  if constexpr (sizeof(Type) == 2) {
    if (!p.scans()) return false;
    const int64_t key_heads = int64_t(p.f.B) * p.f.G;
    const auto start = [&](auto decay) {
      using Backward = LinearBackward<decay>;
      using Forward = LinearForward<decay>;
      if (backward)
        launch(linear_chunk_backward_kernel<Backward>,
               {key_heads, p.chunks(), Backward::kThreads, Backward::kBytes}, stream, p);
      else
        launch(linear_chunk_forward_kernel<Forward>,
               {heads(p.f), p.chunks(), Forward::kThreads, Forward::kBytes}, stream, p);
    };
    p.f.decay ? start(std::true_type()) : start(std::false_type());
    return true;
  }
  return false;
}

template <>
void ChunkedLaunch<T>::forward(const Chunks& p, Stream stream) {
  if (launch_linear<T>(p, false, stream)) return;
  p.f.decay ? forward_of<true>(p, stream) : forward_of<false>(p, stream);
}
template <>
void ChunkedLaunch<T>::backward_queries(const Chunks& p, Stream stream) {
  if (p.scans()) return;
  p.f.decay ? queries_of<true>(p, stream) : queries_of<false>(p, stream);
}
template <>
void ChunkedLaunch<T>::backward_keys(const Chunks& p, Stream stream) {
  if (launch_linear<T>(p, true, stream)) return;
  if (!p.f.decay) return keys_of<false>(p, stream);
  keys_of<true>(p, stream);
  if (p.d_after)
    launch(chunk_crossings_kernel<T>, {int64_t(p.f.B) * p.f.G, p.chunks() - 1, kCrossingThreads, 0},
           stream, p);
}

}  // namespace horner::attn::kernels::cuda
