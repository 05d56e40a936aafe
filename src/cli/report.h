// What the commands share that write reports.
#pragma once

#include <filesystem>
#include <string>

#include "report/report.h"
#include "study/study_report.h"

namespace horner::cli {

// Writes report.json and, where this program has the page, report.html; returns the file to open.
std::string write_report(const report::Report&, const std::filesystem::path& out);

// Throws if write_report would replace files that are not reports, or inputs.
void check_report(const std::filesystem::path& out, bool force,
                  const std::vector<std::filesystem::path>& inputs = {});

// Title and command, from the origin.json that a study leaves in its folder.
study::Origin origin_of(const std::filesystem::path& folder);

}  // namespace horner::cli
