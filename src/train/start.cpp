#include "train/start.h"

#include "core/check.h"
#include "core/names.h"
#include "files/json.h"
#include "train/checkpoint.h"

namespace horner::train {

namespace fs = std::filesystem;

static Json changed(Json config, const Settings& s) {
  config.merge_patch(s.model_config);
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
  check(fs::is_regular_file(path), "no model '", s.model, "': neither a preset (", quoted(presets),
        ") nor a folder nor a config.json");
  return nn::random_model(nn::model_config(changed(files::read_json(path), s)), s.seed);
}

// What a resumed run may not change; steps move the schedule unless its end is given.
static bool may_change(const Setting& row, const Settings& s) {
  return !row.fixed && (std::string(row.name) != "steps" || s.decay_steps > 0);
}

bool claim_folder(const fs::path& folder, const Settings& s, bool resume) {
  const fs::path file = folder / "settings.json";
  const Json now = to_json(s);
  const bool there = fs::exists(file);
  check(resume || !there, folder.string(),
        " has a run already: go on with --resume, or give another --out");
  if (there) {
    const Json before = files::read_json(file);
    for (const Setting& row : setting_table())
      check(may_change(row, s) || before.value(row.name, now[row.name]) == now[row.name],
            folder.string(), " was begun with ", row.name, " ", before[row.name].dump(), ", not ",
            now[row.name].dump(), "; give another --out for a run with that");
    const fs::path result = folder / "result.json";
    if (fs::exists(result) && files::read_json(result).value("steps", int64_t(0)) >= s.steps)
      return false;
  }
  fs::create_directories(folder);
  files::write_json(file, now);
  return true;
}

}  // namespace horner::train
