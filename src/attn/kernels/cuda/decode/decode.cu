// How the kernels for one token are started.
#include <algorithm>

#include "attn/kernels/cuda/decode/decode.cuh"
#include "core/check.h"

namespace horner::attn::kernels::cuda {

// Enough blocks for the GPU, each with enough to read.
static DecodeParts parts_of(const Decode<float>& c) {
  constexpr int64_t kBlocks = 1024;
  DecodeParts p{};
  p.heads = int(c.H / c.G), p.groups = (p.heads + kMostDecodeHeads - 1) / kMostDecodeHeads;
  const int64_t there = std::max<int64_t>(1, c.B * c.G * p.groups);
  const auto share = [&](int64_t n, int64_t least, int64_t& each) {
    if (n <= 0) return 0;
    const int64_t most = std::max<int64_t>(1, kBlocks / there);
    const int64_t parts = std::min(most, (n + least - 1) / least);
    each = ((n + parts - 1) / parts + least - 1) / least * least;
    return int((n + each - 1) / each);
  };
  p.keys = share(c.to - c.from, kKeysOfPart, p.per_key_part);
  p.features = share(c.S ? c.F : 0, kFeaturesOfPart, p.per_feature_part);
  return p;
}

static void check_started(const char* what) {
  const cudaError_t error = cudaGetLastError();
  check(error == cudaSuccess, "the GPU cannot run ", what, ": ", cudaGetErrorString(error));
}

int64_t decode_scratch(const Decode<float>& c) {
  return c.B * c.H * parts_of(c).all() * (c.E + 2);
}

void decode_ask(const Decode<float>& c, float* scratch, CUstream_st* stream) {
  check(c.width <= kMostDecodeChannels && c.E <= kMostDecodeChannels,
        "decoding on a GPU takes head dimensions up to ", kMostDecodeChannels);
  const DecodeParts parts = parts_of(c);
  if (c.B * c.H == 0) return;
  const dim3 grid(unsigned(c.B * c.G * parts.groups), unsigned(parts.all()));
  const auto start = [&]<class W>(const W& w) {
    const bool single = parts.heads == 1, narrow = c.E <= 64;
    const auto kernel = single && narrow ? decode_ask_kernel<W, 1, 2>
                        : single         ? decode_ask_kernel<W, 1, 8>
                        : narrow         ? decode_ask_kernel<W, kMostDecodeHeads, 2>
                                         : decode_ask_kernel<W, kMostDecodeHeads, 8>;
    kernel<<<grid, kDecodeThreads, 0, stream>>>({c, w, parts, scratch});
  };
  if (parts.all() > 0) std::visit(start, c.weight);
  decode_sum_kernel<<<unsigned(c.B * c.H), 128, 0, stream>>>(c, parts.all(), scratch);
  check_started("this decoding step");
}

void decode_fold(const Decode<float>& c, CUstream_st* stream) {
  check(c.width <= kMostDecodeChannels && c.last <= kMostDecodeOrder,
        "a state on a GPU takes head dimensions up to ", kMostDecodeChannels, " and orders up to ",
        kMostDecodeOrder);
  if (c.B * c.G == 0 || c.from >= c.to) return;
  const dim3 grid(unsigned(c.B * c.G), unsigned((c.F + kFoldFeatures - 1) / kFoldFeatures),
                  unsigned((c.E + 63) / 64));
  decode_fold_kernel<<<grid, kFoldThreads, 0, stream>>>(c);
  check_started("this update of a state");
}

}  // namespace horner::attn::kernels::cuda
