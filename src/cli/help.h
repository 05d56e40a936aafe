// Help, the manual page and the completions of shells, all made from the options of the commands.
#pragma once

#include <string>
#include <vector>

#include "cli/command.h"

namespace horner::cli {

struct OptionFacts {
  std::vector<std::string> names;  // "--out", "-v"; the word itself for an argument
  std::string word, about;         // word: "" for a flag
  std::vector<std::string> choices;
  bool positional, required, several;
};
std::vector<OptionFacts> options_of(const CLI::App&);

// The commands below `app` and theirs, each with its words: "data pack".
std::vector<std::pair<std::string, const CLI::App*>> commands_of(const CLI::App& app);

std::string help_text(const CLI::App&, size_t columns);
std::string manual(const CLI::App&);  // roff
std::string completion(const CLI::App&, const std::string& shell);

// Makes --help of the app and of its commands look like help_text.
void use_help_text(CLI::App&);

}  // namespace horner::cli
