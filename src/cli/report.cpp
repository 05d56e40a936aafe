// horner report: one page for all runs in the given folders.
#include "cli/report.h"

#include "cli/options.h"
#include "core/check.h"
#include "files/files.h"
#include "files/json.h"
#include "files/output.h"
#include "study/findings.h"
#include "study/numbers.h"
#include "study/study_report.h"

namespace horner::cli {

namespace fs = std::filesystem;

struct ReportOptions {
  std::vector<std::string> folders;
  std::string out, title, numbers;
  bool force = false, json = false;
};

std::string write_report(const report::Report& r, const fs::path& out, const std::string& name) {
  fs::create_directories(out);
  const auto write = [&](const char* ending, const std::string& text) {
    const fs::path path = out / (name + ending);
    files::NewFile file(path);
    file.write(text);
    file.commit();
    return path.string();
  };
  const std::string data =
      write(".json", to_json(r).dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
  if (report::has_page()) return write(".html", to_html(r));
  std::cerr << "horner was built without npm and cannot write " << name << ".html; the data is in "
            << data << ". Install npm, rebuild horner and run 'horner report' again.\n";
  return data;
}

StudyReport write_study_report(const std::vector<study::RunData>& runs, const study::Origin& origin,
                               const fs::path& out) {
  write_report(study::make_speeds(runs, origin), out, kStudyPages[1]);
  const report::Report found = study::make_report(runs, origin);
  return {found, write_report(found, out, kStudyPages[0])};
}

void check_report(const fs::path& out, bool force, const std::vector<fs::path>& inputs) {
  const auto is_page = [](std::string_view text) {
    return text.find(R"(<script type="application/json" id="report">)") != text.npos;
  };
  const auto is_data = [](std::string_view text) {
    return text.starts_with(R"({"title":)") && text.find(R"(,"sections":[)") != text.npos;
  };
  for (const std::string name : kStudyPages) {
    files::check_output({.path = out / (name + ".html"), .ours = is_page, .inputs = inputs}, force);
    files::check_output({.path = out / (name + ".json"), .ours = is_data, .inputs = inputs}, force);
  }
}

study::Origin origin_of(const fs::path& given) {
  const study::Origin o{.title = "Runs in " + given.string(), .version = HORNER_VERSION};
  const fs::path file = fs::is_regular_file(given) ? given : given / "origin.json";
  return fs::exists(file) ? study::origin_of(files::read_json(file), o) : o;
}

// Written beside a report: small enough to be kept where the folders of the runs are not.
static void write_numbers(const fs::path& path, const Json& numbers) {
  if (!path.parent_path().empty()) fs::create_directories(path.parent_path());
  std::string text = "{";  // a line for every field and every run
  for (const auto& [name, value] : numbers.items()) {
    text += (text.size() > 1 ? ",\n" : "") + Json(name).dump() + ": ";
    if (name != "runs") {
      text += value.dump();
      continue;
    }
    text += "[";
    for (const Json& run : value) text += (text.back() == '[' ? "\n" : ",\n") + run.dump();
    text += "]";
  }
  files::NewFile file(path);
  file.write(text + "}\n");
  file.commit();
}

static Json summary_json(const std::vector<study::RunData>& runs, const report::Report& r,
                         const std::string& page) {
  Json all = Json::array();
  for (const study::RunData& run : runs)
    all.push_back({{"folder", run.folder.string()},
                   {"finished", run.finished},
                   {"attention", run.settings.attention},
                   {"result", run.result}});
  return {{"title", r.title}, {"report", page}, {"findings", r.summary}, {"runs", all}};
}

Action report(CLI::App& app) {
  auto o = std::make_shared<ReportOptions>();
  option(app, "DIR", o->folders, "",
         "run folders, folders that contain them, or files that --numbers wrote")
      ->required();
  option(app, "--out", o->out, "DIR", "folder for report.html and report.json [the first folder]");
  option(app, "--title", o->title, "TEXT", "title of the report");
  option(app, "--numbers", o->numbers, "FILE",
         "also write all runs into one small JSON file, from which 'horner report FILE --out DIR' "
         "makes the same page");
  app.add_flag("--force", o->force, "replace a report.html or report.json that is not a report");
  app.add_flag("--json", o->json, "print the report's path, its findings and its runs as JSON");
  return [o] {
    const std::vector<fs::path> folders(o->folders.begin(), o->folders.end());
    horner::check(!o->out.empty() || !fs::is_regular_file(folders[0]), "'", folders[0].string(),
                  "' is a file: add --out DIR, the folder for the report");
    const fs::path out = o->out.empty() ? folders[0] : fs::path(o->out);
    check_report(out, o->force);
    std::vector<fs::path> files;
    for (const fs::path& each : folders)
      if (fs::is_regular_file(each)) files.push_back(each);
    if (!o->numbers.empty())
      files::check_output({.path = o->numbers, .ours = study::is_numbers_file, .inputs = files},
                          o->force);
    study::Origin origin = origin_of(folders[0]);
    if (!o->title.empty()) origin.title = o->title;
    const auto runs = study::read_runs(folders);
    for (const std::string& sentence : study::repeated_steps(runs))
      std::cerr << "warning: " << sentence << "\n";
    const auto [r, page] = write_study_report(runs, origin, out);
    if (!o->numbers.empty()) write_numbers(o->numbers, study::to_json(runs, origin));
    if (o->json)
      std::cout << summary_json(runs, r, page).dump(2, ' ', false, Json::error_handler_t::replace)
                << "\n";
    else
      std::cout << page << "\n";
    return Outcome::fine;
  };
}

}  // namespace horner::cli
