// horner diagnose: what a model's attention selects on a text, as a report and as JSON.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "cli/data.h"
#include "cli/model.h"
#include "cli/options.h"
#include "cli/report.h"
#include "cli/run.h"
#include "cli/table.h"
#include "core/check.h"
#include "core/stopwatch.h"
#include "diag/diag_report.h"
#include "diag/layers.h"
#include "files/files.h"
#include "files/json.h"
#include "files/output.h"

namespace horner::cli {

namespace fs = std::filesystem;

struct DiagnoseOptions {
  std::string model, text, out = "diagnosis", embedding, device = "cpu";
  diag::Settings settings;
  diag::WhatIfAsked asked;
  int64_t what_if_tokens = 512;
  bool what_if = false, json = false, force = false;
};

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

static void print(const diag::Diagnosis& d, const std::vector<diag::Finding>& findings) {
  for (const diag::Finding& f : findings)
    std::cout << paragraph(bold(f.title) + ": " + f.text) << faint(paragraph("rule: " + f.rule, 2));
  Table t{.head = {"bound", "violations", "of"}, .right = {1, 2}};
  for (const auto& [name, c] : d.crossed)
    t.rows.push_back({name, count_text(double(c.times)), count_text(double(c.of))});
  std::cout << "\n" << cli::text(t);
}

// A line for each loss as it comes; the first is that of the model's own operator.
static void print(const diag::Effect& e, const diag::WhatIf& w, const Progress& progress,
                  bool json) {
  if (json) return;
  progress.clear();
  const bool own = w.normalisers.empty() && w.plain.empty();
  std::cout << text(Table{
                   .rows = {{e.name + (own ? ", unchanged" : ""), formatted("loss %.4f", e.all),
                             own ? "" : formatted("%+.2f %%", 100 * (e.all / w.loss - 1))}}})
            << std::flush;
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
  const nn::Model model = load_model(folder, device, at::ScalarType::Undefined);
  const int64_t length = o.settings.lengths.back();
  const int64_t room = model.config.family->rotary()
                           ? o.what_if_tokens
                           : std::min(o.what_if_tokens, model.config.positions);
  if (o.what_if && o.asked.normalisers.empty())
    o.asked.normalisers = diag::normalisers_of(room, diag::attention_of(model.config));
  const at::Tensor tokens =
      tokens_of(o.text, folder, model, length, o.what_if ? std::max(length, room) : length)
          .to(device);
  if (o.what_if || o.settings.layers.empty()) diag::heads_with_rows(model.config);
  catch_interrupt();
  const Stopwatch watch;
  const size_t layers = model.layers.size(), runs = 1 + o.asked.normalisers.size();
  Progress progress{"diagnose", layers + (o.what_if ? runs + 2 * size_t(o.asked.orders) + 24 : 0)};
  if (o.what_if && o.asked.per_head)
    progress.all += layers * size_t(1 + model.config.H) + runs + 2 * size_t(o.asked.orders);
  struct Stopped {};
  const diag::Say say = [&](const std::string& what) {
    if (stopped()) throw Stopped{};
    progress.show(what);
  };
  std::optional<diag::WhatIf> what_if;
  std::optional<diag::Diagnosis> d;
  bool interrupted = false;
  try {  // the losses first: each is one forward pass, and most readers came for them
    const at::Tensor some = tokens.narrow(0, 0, std::min(tokens.numel(), room));
    if (o.what_if)
      diag::losses_of_model(model, some, o.asked, what_if.emplace(), say,
                            [&](const diag::Effect& e) { print(e, *what_if, progress, o.json); });
    d = diag::diagnose(model, tokens, o.settings, say);
    if (o.what_if && o.asked.per_head) diag::losses_of_heads(model, some, *what_if, say);
  } catch (const Stopped&) {
    interrupted = true;
  }
  progress.clear();
  if (what_if && std::isnan(what_if->loss)) what_if.reset();
  if (!d && !what_if) return Outcome::interrupted;
  const double seconds = watch.ms() / 1000;
  const auto name = [](const fs::path& p) {
    return (p.filename().empty() ? p.parent_path() : p).filename().string();
  };
  const diag::About about{name(o.model), name(o.text), command, HORNER_VERSION};
  const std::string page = write_report(
      d ? diag::make_report(*d, what_if, about) : diag::make_report(*what_if, about), o.out);
  nn::Json numbers = d ? diag::to_json(*d, what_if) : nn::Json{{"what_if", to_json(*what_if)}};
  numbers["seconds"] = seconds;
  if (interrupted) numbers["interrupted"] = true;
  files::write_json(fs::path(o.out) / "diagnosis.json", numbers, 1);
  if (o.json) std::cout << numbers.dump(1) << "\n";
  if (d && !o.json) print(*d, diag::findings(*d, what_if));
  if (!o.json) std::cout << "\n" << page << faint(formatted("  (%.1f s)", seconds)) << "\n";
  if (interrupted) std::cerr << "interrupted; the report has what was measured until then\n";
  return interrupted ? Outcome::interrupted : Outcome::fine;
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
  choices(option(app, "--embedding", o->embedding, "NAME",
                 std::string("points that represent tokens [") +
                     diag::name_of(o->settings.embedding) + "]"),
          {{"tokens", "inputs", "values"}});
  app.add_flag("--unit", o->settings.unit, "normalize points to length 1 for distances, too");
  option(app, "--level", o->settings.level, "P", "level of the Kolmogorov-Smirnov test [0.01]");
  app.add_flag("--what-if", o->what_if,
               "also measure the loss with other normalisers, Taylor orders, top N weights only");
  app.add_flag("--per-head", o->asked.per_head,
               "with --what-if, also switch some of the heads, and cut each head alone: many more "
               "forward passes");
  choices(option(app, "--normaliser", o->asked.normalisers, "NAME",
                 "variants for --what-if [those of docs/diagnosis.md]"),
          variant_choices());
  non_negative(app, "--orders", o->asked.orders, "N", "highest Taylor order of --what-if [20]");
  positive(app, "--what-if-tokens", o->what_if_tokens, "T",
           "tokens of the text for --what-if [512]");
  choices(option(app, "--device", o->device, "NAME", "device of the model [cpu]"),
          {device_names()});
  option(app, "--seed", o->settings.seed, "N", "seed of the sensitivity's random directions [0]");
  option(app, "--out", o->out, "DIR",
         "folder for report.html, report.json and diagnosis.json [diagnosis]");
  app.add_flag("--force", o->force, "replace files of these names that are not a diagnosis");
  app.add_flag("--json", o->json, "print the numbers as JSON");
  return [o] {
    horner::check(o->what_if || !o->asked.per_head, "--per-head belongs to --what-if; add that");
    horner::check(o->settings.level > 0 && o->settings.level < 1,
                  "--level must be between 0 and 1, got ", o->settings.level);
    return run(*o, "horner diagnose --model " + fs::path(o->model).filename().string() +
                       " --text " + fs::path(o->text).filename().string() +
                       (o->what_if ? " --what-if" : "") + (o->asked.per_head ? " --per-head" : ""));
  };
}

}  // namespace horner::cli
