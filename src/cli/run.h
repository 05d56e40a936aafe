// What the commands share that run for long or ask about the machine: Ctrl-C, a progress line, and
// the names of dtypes and devices.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace horner::cli {

// From now on the first Ctrl-C asks to stop, and stopped() says so; the second stops at once.
void catch_interrupt();
void catch_termination();  // SIGTERM, as of a queue that wants its machine back, is the same
bool stopped();

// What is being done, on stderr: while it runs where that is a terminal, and when an error ends it.
struct Progress {
  std::string command;
  size_t all;
  size_t done = 0;
  std::string now = "";

  void show(const std::string& what);
  void clear() const;
  ~Progress();
};

at::ScalarType dtype(const std::string& name);
at::Device device(const std::string& name);

}  // namespace horner::cli
