#include "study/runs.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <set>
#include <tuple>

#include "attn/catalog.h"
#include "attn/spec_text.h"
#include "core/check.h"
#include "files/json.h"
#include "nn/pattern.h"
#include "study/numbers.h"
#include "study/tasks.h"

namespace horner::study {

namespace fs = std::filesystem;

static double number(const Json& j, const char* name) {
  return j.contains(name) && j[name].is_number() ? j[name].get<double>() : std::nan("");
}

static void read_metrics(const fs::path& path, RunData& r) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    const Json j = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!j.is_object() || !j.contains("step")) continue;  // an incomplete last line
    const double step = number(j, "step");
    if (j.contains("loss")) {
      r.loss.push_back({step, number(j, "loss")});
      r.gradient.push_back({step, number(j, "gradient_norm")});
      r.repeated += int64_t(step) <= r.step;
      r.step = std::max(r.step, int64_t(step));
    }
    if (j.contains("validation_loss")) {
      r.validation_loss.push_back({step, number(j, "validation_loss")});
      r.validation_accuracy.push_back({step, number(j, "validation_accuracy")});
    }
    for (const auto& [name, layers] :
         {std::pair{"entropy", &r.entropy}, {"separability", &r.separability}})
      if (j.contains(name) && j[name].is_array()) {
        layers->clear();
        for (const Json& e : j[name])
          layers->push_back(e.is_number() ? e.get<double>() : std::nan(""));
      }
  }
}

void read_result(const Json& result, RunData& r) {
  r.result = result;
  if (!result.is_object()) return;
  r.finished = result.value("finished", false);
  for (const Json& at : result.value("lengths", Json::array()))
    r.lengths.push_back({at.value("length", int64_t(0)), number(at, "validation_loss"),
                         number(at, "validation_accuracy")});
}

static RunData read_run(const fs::path& folder) {
  RunData r{.folder = folder, .settings = {}, .finished = false, .step = 0};
  const fs::path settings = folder / "settings.json", result = folder / "result.json";
  read_settings(r.settings, files::read_json(settings), settings.string());
  if (fs::exists(result)) read_result(files::read_json(result), r);
  read_metrics(folder / "metrics.jsonl", r);
  if (fs::exists(folder / "given_up.json"))
    r.given_up = files::read_json(folder / "given_up.json").value("step", int64_t(0));
  if (fs::exists(folder / "taylor.json"))
    for (const Json& layer : files::read_json(folder / "taylor.json").value("layers", Json())) {
      r.taylor.emplace_back();
      for (const Json& x : layer)
        r.taylor.back().push_back(x.is_number() ? x.get<double>() : -INFINITY);
    }
  if (fs::exists(folder / "heads.json")) r.heads = files::read_json(folder / "heads.json");
  return r;
}

Json identity(const train::Settings& s) {
  Json j = to_json(s);
  for (const train::Setting& row : train::setting_table())
    if (row.on_resume != train::Change::never) j.erase(row.name);
  j.erase("data"), j.erase("validation");
  return j;
}

// Those at or below a folder. What other processes rename or remove meanwhile is passed over.
static void find_runs(const fs::path& folder, std::vector<fs::path>& found) {
  if (fs::exists(folder / "settings.json") && fs::exists(folder / "metrics.jsonl"))
    found.push_back(folder);
  std::error_code gone;
  for (fs::directory_iterator it(folder, gone), end; !gone && it != end; it.increment(gone))
    if (it->is_directory(gone)) find_runs(it->path(), found);
}

std::vector<RunData> read_runs(const std::vector<fs::path>& given) {
  std::vector<fs::path> found;
  std::vector<RunData> all, out;
  for (const fs::path& each : given)
    if (fs::is_regular_file(each)) {
      const std::vector<RunData> more = runs_of(files::read_json(each), each.string());
      all.insert(all.end(), more.begin(), more.end());
    } else {
      check(fs::is_directory(each), "no folder '", each.string(), "'");
      find_runs(each, found);
    }
  check(!found.empty() || !all.empty(), "no runs in ", given[0].string(),
        given.size() > 1 ? " or the other folders" : "",
        ": the folder of a run has settings.json and metrics.jsonl");
  std::sort(found.begin(), found.end());
  for (const fs::path& p : found) all.push_back(read_run(p));
  std::map<std::string, size_t> known;
  for (RunData& r : all) {
    const auto [at, fresh] = known.emplace(identity(r.settings).dump(), out.size());
    if (fresh)
      out.push_back(std::move(r));
    else if (r.step > out[at->second].step)
      out[at->second] = std::move(r);
  }
  return out;
}

Spread spread(const std::vector<double>& values) {
  double sum = 0, squares = 0;
  for (const double x : values) sum += x;
  const auto n = double(values.size());
  const double mean = n > 0 ? sum / n : std::nan("");
  for (const double x : values) squares += (x - mean) * (x - mean);
  return {mean, n > 1 ? std::sqrt(squares / (n - 1)) : 0, values.size()};
}

// In the order of Kind.
static constexpr KindWords kKinds[] = {
    {"Taylor", nullptr},
    {"Taylor, raw sum", nullptr},
    {"Taylor, centred", nullptr},
    {"Taylor, changed", "The series with other stages: "},
    {"gates", "With gates: "},
    {"gates and norms", "With gates and norms: "},
    {"linear kernels", nullptr},
    {"linear kernels with powers", nullptr},
    {"no sum", "Without a sum or norm: "},
    {"norms", nullptr},
    {"other weights", "Other weights: "},
    {"several variants", "Several variants, a pattern of layers: "},
    {"others", nullptr},
    {"other softmax", "Other kinds of softmax: "},
};
static_assert(std::size(kKinds) == size_t(Kind::sums) + 1);

const KindWords& words(Kind kind) {
  return kKinds[size_t(kind)];
}

static Kind kind_of(const attn::Spec& s) {
  using namespace attn;
  const bool series = is<Taylor>(s.weight), identity = is<Identity>(s.features);
  // A sweep over orders is one of a family: a member with other stages is not a point of it.
  if (series && identity) {
    const std::string order = std::to_string(std::get<Taylor>(s.weight).order);
    for (const auto& [family, kind] : {std::pair("taylor", Kind::taylor),
                                       {"raw_taylor", Kind::raw_taylor},
                                       {"centred_taylor", Kind::centred_taylor}})
      if (text(s) == text(find(family + order).spec)) return kind;
    return Kind::changed_taylor;
  }
  if (series) return Kind::linear_powers;
  if (is<Power>(s.weight)) return Kind::linear;
  if (!is<Exp>(s.weight) || !identity) return Kind::weights;
  const bool gates = s.output_gate || s.input_gate || s.post_gate || !is<NoDecay>(s.decay);
  if (!is<NoNorm>(s.norm)) return gates ? Kind::gates_and_norms : Kind::norms;
  if (gates) return Kind::gates;
  return is<Sum>(s.denominator) ? Kind::sums : Kind::no_sum;
}

static Group group_of(const std::string& name) {
  Group g{.name = name};
  try {
    if (const std::vector<std::string> turn = nn::pattern(name); turn.size() > 1) {
      g.kind = Kind::patterns;
      for (const nn::LayersOf& each : nn::by_variant(turn))
        g.about += (g.about.empty() ? "" : "; ") + each.variant + " in " +
                   (each.layers.size() == 1 ? "layer " : "layers ") + each.text();
      g.about += " of each " + std::to_string(turn.size());
      return g;
    }
    const attn::Variant v = attn::find(name);
    g.about = v.about, g.kind = kind_of(v.spec), g.centred = v.spec.centred;
    const auto orders = attn::facts(v.spec.weight).orders;
    g.order = orders ? orders->last : -1;
  } catch (const Error&) {
    g.about = "unknown variant";
  }
  return g;
}

static double last_loss(const RunData& r) {
  return r.validation_loss.empty() ? std::nan("") : r.validation_loss.back().y;
}

// Of several learning rates the one with the lowest mean loss, at the length of training. A rate
// with a seed that diverged or was given up is worse than any without, and so is one with fewer
// seeds.
static void choose_rate(Group& g) {
  std::map<double, std::vector<const RunData*>> by_rate;
  for (const RunData* r : g.runs) by_rate[r->settings.learning_rate].push_back(r);
  if (by_rate.size() < 2) return;
  std::tuple<size_t, double> best(0, 0);  // finite losses, minus their mean
  double rate = by_rate.begin()->first;
  for (const auto& [each, runs] : by_rate) {
    std::vector<double> losses, accuracies;
    size_t given_up = 0;
    for (const RunData* r : runs) {
      given_up += r->given_up > 0;
      if (r->given_up > 0 || !std::isfinite(last_loss(*r))) continue;
      losses.push_back(last_loss(*r));
      if (!r->validation_accuracy.empty()) accuracies.push_back(r->validation_accuracy.back().y);
    }
    g.tried.push_back({each, spread(losses), spread(accuracies), false, given_up});
    const std::tuple mine(losses.size(), losses.empty() ? 0 : -g.tried.back().loss.mean);
    if (mine > best) best = mine, rate = each;
  }
  for (Tried& t : g.tried) t.chosen = t.rate == rate;
  g.runs = by_rate[rate];
}

static void finish_lengths(Group& g) {
  std::map<int64_t, std::pair<std::vector<double>, std::vector<double>>> all;
  for (const RunData* r : g.runs)
    for (const AtLength& at : r->lengths)
      all[at.length].first.push_back(at.loss), all[at.length].second.push_back(at.accuracy);
  for (const auto& [length, each] : all) {
    const auto& [losses, right] = each;
    g.lengths.push_back(
        {length, spread(losses), spread(right), *std::min_element(right.begin(), right.end()),
         *std::max_element(right.begin(), right.end()),
         size_t(std::count_if(right.begin(), right.end(), [](double a) { return a >= kSolved; }))});
  }
}

static void finish(Group& g) {
  choose_rate(g);
  finish_lengths(g);
  std::vector<double> losses, accuracies;
  for (const RunData* r : g.runs) {
    const double loss = last_loss(*r);
    const double first = r->loss.empty() ? std::nan("") : r->loss.front().y;
    g.diverged += !std::isfinite(loss) ? r->finished : loss > 0.98 * first && r->step > 100;
    if (std::isfinite(loss)) losses.push_back(loss);
    if (!r->validation_accuracy.empty()) accuracies.push_back(r->validation_accuracy.back().y);
  }
  g.loss = spread(losses), g.accuracy = spread(accuracies);
}

// Softmax first, then by kind and order.
static bool before(const Group& a, const Group& b) {
  const auto key = [](const Group& g) {
    return std::tuple(g.name != "softmax", g.kind, g.order, g.name);
  };
  return key(a) < key(b);
}

static TaskData task_of(const std::string& name) {
  TaskData t{.name = name, .task = name};
  try {
    const Chosen c = find_task(name);
    if (c.task) t.chance = c.task->chance(c.shape);
    const std::string kind = c.task ? c.task->name : "";
    if (kind == "recall" || kind == "mqar") t.pairs = c.shape.pairs;
  } catch (const Error&) {  // an unknown task is judged by its loss
  }
  return t;
}

// The item of that name, made and appended if there is none.
template <class T>
static T& named(std::vector<T>& all, const std::string& name, T (*make)(const std::string&)) {
  for (T& x : all)
    if (x.name == name) return x;
  return all.emplace_back(make(name));
}

const Comparison* TaskData::find(const Group& mine, const Group* other, int64_t length) const {
  for (const Comparison& c : comparisons)
    if (c.mine == &mine && c.other == other && c.length == length) return &c;
  return nullptr;
}

// A finished run's score: its accuracy, or its loss on a task without right answers.
static double score_at(const TaskData& t, const RunData& r, int64_t length) {
  if (length == 0)
    return number(r.result, t.chance > 0 ? "validation_accuracy" : "validation_loss");
  for (const AtLength& at : r.lengths)
    if (at.length == length) return t.chance > 0 ? at.accuracy : at.loss;
  return NAN;
}

// The finished runs of both variants that have the same seed.
static Comparison compared(const TaskData& t, const Group& mine, const Group& other,
                           int64_t length = 0) {
  std::vector<double> changes;
  for (const RunData* a : mine.runs)
    for (const RunData* b : other.runs) {
      if (a->settings.seed != b->settings.seed || !a->finished || !b->finished) continue;
      const double x = score_at(t, *a, length), y = score_at(t, *b, length);
      const double change = t.chance > 0 ? x - y : x / y - 1;
      if (std::isfinite(change)) changes.push_back(change);
    }
  return {&mine, &other, t_interval(changes), length};
}

static void add_comparisons(TaskData& t) {
  if (!t.softmax) return;
  for (const Group& g : t.groups) {
    if (&g == t.softmax || g.loss.n == 0) continue;
    t.comparisons.push_back(compared(t, g, *t.softmax));
    if (!g.lengths.empty() && g.lengths.back().length != g.runs[0]->settings.length)
      t.comparisons.push_back(compared(t, g, *t.softmax, g.lengths.back().length));
  }
  for (const Group& centred : t.groups)
    for (const Group& plain : t.groups)
      if (centred.kind == Kind::centred_taylor && plain.kind == Kind::taylor &&
          centred.order == plain.order && centred.loss.n > 0 && plain.loss.n > 0)
        t.comparisons.push_back(compared(t, centred, plain));
}

static void correct(std::vector<TaskData>& tasks) {
  std::vector<double> p;
  for (const TaskData& t : tasks)
    for (const Comparison& c : t.comparisons) p.push_back(c.change.n > 1 ? c.change.p : NAN);
  const std::vector<double> all = holm(p);
  size_t i = 0;
  for (TaskData& t : tasks)
    for (Comparison& c : t.comparisons) c.p_holm = c.change.n > 1 ? all[i++] : (++i, 1.0);
}

static std::string attention_of(const RunData& r) {
  return r.settings.attention.empty() ? r.settings.model : r.settings.attention;
}

// What a run is besides its task, variant, learning rate and seed, by name: the fields of its model
// and the settings that affect the losses, but not those that only divide the work.
static std::map<std::string, std::string> sizes_of(const RunData& r) {
  Json all = identity(r.settings);
  const Json model = all["model-config"];
  for (const char* other :
       {"task", "attention", "learning-rate", "seed", "model-config", "micro-batch", "execution"})
    all.erase(other);
  std::map<std::string, std::string> out;
  const auto add = [&](const std::string& name, const Json& value) {
    out[name] = value.is_string() ? value.get<std::string>() : value.dump();
  };
  for (const auto& [name, value] : all.items()) add(name, value);
  for (const auto& [name, value] : model.items())
    if (value.is_object())
      for (const auto& [inner, each] : value.items()) add(name + "." + inner, each);
    else
      add(name, value);
  return out;
}

// By task, the names of those in which two runs of one variant differ.
using Varying = std::map<std::string, std::set<std::string>>;
static Varying varying(const std::vector<RunData>& runs) {
  std::map<std::pair<std::string, std::string>, std::map<std::string, std::string>> first;
  Varying out;
  for (const RunData& r : runs) {
    const auto mine = sizes_of(r);
    const auto& other =
        first.emplace(std::pair(r.settings.task, attention_of(r)), mine).first->second;
    for (const auto& [a, b] : {std::pair(&mine, &other), {&other, &mine}})
      for (const auto& [name, value] : *a)
        if (!b->contains(name) || b->at(name) != value) out[r.settings.task].insert(name);
  }
  return out;
}

static std::string size_text(const RunData& r, const std::set<std::string>& names) {
  const auto all = sizes_of(r);
  std::string out;
  for (const std::string& name : names)
    if (all.contains(name)) out += (out.empty() ? "" : ", ") + name + " " + all.at(name);
  return out;
}

std::vector<TaskData> by_task(const std::vector<RunData>& runs) {
  std::vector<TaskData> out;
  Varying names = varying(runs);
  for (const RunData& r : runs) {
    const std::string size = size_text(r, names[r.settings.task]);
    const auto same = [&](const TaskData& t) {
      return t.task == r.settings.task && t.size == size;
    };
    auto at = std::find_if(out.begin(), out.end(), same);
    if (at == out.end()) {
      at = out.insert(out.end(), task_of(r.settings.task));
      at->size = size, at->name += (size.empty() ? "" : ", " + size);
    }
    named(at->groups, attention_of(r), group_of).runs.push_back(&r);
  }
  for (TaskData& t : out) {
    for (Group& g : t.groups) finish(g);
    std::stable_sort(t.groups.begin(), t.groups.end(), before);
    for (const Group& g : t.groups)
      if (g.name == "softmax") t.softmax = &g;
    add_comparisons(t);
  }
  correct(out);
  return out;
}

}  // namespace horner::study
