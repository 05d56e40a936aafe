#include "attn/exec/isa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/names.h"

namespace horner::attn::exec {

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

static const Isa kSets[] = {
    {"amx", &kernels::amx::fused_kernels, &kernels::amx::fused_bf16_kernels,
     &kernels::amx::row_kernels, has_amx},
    {"avx512_bf16", &kernels::avx512_bf16::fused_kernels, &kernels::avx512_bf16::fused_bf16_kernels,
     &kernels::avx512_bf16::row_kernels, has_avx512_bf16},
    {"avx512", &kernels::avx512::fused_kernels, nullptr, &kernels::avx512::row_kernels, has_avx512},
    {"avx2", &kernels::avx2::fused_kernels, nullptr, &kernels::avx2::row_kernels,
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
    {"portable", &kernels::portable::fused_kernels, nullptr, &kernels::portable::row_kernels,
     [] { return true; }},
};

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
