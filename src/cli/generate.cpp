// horner generate: text from a Hugging Face folder, streamed.
#include "nn/generate.h"

#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/run.h"
#include "cli/table.h"
#include "core/check.h"
#include "nn/checkpoint.h"
#include "text/tokenizer.h"

namespace horner::cli {

using Json = nlohmann::ordered_json;

struct GenerateOptions {
  std::string model, prompt;
  int64_t tokens = 100;
  nn::Sampling sampling;
  bool json = false;
};

// Bytes where the folder has no tokenizer and the vocabulary has 256 tokens.
static text::Tokenizer tokenizer(const std::filesystem::path& folder, int64_t V) {
  if (std::filesystem::exists(folder / "tokenizer.json")) return text::Tokenizer(folder);
  horner::check(V == 256, folder.string(), " has no tokenizer.json, and a vocabulary of ", V,
                " tokens is not bytes (256)");
  return text::Tokenizer();
}

static Outcome run(const GenerateOptions& o) {
  const nn::Model model = nn::load_model(o.model);
  const text::Tokenizer words = tokenizer(o.model, model.config.V);
  std::vector<int64_t> prompt;
  for (text::Token t : words.encode(o.prompt)) prompt.push_back(t);
  const int64_t begin = model.config.begin;
  if (begin >= 0 && !words.is_bytes() && (prompt.empty() || prompt[0] != begin))
    prompt.insert(prompt.begin(), begin);
  catch_interrupt();
  text::DecodeStream stream(words);
  std::string written;
  const auto show = [&](const std::string& text) {
    written += text;
    if (!o.json) std::cout << text << std::flush;
  };
  if (!o.json) std::cout << o.prompt << std::flush;
  const nn::Generated g = nn::generate(model, prompt, o.tokens, o.sampling, [&](int64_t t) {
    show(stream.add(text::Token(t)));
    return !stopped();
  });
  show(stream.rest());
  const double rate = g.seconds > 0 ? double(g.tokens.size() - 1) / g.seconds : 0;
  if (o.json)
    std::cout << Json{{"prompt", o.prompt},
                      {"text", written},
                      {"tokens", g.tokens},
                      {"prompt_tokens", prompt.size()},
                      {"prompt_seconds", g.prompt_seconds},
                      {"tokens_per_second", rate},
                      {"state_bytes", g.state_bytes}}
                     .dump(2, ' ', false, Json::error_handler_t::replace)
              << "\n";
  else
    std::cout << "\n";
  if (!o.json)
    std::cerr << faint(formatted("%.0f tokens", double(g.tokens.size())) + ", " +
                       formatted("%.1f", rate) + " tokens/s; prefill of " +
                       std::to_string(prompt.size()) + " tokens in " +
                       formatted("%.2f s", g.prompt_seconds) + "; state and KV cache " +
                       size_text(double(g.state_bytes)))
              << "\n";
  return stopped() ? Outcome::interrupted : Outcome::fine;
}

Action generate(CLI::App& app) {
  const auto o = std::make_shared<GenerateOptions>();
  app.add_option("--model", o->model, "a Hugging Face folder, or one saved by horner")
      ->type_name("DIR")
      ->required();
  app.add_option("--prompt", o->prompt, "the text to continue")->type_name("TEXT")->required();
  app.add_option("--tokens", o->tokens, "maximum number of new tokens [100]")
      ->check(CLI::PositiveNumber.description(""))
      ->type_name("N");
  app.add_option("--temperature", o->sampling.temperature,
                 "sampling temperature; 0 takes the most likely token [1]")
      ->type_name("X");
  app.add_option("--top-k", o->sampling.top_k, "sample from the K most likely tokens [all]")
      ->check(CLI::NonNegativeNumber.description(""))
      ->type_name("K");
  app.add_option("--top-p", o->sampling.top_p,
                 "sample from the most likely tokens whose probabilities sum to P [1]")
      ->type_name("P");
  app.add_option("--seed", o->sampling.seed, "random seed [0]")->type_name("N");
  app.add_flag("--json", o->json, "print text, tokens and times as JSON");
  return [o] { return run(*o); };
}

}  // namespace horner::cli
