// horner generate: text from a Hugging Face folder or from a run, streamed.
#include "nn/generate.h"

#include <fstream>

#include "cli/data.h"
#include "cli/model.h"
#include "cli/options.h"
#include "cli/run.h"
#include "cli/table.h"
#include "core/check.h"

namespace horner::cli {

struct GenerateOptions {
  std::string model, prompt, file, device = "cpu", dtype;
  int64_t tokens = 100;
  nn::Sampling sampling;
  bool json = false;
};

// A whole file, or standard input for "-", without the newline that ends it.
static std::string text_of(const std::string& file) {
  std::ifstream opened;
  if (file != "-") opened.open(file, std::ios::binary);
  horner::check(file == "-" || opened.is_open(), "cannot open '", file, "' for --prompt-file");
  std::istream& in = file == "-" ? std::cin : opened;
  std::string out{std::istreambuf_iterator<char>(in), {}};
  if (out.ends_with('\n')) out.pop_back();
  if (out.ends_with('\r')) out.pop_back();
  return out;
}

// How many tokens to generate, and a remark where they do not fit the model's context.
static std::pair<int64_t, std::string> room_for(const nn::ModelConfig& c, int64_t prompt,
                                                int64_t wanted) {
  const int64_t last = prompt + wanted - 1;  // the last token is not read again
  if (last <= c.positions) return {wanted, ""};
  const std::string sizes = std::to_string(c.positions) + " tokens";
  if (c.family->rotary())
    return {wanted, "the model was made for a context of " + sizes + "; the prompt of " +
                        std::to_string(prompt) + " and " + std::to_string(wanted) +
                        " new tokens exceed it, and the text may become worse"};
  horner::check(prompt <= c.positions, "the prompt has ", prompt,
                " tokens, but the model's context is ", sizes, "; shorten the prompt");
  const int64_t fits = c.positions - prompt + 1;
  return {fits, "the model's context is " + sizes + ": generating at most " + std::to_string(fits) +
                    " of the " + std::to_string(wanted) + " tokens"};
}

static Outcome run(const GenerateOptions& o) {
  const std::string given = o.file.empty() ? o.prompt : text_of(o.file);
  const std::filesystem::path folder = model_folder(o.model);
  const at::ScalarType type = o.dtype.empty() ? at::ScalarType::Undefined : cli::dtype(o.dtype);
  const nn::Model model = load_model(folder, cli::device(o.device), type);
  const text::Tokenizer words = model_tokenizer(folder, model.config.V);
  const std::vector<int64_t> prompt = model_tokens(words, given);
  const auto [count, remark] = room_for(model.config, int64_t(prompt.size()), o.tokens);
  catch_interrupt();
  text::DecodeStream stream(words);
  std::string written;
  const auto show = [&](const std::string& text) {
    written += text;
    if (!o.json) std::cout << text << std::flush;
  };
  bool begun = false;  // the prompt appears with the first token: an error prints none of it
  const nn::Generated g = nn::generate(model, prompt, count, o.sampling, [&](int64_t t) {
    if (!begun && !o.json) std::cout << given;
    begun = true;
    show(stream.add(text::Token(t)));
    return !stopped();
  });
  if (!begun && !o.json) std::cout << given;  // the first token ended the text
  show(stream.rest());
  const double rate = g.seconds > 0 ? double(g.tokens.size() - 1) / g.seconds : 0;
  if (o.json)
    std::cout << Json{{"prompt", given},
                      {"text", written},
                      {"tokens", g.tokens},
                      {"prompt_tokens", prompt.size()},
                      {"prompt_seconds", g.prompt_seconds},
                      {"tokens_per_second", rate},
                      {"state_bytes", g.state_bytes},
                      {"context", model.config.positions},
                      {"remark", remark}}
                     .dump(2, ' ', false, Json::error_handler_t::replace)
              << "\n";
  else
    std::cout << "\n" << std::flush;
  if (!o.json && !remark.empty()) std::cerr << remark << "\n";
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
  option(app, "--model", o->model, "DIR", "a Hugging Face folder, or a run of 'horner train'")
      ->required();
  CLI::Option* const prompt = option(app, "--prompt", o->prompt, "TEXT", "the text to continue");
  CLI::Option* const file = option(app, "--prompt-file", o->file, "FILE",
                                   "read the text to continue from a file; - reads standard input")
                                ->excludes(prompt);
  positive(app, "--tokens", o->tokens, "N", "maximum number of new tokens [100]");
  option(app, "--temperature", o->sampling.temperature, "X",
         "sampling temperature; 0 takes the most likely token [1]");
  non_negative(app, "--top-k", o->sampling.top_k, "K",
               "sample from the K most likely tokens [all]");
  option(app, "--top-p", o->sampling.top_p, "P",
         "sample from the most likely tokens whose probabilities sum to P [1]");
  option(app, "--seed", o->sampling.seed, "N", "random seed [0]");
  choices(option(app, "--device", o->device, "NAME", "device of the model [cpu]"),
          {device_names()});
  choices(option(app, "--dtype", o->dtype, "NAME", "dtype of the model [that of its weights]"),
          {dtype_names()});
  app.add_flag("--json", o->json, "print text, tokens and times as JSON");
  return [=] {
    horner::check(prompt->count() + file->count() > 0,
                  "generate needs the text to continue: --prompt TEXT, or --prompt-file FILE "
                  "('-' reads standard input)");
    return run(*o);
  };
}

}  // namespace horner::cli
