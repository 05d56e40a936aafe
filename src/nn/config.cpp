#include "nn/config.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "core/check.h"
#include "core/names.h"
#include "nn/parts.h"
#include "nn/pattern.h"

namespace horner::nn {

template <class T>
static T field(const Json& j, const char* name) {
  check(j.contains(name), "config.json: missing field '", name, "'");
  const Json& x = j.at(name);
  const auto [fits, kind] = std::is_same_v<T, std::string> ? std::pair(x.is_string(), "a string")
                            : std::is_same_v<T, bool> ? std::pair(x.is_boolean(), "true or false")
                            : std::is_same_v<T, double>
                                ? std::pair(x.is_number(), "a number")
                                : std::pair(x.is_number_integer(), "an integer");
  check(fits, "config.json: '", name, "' must be ", kind, ", got ", x.dump());
  return x.get<T>();
}
template <class T>
static T field(const Json& j, const char* name, T otherwise) {
  return name && j.contains(name) && !j.at(name).is_null() ? field<T>(j, name) : otherwise;
}

static int64_t size(const Json& j, const char* name, int64_t otherwise = 0) {
  const auto n = otherwise > 0 ? field<int64_t>(j, name, otherwise) : field<int64_t>(j, name);
  constexpr int64_t kBelow = int64_t(1) << 40;
  check(n > 0 && n < kBelow, "config.json: '", name, "' must be 1 to ", kBelow - 1, ", got ", n);
  return n;
}

static void refuse(const Json& j, const char* name) {
  check(!j.contains(name) || j.at(name).is_null() || j.at(name) == false, "config.json: '", name,
        "' is not supported, got ", j.value(name, Json()).dump());
}

static Rope rope(const Json& given, const Rope& otherwise) {
  Rope r{.theta = field<double>(given, "rope_theta", otherwise.theta),
         .share = field<double>(given, "partial_rotary_factor", otherwise.share)};
  const auto type =
      field<std::string>(given, "rope_type", field<std::string>(given, "type", "default"));
  if (type == "default") return r;
  check(type == "linear" || type == "llama3", "config.json: unknown rope_type '", type,
        "'; supported: 'default', 'linear' or 'llama3'");
  r.factor = field<double>(given, "factor");
  r.llama3 = type == "llama3";
  if (!r.llama3) return r;
  r.low = field<double>(given, "low_freq_factor");
  r.high = field<double>(given, "high_freq_factor");
  r.original = field<double>(given, "original_max_position_embeddings");
  return r;
}

// Reads both the newer spelling (rope_parameters, perhaps one for each kind of layer) and the
// older.
static Rope layer_rope(const Json& j, const Family& f, bool window) {
  const bool own = window && f.window_rope_theta > 0;
  const Rope r{.theta = own ? field<double>(j, "rope_local_base_freq", f.window_rope_theta)
                            : field<double>(j, f.fields.rope_theta, f.rope_theta),
               .share = field<double>(j, f.fields.rope_share, f.rope_share)};
  const Json all = j.value("rope_parameters", Json()), older = j.value("rope_scaling", Json());
  for (const auto& [name, x] : {std::pair("rope_parameters", &all), {"rope_scaling", &older}})
    check(x->is_object() || x->is_null(), "config.json: '", name, "' must be a JSON object, got ",
          x->dump());
  if (all.is_object() && (all.contains("full_attention") || all.contains("sliding_attention")))
    return rope(all.value(window ? "sliding_attention" : "full_attention", Json::object()), r);
  if (all.is_object()) return rope(all, r);
  return rope(older.is_object() && !own ? older : Json::object(), r);
}

static bool has_rope(const Json& j, const Family& f, int64_t layer) {
  if (f.no_rope_every == 0) return true;
  if (const Json each = j.value("no_rope_layers", Json()); each.is_array()) {  // 1: with positions
    check(each.size() > size_t(layer) && each[size_t(layer)].is_number_integer(),
          "config.json: 'no_rope_layers' must have an integer for each layer, got ", each.dump());
    return each[size_t(layer)] != 0;
  }
  const auto n = field<int64_t>(j, "no_rope_layer_interval", f.no_rope_every);
  check(n > 0, "config.json: 'no_rope_layer_interval' must be at least 1, got ", n);
  return (layer + 1) % n != 0;
}

static bool has_window(const Json& j, const Family& f, int64_t layer) {
  if (j.value("sliding_window", Json()).is_null()) return false;
  if (f.fields.use_windows && !field<bool>(j, f.fields.use_windows, false)) return false;
  if (const Json types = j.value("layer_types", Json()); types.is_array()) {
    check(types.size() > size_t(layer), "config.json: 'layer_types' has ", types.size(),
          " entries, fewer than there are layers");
    return types[size_t(layer)] == "sliding_attention";
  }
  if (f.no_rope_every > 0) return !has_rope(j, f, layer);
  const auto full = field<int64_t>(j, "sliding_window_pattern",
                                   field<int64_t>(j, "_sliding_window_pattern", f.full_every));
  return full > 0 && (layer + 1) % full != 0;
}

// One per layer. A pattern becomes the list of them in `j`, which is what other readers expect.
static std::vector<std::string> layer_variants(Json& j, int64_t layers) {
  const Json given = j.value("horner_variant", Json());
  if (given.is_null()) return std::vector<std::string>(size_t(layers), "softmax");
  const std::vector<std::string> out = variants_of_layers(given, layers);
  if (!given.is_string() || given != out[0]) j["horner_variant"] = out;
  return out;
}

std::vector<std::string> variants_of(const ModelConfig& c) {
  std::vector<std::string> out;
  for (const LayerConfig& l : c.layers) out.push_back(l.variant);
  return out;
}

static bool is_field(const char* known, std::string_view name) {
  return known && name == known;
}

// c of c tanh(x / c). A family without the field refuses it.
static double softcap(const Json& j, const char* name, double otherwise) {
  if (!name) return 0;
  if (j.contains(name) && j.at(name).is_null()) return 0;
  const auto c = field<double>(j, name, otherwise);
  check(c >= 0, "config.json: '", name, "' must be positive, got ", c);
  return c;
}

// Heads that have the same operator, and the key heads that serve them.
static Part part_of(const ModelConfig& c, const std::string& name, std::vector<int64_t> heads) {
  const attn::Variant variant = attn::find(name);
  Part p{name, variant.spec, variant.around, std::move(heads), {}};
  const int64_t shared = c.H / c.G;
  std::map<int64_t, size_t> served;
  for (const int64_t h : p.heads) ++served[h / shared];
  const bool even = std::ranges::all_of(
      served, [&](const auto& g) { return g.second == served.begin()->second; });
  if (even)
    for (const auto& [g, n] : served) p.key_heads.push_back(g);
  else
    for (const int64_t h : p.heads) p.key_heads.push_back(h / shared);
  return p;
}

static std::vector<Part> parts_of(const ModelConfig& c, const std::string& layer) {
  std::vector<Part> out;
  const auto heads = variants_of_heads(layer, c.H);
  std::vector<std::string> all;
  for (const auto& head : heads)
    for (const std::string& name : head)
      if (std::ranges::find(all, name) == all.end()) all.push_back(name);
  for (const std::string& name : all) {
    std::vector<int64_t> with;
    for (size_t h = 0; h < heads.size(); ++h)
      if (std::ranges::find(heads[h], name) != heads[h].end()) with.push_back(int64_t(h));
    out.push_back(part_of(c, name, with));
  }
  if (out.size() == 1) return out;
  for (Part& p : out) {  // queries, keys and values are those of the layer
    check(!p.around.mamba && !p.around.raw_decay && !p.around.tied_keys && !p.around.exp_gate,
          "pattern '", layer, "': variant '", p.variant,
          "' changes more than the operator, so it cannot share a layer with others");
    p.around = {.silu_gate = p.around.silu_gate, .gate_root = p.around.gate_root};
  }
  return out;
}

// The narrower of the model's window and the variant's. Near keys and the delta rule come with a
// state of all past tokens: the model's window does not apply to them.
static void narrow(int64_t window, int64_t positions, Part& p) {
  attn::Spec& spec = p.attention;
  if (!attn::is<attn::NoKeys>(spec.near) || attn::is<attn::Delta>(spec.values)) return;
  if (auto* const own = std::get_if<attn::Window>(&spec.mask)) {
    own->size = int(std::min<int64_t>(own->size, window));
  } else if (attn::is<attn::Causal>(spec.mask)) {
    spec.mask = attn::Window{int(window)};
  } else {
    check(window >= positions, "variant '", p.variant,
          "' has a mask of its own, but this layer of the model has a window of ", window,
          " tokens");
  }
}

// The layer's own cap and scale, where the variant leaves them open.
static void complete(const Json& j, const Family& f, attn::Spec& spec) {
  if (spec.softcap == 0) spec.softcap = softcap(j, f.fields.softcap, f.softcap);
  if (f.query_scalar > 0 && attn::is<attn::RootDim>(spec.scale))
    spec.scale = attn::Fixed{
        float(1 / std::sqrt(field<double>(j, "query_pre_attn_scalar", f.query_scalar)))};
}

static LayerConfig layer_config(const Json& j, const ModelConfig& c, int64_t layer,
                                const std::string& name) {
  constexpr int64_t kMostTokens = 256;  // of a convolution
  const Family& f = *c.family;
  const bool window = has_window(j, f, layer);
  LayerConfig l{name, layer_rope(j, f, window), parts_of(c, name)};
  const Json own = j.value("horner", Json::object());
  for (Part& p : l.parts) {
    check(!p.attention.bias, "attention '", p.variant,
          "' adds a bias to each score, which models of the command do not make: use horner.nn or "
          "horner.hf, where a layer learns one by distance, or an attention with slopes (alibi)");
    check(!attn::is<attn::Prefix>(p.attention.mask), "attention '", p.variant,
          "' requires the length of a prefix for each sequence, which the command cannot read: use "
          "horner.nn or horner.hf, or another mask, such as mask=causal");
    check(p.attention.dropout == 0, "attention '", p.variant,
          "' has dropout, which training by the command does not support: use horner.nn or "
          "horner.hf");
    p.around.rope = p.around.rope && has_rope(j, f, layer) && field<bool>(own, "rope", true);
    const auto n = field<int64_t>(own, "short_conv", p.around.short_conv);
    check(n >= (p.around.mamba ? 1 : 0) && n <= kMostTokens,
          "config.json: 'horner.short_conv' must be ", p.around.mamba ? "1 to " : "0 (none) to ",
          kMostTokens, ", got ", n);
    p.around.short_conv = int(n);
    if (p.around.raw_decay) {  // the layer makes it part of the gates
      check(p.attention.input_gate && p.attention.output_gate, "variant '", p.variant,
            "': its decay requires an input and an output gate");
      p.attention.decay = attn::NoDecay{};
    }
    if (window) narrow(size(j, "sliding_window"), c.positions, p);
    complete(j, f, p.attention);
  }
  return l;
}

static parts::Activation activation(const Json& j, const Family& f) {
  using enum parts::Activation;
  static const std::pair<const char*, parts::Activation> kKnown[] = {{"silu", silu},
                                                                     {"swish", silu},
                                                                     {"gelu", gelu_erf},
                                                                     {"gelu_new", gelu},
                                                                     {"gelu_pytorch_tanh", gelu},
                                                                     {"gelu_fast", gelu}};
  const auto name = field<std::string>(j, f.fields.activation, f.activation);
  for (const auto& [known, which] : kKnown)
    if (name == known) return which;
  fail("config.json: unknown activation '", name,
       "'; supported: 'silu', 'gelu', 'gelu_new' or 'gelu_pytorch_tanh'");
}

static void read_sizes(const Json& j, ModelConfig& c) {
  const FieldNames& name = c.family->fields;
  c.V = size(j, "vocab_size"), c.C = size(j, name.C), c.H = size(j, name.H);
  c.G = size(j, name.G, c.H), c.M = size(j, name.M, c.family->mlp_ratio * c.C);
  c.positions = size(j, name.positions);
  const bool given = name.D && !j.value(name.D, Json()).is_null();
  check(given || c.C % c.H == 0, "config.json: '", name.C, "' must be a multiple of '", name.H,
        "', got ", c.C, " and ", c.H);
  c.D = given ? size(j, name.D) : c.C / c.H;
  check(c.H % c.G == 0, "config.json: '", name.H, "' must be a multiple of '",
        name.G ? name.G : name.H, "', got ", c.H, " and ", c.G);
}

int64_t rotated_channels(const Rope& r, int64_t D) {
  return int64_t(double(D) * r.share);
}

static void check_rope(const ModelConfig& c, const Rope& r) {
  check(r.share == 1 || c.family->fields.rope_share,
        "config.json: 'partial_rotary_factor' is not supported for model_type '", c.family->name,
        "', got ", r.share);
  if (!c.family->rotary()) return;
  check(c.D % 2 == 0, "config.json: rotary positions require an even head dimension, got ", c.D);
  const int64_t n = rotated_channels(r, c.D);
  check(n > 0 && n <= c.D && n % 2 == 0,
        "config.json: rotary positions require an even number of the ", c.D,
        " channels of a head, got ", n);
}

// Fields that change what a model computes in ways that are not supported.
static constexpr const char* kRefused[] = {
    "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention",
    "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"};

// Fields that are read here or written for other programs, whatever the family.
static constexpr const char* kCommonFields[] = {"architectures",
                                                "bos_token_id",
                                                "dtype",
                                                "eos_token_id",
                                                "horner",
                                                "horner_variant",
                                                "initializer_range",
                                                "layer_types",
                                                "model_type",
                                                "pad_token_id",
                                                "query_pre_attn_scalar",
                                                "rope_local_base_freq",
                                                "rope_parameters",
                                                "rope_scaling",
                                                "rope_theta",
                                                "sliding_window",
                                                "sliding_window_pattern",
                                                "tie_word_embeddings",
                                                "torch_dtype",
                                                "vocab_size"};

static const std::vector<std::string> kOwnFields{"init", "key_shift", "rope", "short_conv"};

// Throws for a name of the object `j` that is not `known`.
static void check_names(const Json& j, const std::vector<std::string>& known,
                        const std::string& what) {
  for (const auto& [name, value] : j.items())
    check(std::ranges::find(known, name) != known.end(), what, " '", name, "'; did you mean ",
          quoted(nearest(name, known)), "?");
}

Json changed_config(const Json& config, const Json& changes) {
  check(config.is_object(), "config.json must be a JSON object");
  std::vector<std::string> known(std::begin(kCommonFields), std::end(kCommonFields));
  known.insert(known.end(), std::begin(kRefused), std::end(kRefused));
  for (const auto& [name, value] : config.items()) known.push_back(name);
  const Json type = changes.value("model_type", config.value("model_type", Json()));
  if (type.is_string()) {
    const FieldNames& f = find_family(type.get<std::string>()).fields;
    for (const char* name : {f.C, f.M, f.layers, f.H, f.G, f.D, f.positions, f.eps, f.activation,
                             f.attention_bias, f.mlp_bias, f.use_windows, f.rope_theta,
                             f.rope_share, f.parallel, f.softcap, f.final_softcap})
      if (name) known.push_back(name);
  }
  std::ranges::sort(known);
  known.erase(std::unique(known.begin(), known.end()), known.end());
  check_names(changes, known, "model-config: config.json has no field");
  Json out = config;
  out.merge_patch(changes);
  return out;
}

ModelConfig model_config(const Json& j) {
  check(j.is_object() && j.value("horner", Json::object()).is_object(),
        "config.json, and 'horner' in it, must be JSON objects");
  check(!j.value("horner", Json::object()).contains("attention"),
        "config.json: the variant is the field 'horner_variant', not 'horner.attention'");
  check_names(j.value("horner", Json::object()), kOwnFields, "config.json: 'horner' has no field");
  ModelConfig c{};
  c.json = j;
  c.family = &find_family(field<std::string>(j, "model_type"));
  const Family& f = *c.family;
  read_sizes(j, c);
  c.eps = field<double>(j, f.fields.eps, f.eps);
  c.tied = field<bool>(j, "tie_word_embeddings", f.tied);
  const bool bias = field<bool>(j, f.fields.attention_bias, f.attention_bias);
  c.norm_bias = f.norm == NormKind::layer;
  c.query_bias = f.query_bias || bias, c.out_bias = f.out_bias || bias;
  c.mlp_bias = f.mlp_bias || field<bool>(j, f.fields.mlp_bias, false);
  const Json own = j.value("horner", Json::object());
  c.key_shift = field<bool>(own, "key_shift", false);
  const auto init = field<std::string>(own, "init", "normal");
  check(init == "normal" || init == "torch",
        "config.json: 'horner.init' must be 'normal' or 'torch', got '", init, "'");
  c.torch_init = init == "torch";
  c.activation = activation(j, f);
  c.parallel = field<bool>(j, f.fields.parallel, f.parallel);
  c.final_softcap = softcap(j, f.fields.final_softcap, f.final_softcap);
  for (const char* name : kRefused)
    if (!is_field(f.fields.softcap, name) && !is_field(f.fields.final_softcap, name))
      refuse(j, name);
  const int64_t layers = size(j, f.fields.layers);
  check(layers <= 10000, "config.json: '", f.fields.layers, "' must be at most 10000, got ",
        layers);
  for (const std::string& variant : layer_variants(c.json, layers)) {
    c.layers.push_back(layer_config(j, c, int64_t(c.layers.size()), variant));
    check_rope(c, c.layers.back().rope);
    check(!c.key_shift || !c.layers.back().around().mamba,
          "config.json: 'horner.key_shift' requires keys, which a Mamba-2 block does not have");
  }
  const Json end = j.value("eos_token_id", Json());
  for (const Json& e : end.is_array() ? end : Json::array({end}))
    if (e.is_number_integer()) c.ends.push_back(e.get<int64_t>());
  return c;
}

// clang-format off
static const struct {
  const char *name, *family;
  int64_t C, M, layers, H, V, positions;
  int64_t end;  // bos_token_id and eos_token_id; -1: none
} kPresets[] = {
    {"tiny",        "llama", 64,   128,  2,  4,  256,   2048, -1},
    {"10m",         "llama", 384,  1024, 6,  6,  256,   2048, -1},
    {"30m",         "llama", 512,  1408, 10, 8,  256,   2048, -1},
    {"small",       "llama", 1024, 2048, 20, 16, 32000, 1024, -1},  // of the first paper, 275 M
    {"large",       "llama", 3072, 6144, 20, 16, 32000, 1024, -1},
    {"large_depth", "llama", 1024, 2048, 60, 32, 32000, 1024, -1},
    {"gpt2",        "gpt2",  768,  3072, 12, 12, 50257, 1024, 50256},
};
// clang-format on

std::vector<std::string> preset_names() {
  std::vector<std::string> out;
  for (const auto& p : kPresets) out.push_back(p.name);
  return out;
}

ModelConfig preset(const std::string& name, const std::string& attention) {
  for (const auto& p : kPresets) {
    if (name != p.name) continue;
    const Family& f = find_family(p.family);
    Json j = {{"architectures", {f.architecture}}, {"model_type", f.name}};
    const auto set = [&](const char* field, const Json& value) {
      if (field) j[field] = value;
    };
    set(f.fields.C, p.C), set(f.fields.M, p.M), set(f.fields.layers, p.layers);
    set(f.fields.H, p.H), set(f.fields.G, p.H), set(f.fields.D, p.C / p.H);
    set("vocab_size", p.V), set(f.fields.positions, p.positions);
    set(f.fields.activation, f.activation), set(f.fields.eps, 1e-5);
    set(f.rotary() ? "rope_theta" : nullptr, f.rope_theta);
    set("tie_word_embeddings", f.tied);
    set(f.fields.attention_bias, false), set(f.fields.mlp_bias, false);
    for (const char* end : {"bos_token_id", "eos_token_id"})
      j[end] = p.end < 0 ? Json() : Json(p.end);
    set("dtype", "float32"), set("initializer_range", 0.02);
    set("horner_variant", attention);
    return model_config(j);
  }
  fail("no model preset '", name, "'; possible: ", quoted(preset_names()));
}

}  // namespace horner::nn
