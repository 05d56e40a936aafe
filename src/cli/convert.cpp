// horner convert: a trained model with states in some of its heads and caches in the others.
#include "convert/convert.h"

#include <ATen/ATen.h>

#include "cli/data.h"
#include "cli/model.h"
#include "cli/options.h"
#include "cli/report.h"
#include "cli/run.h"
#include "cli/table.h"
#include "convert/convert_report.h"
#include "core/check.h"
#include "core/names.h"
#include "core/stopwatch.h"
#include "files/json.h"
#include "files/lock.h"
#include "nn/checkpoint.h"
#include "nn/generate.h"

namespace horner::cli {

namespace fs = std::filesystem;

struct ConvertOptions {
  convert::Settings s;
  std::string out, plan, until = "heal";
  bool json = false;
};

static nn::Model load_teacher(const fs::path& folder, const convert::Settings& s) {
  nn::Model m = load_model(folder, cli::device(s.device), at::kFloat);
  for (size_t i = 0; i < m.config.layers.size(); ++i) {
    const nn::LayerConfig& l = m.config.layers[i];
    const bool wanted =
        s.layers.empty() || std::ranges::find(s.layers, int64_t(i)) != s.layers.end();
    horner::check(!wanted || (l.uniform() && l.around().short_conv == 0 && !l.around().mamba &&
                              !l.around().raw_decay && !l.around().tied_keys),
                  "layer ", i, " has '", l.variant,
                  "', which convert does not take apart; choose others with --layers");
    horner::check(!wanted || l.parts[0].attention.softcap == 0, "layer ", i,
                  " caps its scores, which no form with a state can do");
  }
  for (const int64_t i : s.layers)
    horner::check(i >= 0 && i < int64_t(m.layers.size()), "no layer ", i, "; the model has 0 to ",
                  m.layers.size() - 1);
  return m;
}

// What the folder was begun with, so that resuming cannot mix two conversions.
static void check_settings(const fs::path& work, const convert::Settings& s) {
  const fs::path file = work / "settings.json";
  const Json now = convert::to_json(s);
  if (!fs::exists(file)) return files::write_json(file, now);
  const Json before = files::read_json(file);
  for (const auto& [name, value] : now.items())
    horner::check(before.value(name, Json()) == value, "the conversion in ", work.string(),
                  " has '", name, "' ", before.value(name, Json()).dump(), ", not ", value.dump(),
                  "; use the same options to resume it, or another --out");
}

static std::vector<convert::Sample> samples_of(const nn::Model& teacher, const nn::Model& converted,
                                               const text::Tokenizer& words) {
  constexpr int64_t kTokens = 40;
  std::vector<convert::Sample> out;
  for (const char* prompt :
       {"It was the best of times, it was", "The old man looked at the sea and"}) {
    const std::vector<int64_t> tokens = model_tokens(words, prompt);
    const auto continued = [&](const nn::Model& m) {
      text::DecodeStream stream(words);
      std::string written;
      nn::generate(m, {{tokens, kTokens}}, {.temperature = 0}, 1,
                   [&](size_t, const nn::Generated& g) {
                     if (!g.ended) written += stream.add(text::Token(g.tokens.back()));
                     return true;
                   });
      return written + stream.rest();
    };
    out.push_back({prompt, continued(teacher), continued(converted)});
  }
  return out;
}

static void copy_tokenizer(const fs::path& from, const fs::path& to) {
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                           "generation_config.json"})
    if (fs::exists(from / name))
      fs::copy_file(from / name, to / name, fs::copy_options::overwrite_existing);
}

static Outcome run(const ConvertOptions& o, const std::string& command) {
  const fs::path folder = model_folder(o.s.model), out = o.out, work = out / "work";
  horner::check(!fs::exists(out) || fs::exists(work / "settings.json") || fs::is_empty(out), "'",
                out.string(), "' is not empty and not a conversion; choose another --out");
  const nn::Model teacher = load_teacher(folder, o.s);
  const train::Source source = train::text_source(o.s.data, o.s.seed, o.s.validation);
  source.check_tokens(teacher.config.V);
  const text::Tokenizer words = model_tokenizer(folder, teacher.config.V);
  const std::vector<int64_t> around = model_tokens(words, "");
  const int64_t begin = around.empty() ? -1 : around[0];
  std::optional<convert::Plan> given;
  if (!o.plan.empty()) given = convert::read_plan(files::read_json(o.plan), teacher.config);
  if (!given)
    for (const std::string& form : o.s.forms)
      convert::converted_config(teacher.config, convert::assign_all(teacher.config, form, {0}),
                                o.s.near);  // a form that cannot be is an error before the work
  const files::FolderLock lock(work);
  check_settings(work, o.s);
  catch_interrupt();
  Progress progress{"convert", 0};
  const convert::Hooks hooks{stopped, [&](const std::string& what) {
                               progress.all = progress.done + 1;
                               progress.show(what);
                             }};
  nn::Run run_as;
  if (o.s.dtype == "bfloat16") run_as.compute = at::kBFloat16;
  const Stopwatch watch;
  try {
    const convert::Result r =
        convert::convert({o.s, teacher, source, run_as, work, hooks, begin}, o.until, given);
    progress.clear();
    Json numbers = convert::to_json(r);
    numbers["seconds"] = watch.ms() / 1000;
    std::vector<convert::Sample> samples;
    if (r.model) {
      nn::save_model(*r.model, out);
      copy_tokenizer(folder, out);
      samples = samples_of(teacher, *r.model, words);
    }
    files::write_json(out / "convert.json", numbers, 1);
    if (o.json) return print_json(numbers);
    if (o.until == "measure") {
      std::cout << (work / "measures.json").string() << "\n";
      return Outcome::fine;
    }
    const std::string page =
        write_report(convert::make_report(r, teacher.config, samples, command), out);
    for (const std::string& sentence : convert::findings(r)) std::cout << paragraph(sentence);
    std::cout << "\n" << page << faint(formatted("  (%.1f s)", watch.ms() / 1000)) << "\n";
    return Outcome::fine;
  } catch (const convert::Stopped&) {
    progress.clear();
    std::cerr << "interrupted; run the same command to resume\n";
    return Outcome::interrupted;
  }
}

static void add_training(CLI::App& app, convert::Settings& s) {
  non_negative(app, "--trial-steps", s.trial_steps, "N",
               "steps in which every head tries every form [40]");
  non_negative(app, "--transfer-steps", s.transfer_steps, "N",
               "steps in which converted heads learn what the teacher's give [100]");
  non_negative(app, "--heal-steps", s.heal_steps, "N", "steps of the whole model [100]");
  positive(app, "--batch", s.batch, "N", "sequences of a step [2]");
  positive(app, "--length", s.length, "T", "tokens of a sequence [512]");
  option(app, "--transfer-rate", s.transfer_rate, "X",
         "learning rate of trials and transfer [0.01]");
  option(app, "--heal-rate", s.heal_rate, "X", "learning rate of the whole model [0.0001]");
  option(app, "--distil", s.distil, "X",
         "share of the teacher's predictions in the loss of the whole model, 0 to 1 [0.5]");
  non_negative(app, "--rank", s.rank, "N",
               "rank of the changes to projections; 0: all weights learn [16]");
  app.add_flag("!--no-control", s.control, "do not tune the teacher on the same tokens");
  app.add_flag("--objections", s.objections,
               "also tune near keys only, state only and no heads, for comparison");
  positive(app, "--evaluate-sequences", s.evaluate_sequences, "N", "validation sequences [16]");
}

Action convert(CLI::App& app) {
  const auto o = std::make_shared<ConvertOptions>();
  convert::Settings& s = o->s;
  option(app, "--model", s.model, "DIR", "Hugging Face folder, or run of 'horner train'")
      ->required();
  option(app, "--data", s.data, "FILE", "token file to learn from ('horner data pack')")
      ->required();
  option(app, "--validation", s.validation, "FILE",
         "token file to compare on [a twentieth of --data, held out]");
  option(app, "--out", o->out, "DIR", "folder of the result, and of its stages")->required();
  std::vector<std::string> kinds;
  for (const convert::FormKind& k : convert::form_kinds()) kinds.push_back(k.name);
  option(app, "--forms", s.forms, "FORM",
         "forms that a head may take [hedgehog64 taylor1 delta]; others: near, state");
  positive(app, "--near", s.near, "N", "keys that a converted head still sees exactly [64]");
  option(app, "--layers", s.layers, "I", "layers to convert [all]");
  CLI::Option* const share =
      option(app, "--share", s.share, "X", "budget: share of the teacher's cache [0.125]");
  CLI::Option* const bytes =
      option(app, "--bytes", s.bytes, "N", "budget in bytes")->excludes(share);
  positive(app, "--tokens", s.tokens, "N", "context length of the budget [8192]");
  non_negative(app, "--keep", s.keep, "N", "keep the caches of N heads, whatever the budget");
  app.get_option("--keep")->excludes(share)->excludes(bytes);
  std::vector<std::string> measures{"cost", "random", "uniform"};
  for (const convert::Measure& m : convert::measure_table()) measures.push_back(m.name);
  choices(option(app, "--by", s.by, "NAME", "measure of the heads that keep their caches [kl]"),
          {measures});
  option(app, "--plan", o->plan, "FILE", "a plan.json instead of measures and trials");
  choices(option(app, "--until", o->until, "STAGE", "the last stage to run [heal]"),
          {{std::begin(convert::kStages), std::end(convert::kStages)}});
  app.add_flag(
      "--costs", s.costs,
      "also measure the cost of every head in every form, and compare the measures with it");
  positive(app, "--measure-tokens", s.measure_tokens, "T", "tokens that measures read [512]");
  add_training(app, s);
  option(app, "--seed", s.seed, "N", "random seed [0]");
  choices(option(app, "--device", s.device, "NAME", "device [cpu]"), {device_names()});
  choices(option(app, "--dtype", s.dtype, "NAME", "dtype of products [float32]"),
          {{"float32", "bfloat16"}});
  app.add_flag("--json", o->json, "print the numbers as JSON");
  return [o] {
    const convert::Settings& s = o->s;
    horner::check(s.distil >= 0 && s.distil <= 1, "--distil must be 0 to 1, got ", s.distil);
    horner::check(s.share > 0 && s.bytes >= 0, "--share and --bytes must be positive, got ",
                  s.share, " and ", s.bytes);
    horner::check(s.length > s.near + 64, "--length must exceed --near by more than 64, got ",
                  s.length, " and ", s.near, ": otherwise no key is far");
    convert::ranked({.heads = {{}}}, s.by, 0);  // an unknown measure is an error before the work
    const auto* stage = std::ranges::find(convert::kStages, o->until);
    horner::check(stage != std::end(convert::kStages), "--until must be one of ",
                  quoted({std::begin(convert::kStages), std::end(convert::kStages)}), ", got '",
                  o->until, "'");
    horner::check(s.measure_tokens > 16, "--measure-tokens must be more than 16, got ",
                  s.measure_tokens);
    return run(*o, "horner convert --model " + fs::path(s.model).filename().string() + " --data " +
                       fs::path(s.data).filename().string());
  };
}

}  // namespace horner::cli
