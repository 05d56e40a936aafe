// horner diagnose: what a model's attention selects on a text, as a report and as JSON.
#include <ATen/ATen.h>

#include <algorithm>

#include "cli/data.h"
#include "cli/options.h"
#include "cli/report.h"
#include "cli/run.h"
#include "cli/table.h"
#include "core/check.h"
#include "core/stopwatch.h"
#include "diag/diag_report.h"
#include "files/files.h"
#include "files/json.h"
#include "files/output.h"
#include "nn/checkpoint.h"
#include "train/checkpoint.h"

namespace horner::cli {

namespace fs = std::filesystem;

struct DiagnoseOptions {
  std::string model, text, out = "diagnosis", embedding, device = "cpu";
  diag::Settings settings;
  diag::WhatIfAsked asked;
  int64_t what_if_tokens = 512;
  bool what_if = false, json = false, force = false;
};

// The model's folder, or the newest checkpoint of a run of `horner train`.
static fs::path model_folder(const fs::path& given) {
  horner::check(fs::exists(given), "no model folder '", given.string(), "'");
  if (!fs::exists(given / "config.json"))
    if (const auto newest = train::newest_checkpoint(given)) return *newest;
  return given;
}

// The first `length` to `most` tokens of a text, after a BOS token if the tokenizer adds one.
static at::Tensor tokens_of(const std::string& file, const fs::path& folder, const nn::Model& m,
                            int64_t length, int64_t most) {
  const text::Tokenizer words = model_tokenizer(folder, m.config.V);
  const files::MappedFile mapped{fs::path(file)};
  const std::string_view text = mapped.text();
  horner::check(text.find_first_not_of(" \t\r\n") != text.npos, file,
                " is empty; a text of at least ", length, " tokens is required");
  // No tokenizer makes fewer than one token of 64 bytes of prose: this is enough of a large file.
  const size_t bytes = size_t(most) * 64 + 4096;
  const size_t cut = text.size() <= bytes ? text.size() : text::safe_cut(words, text, bytes);
  std::vector<int64_t> out = model_tokens(words, text.substr(0, cut));
  horner::check(int64_t(out.size()) >= length, file, " has ", out.size(),
                " tokens, fewer than the length ", length, "; use '--length ", out.size(), "'");
  out.resize(std::min(out.size(), size_t(most)));
  return at::tensor(out, at::kLong);
}

// The model moved to a device.
static nn::Model on(at::Device device, nn::Model m) {
  for (const nn::Slot& s : nn::slots(m)) *s.at = s.at->to(device);
  if (m.config.tied) m.head = m.embedding;
  return m;
}

static void print(const diag::Diagnosis& d, const std::vector<diag::Finding>& findings) {
  for (const diag::Finding& f : findings)
    std::cout << bold(f.title) << ": " << f.text << "\n" << faint("  rule: " + f.rule) << "\n";
  Table t{.head = {"bound", "violations", "of"}, .right = {1, 2}};
  for (const auto& [name, c] : d.crossed)
    t.rows.push_back({name, count_text(double(c.times)), count_text(double(c.of))});
  std::cout << "\n" << cli::text(t);
}

static Outcome run(DiagnoseOptions o, const std::string& command) {
  for (auto* list : {&o.settings.lengths, &o.settings.tops}) {
    std::sort(list->begin(), list->end());
    list->erase(std::unique(list->begin(), list->end()), list->end());
  }
  if (!o.embedding.empty()) o.settings.embedding = diag::embedding_of(o.embedding);
  const at::Device device = cli::device(o.device);
  const fs::path folder = model_folder(o.model);
  check_report(o.out, o.force, {o.text});
  files::check_output({.path = fs::path(o.out) / "diagnosis.json",
                       .ours =
                           [](std::string_view text) {
                             return text.starts_with("{\n \"tokens\":") &&
                                    text.find("\n \"attention\":") != text.npos;
                           },
                       .inputs = {o.text}},
                      o.force);
  const nn::Model model = on(device, nn::load_model(folder));
  const int64_t length = o.settings.lengths.back();
  const int64_t room = model.config.family->rotary()
                           ? o.what_if_tokens
                           : std::min(o.what_if_tokens, model.config.positions);
  const at::Tensor tokens =
      tokens_of(o.text, folder, model, length, o.what_if ? std::max(length, room) : length)
          .to(device);
  catch_interrupt();
  const Stopwatch watch;
  const size_t runs =
      o.asked.normalisers.empty() ? diag::normalisers_of(1).size() : o.asked.normalisers.size();
  const size_t layers = model.layers.size(), cuts = 32 + layers * size_t(model.config.H);
  Progress progress{"diagnose", layers * (o.what_if ? 2 : 1) +
                                    (o.what_if ? runs + 2 * size_t(o.asked.orders) + cuts : 0)};
  struct Stopped {};
  const diag::Say say = [&](const std::string& what) {
    if (stopped()) throw Stopped{};
    progress.show(what);
  };
  std::optional<diag::WhatIf> what_if;
  diag::Diagnosis d;
  double seconds = 0;
  try {
    d = diag::diagnose(model, tokens, o.settings, say);
    seconds = watch.ms() / 1000;
    if (o.what_if)
      what_if =
          diag::what_if(model, tokens.narrow(0, 0, std::min(tokens.numel(), room)), o.asked, say);
  } catch (const Stopped&) {
    return Outcome::interrupted;
  }
  progress.clear();
  const auto name = [](const fs::path& p) {
    return (p.filename().empty() ? p.parent_path() : p).filename().string();
  };
  const std::string page = write_report(
      diag::make_report(d, what_if, {name(o.model), name(o.text), command, HORNER_VERSION}), o.out);
  nn::Json numbers = diag::to_json(d, what_if);
  numbers["seconds"] = seconds;
  files::write_json(fs::path(o.out) / "diagnosis.json", numbers, 1);
  if (o.json) {
    std::cout << numbers.dump(1) << "\n";
    return Outcome::fine;
  }
  print(d, diag::findings(d, what_if));
  std::cout << "\n" << page << faint(formatted("  (%.1f s)", seconds)) << "\n";
  return Outcome::fine;
}

Action diagnose(CLI::App& app) {
  const auto o = std::make_shared<DiagnoseOptions>();
  option(app, "--model", o->model, "DIR", "Hugging Face folder, or run of 'horner train'")
      ->required();
  option(app, "--text", o->text, "FILE", "text that the model reads")->required();
  positive(app, "--length", o->settings.lengths, "L", "text lengths [32 64 128 256 512 1024]");
  positive(app, "--top", o->settings.tops, "N",
           "numbers of largest weights to select [1 5 10 20 100]");
  option(app, "--layers", o->settings.layers, "I", "layers to measure [all]");
  option(app, "--heads", o->settings.heads, "H", "heads to measure [all]");
  option(app, "--embedding", o->embedding, "NAME",
         std::string("points that represent tokens: tokens, inputs or values [") +
             diag::name_of(o->settings.embedding) + "]");
  app.add_flag("--unit", o->settings.unit, "normalize points to length 1 for distances, too");
  option(app, "--level", o->settings.level, "P", "level of the Kolmogorov-Smirnov test [0.01]");
  app.add_flag("--what-if", o->what_if,
               "also measure the loss with other normalisers, Taylor orders, top N weights only");
  option(app, "--normaliser", o->asked.normalisers, "NAME",
         "variants for --what-if [those of docs/diagnosis.md]");
  non_negative(app, "--orders", o->asked.orders, "N", "highest Taylor order of --what-if [20]");
  positive(app, "--what-if-tokens", o->what_if_tokens, "T",
           "tokens of the text for --what-if [512]");
  option(app, "--device", o->device, "NAME", "device of the model: cpu or cuda [cpu]");
  option(app, "--seed", o->settings.seed, "N", "seed of the sensitivity's random directions [0]");
  option(app, "--out", o->out, "DIR",
         "folder for report.html, report.json and diagnosis.json [diagnosis]");
  app.add_flag("--force", o->force, "replace files of these names that are not a diagnosis");
  app.add_flag("--json", o->json, "print the numbers as JSON");
  return [o] {
    return run(*o, "horner diagnose --model " + fs::path(o->model).filename().string() +
                       " --text " + fs::path(o->text).filename().string() +
                       (o->what_if ? " --what-if" : ""));
  };
}

}  // namespace horner::cli
