// What a model is: a Hugging Face config.json, read into the few facts that running it takes.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "attn/spec.h"

namespace horner::nn {

using Json = nlohmann::ordered_json;

// A family of models: the switches in which it differs from the others.
struct Family {
  const char* name;                        // config.json's model_type
  const char* architecture;                // and its architectures[0]
  enum { llama, gemma, gpt2 } names;       // of its tensors
  enum { rms, rms_plus_one, layer } norm;  // rms_plus_one: times 1 + weight
  bool rotary;                             // else learned positions
  bool gated_mlp;                          // act(gate x) * up x, else act(up x)
  bool query_key_norm;                     // of each head's queries and keys
  bool sandwich;                           // norms after attention and after the MLP too
  bool scaled_embedding;                   // times the root of the width
  bool query_bias;                         // of q, k and v, whatever the config says
  bool begins;                             // its texts begin with bos_token_id
};
std::span<const Family> model_families();

// Rotary positions: angle of channel pair i is position * theta^(-2i / D), scaled as llama3 does.
struct Rope {
  double theta = 10000, factor = 1;
  bool llama3 = false;
  double low = 1, high = 4, original = 8192;

  bool operator==(const Rope&) const = default;
};

struct LayerConfig {
  attn::Spec attention;
  Rope rope;
};

// C width, M width of the MLP, H heads, G key heads, D channels of a head, V vocabulary.
struct ModelConfig {
  const Family* family;
  int64_t C, M, H, G, D, V, positions;
  double eps;
  bool tied, query_bias, out_bias, mlp_bias, silu;  // silu: else gelu, by tanh
  bool key_shift = false;  // a token's keys come from the token before it, its values from itself
  std::vector<LayerConfig> layers;
  std::vector<int64_t> ends;  // tokens that end a text
  int64_t begin = -1;         // the token that begins one; -1 for none
  Json json;                  // all of it, as it is saved
};

// Throws, naming the field, for what is missing, of a wrong kind, or not known here. Our own fields
// are under "horner": {"attention": a variant, or one for each layer, "key_shift": a truth value}.
ModelConfig model_config(const Json&);

// The config of a preset; `attention` names a variant for every layer.
ModelConfig preset(const std::string& name, const std::string& attention = "softmax");
std::vector<std::string> preset_names();

}  // namespace horner::nn
