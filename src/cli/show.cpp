// horner show: one variant, its formula and the state of its recurrent form.
#include <cmath>
#include <set>

#include "attn/formula.h"
#include "attn/inputs.h"
#include "attn/plan.h"
#include "attn/spec_text.h"
#include "cli/options.h"
#include "cli/table.h"

namespace horner::cli {

struct ShowOptions {
  std::string name;
  int64_t D = 64, E = 0;  // E of 0: as large as D
  bool json = false;
};

// The state of one head, and the length of the bfloat16 KV cache of the same size.
struct State {
  int64_t D, E;
  double features, bytes, cache_tokens;
};

static std::vector<State> states(const attn::Spec& spec, const ShowOptions& o) {
  std::vector<State> out;
  if (!attn::why_no_state(spec).empty()) return out;
  for (int64_t D : std::set<int64_t>{16, 32, 64, 128, o.D}) {
    const int64_t E = o.E ? o.E : D;
    const double bytes = attn::state_bytes(spec, D, E);
    out.push_back(
        {D, E, attn::feature_count(spec, D), bytes, std::ceil(bytes / double(2 * (D + E)))});
  }
  return out;
}

// The variant, spelled as changes to softmax.
static std::string written(const attn::Spec& spec) {
  const std::string stages = attn::text(spec);
  return stages.empty() ? "softmax" : "softmax:" + stages;
}

// The inputs besides q, k and v. Those without a condition are optional.
static std::vector<attn::Input> extras(const attn::Spec& spec) {
  std::vector<attn::Input> out;
  for (const attn::Input& i : attn::input_table())
    if (i.role != attn::Role::tensor && (!i.wanted || i.wanted(spec))) out.push_back(i);
  return out;
}

static Json json(const attn::Variant& v, const ShowOptions& o) {
  Json formula = Json::array(), inputs = Json::array(), sizes = Json::array();
  for (const auto& [label, line] : attn::formula(v.spec))
    formula.push_back({{"label", label}, {"text", line}});
  for (const attn::Input& i : extras(v.spec))
    inputs.push_back({{"name", i.name},
                      {"shape", attn::shape_text(attn::shape(i, v.spec))},
                      {"about", i.about},
                      {"optional", !i.wanted}});
  for (const State& s : states(v.spec, o))
    sizes.push_back({{"D", s.D},
                     {"E", s.E},
                     {"features", whole(s.features)},
                     {"bytes", whole(s.bytes)},
                     {"cache_tokens", whole(s.cache_tokens)}});
  const std::string reason = attn::why_no_state(v.spec);
  return {{"name", v.name},
          {"about", v.about},
          {"source", v.source},
          {"aliases", v.aliases},
          {"spec", attn::text(v.spec)},
          {"formula", formula},
          {"inputs", inputs},
          {"notes", attn::notes(v.spec)},
          {"state",
           {{"dtype", attn::sums_in_double(v.spec) ? "float64" : "float32"},
            {"why_not", reason},
            {"sizes", sizes}}}};
}

static void print_state(const attn::Spec& spec, const ShowOptions& o) {
  const std::string reason = attn::why_no_state(spec);
  if (!reason.empty()) {
    std::cout << "\n" << bold("no recurrent form") << ": " << reason << "\n";
    return;
  }
  Table table{.head = {"D", "E", "features", "state", "= bfloat16 KV cache of"},
              .right = {0, 1, 2, 3, 4},
              .indent = 2};
  for (const State& s : states(spec, o)) {
    Row row{std::to_string(s.D), std::to_string(s.E), count_text(s.features), size_text(s.bytes),
            count_text(s.cache_tokens) + " tokens"};
    if (s.D == o.D)
      for (std::string& cell : row) cell = bold(cell);
    table.rows.push_back(row);
  }
  std::cout << "\n"
            << bold("state of its recurrent form") << ", one head in "
            << (attn::sums_in_double(spec) ? "float64" : "float32") << "\n"
            << text(table);
}

static void print(const attn::Variant& v, const ShowOptions& o) {
  std::cout << bold(v.name) << "  " << v.about << "\n\n";
  Table lines{.indent = 2, .wrap = true};
  std::string last;
  for (const auto& [label, line] : attn::formula(v.spec)) {
    lines.rows.push_back({faint(label == last ? "" : label), line});
    last = label;
  }
  std::cout << text(lines) << "\n";

  Table facts{.rows = {{faint("source"), v.source}}, .indent = 2, .wrap = true};
  if (!v.aliases.empty()) facts.rows.push_back({faint("aliases"), v.aliases});
  facts.rows.push_back({faint("written"), written(v.spec)});
  for (const std::string& note : attn::notes(v.spec)) facts.rows.push_back({faint("note"), note});
  std::cout << text(facts);

  Table inputs{.indent = 2, .wrap = true};
  for (const attn::Input& i : extras(v.spec))
    inputs.rows.push_back({i.name, faint(attn::shape_text(attn::shape(i, v.spec))),
                           i.about + std::string(i.wanted ? "" : " (optional)")});
  std::cout << "\n" << bold("inputs besides q, k, v") << "\n" << text(inputs);
  print_state(v.spec, o);
}

Action show(CLI::App& app) {
  const auto o = std::make_shared<ShowOptions>();
  choices(
      option(app, "NAME", o->name, "", "a variant; stages to change follow a colon")->required(),
      variant_choices());
  const CLI::Validator sizes = within(1, 65536);
  option(app, "--dim", o->D, "D", "head dimension of queries and keys [64]")->check(sizes);
  option(app, "--value-dim", o->E, "E", "head dimension of values [D]")->check(sizes);
  app.add_flag("--json", o->json, "print as JSON, sizes in bytes");
  return [o] {
    const attn::Variant v = attn::find(o->name);
    if (o->json) return print_json(json(v, *o));
    print(v, *o);
    return Outcome::fine;
  };
}

}  // namespace horner::cli
