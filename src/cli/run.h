// Shared by long-running commands: Ctrl-C, a progress line, names of dtypes and devices.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace horner::cli {

// From now on the first Ctrl-C sets stopped(); the second terminates the process.
void catch_interrupt();
void catch_termination();  // the same for SIGTERM, which job schedulers send
bool stopped();
int stop_signal();         // SIGINT or SIGTERM, once stopped
void stop_as(int signal);  // as if that had come: the exit code says so

// The current item, on stderr: live on a terminal, and once when an error ends the command.
struct Progress {
  std::string command;
  size_t all;
  size_t done = 0;
  std::string now = "";

  void show(const std::string& what);
  void clear() const;
  ~Progress();
};

// Whether stderr is a terminal that can redraw its last line; TERM=dumb cannot.
bool live();

at::ScalarType dtype(const std::string& name);
at::Device device(const std::string& name);
std::vector<std::string> dtype_names();
std::vector<std::string> device_names();

}  // namespace horner::cli
