#include "train/start.h"

#include "core/check.h"
#include "core/names.h"
#include "files/json.h"
#include "train/checkpoint.h"

namespace horner::train {

namespace fs = std::filesystem;

static Json changed(const Json& given, const Settings& s) {
  Json config = nn::changed_config(given, s.model_config);
  if (!s.attention.empty()) config["horner"]["attention"] = s.attention;
  return config;
}

nn::Model start_model(const Settings& s) {
  const std::vector<std::string> presets = nn::preset_names();
  if (std::find(presets.begin(), presets.end(), s.model) != presets.end())
    return nn::random_model(nn::model_config(changed(nn::preset(s.model).json, s)), s.seed);
  const fs::path path = s.model;
  if (fs::is_directory(path))
    return nn::load_model(
        path, nn::model_config(changed(files::read_json(path / "config.json"), s)), s.seed);
  check(fs::is_regular_file(path), "no model '", s.model, "': it is neither a preset (",
        quoted(presets), ") nor a folder or config.json");
  return nn::random_model(nn::model_config(changed(files::read_json(path), s)), s.seed);
}

void check_same_run(const fs::path& folder, const Settings& now, bool fixed_steps) {
  const fs::path file = folder / "settings.json";
  if (!fs::exists(file)) return;
  Settings before;
  read_settings(before, files::read_json(file), file.string());
  const Json old = to_json(before), given = to_json(now);
  for (const Setting& row : setting_table()) {
    const bool fixed = row.fixed || (fixed_steps && std::string(row.name) == "steps");
    check(!fixed || old[row.name] == given[row.name], folder.string(), " holds a run with ",
          row.name, " ", old[row.name].dump(), ", not ", given[row.name].dump(),
          "; choose another --out");
  }
}

bool claim_folder(const fs::path& folder, const Settings& s, bool resume) {
  const fs::path file = folder / "settings.json", result = folder / "result.json";
  const bool there = fs::exists(file);
  check(resume || !there, folder.string(),
        " already holds a run; add --resume, or choose another --out");
  check_same_run(folder, s, /*fixed_steps=*/s.decay_steps == 0);  // they end the schedule then
  if (there && fs::exists(result) && files::read_json(result).value("steps", int64_t(0)) >= s.steps)
    return false;
  fs::create_directories(folder);
  files::write_json(file, to_json(s));
  return true;
}

}  // namespace horner::train
