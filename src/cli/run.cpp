#include "cli/run.h"

#include <ATen/Context.h>
#include <unistd.h>

#include <csignal>
#include <exception>
#include <iostream>

#include "attn/inputs.h"
#include "core/check.h"
#include "core/names.h"

namespace horner::cli {

static volatile std::sig_atomic_t interrupted = 0;

static void interrupt(int signal) {
  interrupted = signal;
  std::signal(signal, SIG_DFL);
}

void catch_interrupt() {
  std::signal(SIGINT, interrupt);
}

void catch_termination() {
  std::signal(SIGTERM, interrupt);
}

bool stopped() {
  return interrupted != 0;
}

int stop_signal() {
  return interrupted;
}

static bool live() {
  return isatty(STDERR_FILENO);
}

void Progress::show(const std::string& what) {
  now = what;
  ++done;
  if (live()) std::cerr << "\r\033[K" << done << "/" << all << " " << what << " …" << std::flush;
}

void Progress::clear() const {
  if (live()) std::cerr << "\r\033[K" << std::flush;
}

Progress::~Progress() {
  clear();
  if (std::uncaught_exceptions() > 0) std::cerr << command << " failed at " << now << "\n";
}

at::ScalarType dtype(const std::string& name) {
  std::vector<std::string> names;
  for (at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    names.push_back(attn::dtype_name(type));
    if (name == names.back()) return type;
  }
  fail("unknown dtype '", name, "'; expected one of ", quoted(names));
}

at::Device device(const std::string& name) {
  horner::check(name == "cpu" || name == "cuda", "unknown device '", name,
                "'; expected 'cpu' or 'cuda'");
  horner::check(name == "cpu" || at::hasCUDA(),
                "device 'cuda' is not available: torch finds no GPU (see 'horner info')");
  return name == "cpu" ? at::Device(at::kCPU) : at::Device(at::kCUDA, 0);
}

}  // namespace horner::cli
