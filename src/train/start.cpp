#include "train/start.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <set>

#include "attn/split.h"
#include "core/check.h"
#include "core/names.h"
#include "files/json.h"
#include "files/output.h"
#include "train/checkpoint.h"
#include "train/context.h"

namespace horner::train {

namespace fs = std::filesystem;

static Json changed(const Json& given, const Settings& s) {
  Json config = nn::changed_config(given, s.model_config);
  if (!s.attention.empty()) config["horner_variant"] = s.attention;
  return config;
}

nn::ModelConfig start_config(const Settings& s) {
  const std::vector<std::string> presets = nn::preset_names();
  if (std::find(presets.begin(), presets.end(), s.model) != presets.end())
    return nn::model_config(changed(nn::preset(s.model).json, s));
  const fs::path path = s.model, file = fs::is_directory(path) ? path / "config.json" : path;
  check(fs::is_regular_file(file), "no model '", s.model, "': it is neither a preset (",
        quoted(presets), ") nor a folder or config.json");
  return nn::model_config(changed(files::read_json(file), s));
}

nn::Model start_model(const Settings& s) {
  const nn::ModelConfig config = start_config(s);
  const bool preset = std::ranges::count(nn::preset_names(), s.model) > 0;
  return !preset && fs::is_directory(s.model) ? nn::load_model(s.model, config, s.seed)
                                              : nn::random_model(config, s.seed);
}

// Whether a few sequences are those of rank 0.
static bool same_sequences(const Group& group, const Source& source, Split split, int64_t T) {
  constexpr int64_t kSome = 4;
  const at::Tensor mine = at::empty({kSome, T}, at::kLong);
  std::vector<int64_t> targets(static_cast<size_t>(T));
  for (int64_t i = 0; i < kSome; ++i)
    source.fill(split, uint64_t(i), {mine.data_ptr<int64_t>() + i * T, size_t(T)}, targets);
  const at::Tensor theirs = mine.clone();
  group.broadcast({theirs});
  return at::equal(theirs, mine);
}

void check_same(const Group& group, const Settings& s, const Source& source) {
  if (group.ranks().world == 1) return;
  std::string text = to_json(s).dump(-1, ' ', false, Json::error_handler_t::replace);
  const Json own = Json::parse(text);
  const at::Tensor size = at::full({}, int64_t(text.size()), at::kLong);
  group.broadcast({size});
  text.resize(size_t(size.item<int64_t>()));
  group.broadcast({at::from_blob(text.data(), {int64_t(text.size())}, at::kByte)});
  const Json first = Json::parse(text);
  static const std::set<std::string> kOfMachine = {"threads", "data", "validation"};
  for (const Setting& row : setting_table()) {
    const Json &x = first.at(row.name), &y = own[row.name];
    check(x == y || kOfMachine.contains(row.name), "rank 0 has '", row.name, "' ", x.dump(),
          ", but rank ", group.ranks().rank, " has ", y.dump(),
          "; start all processes with the same options");
  }
  share_of(s, context_of(group.ranks(), s.context_parallel));  // a length beyond all memory
  // Machines may have copies of the data in folders of their own.
  const auto check_file = [&](const char* name, Split split) {
    check(same_sequences(group, source, split, s.length), "rank ", group.ranks().rank,
          " has other '", name, "' (", own[name].dump(), ") than rank 0 (", first[name].dump(),
          "); start all processes with the same data");
  };
  check_file("data", Split::train);
  if (s.evaluate_sequences > 0) check_file("validation", Split::validation);
}

void check_model(const Settings& s, const nn::ModelConfig& c) {
  const int64_t parts = s.context_parallel;
  for (const nn::LayerConfig& layer : c.layers)
    for (const nn::Part& part : layer.parts)
      if (const std::string reason = attn::why_no_split(part.attention); parts > 1)
        check(reason.empty(), "variant '", part.variant, "' cannot divide a sequence over ", parts,
              " ranks (context-parallel): ", reason,
              "; choose another --attention, or remove --context-parallel");
  const auto check_length = [&](const char* name, int64_t T) {
    check(T % parts == 0, "'", name, "' must be a multiple of 'context-parallel', ", parts,
          ", not ", T);
    check(c.family->rotary() || T <= c.positions, "'", name, "' must be at most ", c.positions,
          ", the learned positions of the model, not ", T);
    for (const nn::LayerConfig& layer : c.layers)
      check(parts == 1 || T / parts >= layer.around().short_conv - 1, "'", name, "' ", T, " gives ",
            T / parts, " tokens to each of the ", parts, " ranks of a sequence, and short ",
            "convolutions need ", layer.around().short_conv - 1,
            "; choose a larger one or a smaller --context-parallel");
  };
  check_length("length", s.length);
  if (s.evaluate_sequences > 0)
    for (const int64_t T : evaluated_lengths(s)) check_length("evaluate-lengths", T);
}

std::string trace_of(const fs::path& folder) {
  if (const auto last = newest_checkpoint(folder)) return last->filename().string();
  if (has_lines(folder / "metrics.jsonl")) return "metrics.jsonl";
  return fs::exists(folder / "result.json") ? "result.json" : "";
}

void check_folder(const fs::path& folder, Begin begin) {
  const bool known = fs::exists(folder / "settings.json");
  const std::string trace = trace_of(folder);
  check(known || trace.empty(), folder.string(), " has the ", trace,
        " of a run, but not its settings.json; restore that file, or choose another --out");
  check(known || begin != Begin::resume, "no run to resume: ", folder.string(),
        fs::exists(folder) ? " has no settings.json" : " does not exist",
        "; start the run without --resume");
  check(trace.empty() || begin != Begin::start, folder.string(), " already holds a run (", trace,
        "); add --resume, or choose another --out");
}

// Steps that a folder's run has done and kept.
static int64_t steps_done(const fs::path& folder) {
  const fs::path result = folder / "result.json";
  const auto last = newest_checkpoint(folder);
  return std::max(last ? step_of(*last) : 0,
                  fs::exists(result) ? files::read_json(result).value("steps", int64_t(0)) : 0);
}

// Whether a file names every setting, as those of runs do.
static bool is_settings(std::string_view text) {
  const Json j = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  return j.is_object() && std::ranges::all_of(setting_table(), [&](const Setting& row) {
           return j.contains(row.name) ||
                  (row.name == std::string("micro-batch") && j.contains("at-once"));
         });
}

bool check_run(const fs::path& folder, const Settings& s, Begin begin) {
  check_folder(folder, begin);
  const fs::path file = folder / "settings.json";
  if (trace_of(folder).empty()) {
    files::check_output({.path = file, .ours = is_settings, .otherwise = "choose another --out"});
    return true;
  }
  Settings before;
  read_settings(before, files::read_json(file), file.string());
  const Json old = to_json(before), given = to_json(s);
  for (const Setting& row : setting_table()) {
    const bool schedule = row.on_resume == Change::schedule && s.decay_steps == 0;
    check((row.on_resume != Change::never && !schedule) || old[row.name] == given[row.name],
          folder.string(), " holds a run with ", row.name, " ", old[row.name].dump(), ", not ",
          given[row.name].dump(),
          schedule ? ", and its learning rate was planned for these (decay-steps is not set)" : "",
          "; choose another --out");
  }
  const int64_t done = steps_done(folder);
  check(done <= s.steps, folder.string(), " has done ", done,
        " steps: 'steps' must be at least that, not ", s.steps);
  return !fs::exists(folder / "result.json") || done < s.steps;
}

}  // namespace horner::train
