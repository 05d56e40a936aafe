// What the commands share that write reports.
#pragma once

#include <filesystem>
#include <string>

#include "report/report.h"
#include "study/study_report.h"

namespace horner::cli {

// Writes report.json and, where this program has the page, report.html; returns the file to open.
std::string write_report(const report::Report&, const std::filesystem::path& out,
                         const std::string& name = "report");

// The files of a study's report: what it found, and speed and memory apart from that.
inline constexpr const char* kStudyPages[] = {"report", "speed"};
struct StudyReport {
  report::Report found;
  std::string page;  // to open
};
StudyReport write_study_report(const std::vector<study::RunData>&, const study::Origin&,
                               const std::filesystem::path& out);

// Throws if write_report would replace files that are not reports, or inputs.
void check_report(const std::filesystem::path& out, bool force,
                  const std::vector<std::filesystem::path>& inputs = {});

// Title and command, from the origin.json that a study leaves in its folder.
study::Origin origin_of(const std::filesystem::path& folder);

}  // namespace horner::cli
