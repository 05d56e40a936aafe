// A Hugging Face config.json, read into the facts that running the model takes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attn/catalog.h"
#include "files/json.h"
#include "nn/family.h"

namespace horner::nn {

namespace parts {
enum class Activation;
}
using files::Json;

// Rotary positions: channel pair i is rotated by position * theta^(-2i / D) / factor; llama3
// divides low frequencies only.
struct Rope {
  double theta = 10000, factor = 1;
  double share = 1;  // of a head's channels, those that are rotated; D then counts only these
  bool llama3 = false;
  double low = 1, high = 4, original = 8192;

  bool operator==(const Rope&) const = default;
};

int64_t rotated_channels(const Rope&, int64_t D);  // of the D channels of a head, the first ones

// Heads of a layer that have the same operator.
struct Part {
  std::string variant;
  attn::Spec attention;
  attn::Around around = {};
  std::vector<int64_t> heads, key_heads;  // of the layer; one key head serves as many heads each
};

// Most layers are one part. The results of parts that share a head add up there.
struct LayerConfig {
  std::string variant;  // as config.json names it
  Rope rope;
  std::vector<Part> parts;

  bool uniform() const { return parts.size() == 1; }
  // What holds for the whole layer: of a layer of several parts only whether it has rope.
  const attn::Around& around() const { return parts[0].around; }
};

// C model dim, M MLP dim, H heads, G key/value heads, D head dim, V vocabulary.
struct ModelConfig {
  const Family* family;
  int64_t C, M, H, G, D, V, positions;
  double eps;
  bool tied, norm_bias, query_bias, out_bias, mlp_bias;
  bool parallel;         // attention and MLP read the same x
  double final_softcap;  // c of c tanh(logits / c); 0: none
  parts::Activation activation;
  bool key_shift = false;   // keys come from the previous token, values from the token itself
  bool torch_init = false;  // layers start as torch's modules do
  std::vector<LayerConfig> layers;
  std::vector<int64_t> ends;  // tokens that end a text
  Json json;                  // the whole file, as it is saved
};

// Throws and names the field if one is missing, has the wrong type or is not supported. Our own
// fields are "horner_variant", a pattern of layers (pattern.h), and "horner": {"key_shift": bool,
// "short_conv": tokens, "init": "normal" or "torch"}. A pattern is kept as one variant per layer.
ModelConfig model_config(const Json&);

// The config with `changes` merged into it (null removes a field). Throws for a field of `changes`
// that neither the family nor the config has, with the nearest name.
Json changed_config(const Json& config, const Json& changes);

std::vector<std::string> variants_of(const ModelConfig&);  // of each layer

// The config of a preset, with the pattern `attention` of variants.
ModelConfig preset(const std::string& name, const std::string& attention = "softmax");
std::vector<std::string> preset_names();

}  // namespace horner::nn
