// The kernels of one dtype (HORNER_DTYPE) for attention in chunks, and how they are started.
#include <algorithm>

#include "attn/exec/kernels/chunked_cuda_kernels.cuh"
#include "attn/exec/kernels/chunked_cuda_launch.h"
#include "attn/exec/kernels/chunked_cuda_states.cuh"
#include "attn/exec/kernels/fused_cuda_launch.cuh"

namespace horner::attn::kernels::cuda {

using T = HORNER_DTYPE;
static constexpr bool kWide = sizeof(T) == 4;
template <bool decay>
using ForwardOf = ChunkShape<T, 1, kWide || !decay ? 4 : 8,
                             kWide   ? 1
                             : decay ? 2
                                     : 4,
                             decay>;
template <bool decay>
using QueriesOf = ChunkShape<T, 1, kWide ? 4 : 8, kWide ? 1 : 2, decay>;
template <bool decay>
using KeysOf = ChunkKeysShape<T, kWide || !decay ? 1 : 2, 4,
                              kWide   ? 1
                              : decay ? 2
                                      : 3,
                              decay>;
using Sums1 = SumsShape<T, 1, 5, 1>;  // of order 1: up to four tiles and the constant
using Sums2 = SumsShape<T, 2, 4, 1>;

template <class Shape, bool of_queries>
static void sums(const Chunks& p, Stream stream) {
  const int64_t parts = blocks(p.tiles() + 1, Shape::kOwn * Shape::kWarps);
  const Grid grid{int64_t(p.f.B) * p.f.G * parts, p.chunks(), Shape::kThreads, Shape::kBytes};
  launch(sums_kernel<T, Shape, of_queries>, grid, stream, p);
}
template <bool of_queries>
static void states(const Chunks& p, Stream stream) {
  p.w.c[2] != 0 ? sums<Sums2, of_queries>(p, stream) : sums<Sums1, of_queries>(p, stream);
  const int64_t pairs = int64_t(p.tiles() + 1) * kTileSums / 2;
  const Grid grid{blocks(pairs, kScanThreads), int64_t(p.f.B) * p.f.G, kScanThreads, 0};
  launch(scan_kernel<T, of_queries>, grid, stream, p);
}

template <>
int ChunkedLaunch<T>::shared_memory() {
  return std::max({ForwardOf<true>::kForwardBytes, QueriesOf<true>::kQueriesBytes,
                   KeysOf<true>::kBytes, Sums1::kBytes, Sums2::kBytes});
}
template <>
void ChunkedLaunch<T>::states(const Chunks& p, bool of_queries, Stream stream) {
  of_queries ? cuda::states<true>(p, stream) : cuda::states<false>(p, stream);
}
template <bool decay>
static void forward_of(const Chunks& p, Stream stream) {
  using Shape = ForwardOf<decay>;
  const Grid grid{heads(p.f), blocks(p.f.T, Shape::kQueries), Shape::kThreads,
                  Shape::kForwardBytes};
  launch(chunk_forward_kernel<T, Shape>, grid, stream, p);
}
template <bool decay>
static void keys_of(const Chunks& p, Stream stream) {
  using Shape = KeysOf<decay>;
  const Grid grid{int64_t(p.f.B) * p.f.G, blocks(p.f.S, Shape::kKeys), Shape::kThreads,
                  Shape::kBytes};
  launch(chunk_keys_kernel<T, Shape>, grid, stream, p);
}
template <bool decay>
static void queries_of(const Chunks& p, Stream stream) {
  using Shape = QueriesOf<decay>;
  const Grid grid{heads(p.f), blocks(p.f.T, Shape::kQueries), Shape::kThreads,
                  Shape::kQueriesBytes};
  launch(chunk_queries_kernel<T, Shape>, grid, stream, p);
}

template <>
void ChunkedLaunch<T>::forward(const Chunks& p, Stream stream) {
  p.f.decay ? forward_of<true>(p, stream) : forward_of<false>(p, stream);
}
template <>
void ChunkedLaunch<T>::keys(const Chunks& p, Stream stream) {
  p.f.decay ? keys_of<true>(p, stream) : keys_of<false>(p, stream);
}
template <>
void ChunkedLaunch<T>::queries(const Chunks& p, Stream stream) {
  p.f.decay ? queries_of<true>(p, stream) : queries_of<false>(p, stream);
}

}  // namespace horner::attn::kernels::cuda
