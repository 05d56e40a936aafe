// horner generate: text from a Hugging Face folder or from a run, streamed.
#include "nn/generate.h"

#include <fstream>
#include <sstream>

#include "cli/data.h"
#include "cli/model.h"
#include "cli/options.h"
#include "cli/run.h"
#include "cli/table.h"
#include "core/check.h"

namespace horner::cli {

struct GenerateOptions {
  std::string model, prompt, file, prompts, device = "cpu", dtype;
  int64_t tokens = 100, batch = 16;
  nn::Sampling sampling;
  bool json = false;
};

// A prompt and its text. `where`: what begins a sentence about it.
struct Item {
  std::string where, given;
  text::DecodeStream stream;
  std::string written = "", remark = "";
  bool begun = false, finished = false;
};

static std::string without_newline(std::string line) {
  if (line.ends_with('\n')) line.pop_back();
  if (line.ends_with('\r')) line.pop_back();
  return line;
}

// A whole file, or standard input for "-".
static std::string text_of(const std::string& file, const char* option) {
  std::ifstream opened;
  if (file != "-") opened.open(file, std::ios::binary);
  horner::check(file == "-" || opened.is_open(), "cannot open '", file, "' for ", option);
  std::istream& in = file == "-" ? std::cin : opened;
  return {std::istreambuf_iterator<char>(in), {}};
}

// The prompt in a line of a .jsonl file.
static std::string prompt_in(const std::string& line, const std::string& where) {
  const Json j = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  const Json prompt = j.is_object() ? j.value("prompt", Json()) : j;
  horner::check(prompt.is_string(), where,
                "expected a JSON string, or an object with a string \"prompt\"");
  return prompt;
}

// One text of --prompt or --prompt-file, or one of each line of --prompts.
static std::vector<Item> items(const GenerateOptions& o, const text::Tokenizer& words) {
  const text::DecodeStream stream(words);
  if (!o.file.empty()) return {{"", without_newline(text_of(o.file, "--prompt-file")), stream}};
  if (o.prompts.empty()) return {{"", o.prompt, stream}};
  const std::string name = o.prompts == "-" ? "standard input" : o.prompts;
  std::istringstream lines(text_of(o.prompts, "--prompts"));
  std::vector<Item> out;
  for (std::string line; std::getline(lines, line);) {
    const std::string where = name + ":" + std::to_string(out.size() + 1) + ": ";
    std::string prompt = without_newline(line);
    if (name.ends_with(".jsonl")) prompt = prompt_in(prompt, where);
    horner::check(!prompt.empty(), where, "the prompt is empty; expected one in every line");
    out.push_back({where, prompt, stream});
  }
  horner::check(!out.empty(), name, " is empty; expected a prompt in every line");
  return out;
}

// How many tokens to generate, and a remark where they do not fit the model's context.
static std::pair<int64_t, std::string> room_for(const nn::ModelConfig& c, const std::string& where,
                                                int64_t prompt, int64_t wanted) {
  const int64_t last = prompt + wanted - 1;  // the last token is not read again
  if (last <= c.positions) return {wanted, ""};
  const std::string sizes = std::to_string(c.positions) + " tokens";
  if (c.family->rotary())
    return {wanted, "the model was made for a context of " + sizes + "; the prompt of " +
                        std::to_string(prompt) + " and " + std::to_string(wanted) +
                        " new tokens exceed it, and the text may become worse"};
  horner::check(prompt <= c.positions, where, "the prompt has ", prompt,
                " tokens, but the model's context is ", sizes, "; shorten the prompt");
  const int64_t fits = c.positions - prompt + 1;
  return {fits, "the model's context is " + sizes + ": generating at most " + std::to_string(fits) +
                    " of the " + std::to_string(wanted) + " tokens"};
}

// Prints texts in order, the first that is not finished as it grows.
struct Printer {
  const std::vector<Item>& items;
  size_t at = 0, printed = 0;  // a text, and how much of what was written
  bool begun = false;

  void print() {
    for (; at < items.size() && items[at].begun; ++at, printed = 0, begun = false) {
      const Item& item = items[at];
      // The prompt appears with the first token: an error prints none of it.
      if (!begun) std::cout << (at > 0 ? "\n" : "") << item.given;
      std::cout << std::string_view(item.written).substr(printed);
      begun = true, printed = item.written.size();
      if (!item.finished) break;
      std::cout << "\n";
    }
    std::cout << std::flush;
  }
};

static Json json_of(const Item& item, const nn::Prompt& prompt, const nn::Generated& g) {
  return {{"prompt", item.given},
          {"text", item.written},
          {"tokens", g.tokens},
          {"prompt_tokens", prompt.tokens.size()},
          {"remark", item.remark}};
}

static void print(const GenerateOptions& o, const nn::Model& m, const std::vector<Item>& items,
                  const std::vector<nn::Prompt>& prompts, const nn::Texts& texts) {
  size_t tokens = 0, read = 0;
  Json all = Json::array();
  for (size_t i = 0; i < items.size(); ++i) {
    tokens += texts.each[i].tokens.size(), read += prompts[i].tokens.size();
    all.push_back(json_of(items[i], prompts[i], texts.each[i]));
  }
  if (o.json) {
    Json j =
        o.prompts.empty() ? all[0] : Json{{"texts", all}, {"shared_tokens", texts.shared_tokens}};
    j.update(Json{{"prompt_seconds", texts.prompt_seconds},
                  {"tokens_per_second", texts.rate()},
                  {"state_bytes", texts.state_bytes},
                  {"context", m.config.positions}});
    std::cout << j.dump(2, ' ', false, Json::error_handler_t::replace) << "\n";
    return;
  }
  for (const Item& item : items)
    if (!item.remark.empty()) std::cerr << item.where << item.remark << "\n";
  const std::string shared =
      texts.shared_tokens > 0 ? ", of which all share " + std::to_string(texts.shared_tokens) + ","
                              : "";
  std::cerr << faint(formatted("%.0f tokens", double(tokens)) + ", " +
                     formatted("%.1f", texts.rate()) + " tokens/s; prefill of " +
                     std::to_string(read) + " tokens" + shared + " in " +
                     formatted("%.2f s", texts.prompt_seconds) + "; state and KV cache " +
                     size_text(double(texts.state_bytes)))
            << "\n";
}

static Outcome run(const GenerateOptions& o) {
  const std::filesystem::path folder = model_folder(o.model);
  const at::ScalarType type = o.dtype.empty() ? at::ScalarType::Undefined : cli::dtype(o.dtype);
  const nn::Model model = load_model(folder, cli::device(o.device), type);
  const text::Tokenizer words = model_tokenizer(folder, model.config.V);
  std::vector<Item> items = cli::items(o, words);
  std::vector<nn::Prompt> prompts;
  for (Item& item : items) {
    std::vector<int64_t> tokens = model_tokens(words, item.given);
    const auto [count, remark] =
        room_for(model.config, item.where, int64_t(tokens.size()), o.tokens);
    item.remark = remark;
    prompts.push_back({std::move(tokens), count});
  }
  catch_interrupt();
  Printer printer{items};
  const auto add = [&](size_t i, const nn::Generated& g) {
    Item& item = items[i];
    item.begun = true;
    if (!g.ended) item.written += item.stream.add(text::Token(g.tokens.back()));
    if (g.finished) item.written += item.stream.rest(), item.finished = true;
    if (!o.json) printer.print();
    return !stopped();
  };
  const nn::Texts texts = nn::generate(model, prompts, o.sampling, o.batch, add);
  for (Item& item : items)  // where all were stopped
    if (!item.finished) item.written += item.stream.rest(), item.finished = true;
  if (!o.json) printer.print();
  print(o, model, items, prompts, texts);
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
  CLI::Option* const prompts =
      option(app, "--prompts", o->prompts, "FILE",
             "a text to continue in each line of a file; in a .jsonl file a JSON string, or an "
             "object with a \"prompt\"; - reads standard input")
          ->excludes(prompt)
          ->excludes(file);
  option(app, "--batch", o->batch, "N", "how many of --prompts to continue at a time [16]")
      ->check(within(1))
      ->needs(prompts);
  positive(app, "--tokens", o->tokens, "N", "maximum number of new tokens of a text [100]");
  option(app, "--temperature", o->sampling.temperature, "X",
         "sampling temperature; 0 takes the most likely token [1]");
  non_negative(app, "--top-k", o->sampling.top_k, "K",
               "sample from the K most likely tokens [all]");
  option(app, "--top-p", o->sampling.top_p, "P",
         "sample from the most likely tokens whose probabilities sum to P [1]");
  option(app, "--seed", o->sampling.seed, "N",
         "random seed; that of each further line of --prompts is one more [0]");
  choices(option(app, "--device", o->device, "NAME", "device of the model [cpu]"),
          {device_names()});
  choices(option(app, "--dtype", o->dtype, "NAME", "dtype of the model [that of its weights]"),
          {dtype_names()});
  app.add_flag("--json", o->json, "print text, tokens and times as JSON");
  return [=] {
    horner::check(prompt->count() + file->count() + prompts->count() > 0,
                  "generate needs the text to continue: --prompt TEXT, or --prompt-file FILE "
                  "('-' reads standard input), or several: --prompts FILE");
    return run(*o);
  };
}

}  // namespace horner::cli
