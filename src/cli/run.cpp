#include "cli/run.h"

#include <ATen/Context.h>
#include <unistd.h>

#include <csignal>
#include <exception>
#include <iostream>

#include "attn/inputs.h"
#include "cli/table.h"
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

void stop_as(int signal) {
  interrupted = signal;
}

bool live() {
  return can_redraw(STDERR_FILENO);
}

void Progress::show(const std::string& what) {
  now = what;
  ++done;
  if (!live()) return;
  const std::string line = std::to_string(done) + "/" + std::to_string(all) + " " + what + " …";
  std::cerr << "\r\033[K" << fitted(line, terminal_width(STDERR_FILENO)) << std::flush;
}

void Progress::clear() const {
  if (live()) std::cerr << "\r\033[K" << std::flush;
}

Progress::~Progress() {
  clear();
  if (std::uncaught_exceptions() > 0 && !now.empty())
    std::cerr << command << " failed at " << now << "\n";
}

static constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};

std::vector<std::string> dtype_names() {
  std::vector<std::string> out;
  for (const at::ScalarType type : kDtypes) out.push_back(attn::dtype_name(type));
  return out;
}
std::vector<std::string> device_names() {
  return {"cpu", "cuda"};
}

at::ScalarType dtype(const std::string& name) {
  for (const at::ScalarType type : kDtypes)
    if (name == attn::dtype_name(type)) return type;
  fail("unknown dtype '", name, "'; expected one of ", quoted(dtype_names()));
}

at::Device device(const std::string& name) {
  horner::check(name == "cpu" || name == "cuda", "unknown device '", name,
                "'; expected 'cpu' or 'cuda'");
  horner::check(name == "cpu" || at::hasCUDA(),
                "device 'cuda' is not available: torch finds no GPU (see 'horner info')");
  return name == "cpu" ? at::Device(at::kCPU) : at::Device(at::kCUDA, 0);
}

}  // namespace horner::cli
