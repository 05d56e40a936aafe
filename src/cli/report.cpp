// horner report: one page for all runs in the given folders.
#include "cli/report.h"

#include "cli/options.h"
#include "files/files.h"
#include "files/json.h"
#include "files/output.h"
#include "study/findings.h"
#include "study/study_report.h"

namespace horner::cli {

namespace fs = std::filesystem;

struct ReportOptions {
  std::vector<std::string> folders;
  std::string out, title;
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

study::Origin origin_of(const fs::path& folder) {
  study::Origin o{.title = "Runs in " + folder.string(), .version = HORNER_VERSION};
  if (!fs::exists(folder / "origin.json")) return o;
  const train::Json j = files::read_json(folder / "origin.json");
  o.title = j.value("title", o.title), o.command = j.value("command", o.command);
  o.added = j.value("added", o.added);
  return o;
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
  option(app, "DIR", o->folders, "", "run folders, or folders that contain them")->required();
  option(app, "--out", o->out, "DIR", "folder for report.html and report.json [the first folder]");
  option(app, "--title", o->title, "TEXT", "title of the report");
  app.add_flag("--force", o->force, "replace a report.html or report.json that is not a report");
  app.add_flag("--json", o->json, "print the report's path, its findings and its runs as JSON");
  return [o] {
    const std::vector<fs::path> folders(o->folders.begin(), o->folders.end());
    const fs::path out = o->out.empty() ? folders[0] : fs::path(o->out);
    check_report(out, o->force);
    study::Origin origin = origin_of(folders[0]);
    if (!o->title.empty()) origin.title = o->title;
    const auto runs = study::read_runs(folders);
    for (const std::string& sentence : study::repeated_steps(runs))
      std::cerr << "warning: " << sentence << "\n";
    const auto [r, page] = write_study_report(runs, origin, out);
    if (o->json)
      std::cout << summary_json(runs, r, page).dump(2, ' ', false, Json::error_handler_t::replace)
                << "\n";
    else
      std::cout << page << "\n";
    return Outcome::fine;
  };
}

}  // namespace horner::cli
