// A command: one row of the table in main.cpp, one file of this folder.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "attn/catalog.h"

namespace CLI {
class App;
}

namespace horner::cli {

enum class Outcome { fine = 0, failed = 1, interrupted = 130 };  // the exit codes

// Adds a command's options to its App and returns what runs it once they are parsed.
using Action = std::function<Outcome()>;

struct Command {
  const char *name, *about;
  std::vector<const char*> examples;
  Action (*add)(CLI::App&);
};

Action list(CLI::App&);
Action show(CLI::App&);
Action check(CLI::App&);
Action bench(CLI::App&);
Action convert(CLI::App&);
Action data(CLI::App&);
Action diagnose(CLI::App&);
Action generate(CLI::App&);
Action help(CLI::App&);
Action info(CLI::App&);
Action plan(CLI::App&);
Action report(CLI::App&);
Action study(CLI::App&);
Action train(CLI::App&);

// The variants that the patterns name, each once: globs over `variants`, and names that attn::find
// knows. Without a pattern all of them. A pattern that names none throws, with the nearest.
std::vector<attn::Variant> select(const std::vector<std::string>& patterns);

}  // namespace horner::cli
