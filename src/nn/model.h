// One transformer for every family: a struct of tensors, and functions on it.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "attn/state.h"
#include "nn/config.h"

namespace horner::nn {

// Weights are [out, in]. Those that a family does not have are undefined.
struct Layer {
  at::Tensor before_attention, before_attention_bias;        // [C], norms
  at::Tensor q, q_bias, k, k_bias, v, v_bias;                // [H D, C], [G D, C], [G D, C]
  at::Tensor q_norm, k_norm;                                 // [D]
  at::Tensor o, o_bias;                                      // [C, H D]
  at::Tensor after_attention;                                // [C]
  at::Tensor before_mlp, before_mlp_bias;                    // [C]
  at::Tensor gate, gate_bias, up, up_bias, down, down_bias;  // [M, C], [M, C], [C, M]
  at::Tensor after_mlp;                                      // [C]
  // What the variant takes beside q, k and v, by the name of the input: a parameter itself, or
  // "<gate>.weight" [heads, C] and "<gate>.bias" [heads].
  std::map<std::string, at::Tensor> variant;
};

struct Model {
  ModelConfig config;
  at::Tensor embedding;  // [V, C]
  at::Tensor positions;  // [P, C], learned ones
  std::vector<Layer> layers;
  at::Tensor last_norm, last_norm_bias;
  at::Tensor head;  // [V, C]; the embedding where they are tied
};

// Every tensor of a model by its Hugging Face name, with the shape it must have; joined and
// transposed where a family keeps them so (checkpoint.cpp).
struct Slot {
  std::string name;
  at::Tensor* at;
  std::vector<int64_t> shape;
};
std::vector<Slot> slots(Model&);

bool is_of_variant(const Slot&);  // a gate or a norm of the layer's attention

// How a weight begins.
at::Tensor random_start(const Slot&, const ModelConfig&, const at::Generator&);

// Random weights, as the families' own code draws them: normal, of config.json's initializer_range.
Model random_model(const ModelConfig&, uint64_t seed);

int64_t parameter_count(const Model&);

// Called with what a layer's attention takes and gives, for analyses. What `attention` writes into
// the result is what the layer goes on with.
struct Probe {
  std::function<void(int64_t layer, const attn::Spec&, const attn::Inputs&,
                     const at::Tensor& result)>
      attention;
  // Before it, with the normed input that queries, keys and values are made of, [B T, C].
  std::function<void(int64_t layer, const at::Tensor& x)> input = {};
};

struct Run {
  std::vector<attn::State>* states = nullptr;  // one a layer: the tokens follow what they hold
  std::string execution = "auto";
  const Probe* probe = nullptr;
  // What the products and the parts between them are computed in; undefined: the weights' dtype.
  // Mixed precision is float32 weights with bfloat16 here: gradients arrive in float32.
  at::ScalarType compute = at::ScalarType::Undefined;
};

// One empty state for each layer.
std::vector<attn::State> empty_states(const Model&, int64_t batch);

// [B, T] tokens -> [B, T, C], after the last norm.
at::Tensor hidden(const Model&, const at::Tensor& tokens, const Run& = {});
// [.., C] -> [.., V]
at::Tensor logits(const Model&, const at::Tensor& hidden);

// The mean cross-entropy of targets [n] given hidden [n, C], a slice of tokens at a time: never
// more than one slice of logits. Targets below 0 do not count.
at::Tensor cross_entropy(const Model&, const at::Tensor& hidden, const at::Tensor& targets);

}  // namespace horner::nn
