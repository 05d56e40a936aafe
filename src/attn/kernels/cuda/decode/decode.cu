// Launches of a decode step: attend and combine, or fold into the state.
#include <algorithm>

#include "attn/kernels/cuda/decode/decode.cuh"
#include "core/check.h"

namespace horner::attn::kernels::cuda {

// Splits keys and features into enough thread blocks to fill the GPU, each with enough to read.
static DecodeParts parts_of(const Decode<float>& c) {
  constexpr int64_t kBlocks = 1024;
  DecodeParts p{};
  p.heads = int(c.H / c.G), p.groups = (p.heads + kMaxDecodeHeads - 1) / kMaxDecodeHeads;
  const int64_t there = std::max<int64_t>(1, c.B * c.G * p.groups);
  const auto share = [&](int64_t n, int64_t least, int64_t& each) {
    if (n <= 0) return 0;
    const int64_t most = std::max<int64_t>(1, kBlocks / there);
    const int64_t parts = std::min(most, (n + least - 1) / least);
    each = ((n + parts - 1) / parts + least - 1) / least * least;
    return int((n + each - 1) / each);
  };
  p.keys = share(c.to - c.from, kKeysPerPart, p.per_key_part);
  p.features = share(c.S ? c.F : 0, kFeaturesPerPart, p.per_feature_part);
  return p;
}

static void check_started(const char* what) {
  const cudaError_t error = cudaGetLastError();
  check(error == cudaSuccess, "CUDA failed to launch ", what, ": ", cudaGetErrorString(error));
}

int64_t decode_scratch(const Decode<float>& c) {
  return c.B * c.H * parts_of(c).all() * (c.E + 2);
}

void decode_attend(const Decode<float>& c, float* scratch, CUstream_st* stream) {
  check(c.width <= kMaxDecodeChannels && c.E <= kMaxDecodeChannels,
        "decode on CUDA supports head dimensions up to ", kMaxDecodeChannels, ", given ", c.D,
        " (queries, keys) and ", c.E, " (values)");
  const DecodeParts parts = parts_of(c);
  if (c.B * c.H == 0) return;
  const dim3 grid(unsigned(c.B * c.G * parts.groups), unsigned(parts.all()));
  const auto start = [&]<class W>(const W& w) {
    const bool single = parts.heads == 1, narrow = c.E <= 64;
    const auto kernel = single && narrow ? decode_attend_kernel<W, 1, 2>
                        : single         ? decode_attend_kernel<W, 1, 8>
                        : narrow         ? decode_attend_kernel<W, kMaxDecodeHeads, 2>
                                         : decode_attend_kernel<W, kMaxDecodeHeads, 8>;
    kernel<<<grid, kDecodeThreads, 0, stream>>>({c, w, parts, scratch});
  };
  if (parts.all() > 0) std::visit(start, c.weight);
  decode_combine_kernel<<<unsigned(c.B * c.H), 128, 0, stream>>>(c, parts.all(), scratch);
  check_started("the decode step");
}

void decode_fold(const Decode<float>& c, CUstream_st* stream) {
  check(c.width <= kMaxDecodeChannels && c.last <= kMaxDecodeOrder,
        "states on CUDA support head dimensions up to ", kMaxDecodeChannels, " and orders up to ",
        kMaxDecodeOrder, ", given ", c.D, " and ", c.last);
  if (c.B * c.G == 0 || c.from >= c.to) return;
  const dim3 grid(unsigned(c.B * c.G), unsigned((c.F + kFoldFeatures - 1) / kFoldFeatures),
                  unsigned((c.E + 63) / 64));
  decode_fold_kernel<<<grid, kFoldThreads, 0, stream>>>(c);
  check_started("the fold into the state");
}

}  // namespace horner::attn::kernels::cuda
