// horner data: convert text to token files, inspect them, and train tokenizers.
#include "cli/data.h"

#include "cli/options.h"
#include "core/check.h"

namespace horner::cli {

text::Tokenizer tokenizer_at(const std::string& path) {
  return path.empty() ? text::Tokenizer() : text::Tokenizer(path);
}

text::Tokenizer model_tokenizer(const std::filesystem::path& folder, int64_t V) {
  if (std::filesystem::exists(folder / "tokenizer.json")) return text::Tokenizer(folder);
  horner::check(V == 256, folder.string(), " has no tokenizer.json, and a vocabulary of ", V,
                " tokens is not bytes (256); copy the tokenizer.json of its text into the folder");
  return text::Tokenizer();
}

std::vector<int64_t> model_tokens(const text::Tokenizer& t, std::string_view text) {
  const std::vector<text::Token> tokens = t.encode(text);
  return {tokens.begin(), tokens.end()};
}

static Action add_pack(CLI::App& app) {
  const auto o = std::make_shared<PackOptions>();
  option(app, "INPUT", o->inputs, "",
         "text files, folders of them, .jsonl files, each also as .xz, .gz or .zst [the Python "
         "sources "
         "of torch]");
  option(app, "--out", o->out, "FILE", "the token file to write, in llm.c's layout [tokens.bin]");
  option(app, "--tokenizer", o->tokenizer, "FILE",
         "a tokenizer.json, or a folder with one [bytes]");
  option(app, "--key", o->key, "NAME", "the field of a .jsonl line that holds the text [text]");
  option(app, "--begin", o->begin, "TOKEN",
         "a token to insert before every document, such as '<bos>'");
  option(app, "--end", o->end, "TOKEN",
         "a token to insert after every document, such as '<|endoftext|>'");
  option(app, "--shard", o->shard, "N",
         "maximum tokens per file; the rest goes to NAME_000001.bin, …");
  app.add_flag("--force", o->force, "replace files that are not token files");
  app.add_flag("--json", o->json, "print a summary as JSON");
  return [o] { return pack(*o); };
}

static Action add_tokenizer(CLI::App& app) {
  const auto o = std::make_shared<TokenizerOptions>();
  option(app, "--train", o->inputs, "FILE",
         "text files and folders of them, each file also as .xz, .gz or .zst")
      ->required();
  option(app, "--vocabulary", o->vocabulary, "N", "number of tokens [16384]")
      ->check(within(256, 1 << 24));
  option(app, "--special", o->special, "TOKEN",
         "special tokens, the first of the vocabulary, such as '<|endoftext|>'");
  option(app, "--out", o->out, "FILE", "the file to write [tokenizer.json]");
  app.add_flag("--force", o->force, "replace a file that is not a tokenizer.json");
  app.add_flag("--json", o->json, "print a summary as JSON");
  return [o] { return train_tokenizer(*o); };
}

static Action add_info(CLI::App& app) {
  const auto o = std::make_shared<TokensOptions>();
  option(app, "FILE", o->files, "", "token files, in llm.c's or nanoGPT's layout")->required();
  option(app, "--tokenizer", o->tokenizer, "FILE",
         "a tokenizer.json, or a folder with one [bytes]");
  option(app, "--tokens", o->shown, "N", "how many of the first tokens to decode [64]");
  app.add_flag("--json", o->json, "print as JSON");
  return [o] { return describe_tokens(*o); };
}

Action data(CLI::App& app) {
  app.require_subcommand(1);
  CLI::App* const pack = app.add_subcommand("pack", "convert text to a token file");
  CLI::App* const info = app.add_subcommand("info", "inspect a token file");
  CLI::App* const tokenizer =
      app.add_subcommand("tokenizer", "train a byte-level BPE tokenizer on text");
  for (CLI::App* each : {pack, info, tokenizer}) each->allow_extras(false);  // not from above
  const Action pack_action = add_pack(*pack), info_action = add_info(*info),
               tokenizer_action = add_tokenizer(*tokenizer);
  return [=] {
    return pack->parsed() ? pack_action() : info->parsed() ? info_action() : tokenizer_action();
  };
}

}  // namespace horner::cli
