#include "attn/exec/isa.h"

#include "core/simd/isa.h"

namespace horner::attn::exec {

namespace k = kernels;
using States = CpuKernels::States;
static constexpr States kPortableStates{
    &k::portable::chunked_float, &k::portable::chunked_double, &k::portable::decode_float,
    &k::portable::decode_double, &k::portable::channels_float, &k::portable::channels_double};
static constexpr States kAvx2States{&k::avx2::chunked_float,  &k::avx2::chunked_double,
                                    &k::avx2::decode_float,   &k::avx2::decode_double,
                                    &k::avx2::channels_float, &k::avx2::channels_double};
// avx512_bf16 and amx would not speed these up.
static constexpr States kAvx512States{&k::avx512::chunked_float,  &k::avx512::chunked_double,
                                      &k::avx512::decode_float,   &k::avx512::decode_double,
                                      &k::avx512::channels_float, &k::avx512::channels_double};

const CpuKernels& isa() {
  // clang-format off
  static constexpr CpuKernels kSets[] = {  // in the order of simd::Isa
      {&k::portable::fused_kernels,    nullptr,                             &k::portable::row_kernels,    kPortableStates},
      {&k::avx2::fused_kernels,        nullptr,                             &k::avx2::row_kernels,        kAvx2States},
      {&k::avx512::fused_kernels,      nullptr,                             &k::avx512::row_kernels,      kAvx512States},
      {&k::avx512_bf16::fused_kernels, &k::avx512_bf16::fused_bf16_kernels, &k::avx512_bf16::row_kernels, kAvx512States},
      {&k::amx::fused_kernels,         &k::amx::fused_bf16_kernels,         &k::amx::row_kernels,         kAvx512States},
  };
  // clang-format on
  return kSets[size_t(simd::isa())];
}

}  // namespace horner::attn::exec
