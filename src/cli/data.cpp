// horner data: text to tokens in files, and what is in such a file.
#include "cli/data.h"

#include <CLI/CLI.hpp>
#include <memory>

namespace horner::cli {

text::Tokenizer tokenizer_at(const std::string& path) {
  return path.empty() ? text::Tokenizer() : text::Tokenizer(path);
}

static Action add_pack(CLI::App& app) {
  const auto o = std::make_shared<PackOptions>();
  app.add_option("INPUT", o->inputs,
                 "text files, folders of them, .jsonl files [the Python sources of torch]")
      ->type_name("");
  app.add_option("--out", o->out, "the file to write, in llm.c's layout")->capture_default_str();
  app.add_option("--tokenizer", o->tokenizer, "a tokenizer.json, or a folder with one [bytes]");
  app.add_option("--key", o->key, "where a line of .jsonl has its text")->capture_default_str();
  app.add_option("--begin", o->begin, "a token before every document, as '<bos>'");
  app.add_option("--end", o->end, "a token after every document, as '<|endoftext|>'");
  app.add_option("--shard", o->shard, "most tokens of a file; more go to NAME_000001.bin and on");
  app.add_flag("--json", o->json, "what was done, as JSON");
  return [o] { return pack(*o); };
}

static Action add_info(CLI::App& app) {
  const auto o = std::make_shared<TokensOptions>();
  app.add_option("FILE", o->files, "files of tokens: llm.c's layout or nanoGPT's")
      ->required()
      ->type_name("");
  app.add_option("--tokenizer", o->tokenizer, "a tokenizer.json, or a folder with one [bytes]");
  app.add_option("--tokens", o->shown, "how many of the first to decode")->capture_default_str();
  app.add_flag("--json", o->json, "the same as JSON");
  return [o] { return describe_tokens(*o); };
}

Action data(CLI::App& app) {
  app.require_subcommand(1);
  app.get_formatter()->label("SUBCOMMAND", "WHAT");
  CLI::App* const pack = app.add_subcommand("pack", "text to a file of tokens");
  CLI::App* const info = app.add_subcommand("info", "what is in a file of tokens");
  pack->allow_extras(false);  // they would take it from above
  info->allow_extras(false);
  const Action pack_action = add_pack(*pack), info_action = add_info(*info);
  return [=] { return pack->parsed() ? pack_action() : info_action(); };
}

}  // namespace horner::cli
