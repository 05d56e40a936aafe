// horner info: what this build is and what it runs on.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <torch/version.h>

#include <set>

#include "cli/options.h"
#include "cli/table.h"
#include "core/machine.h"
#include "instruments/bench.h"

namespace horner::cli {

static std::vector<std::string> instruction_sets() {
  static constexpr std::pair<const char*, const char*> kSets[] = {{"sse4.2", "sse4_2"},
                                                                  {"avx2", "avx2"},
                                                                  {"avx512f", "avx512f"},
                                                                  {"avx512bf16", "avx512_bf16"},
                                                                  {"amx", "amx_tile"}};
  std::istringstream words(proc_value("/proc/cpuinfo", "flags"));
  const std::set<std::string> flags{std::istream_iterator<std::string>(words), {}};
  std::vector<std::string> out;
  for (const auto& [name, flag] : kSets)
    if (flags.contains(flag)) out.emplace_back(name);
  return out;
}

static std::string compiler() {
#ifdef __clang__
  return __VERSION__;
#else
  return "GCC " __VERSION__;
#endif
}

static std::string build() {
#ifdef __OPTIMIZE__
  const std::string optimised = "optimised";
#else
  const std::string optimised = "not optimised";
#endif
#ifdef NDEBUG
  return optimised + ", without assertions";
#else
  return optimised + ", with assertions";
#endif
}

static Json facts() {
  const bool cuda = at::hasCUDA();
  return {{"horner", HORNER_VERSION},
          {"torch", TORCH_VERSION},
          {"compiler", compiler()},
          {"build", build()},
          {"threads", at::get_num_threads()},
          {"cpu", processor_name()},
          {"instruction_sets", instruction_sets()},
          {"kernels", instruments::cpu_kernels()},
          {"torch_kernels", at::get_cpu_capability()},
          {"gpus", cuda ? int(at::detail::getCUDAHooks().deviceCount()) : 0}};
}

static std::string readable(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) return value.dump();
  std::string out;
  for (const Json& item : value) out += (out.empty() ? "" : " ") + item.get<std::string>();
  return out;
}

Action info(CLI::App& app) {
  const auto json = std::make_shared<bool>(false);
  app.add_flag("--json", *json, "print as JSON");
  return [json] {
    const Json all = facts();
    if (*json) return print_json(all);
    Table table{.wrap = true};
    for (const auto& [key, value] : all.items()) {
      std::string label = key;
      std::replace(label.begin(), label.end(), '_', ' ');
      table.rows.push_back({faint(label), readable(value)});
    }
    std::cout << text(table);
    return Outcome::fine;
  };
}

}  // namespace horner::cli
