#include "attn/exec/isa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/names.h"

namespace horner::attn::exec {

static bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
static bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
}

static bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16");
}
// The kernel gives a process the tile registers when it asks for them: once is enough.
static bool has_amx() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = has_avx512_bf16() && __builtin_cpu_supports("amx-tile") &&
                              __builtin_cpu_supports("amx-bf16") &&
                              syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

namespace k = kernels;
static const Isa::States kPortableStates{&k::portable::chunked_float, &k::portable::chunked_double,
                                         &k::portable::decode_float, &k::portable::decode_double};
static const Isa::States kAvx2States{&k::avx2::chunked_float, &k::avx2::chunked_double,
                                     &k::avx2::decode_float, &k::avx2::decode_double};
// These gain nothing from the sets above it.
static const Isa::States kAvx512States{&k::avx512::chunked_float, &k::avx512::chunked_double,
                                       &k::avx512::decode_float, &k::avx512::decode_double};
// clang-format off
static const Isa kSets[] = {
    {"amx",         &k::amx::fused_kernels,         &k::amx::fused_bf16_kernels,         &k::amx::row_kernels,         kAvx512States,   has_amx},
    {"avx512_bf16", &k::avx512_bf16::fused_kernels, &k::avx512_bf16::fused_bf16_kernels, &k::avx512_bf16::row_kernels, kAvx512States,   has_avx512_bf16},
    {"avx512",      &k::avx512::fused_kernels,      nullptr,                             &k::avx512::row_kernels,      kAvx512States,   has_avx512},
    {"avx2",        &k::avx2::fused_kernels,        nullptr,                             &k::avx2::row_kernels,        kAvx2States,     has_avx2},
    {"portable",    &k::portable::fused_kernels,    nullptr,                             &k::portable::row_kernels,    kPortableStates, [] { return true; }},
};
// clang-format on

std::span<const Isa> instruction_sets() {
  return kSets;
}

const Isa& isa() {
  const char* wanted = std::getenv("HORNER_CPU");
  std::vector<std::string> possible;
  for (const Isa& set : kSets) {
    if (!set.here()) continue;
    if (!wanted || !*wanted || set.name == wanted) return set;
    possible.emplace_back(set.name);
  }
  fail("HORNER_CPU is '", wanted, "'; this CPU has ", quoted(possible));
}

}  // namespace horner::attn::exec
