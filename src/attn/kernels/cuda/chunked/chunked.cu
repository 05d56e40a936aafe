// Launches of the chunked kernels, dispatched by dtype.
#include "attn/kernels/cuda/chunked/chunked.h"
#include "attn/kernels/cuda/common/launch.cuh"

namespace horner::attn::kernels::cuda {

template <class F>
static void with_launch(Dtype dtype, const F& f) {
  dtype == Dtype::bfloat16 ? f(ChunkedLaunch<bf16>()) : f(ChunkedLaunch<float>());
}
static Chunks with_g(Chunks p) {
  p.f = with_g(p.f);
  return p;
}

int chunk_shared_memory() {
  const int narrow = ChunkedLaunch<bf16>::shared_memory();
  const int wide = ChunkedLaunch<float>::shared_memory();
  return narrow > wide ? narrow : wide;
}

void chunk_states(const Chunks& p, bool of_queries, Stream stream) {
  with_launch(p.f.dtype,
              [&](auto launch) { launch.states(of_queries ? with_g(p) : p, of_queries, stream); });
}
void chunk_forward(const Chunks& p, Stream stream) {
  with_launch(p.f.dtype, [&](auto launch) { launch.forward(p, stream); });
}
void chunk_backward_queries(const Chunks& p, Stream stream) {
  with_launch(p.f.dtype, [&](auto launch) { launch.backward_queries(with_g(p), stream); });
}
void chunk_backward_keys(const Chunks& p, Stream stream) {
  with_launch(p.f.dtype, [&](auto launch) { launch.backward_keys(with_g(p), stream); });
}

}  // namespace horner::attn::kernels::cuda
