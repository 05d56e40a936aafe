// Launches of the kernels in chunks.
#include "attn/kernels/cuda/delta/channel_chunk.cuh"
#include "attn/kernels/cuda/delta/chunk.cuh"
#include "attn/kernels/cuda/delta/chunks.h"
#include "attn/kernels/cuda/delta/scan.cuh"

namespace horner::attn::kernels::cuda {

namespace {

template <class F>
void with_width(int C, const F& f) {
  check(C == 64 || C == 128, "the kernels have 64 or 128 channels, not ", C);
  C == 64 ? f(std::integral_constant<int, 64>()) : f(std::integral_constant<int, 128>());
}

template <int C, bool channels, bool corrected>
struct DeltaLaunch {
  static constexpr int kForward = delta::SolveShape < C, channels ? 4 : 2 > ::kBytes;
  static constexpr int kBackward = delta::SolveShape < C, channels ? 6 : 3 > ::kBytes;
  static constexpr int kScan = delta::ScanShape<C, false, channels, corrected>::kBytes;
  static constexpr int kReverse = delta::ScanShape<C, true, channels, corrected>::kBytes;
  static constexpr int kOutput =
      channels ? delta::ChannelOutputShape<C>::kBytes : delta::OutputShape<C>::kBytes;
  static constexpr int kGradient = channels ? delta::ChannelGradientShape<C, corrected>::kBytes
                                            : delta::GradientShape<C>::kBytes;

  static int shared_memory() {
    int most = 0;
    for (int bytes :
         {corrected ? kForward : 0, corrected ? kBackward : 0, kScan, kReverse, kOutput, kGradient})
      most = bytes > most ? bytes : most;
    return most;
  }
  static Grid each(const DeltaChunks& p, int bytes) {
    return {p.records(), 1, delta::kThreads, bytes};
  }
  static Grid heads(const DeltaChunks& p, int bytes) {
    return {int64_t(p.B) * p.H, C / 64, delta::kThreads, bytes};
  }
  static void forward(const DeltaChunks& p, Stream stream) {
    if constexpr (channels) {
      const int64_t blocks = ceil_div(p.records(), delta::kThreads / C);
      launch(delta::decay_kernel<C>, Grid{blocks, 1, delta::kThreads, 0}, stream, p);
    }
    if constexpr (corrected)
      launch(delta::solve_forward<C, channels>, each(p, kForward), stream, p);
    launch(delta::scan_kernel<C, false, channels, corrected>, heads(p, kScan), stream, p);
    if constexpr (channels)
      launch(delta::channel_output_kernel<C, corrected>, each(p, kOutput), stream, p);
    else
      launch(delta::output_kernel<C>, each(p, kOutput), stream, p);
  }
  static void backward(const DeltaChunks& p, Stream stream) {
    if constexpr (corrected)
      launch(delta::solve_backward<C, channels>, each(p, kBackward), stream, p);
    launch(delta::scan_kernel<C, true, channels, corrected>, heads(p, kReverse), stream, p);
    if constexpr (channels)
      launch(delta::channel_gradient_kernel<C, corrected>, each(p, kGradient), stream, p);
    else
      launch(delta::gradient_kernel<C>, each(p, kGradient), stream, p);
  }
};

template <class F>
void with_launch(int C, bool channels, bool corrected, const F& f) {
  check(channels || corrected, "there are neither gates of channels nor a delta rule");
  with_width(C, [&](auto c) {
    if (!channels)
      f(DeltaLaunch<c(), false, true>());
    else if (corrected)
      f(DeltaLaunch<c(), true, true>());
    else
      f(DeltaLaunch<c(), true, false>());
  });
}

}  // namespace

int delta_shared_memory(int C, bool channels, bool corrected) {
  int bytes = 0;
  with_launch(C, channels, corrected, [&](auto launch) { bytes = launch.shared_memory(); });
  return bytes;
}
void delta_forward(const DeltaChunks& p, Stream stream) {
  with_launch(p.C, bool(p.channel_logs), p.beta, [&](auto launch) { launch.forward(p, stream); });
}
void delta_backward(const DeltaChunks& p, Stream stream) {
  with_launch(p.C, bool(p.channel_logs), p.beta, [&](auto launch) { launch.backward(p, stream); });
}

}  // namespace horner::attn::kernels::cuda
