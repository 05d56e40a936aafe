// One transformer for every family: a struct of tensors, and functions on it.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "attn/split.h"
#include "attn/state.h"
#include "nn/config.h"

namespace horner::nn {

// Weights are [out, in]. Tensors that the family does not have are undefined.
struct Layer {
  at::Tensor before_attention, before_attention_bias;        // [C], norms
  at::Tensor q, q_bias, k, k_bias, v, v_bias;                // [H D, C], [G D, C], [G D, C]
  at::Tensor q_norm, k_norm;                                 // [D], or [H D] and [G D]
  at::Tensor o, o_bias;                                      // [C, H D]
  at::Tensor after_attention, after_attention_bias;          // [C]
  at::Tensor before_mlp, before_mlp_bias;                    // [C]
  at::Tensor gate, gate_bias, up, up_bias, down, down_bias;  // [M, C], [M, C], [C, M]
  at::Tensor after_mlp, after_mlp_bias;                      // [C]
  // The variant's own weights. By the name of its input: a parameter, or "<gate>.weight" [heads, C]
  // and "<gate>.bias" [heads]. "short_conv.weight" [channels, n]; "mamba.<name>" (mamba.cpp). In a
  // layer of several parts, "<part>." precedes the names.
  std::map<std::string, at::Tensor> variant;
};

struct Model {
  ModelConfig config;
  at::Tensor embedding;  // [V, C]
  at::Tensor positions;  // [P, C], where they are learned
  std::vector<Layer> layers;
  at::Tensor last_norm, last_norm_bias;
  at::Tensor head;  // [V, C]; the embedding if tied
};

// One part of a layer's attention: what it got, and the result [B, heads, T, E].
struct Operated {
  int64_t layer;
  const Part& part;
  const attn::Inputs& in;
  const at::Tensor& result;
};

// Callbacks for analyses: `attention` sees each part of each layer's attention. The layer continues
// with what it writes into the result.
struct Probe {
  std::function<void(const Operated&)> attention;
  // Called first, with the rows [B T, C] that queries, keys and values are projected from.
  std::function<void(int64_t layer, const at::Tensor& x)> input = {};
};

// What a layer keeps of the tokens so far: the state of each part of its attention, and the last
// rows of what its key shift and its convolution read. An undefined tensor stands for zeros.
struct LayerState {
  std::vector<attn::State> parts;
  at::Tensor inputs = {};       // [B, 1, C], with key_shift
  at::Tensor projections = {};  // [B, n - 1, channels], before a convolution over n tokens
  at::Tensor decay = {};        // [B, G, 1], double: the sum of raw decays
};
int64_t bytes(const LayerState&);
// The same of a part, calculated, after `tokens` tokens.
double kept_bytes(const ModelConfig&, const Part&, at::ScalarType, int64_t tokens);

struct Run {
  std::vector<LayerState>* states = nullptr;  // one per layer: the tokens continue from them
  // [B], integers, for one token of each text: their positions, which may differ. The caller keeps
  // them within learned positions. Undefined: all follow those that the states have.
  at::Tensor positions = {};
  std::string execution = "auto";
  const Probe* probe = nullptr;
  // The dtype of products and of the parts between them; undefined: the weights' dtype. Mixed
  // precision is bfloat16 here with float32 weights: gradients are float32.
  at::ScalarType compute = at::ScalarType::Undefined;
  // Keep only the rows between layers for the backward pass, which computes the rest again.
  bool recompute = false;
  // The tokens are this rank's part of sequences that several ranks share.
  const attn::Split* split = nullptr;
  // Called before the weights of a layer are read, in order; 0 includes the embedding, and the
  // number of layers stands for what follows them.
  std::function<void(size_t layer)> before_weights = {};
};

// One empty state per layer.
std::vector<LayerState> empty_states(const Model&, int64_t batch);

// The attention of one layer alone, between its projections: from the token rows x [B T, C] and the
// layer's q, k and v to [B, H, T, E]. For a layer that changes only the operator.
at::Tensor heads_of_layer(const Model&, size_t layer, const at::Tensor& x, const attn::Inputs& qkv);

// [B, T] tokens -> [B, T, C], after the last norm.
at::Tensor hidden(const Model&, const at::Tensor& tokens, const Run& = {});
// [.., C] -> [.., V]
at::Tensor logits(const Model&, const at::Tensor& hidden);

// The mean cross-entropy of targets [n] given hidden [n, C]. Computes one slice of logits at a
// time. Negative targets are ignored.
at::Tensor cross_entropy(const Model&, const at::Tensor& hidden, const at::Tensor& targets);

// The mean of (1 - share) cross-entropy + share KL(teacher || model), given the hidden rows [n, C]
// of both; gradients for the model only. Slices as above. Negative targets are ignored.
at::Tensor distillation(const Model&, const at::Tensor& hidden, const Model& teacher,
                        const at::Tensor& teacher_hidden, const at::Tensor& targets, double share);

}  // namespace horner::nn
