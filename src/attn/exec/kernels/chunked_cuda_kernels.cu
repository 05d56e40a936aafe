// The kernels of one dtype (HORNER_DTYPE) for attention in chunks, and how they are started.
#include "attn/exec/kernels/chunked_cuda_kernels.cuh"
#include "attn/exec/kernels/chunked_cuda_launch.h"
#include "attn/exec/kernels/chunked_cuda_states.cuh"
#include "attn/exec/kernels/fused_cuda_launch.cuh"

namespace horner::attn::kernels::cuda {

using T = HORNER_DTYPE;
static constexpr bool kWide = sizeof(T) == 4;

template <class Shape, bool of_queries>
static void sums(const Chunks& p, Stream stream) {
  const int64_t parts = blocks(p.tiles() + 1, Shape::kOwn * Shape::kWarps);
  launch(sums_kernel<T, Shape, of_queries>,
         {int64_t(p.f.B) * p.f.G * parts, p.chunks(), Shape::kThreads, Shape::kBytes}, stream, p);
}
template <bool of_queries>
static void states(const Chunks& p, Stream stream) {
  if (p.w.c[2] != 0)
    sums<SumsShape<T, 3, 6>, of_queries>(p, stream);
  else
    sums<SumsShape<T, 1, 5>, of_queries>(p, stream);
  launch(scan_kernel<T, of_queries>,
         {blocks(int64_t(p.tiles() + 1) * kTileSums / 2, kScanThreads), int64_t(p.f.B) * p.f.G,
          kScanThreads, 0},
         stream, p);
}
template <>
void ChunkedLaunch<T>::states(const Chunks& p, bool of_queries, Stream stream) {
  of_queries ? cuda::states<true>(p, stream) : cuda::states<false>(p, stream);
}
template <>
void ChunkedLaunch<T>::forward(const Chunks& p, Stream stream) {
  using Shape = ChunkShape<T, 1, kWide ? 4 : 8, kWide ? 1 : 2>;
  launch(chunk_forward_kernel<T, Shape>, {heads(p.f), blocks(p.f.T, Shape::kQueries),
         Shape::kThreads, Shape::kForwardBytes}, stream, p);
}
template <>
void ChunkedLaunch<T>::keys(const Chunks& p, Stream stream) {
  using Shape = ChunkKeysShape<T>;
  launch(chunk_keys_kernel<T>, {int64_t(p.f.B) * p.f.G, blocks(p.f.S, Shape::kKeys),
         Shape::kThreads, Shape::kBytes}, stream, p);
}
template <>
void ChunkedLaunch<T>::queries(const Chunks& p, Stream stream) {
  using Shape = ChunkShape<T, kWide ? 1 : 2, 4, kWide ? 1 : 2>;
  launch(chunk_queries_kernel<T, Shape>, {heads(p.f), blocks(p.f.T, Shape::kQueries),
         Shape::kThreads, Shape::kQueriesBytes}, stream, p);
}

}  // namespace horner::attn::kernels::cuda
