// The families of models, one row each.
#include "nn/family.h"

#include <string>
#include <vector>

#include "core/check.h"
#include "core/names.h"

namespace horner::nn {

// clang-format off
static const Family kFamilies[] = {
    {.name = "llama", .architecture = "LlamaForCausalLM", .fields = {.mlp_bias = "mlp_bias"}},
    {.name = "mistral", .architecture = "MistralForCausalLM", .full_every = kNever},
    {.name = "qwen2", .architecture = "Qwen2ForCausalLM",
     .fields = {.use_windows = "use_sliding_window"}, .query_bias = true},
    {.name = "qwen3", .architecture = "Qwen3ForCausalLM",
     .tensors = {.q_norm = "self_attn.q_norm", .k_norm = "self_attn.k_norm"},
     .fields = {.use_windows = "use_sliding_window"}},
    {.name = "olmo2", .architecture = "Olmo2ForCausalLM",
     .tensors = {.before_attention = nullptr, .after_attention = "post_attention_layernorm",
                 .q_norm = "self_attn.q_norm", .k_norm = "self_attn.k_norm",
                 .before_mlp = nullptr, .after_mlp = "post_feedforward_layernorm"},
     .query_key_norm = NormWidth::projection, .eps = 1e-5},
    {.name = "phi3", .architecture = "Phi3ForCausalLM",
     .tensors = {.q = "self_attn.qkv_proj", .k = "self_attn.qkv_proj", .v = "self_attn.qkv_proj",
                 .gate = "mlp.gate_up_proj", .up = "mlp.gate_up_proj"},
     .fields = {.attention_bias = nullptr, .rope_share = "partial_rotary_factor"},
     .eps = 1e-5, .full_every = kNever},
    {.name = "smollm3", .architecture = "SmolLM3ForCausalLM",
     .fields = {.mlp_bias = "mlp_bias", .use_windows = "use_sliding_window"},
     .tied = true, .rope_theta = 2e6, .no_rope_every = 4},
    {.name = "gpt_neox", .architecture = "GPTNeoXForCausalLM",
     .tensors = {.embedding = "gpt_neox.embed_in", .layers = "gpt_neox.layers",
                 .q = "attention.query_key_value", .k = "attention.query_key_value",
                 .v = "attention.query_key_value", .o = "attention.dense", .gate = nullptr,
                 .up = "mlp.dense_h_to_4h", .down = "mlp.dense_4h_to_h",
                 .last_norm = "gpt_neox.final_layer_norm", .head = "embed_out"},
     .fields = {.G = nullptr, .D = nullptr, .eps = "layer_norm_eps", .rope_theta = "rotary_emb_base",
                .rope_share = "rotary_pct", .parallel = "use_parallel_residual"},
     .by_head = true, .norm = NormKind::layer, .mlp_bias = true, .eps = 1e-5, .activation = "gelu",
     .attention_bias = true, .parallel = true, .rope_share = 0.25},
    {.name = "gemma2", .architecture = "Gemma2ForCausalLM",
     .tensors = {.after_attention = "post_attention_layernorm",
                 .before_mlp = "pre_feedforward_layernorm", .after_mlp = "post_feedforward_layernorm"},
     .fields = {.activation = "hidden_activation", .softcap = "attn_logit_softcapping",
                .final_softcap = "final_logit_softcapping"},
     .norm = NormKind::rms_plus_one, .scaled_embedding = true, .activation = "gelu_pytorch_tanh",
     .tied = true, .softcap = 50, .final_softcap = 30, .query_scalar = 256, .full_every = 2},
    {.name = "gemma3_text", .architecture = "Gemma3ForCausalLM",
     .tensors = {.after_attention = "post_attention_layernorm",
                 .q_norm = "self_attn.q_norm", .k_norm = "self_attn.k_norm",
                 .before_mlp = "pre_feedforward_layernorm", .after_mlp = "post_feedforward_layernorm"},
     .fields = {.activation = "hidden_activation", .final_softcap = "final_logit_softcapping"},
     .norm = NormKind::rms_plus_one, .scaled_embedding = true, .activation = "gelu_pytorch_tanh", .tied = true,
     .rope_theta = 1e6, .window_rope_theta = 1e4, .query_scalar = 256, .full_every = 6},
    {.name = "gpt2", .architecture = "GPT2LMHeadModel",
     .tensors = {.embedding = "transformer.wte", .positions = "transformer.wpe", .layers = "transformer.h",
                 .before_attention = "ln_1", .q = "attn.c_attn", .k = "attn.c_attn", .v = "attn.c_attn",
                 .o = "attn.c_proj", .before_mlp = "ln_2", .gate = nullptr, .up = "mlp.c_fc",
                 .down = "mlp.c_proj", .last_norm = "transformer.ln_f"},
     .fields = {.C = "n_embd", .M = "n_inner", .layers = "n_layer", .H = "n_head", .G = nullptr, .D = nullptr,
                .positions = "n_positions", .eps = "layer_norm_epsilon",
                .activation = "activation_function", .attention_bias = nullptr},
     .transposed = true, .norm = NormKind::layer,
     .query_bias = true, .out_bias = true, .mlp_bias = true,
     .eps = 1e-5, .activation = "gelu_new", .tied = true, .mlp_ratio = 4},
};
// clang-format on

const Family& find_family(std::string_view model_type) {
  std::vector<std::string> known;
  for (const Family& f : kFamilies) {
    if (model_type == f.name) return f;
    known.push_back(f.name);
  }
  fail("config.json: unknown model_type '", model_type, "'; supported: ", quoted(known));
}

}  // namespace horner::nn
