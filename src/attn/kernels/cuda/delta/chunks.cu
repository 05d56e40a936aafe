// Launches of the delta rule in chunks.
#include "attn/kernels/cuda/delta/chunk.cuh"
#include "attn/kernels/cuda/delta/chunks.h"
#include "attn/kernels/cuda/delta/scan.cuh"

namespace horner::attn::kernels::cuda {

template <class F>
static void with_width(int C, const F& f) {
  check(C == 64 || C == 128, "the kernels have 64 or 128 channels, not ", C);
  C == 64 ? f(std::integral_constant<int, 64>()) : f(std::integral_constant<int, 128>());
}

int delta_shared_memory(int C) {
  int most = 0;
  with_width(C, [&](auto c) {
    for (int bytes : {delta::SolveShape<c(), 3>::kBytes, delta::ScanShape<c()>::kBytes,
                      delta::OutputShape<c()>::kBytes, delta::GradientShape<c()>::kBytes})
      most = bytes > most ? bytes : most;
  });
  return most;
}

void delta_forward(const DeltaChunks& p, Stream stream) {
  with_width(p.C, [&](auto c) {
    constexpr int C = c();
    const auto each = [&](int bytes) { return Grid{p.records(), 1, delta::kThreads, bytes}; };
    const Grid heads{int64_t(p.B) * p.H, C / 64, delta::kThreads, delta::ScanShape<C>::kBytes};
    launch(delta::solve_forward<C>, each(delta::SolveShape<C, 2>::kBytes), stream, p);
    launch(delta::scan_kernel<C, false>, heads, stream, p);
    launch(delta::output_kernel<C>, each(delta::OutputShape<C>::kBytes), stream, p);
  });
}

void delta_backward(const DeltaChunks& p, Stream stream) {
  with_width(p.C, [&](auto c) {
    constexpr int C = c();
    const auto each = [&](int bytes) { return Grid{p.records(), 1, delta::kThreads, bytes}; };
    const Grid heads{int64_t(p.B) * p.H, C / 64, delta::kThreads, delta::ScanShape<C>::kBytes};
    launch(delta::solve_backward<C>, each(delta::SolveShape<C, 3>::kBytes), stream, p);
    launch(delta::scan_kernel<C, true>, heads, stream, p);
    launch(delta::gradient_kernel<C>, each(delta::GradientShape<C>::kBytes), stream, p);
  });
}

}  // namespace horner::attn::kernels::cuda
