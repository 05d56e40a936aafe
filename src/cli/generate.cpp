// horner generate: text from a Hugging Face folder, streamed.
#include "nn/generate.h"

#include "cli/data.h"
#include "cli/options.h"
#include "cli/run.h"
#include "cli/table.h"
#include "nn/checkpoint.h"

namespace horner::cli {

struct GenerateOptions {
  std::string model, prompt;
  int64_t tokens = 100;
  nn::Sampling sampling;
  bool json = false;
};

static Outcome run(const GenerateOptions& o) {
  const nn::Model model = nn::load_model(o.model);
  const text::Tokenizer words = model_tokenizer(o.model, model.config.V);
  const std::vector<int64_t> prompt = model_tokens(words, o.prompt);
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
  option(app, "--model", o->model, "DIR", "a Hugging Face folder, or one saved by horner")
      ->required();
  option(app, "--prompt", o->prompt, "TEXT", "the text to continue")->required();
  positive(app, "--tokens", o->tokens, "N", "maximum number of new tokens [100]");
  option(app, "--temperature", o->sampling.temperature, "X",
         "sampling temperature; 0 takes the most likely token [1]");
  non_negative(app, "--top-k", o->sampling.top_k, "K",
               "sample from the K most likely tokens [all]");
  option(app, "--top-p", o->sampling.top_p, "P",
         "sample from the most likely tokens whose probabilities sum to P [1]");
  option(app, "--seed", o->sampling.seed, "N", "random seed [0]");
  app.add_flag("--json", o->json, "print text, tokens and times as JSON");
  return [o] { return run(*o); };
}

}  // namespace horner::cli
