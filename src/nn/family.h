// A family of models is data: the names of its tensors, the names of config.json's fields, and
// facts. What a row does not say is as in Llama.
#pragma once

#include <cstdint>
#include <string>

namespace horner::nn {

// Names without ".weight" and ".bias". nullptr: the family has no such tensor; this is also how a
// row places its norms and chooses between plain and gated MLPs. Tensors of the same name are
// stored as one, their rows below each other.
struct TensorNames {
  const char* embedding = "model.embed_tokens";
  const char* positions = nullptr;      // learned positions; nullptr: rotary positions
  const char* layers = "model.layers";  // "<layers>.<i>." precedes the names of layer i
  const char *before_attention = "input_layernorm", *after_attention = nullptr;
  const char *q = "self_attn.q_proj", *k = "self_attn.k_proj", *v = "self_attn.v_proj";
  const char *q_norm = nullptr, *k_norm = nullptr;
  const char* o = "self_attn.o_proj";
  const char *before_mlp = "post_attention_layernorm", *after_mlp = nullptr;
  const char *gate = "mlp.gate_proj", *up = "mlp.up_proj", *down = "mlp.down_proj";
  const char *last_norm = "model.norm", *head = "lm_head";
};

// Fields of config.json. nullptr: the family does not have it, and the default holds.
struct FieldNames {
  const char *C = "hidden_size", *M = "intermediate_size", *layers = "num_hidden_layers";
  const char *H = "num_attention_heads", *G = "num_key_value_heads", *D = "head_dim";
  const char *positions = "max_position_embeddings", *eps = "rms_norm_eps";
  const char* activation = "hidden_act";
  const char* attention_bias = "attention_bias";  // biases of q, k, v and o
  const char* mlp_bias = nullptr;
  const char* use_windows = nullptr;  // false there: no layer has a window
  const char *rope_theta = "rope_theta", *rope_share = nullptr;
  const char* parallel = nullptr;
  const char *softcap = nullptr, *final_softcap = nullptr;  // of scores; of logits
};

enum class NormKind { rms, rms_plus_one, layer };  // rms_plus_one: times 1 + weight
enum class NormWidth { head, projection };         // D channels of a head; all channels of q or k

struct Family {
  const char *name, *architecture;  // config.json's model_type and architectures[0]
  TensorNames tensors = {};
  FieldNames fields = {};
  bool transposed = false;  // the products of layers are stored [in, out]
  bool by_head = false;     // q, k and v of one name: stored head by head, not one below the other
  NormKind norm = NormKind::rms;
  NormWidth query_key_norm = NormWidth::head;
  bool query_bias = false, out_bias = false, mlp_bias = false;  // whatever config.json says
  bool scaled_embedding = false;                                // times the root of C

  // Defaults where config.json does not say.
  double eps = 1e-6;
  const char* activation = "silu";
  bool tied = false;
  int64_t mlp_ratio = 0;  // M / C; 0: config.json must say
  bool attention_bias = false;
  bool parallel = false;                  // attention and MLP both read x; their sum is added to it
  double softcap = 0, final_softcap = 0;  // c tanh(x / c) of scores and of logits; 0: none
  double rope_theta = 1e4;
  double rope_share = 1;         // of a head's channels, the first ones, that are rotated
  int64_t no_rope_every = 0;     // every n-th layer has no positions; 0: all have them
  double window_rope_theta = 0;  // for layers with a window; 0: the same as for others
  double query_scalar = 0;       // scores are divided by its root; 0: by that of D
  int64_t full_every = 1;        // every n-th layer has no window; kNever: all have one

  bool rotary() const { return !tensors.positions; }
};
inline constexpr int64_t kNever = INT64_MAX;

const Family& find_family(std::string_view model_type);

}  // namespace horner::nn
