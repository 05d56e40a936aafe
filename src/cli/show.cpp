// horner show: one variant, its formula and the state of its recurrent form.
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "attn/formula.h"
#include "attn/inputs.h"
#include "attn/plan.h"
#include "attn/spec_text.h"
#include "cli/command.h"
#include "cli/table.h"

namespace horner::cli {

using Json = nlohmann::ordered_json;

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

struct Extra {
  std::string name, shape, about;
  bool optional;
};

// The inputs besides q, k and v.
static std::vector<Extra> extras(const attn::Spec& spec) {
  std::vector<Extra> out;
  for (const attn::Input& i : attn::input_table()) {
    if (i.role == attn::Role::tensor || (i.wanted && !i.wanted(spec))) continue;
    std::string shape;
    for (const char* c = i.shape; *c; ++c)
      shape += (shape.empty() ? "" : ", ") + std::string(1, *c);
    out.push_back({i.name, "[" + shape + "]", i.about, i.wanted == nullptr});
  }
  return out;
}

// A number without a fraction where it has none and fits.
static Json whole(double x) {
  return x < 1e15 ? Json(int64_t(x)) : Json(x);
}

static Json json(const attn::Variant& v, const ShowOptions& o) {
  Json formula = Json::array(), inputs = Json::array(), sizes = Json::array();
  for (const auto& [label, line] : attn::formula(v.spec))
    formula.push_back({{"label", label}, {"text", line}});
  for (const Extra& e : extras(v.spec))
    inputs.push_back(
        {{"name", e.name}, {"shape", e.shape}, {"about", e.about}, {"optional", e.optional}});
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
              .rows = {},
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
  Table lines{.head = {}, .rows = {}, .indent = 2};
  std::string last;
  for (const auto& [label, line] : attn::formula(v.spec)) {
    lines.rows.push_back({faint(label == last ? "" : label), line});
    last = label;
  }
  std::cout << text(lines) << "\n";

  Table facts{.head = {}, .rows = {{faint("source"), v.source}}, .indent = 2};
  if (!v.aliases.empty()) facts.rows.push_back({faint("aliases"), v.aliases});
  facts.rows.push_back({faint("written"), written(v.spec)});
  for (const std::string& note : attn::notes(v.spec)) facts.rows.push_back({faint("note"), note});
  std::cout << text(facts);

  Table inputs{.head = {}, .rows = {}, .indent = 2};
  for (const Extra& e : extras(v.spec))
    inputs.rows.push_back({e.name, faint(e.shape), e.about + (e.optional ? " (optional)" : "")});
  std::cout << "\n" << bold("inputs besides q, k, v") << "\n" << text(inputs);
  print_state(v.spec, o);
}

Action show(CLI::App& app) {
  const auto o = std::make_shared<ShowOptions>();
  app.add_option("NAME", o->name, "a variant; stages to change follow a colon")
      ->required()
      ->type_name("");
  const CLI::Validator sizes = CLI::Range(1, 65536).description("");
  app.add_option("--dim", o->D, "head dimension of queries and keys [64]")
      ->check(sizes)
      ->type_name("D");
  app.add_option("--value-dim", o->E, "head dimension of values [D]")->check(sizes)->type_name("E");
  app.add_flag("--json", o->json, "print as JSON, sizes in bytes");
  return [o] {
    const attn::Variant v = attn::find(o->name);
    if (o->json)
      std::cout << json(v, *o).dump(2) << "\n";
    else
      print(v, *o);
    return Outcome::fine;
  };
}

}  // namespace horner::cli
