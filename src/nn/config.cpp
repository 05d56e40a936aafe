#include "nn/config.h"

#include <cmath>

#include "attn/catalog.h"
#include "core/check.h"
#include "core/names.h"

namespace horner::nn {

// clang-format off
static const Family kFamilies[] = {
    // name         architecture           names          norm                  rotary gated  qk_norm sandwich scaled qkv bias begins
    {"llama",       "LlamaForCausalLM",    Family::llama, Family::rms,          true,  true,  false,  false,   false, false, true},
    {"mistral",     "MistralForCausalLM",  Family::llama, Family::rms,          true,  true,  false,  false,   false, false, true},
    {"qwen2",       "Qwen2ForCausalLM",    Family::llama, Family::rms,          true,  true,  false,  false,   false, true,  false},
    {"qwen3",       "Qwen3ForCausalLM",    Family::llama, Family::rms,          true,  true,  true,   false,   false, false, false},
    {"gemma3_text", "Gemma3ForCausalLM",   Family::gemma, Family::rms_plus_one, true,  true,  true,   true,    true,  false, true},
    {"gpt2",        "GPT2LMHeadModel",     Family::gpt2,  Family::layer,        false, false, false,  false,   false, true,  false},
};

// Presets, in Llama's family but for gpt2: width, MLP, layers, heads, vocabulary, positions.
struct Preset {
  const char* name;
  int64_t C, M, layers, H, V, positions;
};
static const Preset kPresets[] = {
    {"tiny",        64,   128,  2,  4,  256,   2048},
    {"10m",         384,  1024, 6,  6,  256,   2048},
    {"30m",         512,  1408, 10, 8,  256,   2048},
    {"small",       1024, 2048, 20, 16, 32000, 1024},  // the first paper's, 275 M
    {"large",       3072, 6144, 20, 16, 32000, 1024},
    {"large_depth", 1024, 2048, 60, 32, 32000, 1024},
    {"gpt2",        768,  3072, 12, 12, 50257, 1024},
};
// clang-format on

std::span<const Family> model_families() {
  return kFamilies;
}

static const Family& family(const std::string& type) {
  std::vector<std::string> known;
  for (const Family& f : kFamilies) {
    if (type == f.name) return f;
    known.push_back(f.name);
  }
  fail("no family of models '", type, "'; possible: ", quoted(known));
}

template <class T>
static T field(const Json& j, const std::string& name) {
  check(j.contains(name), "config.json has no '", name, "'");
  try {
    return j.at(name).get<T>();
  } catch (const Json::exception&) {
    fail("config.json: '", name, "' is ", j.at(name).dump(), ", which is no ",
         std::is_same_v<T, std::string> ? "text" : "number of the right kind");
  }
}
template <class T>
static T field(const Json& j, const std::string& name, T otherwise) {
  return j.contains(name) && !j.at(name).is_null() ? field<T>(j, name) : otherwise;
}

static int64_t size(const Json& j, const std::string& name) {
  const auto n = field<int64_t>(j, name);
  check(n > 0 && n < (int64_t(1) << 40), "config.json: '", name, "' must be positive, not ", n);
  return n;
}

static void refuse(const Json& j, const char* name) {
  check(!j.contains(name) || j.at(name).is_null() || j.at(name) == false, "config.json: '", name,
        "' is ", j.value(name, Json()).dump(), ", which is not supported here");
}

static Rope rope(const Json& given, double theta) {
  Rope r{.theta = field<double>(given, "rope_theta", theta)};
  const auto type =
      field<std::string>(given, "rope_type", field<std::string>(given, "type", "default"));
  if (type == "default") return r;
  check(type == "linear" || type == "llama3", "config.json: no rotary positions of type '", type,
        "'; possible: 'default', 'linear', 'llama3'");
  r.factor = field<double>(given, "factor");
  r.llama3 = type == "llama3";
  if (!r.llama3) return r;
  r.low = field<double>(given, "low_freq_factor"),
  r.high = field<double>(given, "high_freq_factor");
  r.original = field<double>(given, "original_max_position_embeddings");
  return r;
}

// Both the newer spelling (rope_parameters, by kind of layer for Gemma) and the older one.
static Rope layer_rope(const Json& j, bool by_kind, bool sliding) {
  const double theta = by_kind && sliding ? field<double>(j, "rope_local_base_freq", 10000)
                                          : field<double>(j, "rope_theta", by_kind ? 1e6 : 10000);
  const Json all = j.contains("rope_parameters") ? j["rope_parameters"] : Json();
  if (all.is_object() && by_kind &&
      (all.contains("full_attention") || all.contains("sliding_attention")))
    return rope(all.value(sliding ? "sliding_attention" : "full_attention", Json::object()), theta);
  if (all.is_object()) return rope(all, theta);
  const Json older = j.contains("rope_scaling") ? j["rope_scaling"] : Json();
  return rope(older.is_object() && !(by_kind && sliding) ? older : Json::object(), theta);
}

// Whether a layer sees a window alone.
static bool is_sliding(const Json& j, const Family& f, int64_t layer) {
  if (!j.contains("sliding_window") || j["sliding_window"].is_null()) return false;
  const std::string name = f.name;
  if (name.starts_with("qwen") && !field<bool>(j, "use_sliding_window", false)) return false;
  if (j.contains("layer_types") && j["layer_types"].is_array()) {
    check(j["layer_types"].size() > size_t(layer), "config.json: 'layer_types' has ",
          j["layer_types"].size(), " entries, too few");
    return j["layer_types"][size_t(layer)] == "sliding_attention";
  }
  if (f.names == Family::gemma) {
    const auto pattern = field<int64_t>(j, "sliding_window_pattern",
                                        field<int64_t>(j, "_sliding_window_pattern", 6));
    return pattern > 0 && (layer + 1) % pattern != 0;
  }
  return name == "mistral";
}

static std::string attention_name(const Json& j, int64_t layer, int64_t layers) {
  if (!j.contains("horner")) return "softmax";
  const Json a = j["horner"].value("attention", Json("softmax"));
  if (a.is_string()) return a.get<std::string>();
  check(a.is_array() && int64_t(a.size()) == layers && a[size_t(layer)].is_string(),
        "config.json: 'horner.attention' must be a variant, or one for each of ", layers,
        " layers");
  return a[size_t(layer)].get<std::string>();
}

static LayerConfig layer_config(const Json& j, const ModelConfig& c, int64_t layer,
                                int64_t layers) {
  const bool sliding = is_sliding(j, *c.family, layer), by_kind = c.family->names == Family::gemma;
  LayerConfig l{attn::find(attention_name(j, layer, layers)).spec, layer_rope(j, by_kind, sliding)};
  if (sliding && attn::is<attn::Causal>(l.attention.mask))
    l.attention.mask = attn::Window{int(size(j, "sliding_window"))};
  if (by_kind && attn::is<attn::RootDim>(l.attention.scale))
    l.attention.scale =
        attn::Fixed{float(1 / std::sqrt(field<double>(j, "query_pre_attn_scalar", 256)))};
  return l;
}

static void read_activation(const Json& j, ModelConfig& c) {
  const char* key = c.family->names == Family::gpt2    ? "activation_function"
                    : c.family->names == Family::gemma ? "hidden_activation"
                                                       : "hidden_act";
  const auto name =
      field<std::string>(j, key, c.family->names == Family::llama ? "silu" : "gelu_pytorch_tanh");
  c.silu = name == "silu" || name == "swish";
  check(c.silu || name == "gelu_new" || name == "gelu_pytorch_tanh" || name == "gelu_fast",
        "config.json: no activation '", name,
        "'; possible: 'silu', 'gelu_new', 'gelu_pytorch_tanh'");
}

ModelConfig model_config(const Json& j) {
  check(j.is_object(), "config.json is no JSON object");
  ModelConfig c{};
  c.json = j;
  c.family = &family(field<std::string>(j, "model_type"));
  const bool gpt2 = c.family->names == Family::gpt2;
  c.C = size(j, gpt2 ? "n_embd" : "hidden_size"), c.V = size(j, "vocab_size");
  c.H = size(j, gpt2 ? "n_head" : "num_attention_heads");
  c.G = gpt2 ? c.H : field<int64_t>(j, "num_key_value_heads", c.H);
  c.D = gpt2 ? c.C / c.H : field<int64_t>(j, "head_dim", c.C / c.H);
  c.M = gpt2 ? field<int64_t>(j, "n_inner", 4 * c.C) : size(j, "intermediate_size");
  c.positions = size(j, gpt2 ? "n_positions" : "max_position_embeddings");
  check(c.G > 0 && c.H % c.G == 0, "config.json: ", c.H, " heads are no multiple of ", c.G,
        " key heads");
  check(!c.family->rotary || c.D % 2 == 0,
        "config.json: rotary positions need an even head dimension, not ", c.D);
  check(!gpt2 || c.C % c.H == 0, "config.json: a width of ", c.C, " is no multiple of ", c.H,
        " heads");
  c.eps = field<double>(j, gpt2 ? "layer_norm_epsilon" : "rms_norm_eps", gpt2 ? 1e-5 : 1e-6);
  c.tied = field<bool>(j, "tie_word_embeddings", gpt2 || c.family->names == Family::gemma);
  const bool bias = field<bool>(j, "attention_bias", false);
  c.query_bias = c.family->query_bias || bias;
  c.out_bias = gpt2 || bias, c.mlp_bias = gpt2 || field<bool>(j, "mlp_bias", false);
  c.key_shift = j.contains("horner") && field<bool>(j["horner"], "key_shift", false);
  read_activation(j, c);
  for (const char* name :
       {"attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention",
        "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"})
    refuse(j, name);
  const int64_t layers = size(j, gpt2 ? "n_layer" : "num_hidden_layers");
  check(layers <= 10000, "config.json: ", layers, " layers are too many");
  for (int64_t i = 0; i < layers; ++i) c.layers.push_back(layer_config(j, c, i, layers));
  const Json end = j.contains("eos_token_id") ? j["eos_token_id"] : Json();
  for (const Json& e : end.is_array() ? end : Json::array({end}))
    if (e.is_number_integer()) c.ends.push_back(e.get<int64_t>());
  const Json begin = j.contains("bos_token_id") ? j["bos_token_id"] : Json();
  if (c.family->begins && begin.is_number_integer()) c.begin = begin.get<int64_t>();
  return c;
}

std::vector<std::string> preset_names() {
  std::vector<std::string> out;
  for (const Preset& p : kPresets) out.push_back(p.name);
  return out;
}

ModelConfig preset(const std::string& name, const std::string& attention) {
  for (const Preset& p : kPresets) {
    if (name != p.name) continue;
    Json j;
    if (name == "gpt2")
      j = {{"architectures", {"GPT2LMHeadModel"}},
           {"model_type", "gpt2"},
           {"n_embd", p.C},
           {"n_head", p.H},
           {"n_layer", p.layers},
           {"n_inner", p.M},
           {"n_positions", p.positions},
           {"vocab_size", p.V},
           {"activation_function", "gelu_new"},
           {"layer_norm_epsilon", 1e-5},
           {"tie_word_embeddings", true},
           {"bos_token_id", 50256},
           {"eos_token_id", 50256}};
    else
      j = {{"architectures", {"LlamaForCausalLM"}},
           {"model_type", "llama"},
           {"hidden_size", p.C},
           {"intermediate_size", p.M},
           {"num_hidden_layers", p.layers},
           {"num_attention_heads", p.H},
           {"num_key_value_heads", p.H},
           {"head_dim", p.C / p.H},
           {"vocab_size", p.V},
           {"max_position_embeddings", p.positions},
           {"hidden_act", "silu"},
           {"rms_norm_eps", 1e-5},
           {"rope_theta", 10000.0},
           {"tie_word_embeddings", false},
           {"attention_bias", false},
           {"mlp_bias", false},
           {"bos_token_id", nullptr},
           {"eos_token_id", nullptr}};
    j["dtype"] = "float32";
    j["initializer_range"] = 0.02;
    j["horner"] = {{"attention", attention}};
    return model_config(j);
  }
  fail("no model preset '", name, "'; possible: ", quoted(preset_names()));
}

}  // namespace horner::nn
