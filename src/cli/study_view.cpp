#include "cli/study_view.h"

#include <unistd.h>

#include "cli/run.h"
#include "study/leases.h"

namespace horner::cli {

using study::RunState;
using study::Status;

Row Live::row(size_t i, const RunState& p) const {
  const int64_t steps = study.runs[i].settings.steps;
  return {study.runs[i].name, std::to_string(p.step) + "/" + std::to_string(steps),
          p.step > 0 ? formatted("%.4f", p.loss) : "",
          p.step > 0 ? count_text(std::round(p.tokens_per_second)) : "",
          p.status == Status::running && p.step > 0 ? duration_text(p.seconds_left) : ""};
}

void Live::draw(const std::vector<RunState>& all) {
  Table t{.head = {"run", "step", "loss", "tokens/s", "time left"}, .right = {1, 2, 3, 4}};
  size_t done = 0, failed = 0, elsewhere = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    done += all[i].status == Status::finished || all[i].status == Status::given_up;
    failed += all[i].status == Status::failed;
    if (all[i].status != Status::running) continue;
    if (all[i].here)
      t.rows.push_back(row(i, all[i]));
    else
      ++elsewhere;
  }
  std::string out = lines > 0 ? "\033[" + std::to_string(lines) + "A\r\033[J" : "";
  const std::string table =
      t.rows.empty() ? "" : text(t, size_t(std::max(40, int(terminal_width(STDERR_FILENO)) - 1)));
  const std::string status = std::to_string(done) + " of " + std::to_string(all.size()) +
                             " runs done" +
                             (elsewhere ? ", " + std::to_string(elsewhere) + " elsewhere" : "") +
                             (failed ? ", " + red(std::to_string(failed) + " failed") : "") + ", " +
                             duration_text(clock.ms() / 1e3);
  lines = size_t(std::count(table.begin(), table.end(), '\n')) + 1;
  std::cerr << out << table << faint(status) << "\n" << std::flush;
}

void Live::show(const std::vector<RunState>& all) {
  const bool live = cli::live();
  seen.resize(all.size(), Status::waiting);
  if (live && since.ms() < 400 && lines > 0) return;
  const bool time = !live && since.ms() > 30000;
  if (live || time) since = Stopwatch();
  for (size_t i = 0; i < all.size(); ++i) {
    const RunState& p = all[i];
    const bool changed = p.here && p.status != seen[i] && p.status != Status::running;
    seen[i] = p.status;
    if (!changed && !(time && p.here && p.status == Status::running)) continue;
    if (live && lines > 0) std::cerr << "\033[" << lines << "A\r\033[J", lines = 0;
    static const char* const kWords[] = {"to be tried again", "",        "done", "FAILED",
                                         "interrupted",       "given up"};
    const Row r = row(i, p);
    std::cerr << r[0] << "  " << r[1];
    if (p.step > 0) std::cerr << "  loss " << r[2] << "  " << r[3] << " tokens/s";
    std::cerr << "  "
              << (p.status != Status::running ? kWords[size_t(p.status)]
                  : p.step > 0                ? r[4] + " left"
                                              : "starting")
              << (p.why.empty() ? "" : ": " + p.why) << "\n";
  }
  if (live) draw(all);
}

Json summary_json(const study::Study& s, const std::vector<RunState>& all,
                  const std::vector<std::string>& findings, const std::string& page) {
  static const char* const kWords[] = {"waiting", "running",     "finished",
                                       "failed",  "interrupted", "given up"};
  Json runs = Json::array();
  for (size_t i = 0; i < all.size(); ++i)
    runs.push_back({{"name", s.runs[i].name},
                    {"status", kWords[size_t(all[i].status)]},
                    {"step", all[i].step},
                    {"loss", all[i].step > 0 ? Json(all[i].loss) : Json()},
                    {"why", all[i].why}});
  return {{"title", s.title}, {"report", page}, {"findings", findings}, {"runs", runs}};
}

// Who has a run, and since when nothing was heard of it.
static Json standing(const study::Run& r) {
  const study::Seen seen = study::newest_try(r.folder);
  const bool finished = study::is_finished(r);
  const study::Lease& l = seen.lease;
  Json out = {{"name", r.name}, {"finished", finished}, {"state", "waiting"}};
  const std::string why = study::why_given_up(r);
  if (finished)
    out["state"] = "done";
  else if (!why.empty())
    out["state"] = "given up", out["why"] = why;
  else if (l.state == "failed" && l.crashes >= study::kMostCrashes)
    out["state"] = "failed";
  else if (l.state == "released" || l.state == "failed")
    out["state"] = "interrupted";
  else if (seen.number > 0)
    out["state"] = "running";
  if (finished || seen.number == 0) return out;
  out["folder"] = seen.folder.string();
  if (!l.why.empty()) out["why"] = l.why;
  if (l.state != "running") return out;
  out["host"] = l.host, out["pid"] = l.pid, out["job"] = l.job;
  if (const double age = study::heartbeat_age(seen.folder); age >= 0) out["heartbeat_age"] = age;
  return out;
}

static std::string standing_text(const Json& j) {
  const std::string state = j["state"];
  if (state == "waiting") return "";
  std::string out = "  " + state;
  if (j.contains("host")) {
    out += " on " + j["host"].get<std::string>() + ", process " + std::to_string(int64_t(j["pid"]));
    if (j["job"] != "") out += ", job " + j["job"].get<std::string>();
    if (j.contains("heartbeat_age"))
      out += ", heartbeat " + duration_text(j["heartbeat_age"]) + " ago";
  }
  return out + (j.contains("why") ? ": " + j["why"].get<std::string>() : "");
}

Outcome list_runs(const study::Study& s, bool json) {
  if (!s.about.empty()) std::cerr << s.about << "\n";
  Json listed = Json::array();
  for (const study::Run& r : s.runs) {
    listed.push_back(standing(r));
    if (!json) std::cout << r.name << standing_text(listed.back()) << "\n";
  }
  return json ? print_json({{"title", s.title}, {"runs", listed}}) : Outcome::fine;
}

}  // namespace horner::cli
