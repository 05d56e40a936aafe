// Which kernels a problem takes.
#include <cuda_bf16.h>

#include "attn/kernels/cuda/chunked/launch.h"

namespace horner::attn::kernels::cuda {

template <class F>
static void with_dtype(Dtype dtype, const F& f) {
  dtype == Dtype::bfloat16 ? f(ChunkedLaunch<__nv_bfloat16>()) : f(ChunkedLaunch<float>());
}
// After `rows`, g is what stands for the gradient of the result.
static Chunks with_g(Chunks p) {
  const int64_t row = p.f.E, head = row * p.f.T;
  if (p.f.g) p.f.d_o = {p.f.g, head * p.f.H, head, row};
  return p;
}

int chunk_shared_memory() {
  const int narrow = ChunkedLaunch<__nv_bfloat16>::shared_memory();
  const int wide = ChunkedLaunch<float>::shared_memory();
  return narrow > wide ? narrow : wide;
}

void chunk_states(const Chunks& p, bool of_queries, Stream stream) {
  with_dtype(p.f.dtype,
             [&](auto launch) { launch.states(of_queries ? with_g(p) : p, of_queries, stream); });
}
void chunk_forward(const Chunks& p, Stream stream) {
  with_dtype(p.f.dtype, [&](auto launch) { launch.forward(p, stream); });
}
void chunk_queries(const Chunks& p, Stream stream) {
  with_dtype(p.f.dtype, [&](auto launch) { launch.queries(with_g(p), stream); });
}
void chunk_keys(const Chunks& p, Stream stream) {
  with_dtype(p.f.dtype, [&](auto launch) { launch.keys(with_g(p), stream); });
}

}  // namespace horner::attn::kernels::cuda
