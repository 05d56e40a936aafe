// What chunked_cuda.cu calls, by the dtype.
#pragma once

#include "attn/kernels/cuda/chunked/chunked.h"

namespace horner::attn::kernels::cuda {

template <class T>
struct ChunkedLaunch {
  static int shared_memory();
  static void states(const Chunks&, bool of_queries, Stream);
  static void forward(const Chunks&, Stream);
  static void queries(const Chunks&, Stream);
  static void keys(const Chunks&, Stream);
};

}  // namespace horner::attn::kernels::cuda
