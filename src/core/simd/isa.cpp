#include "core/simd/isa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "core/check.h"
#include "core/names.h"

namespace horner::simd {

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
// A process must ask Linux for the AMX tile registers; asking once is enough.
static bool has_amx() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = has_avx512_bf16() && __builtin_cpu_supports("amx-tile") &&
                              __builtin_cpu_supports("amx-bf16") &&
                              syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

struct Set {
  Isa isa;
  std::string_view name;
  bool (*here)();
};
static constexpr Set kBestFirst[] = {{Isa::amx, "amx", has_amx},
                                     {Isa::avx512_bf16, "avx512_bf16", has_avx512_bf16},
                                     {Isa::avx512, "avx512", has_avx512},
                                     {Isa::avx2, "avx2", has_avx2},
                                     {Isa::portable, "portable", [] { return true; }}};

std::string_view name(Isa isa) {
  for (const Set& set : kBestFirst)
    if (set.isa == isa) return set.name;
  return "";
}

std::vector<Isa> supported() {
  std::vector<Isa> out;
  for (const Set& set : kBestFirst)
    if (set.here()) out.push_back(set.isa);
  return out;
}

Isa isa() {
  const char* wanted = std::getenv("HORNER_CPU");
  std::vector<std::string> names;
  for (const Set& set : kBestFirst) {
    if (!set.here()) continue;
    if (!wanted || !*wanted || set.name == wanted) return set.isa;
    names.emplace_back(set.name);
  }
  fail("HORNER_CPU='", wanted, "' is not an instruction set of this CPU; expected ", quoted(names));
}

}  // namespace horner::simd
