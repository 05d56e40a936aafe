// Rows of `horner bench attention` measured by an external command.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "attn/inputs.h"
#include "cli/bench.h"
#include "cli/run.h"
#include "core/check.h"
#include "files/json.h"

namespace horner::cli {

using Object = nlohmann::json;

static instruments::Timing timing(const Object& ms, const instruments::Case& c, bool backward) {
  const double t = ms.get<double>();
  return {.ms = t, .best_ms = t, .flop = instruments::flop({}, c, backward), .runs = 1};
}

static BenchRow row_of(const Object& x, const instruments::Case& c) {
  BenchRow row{x.at("variant"), x.at("execution"), {}};
  if (x.contains("why_not")) {
    row.result.standing = instruments::Standing::cannot_run;
    row.result.why_not = x["why_not"];
    return row;
  }
  row.result.forward = timing(x.at("forward_ms"), c, false);
  if (c.gradients) row.result.both = timing(x.at("both_ms"), c, true);
  row.result.extra_bytes = x.at("extra_bytes");
  return row;
}

static std::vector<std::string> lines_of(std::FILE* pipe) {
  std::vector<std::string> lines(1);
  for (int c; (c = std::fgetc(pipe)) != EOF;) {
    if (c == '\n')
      lines.emplace_back();
    else
      lines.back() += char(c);
  }
  return lines;
}

std::vector<BenchRow> peers_of(const std::string& command, const instruments::Case& c) {
  std::ostringstream line;
  line << command << " --shape " << c.B << "," << c.H << "," << c.T << "," << c.D << " --dtype "
       << attn::dtype_name(c.dtype) << " --device " << c.device.str()
       << (c.gradients ? "" : " --forward-only");
  std::FILE* pipe = popen(line.str().c_str(), "r");
  horner::check(pipe != nullptr, "cannot start '", line.str(), "'");
  const std::vector<std::string> lines = lines_of(pipe);
  const int status = pclose(pipe);
  horner::check(status == 0 || stopped(), "--peers: '", line.str(),
                "' failed; run it by itself to see why");
  std::vector<BenchRow> rows;
  for (const std::string& text : lines) {
    if (!text.starts_with("{")) continue;  // what else its libraries print
    try {
      rows.push_back(row_of(Object::parse(text), c));
    } catch (const Object::exception& e) {
      fail("--peers: invalid row '", text, "' (", files::problem_of(e), ")");
    }
  }
  return rows;
}

}  // namespace horner::cli
