// Which kernels a problem takes, and the running sums of the log gates.
#include <cuda_bf16.h>

#include "attn/exec/kernels/chunked_cuda_launch.h"
#include "attn/exec/kernels/fused_cuda_launch.cuh"

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
void chunk_backward(const Chunks& p, Stream stream) {
  with_dtype(p.f.dtype, [&](auto launch) { launch.backward(with_g(p), stream); });
}

// A block of threads has a part of a row: first its sum alone, then with all the sums before it.
static constexpr int kGateThreads = 256, kGatesOfThread = kGatesAtOnce / kGateThreads;
template <bool backwards>
struct GatePart {
  RunningGates g;
  int64_t row = blockIdx.x, part = blockIdx.y;

  // Number i of this thread, or its place beyond the row.
  __device__ int64_t place(int i) const {
    const int64_t at = part * kGatesAtOnce + int64_t(threadIdx.x) * kGatesOfThread + i;
    return at >= g.n ? -1 : row * g.n + (backwards ? g.n - 1 - at : at);
  }
  __device__ double number(int i) const { return place(i) < 0 ? 0 : g.x[place(i)]; }
};
// The sum over all threads, and that over those before this one.
struct ThreadSums {
  double all, before;
};
static __device__ ThreadSums over_threads(double x) {
  __shared__ double of_warp[kGateThreads / 32];
  double sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const double y = __shfl_up_sync(~0u, sum, unsigned(step));
    if (lane() >= step) sum += y;
  }
  __syncthreads();
  if (lane() == 31) of_warp[warp()] = sum;
  __syncthreads();
  ThreadSums y{0, sum - x};
  for (int w = 0; w < kGateThreads / 32; ++w) {
    if (w < warp()) y.before += of_warp[w];
    y.all += of_warp[w];
  }
  return y;
}
template <bool backwards>
static __global__ void gate_parts_kernel(RunningGates g) {
  const GatePart<backwards> part{g};
  double sum = 0;
  for (int i = 0; i < kGatesOfThread; ++i) sum += part.number(i);
  const ThreadSums y = over_threads(sum);
  if (threadIdx.x == 0) g.parts[part.row * gridDim.y + part.part] = y.all;
}
template <bool backwards>
static __global__ void running_gates_kernel(RunningGates g) {
  const GatePart<backwards> part{g};
  double before = 0, own = 0, x[kGatesOfThread];
  for (int64_t i = threadIdx.x; i < part.part; i += kGateThreads)
    before += g.parts[part.row * gridDim.y + i];
#pragma unroll
  for (int i = 0; i < kGatesOfThread; ++i) own += x[i] = part.number(i);
  before = over_threads(before).all;
  before += over_threads(own).before;
#pragma unroll
  for (int i = 0; i < kGatesOfThread; ++i) {
    before += x[i];
    if (part.place(i) >= 0) g.y[part.place(i)] = before;
  }
}
void running_gates(const RunningGates& g, bool backwards, Stream stream) {
  const Grid grid{g.rows, gate_parts(g.n), kGateThreads, 0};
  launch(backwards ? gate_parts_kernel<true> : gate_parts_kernel<false>, grid, stream, g);
  launch(backwards ? running_gates_kernel<true> : running_gates_kernel<false>, grid, stream, g);
}

}  // namespace horner::attn::kernels::cuda
