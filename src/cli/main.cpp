// The command line: the table of commands, and how errors are reported.
//   exit code 0: success · 1: a check failed · 2: an error, one line on stderr · 130: interrupted
//   by Ctrl-C · 143: by SIGTERM
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>

#include "cli/command.h"
#include "cli/errors.h"
#include "cli/help.h"
#include "cli/run.h"
#include "core/check.h"
#include "core/names.h"

namespace horner::cli {

// To add a command, add a row and the file that defines its function.
static const Command kCommands[] = {
    {"list",
     "list the attention variants and the executions that run each",
     {"horner list", "horner list 'taylor*' 'l2*'", "horner list --json | jq '.variants[].name'"},
     list},
    {"show",
     "describe one variant: formula, inputs, size of its state",
     {"horner show taylor4", "horner show linear_elu --dim 32 --value-dim 64",
      "horner show 'softmax:norm=l2,denominator=nothing'"},
     show},
    {"check",
     "compare every execution with the reference in double, outputs and gradients",
     {"horner check                              everything: some minutes",
      "horner check --variant 'taylor*' --dtype float32",
      "horner check --variant softmax --variant 'softmax:norm=l2' --execution reference -v"},
     check},
    {"bench",
     "time every execution against torch's softmax attention, after checking it",
     {"horner bench attention                    some minutes",
      "horner bench attention --variant 'taylor*' --shape 1,8,4096,64",
      "horner bench attention --variant l2 --execution fused_cpu reference --dtype bfloat16",
      "horner bench decode --shape 1,8,65536,64 --svg decode.svg",
      "horner bench order --svg order.svg"},
     bench},
    {"plan",
     "memory and FLOPs of a variant at a given size, and which execution to use",
     {"horner plan taylor2 --dim 64 --heads 8 --tokens 65536",
      "horner plan 'linear_decay*3,softmax' --layers 12 --json",
      "horner plan --model converted --dtype bfloat16",
      "horner plan --train --model large --gpus 8 --length 4096 --shard gradients"},
     plan},
    {"data",
     "convert text to token files; inspect a token file",
     {"horner data pack --out torch.bin          the Python sources of torch, as bytes",
      "horner data pack book.txt corpus/ more.jsonl --tokenizer model/ --end '<eos>' --out "
      "train.bin",
      "horner data info train.bin --tokenizer model/"},
     data},
    {"train",
     "train a model with any variant; safe to interrupt and to resume",
     {"horner train --model tiny --attention taylor4 --steps 60 --out runs/taylor4",
      "horner train --out runs/taylor4 --resume",
      "horner train --attention 'linear_decay*3,softmax' --model 10m --out runs/hybrid",
      "horner train --model 10m --dtype bfloat16 --batch 64 --data train.bin --out runs/10m",
      "torchrun --no-python --nproc-per-node=2 horner train --model tiny --out runs/two"},
     train},
    {"study",
     "train a grid of variants under equal conditions and write a report",
     {"horner study quick --out quick              a few minutes on 2 cores",
      "horner study paper-small --device cuda --jobs 2 --out ablation",
      "horner study mine.json --out mine --set '{\"steps\": 200}'",
      "horner study paper-small --out /shared/small --slurm --array 8 --time 4:00:00 --gpus 1"},
     study},
    {"report",
     "write one report for all runs found in the given folders",
     {"horner report quick", "horner report here there --out both"},
     report},
    {"diagnose",
     "analyse what a model's attention can and cannot select",
     {"horner diagnose --model DIR --text book.txt --out diagnosis",
      "horner diagnose --model DIR --text book.txt --length 256 --top 1 5 20 --embedding inputs",
      "horner diagnose --model DIR --text book.txt --what-if   other normalisers"},
     diagnose},
    {"convert",
     "turn a trained model into one with constant states where its heads allow it",
     {"horner convert --model DIR --data train.bin --validation valid.bin --out converted",
      "horner convert --model DIR --data train.bin --keep 12 --by kl --out converted",
      "horner convert --model DIR --data train.bin --until plan --costs --out plan",
      "horner convert --model DIR --data train.bin --plan edited.json --out converted"},
     convert},
    {"generate",
     "generate text with a model",
     {"horner generate --model DIR --prompt 'Once upon a time' --tokens 100 --temperature 0",
      "horner generate --model runs/taylor4 --prompt-file letter.txt --device cuda --dtype "
      "bfloat16",
      "fortune | horner generate --model DIR --prompt-file -"},
     generate},
    {"info", "show versions, processor and GPUs", {"horner info", "horner info --json"}, info},
    {"help",
     "explain a command; print completions for a shell, or the manual page",
     {"horner help train", "source <(horner help --completion bash)",
      "horner help --man | man -l -"},
     help},
};

static std::string footer(const Command& c) {
  std::string out = "Examples:";
  for (const char* example : c.examples) out += "\n  " + std::string(example);
  return out;
}

// Throws for arguments that no option takes: names the first unknown option, else the first word.
static void check_leftovers(const CLI::App& app, const std::string& command) {
  const std::vector<std::string> left = app.remaining();
  if (left.empty()) return;
  const auto is_option = [](const std::string& word) { return word.starts_with("-"); };
  const auto option = std::find_if(left.begin(), left.end(), is_option);
  std::vector<std::string> known;
  if (option != left.end()) {
    for (const CLI::Option* o : app.get_options())
      for (const std::string& name : o->get_lnames()) known.push_back("--" + name);
    fail("unknown option '", *option, "' for '", command, "'; did you mean ",
         quoted(nearest(*option, known)), "?");
  }
  for (const Command& c : kCommands) known.push_back(c.name);
  if (command == "horner")
    fail("unknown command '", left[0], "'; did you mean ", quoted(nearest(left[0], known)),
         "? ('horner --help' shows them all)");
  fail("'", command, "' does not expect '", left[0], "'; see '", command, " --help'");
}

// What is wrong with the options, in words of ours where the parser's are not clear.
static std::string parse_problem(const CLI::ParseError& e, const CLI::App& app) {
  const std::string text = e.what();
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&e) && text.find("missing") != text.npos)
    return text.substr(0, text.find(':')) + " needs a value";
  if (dynamic_cast<const CLI::RequiredError*>(&e) && text.find("ubcommand") != text.npos) {
    std::vector<std::string> below;
    for (const auto& [name, command] : commands_of(app)) below.push_back(name);
    return "'" + app.get_name() + "' needs " + quoted(below) + " after it";
  }
  return text;
}

static Outcome run(int argc, char** argv) {
  CLI::App app("Horner: attention operators as data", "horner");
  app.set_version_flag("--version", "horner " HORNER_VERSION);
  app.require_subcommand(0, 1)->allow_extras();
  app.footer("Run 'horner COMMAND --help' for the options of a command.");
  std::map<const CLI::App*, Action> actions;
  for (const Command& c : kCommands) {
    CLI::App* command = app.add_subcommand(c.name, c.about)->allow_extras();
    command->group("Commands")->footer(footer(c));
    actions[command] = c.add(*command);
  }
  use_help_text(app);

  auto chosen = [&]() -> const CLI::App& {
    const auto parsed = app.get_subcommands();
    return parsed.empty() ? app : *parsed[0];
  };
  auto chosen_name = [&] { return &chosen() == &app ? "horner" : "horner " + chosen().get_name(); };
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help_or_version) {
    app.exit(help_or_version);
    return Outcome::fine;
  } catch (const CLI::ParseError& e) {
    check_leftovers(chosen(), chosen_name());
    fail(parse_problem(e, chosen()), "; see '", chosen_name(), " --help'");
  }
  check_leftovers(app, "horner");
  if (&chosen() == &app) {
    std::cout << app.help();
    return Outcome::fine;
  }
  check_leftovers(chosen(), chosen_name());
  return actions.at(&chosen())();
}

// The exit code, once everything that was printed has arrived.
static int finish(Outcome o) {
  const bool written = std::cout.flush().good() && std::fflush(stdout) == 0 && !std::ferror(stdout);
  errno = 0;
  // The error may be an old one: another byte shows the reason.
  if (!written && ::write(STDOUT_FILENO, "\n", 1) > 0) errno = EIO;
  horner::check(written, "cannot write to stdout: ", std::strerror(errno));
  return o == Outcome::interrupted && stop_signal() != 0 ? 128 + stop_signal() : int(o);
}

// Keeps files from getting the number of a closed stdin, stdout or stderr; output to it fails.
static void open_standard_files() {
  for (const int file : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(file, F_GETFD) < 0 && ::open("/dev/null", O_RDONLY) < 0) return;
}

}  // namespace horner::cli

int main(int argc, char** argv) {
  horner::cli::open_standard_files();
  std::signal(SIGPIPE, SIG_DFL);
  std::signal(SIGXFSZ, SIG_IGN);  // the write fails then, as on a full disk
  try {
    return horner::cli::finish(horner::cli::run(argc, argv));
  } catch (const std::exception& e) {
    std::cout << std::flush;
    std::cerr << "horner: " << horner::cli::message_of(e) << "\n";
  }
  return 2;
}
