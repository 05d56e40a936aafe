// horner bench decode: time per token at several context lengths, with a state or a KV cache.
#include <optional>
#include <sstream>

#include "cli/bench.h"
#include "cli/options.h"
#include "cli/run.h"
#include "cli/table.h"
#include "files/files.h"
#include "instruments/bench.h"
#include "instruments/bench_state.h"
#include "report/svg.h"

namespace horner::cli {

struct DecodeRow {
  attn::Variant variant;
  std::string wrong;
  std::vector<instruments::DecodeTime> times;
  double gflops = 0;  // of a finite state, in batches of 64 tokens
};

static std::vector<int64_t> contexts(int64_t longest) {
  std::vector<int64_t> out;
  for (int64_t n = 250; n < longest; n *= 4) out.push_back(n);
  out.push_back(longest);
  return out;
}

// From which context on `state` takes less time than `cache`, between measured ones on a line; 0:
// nowhere.
static double crossover(const DecodeRow& state, const DecodeRow& cache) {
  const size_t n = std::min(state.times.size(), cache.times.size());
  for (size_t i = 0; i < n; ++i) {
    const double gain = cache.times[i].us - state.times[i].us;
    if (gain < 0) continue;
    if (i == 0) return double(state.times[0].context);
    const double before = state.times[i - 1].us - cache.times[i - 1].us;
    const double a = double(state.times[i - 1].context), b = double(state.times[i].context);
    return a + (b - a) * before / (before + gain);
  }
  return 0;
}

static bool has_state(const DecodeRow& r) {
  return attn::why_no_state(r.variant.spec).empty();
}
static const DecodeRow* cache_row(const std::vector<DecodeRow>& rows) {
  for (const DecodeRow& r : rows)
    if (!has_state(r) && r.wrong.empty()) return &r;
  return nullptr;
}

static std::string label(const DecodeRow& r) {
  return r.variant.name + (has_state(r) ? "" : " (KV cache)");
}

static std::string on(const instruments::Stream& s) {
  return s.device.is_cpu() ? "" : " on " + s.device.str();
}

static report::Chart chart(const std::vector<DecodeRow>& rows, const instruments::Stream& s) {
  std::ostringstream title;
  title << "Decoding with a state and with a KV cache: B" << s.B << " H" << s.H << " D" << s.D
        << ", " << attn::dtype_name(s.dtype) << on(s);
  report::Chart out{.title = title.str(),
                    .x_label = "tokens of context",
                    .y_label = "µs for a token, all heads",
                    .log_x = true,
                    .log_y = true};
  for (const DecodeRow& r : rows) {
    report::Series& line = out.series.emplace_back(report::Series{label(r), {}});
    for (const instruments::DecodeTime& t : r.times)
      line.points.push_back({double(t.context), t.us});
  }
  return out;
}

static Json json(const std::vector<DecodeRow>& rows, const instruments::Stream& s, double peak) {
  Json results = Json::array();
  const DecodeRow* cache = cache_row(rows);
  for (const DecodeRow& r : rows) {
    Json times = Json::array();
    for (const instruments::DecodeTime& t : r.times)
      times.push_back({{"context", t.context}, {"us", t.us}, {"bytes", t.bytes}});
    Json row{{"variant", r.variant.name}, {"wrong", r.wrong}, {"times", times}};
    if (has_state(r)) {
      row["state_gflops"] = r.gflops;
      row["share_of_peak"] = r.gflops / peak;
      row["predicted_crossover"] = attn::decode_crossover(r.variant.spec, s.D, s.D);
      if (cache) row["measured_crossover"] = crossover(r, *cache);
    }
    results.push_back(row);
  }
  return {{"B", s.B},
          {"H", s.H},
          {"D", s.D},
          {"dtype", attn::dtype_name(s.dtype)},
          {"device", s.device.str()},
          {"peak_gflops", peak},
          {"results", results}};
}

static void print(const std::vector<DecodeRow>& rows, const instruments::Stream& s, double peak) {
  std::cout << "B" << s.B << " H" << s.H << " D" << s.D << ", " << attn::dtype_name(s.dtype)
            << on(s) << ": µs for a token after ...\n";
  Table table{.head = {"tokens"}, .right = {0}};
  size_t n = 0;
  for (const DecodeRow& r : rows) {
    table.right.push_back(table.head.size());
    table.head.push_back(label(r));
    n = std::max(n, r.times.size());
  }
  for (size_t i = 0; i < n; ++i) {
    Row row{""};
    for (const DecodeRow& r : rows) {
      if (i < r.times.size()) row[0] = std::to_string(r.times[i].context);
      row.push_back(i < r.times.size() ? formatted("%.1f", r.times[i].us) : "–");
    }
    table.rows.push_back(row);
  }
  std::cout << text(table);
  const DecodeRow* cache = cache_row(rows);
  for (const DecodeRow& r : rows) {
    if (!r.wrong.empty()) std::cout << red(r.variant.name + " is wrong: " + r.wrong) << "\n";
    if (!has_state(r) || r.times.empty()) continue;
    std::cout << r.variant.name << ": update and query of 64 tokens at "
              << formatted("%.0f", r.gflops) << " GFLOP/s, "
              << formatted("%.0f", 100 * r.gflops / peak) << " % of a matrix product's";
    if (cache) {
      const double found = crossover(r, *cache);
      std::cout << "; faster than " << cache->variant.name << "'s KV cache from "
                << (found > 0 ? formatted("%.0f", found) : "no measured") << " tokens on, "
                << formatted("%.0f", attn::decode_crossover(r.variant.spec, s.D, s.D))
                << " predicted";
    }
    std::cout << "\n";
  }
}

Outcome bench_decode(const std::vector<attn::Variant>& variants, const instruments::Case& c,
                     int repeats, const Shown& shown) {
  std::optional<files::NewFile> file;  // fails before the work, not after it
  if (!shown.svg.empty()) file.emplace(shown.svg);
  instruments::Stream s{.B = c.B, .H = c.H, .D = c.D, .dtype = c.dtype, .device = c.device};
  if (repeats > 0) s.runs = repeats;
  const std::vector<int64_t> lengths = contexts(c.T);
  catch_interrupt();
  const double peak = instruments::matmul_gflops(s.dtype, s.device);
  std::vector<DecodeRow> rows;
  Progress progress{.command = "bench", .all = variants.size()};
  bool failed = false;
  for (const attn::Variant& v : variants) {
    if (stopped()) break;
    progress.show(v.name);
    DecodeRow row{v, instruments::why_wrong(v.spec, s), {}};
    failed |= !row.wrong.empty();
    if (row.wrong.empty()) row.times = instruments::time_decoding(v.spec, s, lengths, stopped);
    if (row.wrong.empty() && has_state(row)) row.gflops = instruments::state_gflops(v.spec, s, 64);
    rows.push_back(row);
    ++progress.done;
  }
  progress.clear();
  if (file && !stopped()) file->write(report::chart(chart(rows, s))), file->commit();
  if (shown.json)
    std::cout << json(rows, s, peak).dump(2) << "\n";
  else
    print(rows, s, peak);
  return stopped() ? Outcome::interrupted : failed ? Outcome::failed : Outcome::fine;
}

}  // namespace horner::cli
