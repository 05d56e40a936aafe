// horner plan: memory and FLOPs of a variant at a given size, by form, and which form to use.
#include "attn/plan.h"

#include <ATen/ATen.h>

#include <cmath>

#include "attn/attend.h"
#include "attn/inputs.h"
#include "attn/make_state.h"
#include "cli/options.h"
#include "cli/plan_train.h"
#include "cli/run.h"
#include "cli/table.h"
#include "core/check.h"
#include "nn/pattern.h"

namespace horner::cli {

struct PlanOptions {
  std::string variant, dtype = "float32";
  int64_t D = 64, E = 0, heads = 8, key_heads = 0, layers = 0, batch = 1, tokens = 4096;
  bool json = false;
};

// One way to run it: multiplications and additions for a token of one head, forward.
struct Way {
  std::string name, about;
  double flop;
};

struct Planned {
  attn::Variant variant;
  std::string why_no_state, too_large;
  double features = 0, state_bytes = 0;  // of a head
  double cache_bytes = 0;                // of a head, for all tokens
  int chunk = 0;                         // tokens
  std::vector<Way> ways;
  double smaller = 0, cheaper = 0, faster = 0;  // from so many tokens on
  std::string chosen, why, cached;              // dtype of the KV cache
};

// A tensor of that shape without memory.
static at::Tensor shape_only(std::initializer_list<int64_t> sizes, at::ScalarType dtype) {
  return at::zeros({}, dtype).expand(at::IntArrayRef(sizes));
}

static void choose(const PlanOptions& o, Planned& p) {
  const at::ScalarType dtype = cli::dtype(o.dtype);
  attn::Inputs in;
  in.q = shape_only({o.batch, o.heads, o.tokens, o.D}, dtype);
  in.k = shape_only({o.batch, o.key_heads, o.tokens, o.D}, dtype);
  in.v = shape_only({o.batch, o.key_heads, o.tokens, o.E}, dtype);
  const attn::Execution& best = attn::choose(p.variant.spec, in);
  p.chosen = best.name;
  std::string others;
  for (const attn::Execution* e : attn::executions()) {
    if (e == &best) break;
    const std::string reason = e->why_not(p.variant.spec, in);
    others += (others.empty() ? "" : "; ") + std::string(e->name) + ": " +
              (reason.empty() ? "takes more work" : reason);
  }
  p.why = others.empty() ? "the first in the table that can run; none after it takes less work"
                         : others;
}

static Planned planned(const PlanOptions& o) {
  Planned p{attn::find(o.variant)};
  const attn::Spec& spec = p.variant.spec;
  const auto cached = attn::cache_dtype(spec, cli::dtype(o.dtype));
  const double element = double(c10::elementSize(cached));
  p.cached = attn::dtype_name(cached);
  p.cache_bytes = double(o.D + o.E) * element * double(o.tokens);
  p.why_no_state = attn::why_no_state(spec);
  const double T = double(o.tokens);
  p.ways.push_back({"tiles", "over all keys (fused_cpu), on average",
                    2 * attn::work_in_tiles(spec, o.tokens, o.tokens, o.D, o.E) / T});
  p.ways.push_back(
      {"decode, KV cache", "the last token, over all keys", 2 * double(o.D + o.E) * T});
  if (p.why_no_state.empty()) {
    p.features = attn::feature_count(spec, o.D);
    p.state_bytes = attn::state_bytes(spec, o.D, o.E);
    p.too_large = attn::why_too_large(spec, {o.batch, o.key_heads, o.D, o.E});
    p.chunk = attn::chunk_length(spec, o.D, o.E);
    p.smaller = std::ceil(p.state_bytes / (double(o.D + o.E) * element));
    p.faster = std::ceil(attn::decode_crossover(spec, o.D, o.E) * sizeof(float) / element);
    const double chunked =
        2 * attn::work_in_chunks(spec, int64_t(1) << 40, o.D, o.E) / double(int64_t(1) << 40);
    p.cheaper = std::ceil(chunked / double(o.D + o.E));
    if (!p.too_large.empty()) return choose(o, p), p;
    p.ways.push_back({"chunked", "in chunks of " + std::to_string(p.chunk), chunked});
    p.ways.push_back(
        {"decode, state", "any token (recurrent)", 2 * attn::work_by_token(spec, 1, o.D, o.E)});
  }
  choose(o, p);
  return p;
}

static Json json(const Planned& p, const PlanOptions& o) {
  const double heads = double(o.key_heads * o.layers * o.batch);
  Json ways = Json::array();
  for (const Way& w : p.ways)
    ways.push_back({{"name", w.name}, {"about", w.about}, {"flop_per_token_and_head", w.flop}});
  Json out{
      {"variant", p.variant.name}, {"D", o.D},           {"E", o.E},         {"heads", o.heads},
      {"key_heads", o.key_heads},  {"layers", o.layers}, {"batch", o.batch}, {"tokens", o.tokens},
      {"dtype", o.dtype}};
  out["cache_bytes"] = whole(p.cache_bytes * heads);
  out["why_no_state"] = p.why_no_state;
  if (p.why_no_state.empty()) {
    out["features"] = whole(p.features);
    out["state_bytes_per_head"] = whole(p.state_bytes);
    out["state_bytes"] = whole(p.state_bytes * heads);
    out["too_large"] = p.too_large;
    if (p.too_large.empty()) out["chunk"] = p.chunk;
    out["from_tokens"] = {{"state_smaller_than_cache", whole(p.smaller)},
                          {"chunked_cheaper_than_tiles", whole(p.cheaper)},
                          {"state_decodes_faster_than_cache", whole(p.faster)}};
  }
  out["flop"] = ways;
  out["auto"] = {{"execution", p.chosen}, {"why", p.why}};
  return out;
}

static void print(const Planned& p, const PlanOptions& o) {
  const double heads = double(o.key_heads * o.layers * o.batch);
  std::cout << bold(p.variant.name) << "  " << p.variant.about << "\n"
            << "D " << o.D << ", E " << o.E << ", " << o.heads << " heads on " << o.key_heads
            << " key heads, " << o.layers << " layers, batch " << o.batch << ", " << o.tokens
            << " tokens, " << o.dtype << "\n\n";
  Table sizes{.head = {"memory", "a head", "all heads and layers"}, .right = {1, 2}, .indent = 2};
  if (p.why_no_state.empty())
    sizes.rows.push_back({"state, " + count_text(p.features) + " features",
                          size_text(p.state_bytes), size_text(p.state_bytes * heads)});
  sizes.rows.push_back({"KV cache of " + count_text(double(o.tokens)) + " tokens",
                        size_text(p.cache_bytes), size_text(p.cache_bytes * heads)});
  std::cout << text(sizes);
  if (!p.why_no_state.empty()) std::cout << "  no state: " << p.why_no_state << "\n";
  if (!p.too_large.empty()) std::cout << "  " << red("refused") << ": " << p.too_large << "\n";
  Table ways{.head = {"for a token of one head", "FLOP", ""}, .right = {1}, .indent = 2};
  for (const Way& w : p.ways) ways.rows.push_back({w.name, count_text(w.flop), w.about});
  std::cout << "\n" << text(ways);
  if (p.why_no_state.empty() && p.too_large.empty())
    std::cout << "\n  from " << count_text(p.smaller)
              << " tokens on, the state is smaller than the KV cache\n"
              << "  from " << count_text(p.cheaper)
              << " tokens on, chunks take fewer FLOPs than tiles\n"
              << "  from " << count_text(p.faster) << " tokens on, the state decodes faster than a "
              << p.cached << " KV cache\n";
  std::cout << "\n" << paragraph(bold("auto") + " chooses " + green(p.chosen) + " (" + p.why + ")");
}

// What decoding keeps in a layer of a model: the smaller of the two (nn::empty_states).
static bool keeps_state(const Planned& p) {
  return p.why_no_state.empty() && p.too_large.empty() && p.state_bytes <= p.cache_bytes;
}

// A model with several variants: what each of its layers keeps, then the plan of each variant.
static Outcome plan_pattern(const std::vector<nn::LayersOf>& parts, const PlanOptions& all) {
  std::vector<std::pair<Planned, PlanOptions>> plans;
  double sum = 0;
  Table t{.head = {"layers", "variant", "keeps", "all heads and layers"}, .right = {3}};
  Json out{{"pattern", all.variant}, {"layers", all.layers}, {"variants", Json::array()}};
  for (const nn::LayersOf& part : parts) {
    PlanOptions o = all;
    o.variant = part.variant, o.layers = int64_t(part.layers.size());
    const Planned p = planned(o);
    const bool state = keeps_state(p);
    const double bytes =
        (state ? p.state_bytes : p.cache_bytes) * double(o.key_heads * o.layers * o.batch);
    sum += bytes;
    t.rows.push_back(
        {part.text(), p.variant.name, state ? "a state" : "a KV cache", size_text(bytes)});
    Json& each = out["variants"].emplace_back(json(p, o));
    each["of_layers"] = part.layers, each["keeps"] = state ? "state" : "cache";
    plans.emplace_back(p, o);
  }
  t.rows.push_back({"all", "", "", size_text(sum)});
  out["kept_bytes"] = whole(sum);
  if (all.json) return print_json(out);
  std::cout << text(t);
  for (const auto& [p, o] : plans) std::cout << "\n", print(p, o);
  return Outcome::fine;
}

Action plan(CLI::App& app) {
  const auto o = std::make_shared<PlanOptions>();
  choices(
      option(app, "VARIANT", o->variant, "", "a variant, such as taylor2, or a pattern of layers"),
      variant_choices());
  positive(app, "-d,--dim", o->D, "N", "head dimension of queries and keys [64]");
  positive(app, "--value-dim", o->E, "N", "head dimension of values [D]");
  positive(app, "--heads", o->heads, "N", "query heads [8]");
  positive(app, "--key-heads", o->key_heads, "N", "key/value heads [as many as query heads]");
  positive(app, "--layers", o->layers, "N", "layers [1, or those of the pattern]");
  positive(app, "--batch", o->batch, "N", "batch size [1]");
  positive(app, "-t,--tokens", o->tokens, "N", "context length [4096]");
  choices(option(app, "--dtype", o->dtype, "NAME", "dtype of the inputs [float32]"),
          {dtype_names()});
  app.add_flag("--json", o->json, "print as JSON");
  const auto training = std::make_shared<TrainingPlan>();
  const auto train = std::make_shared<bool>(false);
  app.add_flag("--train", *train, "plan a training step of a model instead");
  add_training_options(app, *training);
  return [o, training, train] {
    if (*train) {
      horner::check(o->variant.empty(),
                    "--train plans a whole model: give the variant as --attention ", o->variant);
      if (training->model.empty()) training->model = "tiny";
      training->batch = o->batch, training->json = o->json;
      training->bfloat16 = cli::dtype(o->dtype) == at::kBFloat16;
      return plan_training(*training);
    }
    if (!training->model.empty()) {
      horner::check(o->variant.empty(), "--model plans what the model has; remove '", o->variant,
                    "', or add --train to plan its training");
      return plan_model(training->model, o->dtype, o->json);
    }
    horner::check(!o->variant.empty(),
                  "VARIANT is required: a variant, such as taylor2, --model DIR or --train");
    if (o->E == 0) o->E = o->D;
    if (o->key_heads == 0) o->key_heads = o->heads;
    horner::check(o->heads % o->key_heads == 0, "the ", o->heads,
                  " heads must be a multiple of the ", o->key_heads, " key heads");
    const double most = 0x1p62, elements = double(o->batch) * double(o->heads) * double(o->tokens) *
                                           double(std::max(o->D, o->E));
    horner::check(elements < most, "the tensors would have ", elements,
                  " elements, more than can be counted (", most,
                  "); choose fewer --tokens, --heads, a smaller --dim or --batch");
    if (o->layers == 0) o->layers = int64_t(nn::pattern(o->variant).size());
    const auto parts = nn::by_variant(nn::variants_of_layers(o->variant, o->layers));
    if (parts.size() > 1) return plan_pattern(parts, *o);
    o->variant = parts[0].variant;
    const Planned p = planned(*o);
    if (o->json) return print_json(json(p, *o));
    print(p, *o);
    return Outcome::fine;
  };
}

}  // namespace horner::cli
