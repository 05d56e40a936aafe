#include "nn/model.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <cmath>

#include "attn/recompute.h"
#include "core/check.h"
#include "nn/layer.h"

namespace horner::nn {

using attn::recomputed;
using attn::Tensors;

// The angles of positions [n]. Runs on the device only, so that a step can be captured as a CUDA
// graph.
static parts::Rotation rotation(const Rope& r, int64_t D, const at::Tensor& positions) {
  const at::TensorOptions on = positions.options();
  constexpr double kTurn = 2 * M_PI;
  const int64_t R = rotated_channels(r, D);
  at::Tensor f = at::pow(r.theta, at::arange(0, R, 2, on.dtype(at::kDouble)) * (-1. / double(R)));
  if (r.llama3) {
    const at::Tensor length = kTurn / f, slow = f / r.factor;
    const at::Tensor smooth = (r.original / length - r.low) / (r.high - r.low);
    const at::Tensor between = f * ((1 - smooth) / r.factor + smooth);
    f = at::where(length > r.original / r.low, slow,
                  at::where(length >= r.original / r.high, between, f));
  } else {
    f = f / r.factor;
  }
  // The other channels turn by 0: the order of a head's channels (slots.cpp) pairs them.
  if (R < D) f = at::constant_pad_nd(f, {0, (D - R) / 2});
  const at::Tensor angle = positions.to(at::kFloat).unsqueeze(1) * f.to(at::kFloat);
  return {angle.cos(), angle.sin()};
}

static at::Tensor mlp(const ModelConfig& c, const Layer& l, const at::Tensor& x) {
  const at::Tensor y =
      l.gate.defined()
          ? parts::gated(c.activation, parts::product(x, {l.gate, l.up}, {l.gate_bias, l.up_bias}))
          : parts::activated(c.activation, parts::product(x, {l.up}, {l.up_bias}));
  return parts::product(y, {l.down}, {l.down_bias});
}

// Of a token in a KV cache of one head.
static double cached_bytes(const ModelConfig& c, const Part& p, at::ScalarType dtype) {
  return double(2 * c.D) * double(c10::elementSize(attn::cache_dtype(p.attention, dtype)));
}
// A recurrent state where it takes no more memory than a KV cache of all positions of the model, a
// KV cache otherwise.
static bool keeps_state(const ModelConfig& c, const Part& p, at::ScalarType dtype) {
  const double cache = double(c.positions) * cached_bytes(c, p, dtype);
  return attn::state_bytes(p.attention, c.D, c.D) <= cache;
}

static int64_t heads_kept(const ModelConfig& c, const Part& p) {
  return p.around.mamba ? c.H : int64_t(p.key_heads.size());
}

std::vector<LayerState> empty_states(const Model& m, int64_t batch) {
  const ModelConfig& c = m.config;
  const at::ScalarType dtype = m.embedding.scalar_type();
  std::vector<LayerState> out(c.layers.size());
  for (size_t i = 0; i < c.layers.size(); ++i)
    for (const Part& p : c.layers[i].parts)
      out[i].parts.push_back(attn::make_state(p.attention, {batch, heads_kept(c, p), c.D, c.D},
                                              dtype, keeps_state(c, p, dtype) ? attn::kWaiting : 0,
                                              m.embedding.device()));
  return out;
}

int64_t bytes(const LayerState& s) {
  int64_t n = 0;
  for (const attn::State& part : s.parts) n += attn::bytes(part);
  for (const at::Tensor& x : {s.inputs, s.projections, s.decay})
    if (x.defined()) n += int64_t(x.nbytes());
  return n;
}

double kept_bytes(const ModelConfig& c, const Part& p, at::ScalarType dtype, int64_t tokens) {
  const auto* near = std::get_if<attn::Window>(&p.attention.near);
  const auto* window = std::get_if<attn::Window>(&p.attention.mask);
  const double heads = double(heads_kept(c, p));
  if (!keeps_state(c, p, dtype))
    return heads * cached_bytes(c, p, dtype) *
           double(window ? std::min<int64_t>(window->size, tokens) : tokens);
  const double near_bytes = near ? double(2 * c.D * near->size) * 4 : 0;  // in float32
  return heads * (attn::state_bytes(p.attention, c.D, c.D) + near_bytes);
}

// The norm before layer i, or the last one: weight and bias.
static std::pair<at::Tensor, at::Tensor> norm_before(const Model& m, size_t i) {
  if (i == m.layers.size()) return {m.last_norm, m.last_norm_bias};
  return {m.layers[i].before_attention, m.layers[i].before_attention_bias};
}

// The residual stream x and its norm y before layer i -> the same before the next layer.
//
// Mixed precision is explicit, not at::autocast: each weight is cast once per forward pass, into
// the joined matrix that its product needs anyway. The residual stream x keeps the weights' dtype;
// products and the parts between them are in the dtype of y.
static Tensors layer(const Pass& pass, size_t i, const parts::Rotation& by, const Tensors& xy) {
  const ModelConfig& c = pass.m.config;
  const Layer& l = pass.m.layers[i];
  const parts::Norm norm = norm_of(c);
  at::Tensor x = xy[0], y = xy[1];
  const at::ScalarType own = x.scalar_type(), compute = y.scalar_type();
  const auto normed = [&](const at::Tensor& y, const at::Tensor& weight, const at::Tensor& bias) {
    return weight.defined() ? parts::norm(norm, y, weight, bias, compute) : y.to(compute);
  };
  const auto add = [&](const at::Tensor& y, const at::Tensor& weight, const at::Tensor& bias) {
    if (weight.defined()) return parts::add_norm(norm, x, y, weight, bias);
    const at::Tensor sum = (x + y).to(own);
    return std::pair(sum, sum.to(compute));
  };
  const at::Tensor a = normed(attention(pass, i, y, by), l.after_attention, l.after_attention_bias);
  if (c.parallel)
    y = normed(x, l.before_mlp, l.before_mlp_bias);
  else
    std::tie(x, y) = add(a, l.before_mlp, l.before_mlp_bias);
  y = normed(mlp(c, l, y), l.after_mlp, l.after_mlp_bias);
  if (c.parallel) y = y + a;
  if (pass.run.before_weights) pass.run.before_weights(i + 1);
  const auto [weight, bias] = norm_before(pass.m, i + 1);
  std::tie(x, y) = add(y, weight, bias);
  return {x, y};
}

// What layer() reads of the model.
static Tensors weights_of_layer(const Model& m, size_t i) {
  using L = Layer;
  constexpr at::Tensor L::* kAll[] = {&L::q,
                                      &L::q_bias,
                                      &L::k,
                                      &L::k_bias,
                                      &L::v,
                                      &L::v_bias,
                                      &L::q_norm,
                                      &L::k_norm,
                                      &L::o,
                                      &L::o_bias,
                                      &L::before_mlp,
                                      &L::before_mlp_bias,
                                      &L::gate,
                                      &L::gate_bias,
                                      &L::up,
                                      &L::up_bias,
                                      &L::down,
                                      &L::down_bias,
                                      &L::after_attention,
                                      &L::after_mlp,
                                      &L::after_mlp_bias,
                                      &L::after_attention_bias};
  const auto [weight, bias] = norm_before(m, i + 1);
  Tensors out{weight, bias};
  for (const auto x : kAll) out.push_back(m.layers[i].*x);
  for (const auto& [name, x] : m.layers[i].variant) out.push_back(x);
  std::erase_if(out, [](const at::Tensor& x) { return !x.defined() || !x.requires_grad(); });
  return out;
}

at::Tensor hidden(const Model& m, const at::Tensor& tokens, const Run& run) {
  const ModelConfig& c = m.config;
  check(tokens.dim() == 2, "tokens must have shape [B, T], got ", tokens.sizes());
  const Pass pass{m, run, tokens.size(0), tokens.size(1)};
  const int64_t T = pass.T, from = run.states  ? (*run.states)[0].parts[0].tokens
                                   : run.split ? run.split->rank * T
                                               : 0;
  const bool placed = run.positions.defined();  // each text at its own
  check(placed || !m.positions.defined() || from + T <= c.positions, "the model has ", c.positions,
        " positions, got ", from + T, " tokens; shorten the text");
  check(!placed || (T == 1 && run.positions.dim() == 1 && run.positions.size(0) == pass.B),
        "positions must be [", pass.B, "], for one token of each text, got ", run.positions.sizes(),
        " for ", T, " tokens");
  const at::ScalarType own = m.embedding.scalar_type(),
                       compute = run.compute == at::ScalarType::Undefined ? own : run.compute;
  if (run.before_weights) run.before_weights(0);
  at::Tensor x = at::embedding(m.embedding, tokens.reshape({-1}));  // [B T, C], as all rows here
  if (c.family->scaled_embedding)
    x = x * at::scalar_tensor(std::sqrt(double(c.C)), at::kFloat).to(own).item<double>();
  if (m.positions.defined())
    x = placed ? x + m.positions.index_select(0, run.positions)
               : (x.view({pass.B, T, c.C}) + m.positions.narrow(0, from, T)).view({-1, c.C});
  // The layers share few kinds of rotary positions: each is computed once.
  std::vector<std::pair<Rope, parts::Rotation>> rotations;
  const auto rotation_of = [&](const LayerConfig& l) -> parts::Rotation {
    if (!c.family->rotary() || !l.around().rope) return {};
    for (const auto& [rope, by] : rotations)
      if (rope == l.rope) return by;
    const at::Tensor positions =
        placed ? run.positions : at::arange(from, from + T, tokens.options().dtype(at::kFloat));
    return rotations.emplace_back(l.rope, rotation(l.rope, c.D, positions)).second;
  };
  const auto [weight, bias] = norm_before(m, 0);
  Tensors xy{x,
             weight.defined() ? parts::norm(norm_of(c), x, weight, bias, compute) : x.to(compute)};
  const bool again = run.recompute && c10::GradMode::is_enabled() && !run.states && !run.probe;
  for (size_t i = 0; i < m.layers.size(); ++i) {
    const parts::Rotation by = rotation_of(c.layers[i]);
    // What runs again in the backward pass outlives this call; the model does, too.
    const auto part = [&m, run, B = pass.B, T, i, by](const Tensors& xy) {
      return layer({m, run, B, T}, i, by, xy);
    };
    xy = again ? recomputed(part, xy, weights_of_layer(m, i)) : layer(pass, i, by, xy);
  }
  return xy[1].view({pass.B, T, c.C});
}

at::Tensor logits(const Model& m, const at::Tensor& hidden) {
  const at::Tensor rows = hidden.reshape({-1, hidden.size(-1)});
  std::vector<int64_t> shape = hidden.sizes().vec();
  shape.back() = m.config.V;
  const double cap = m.config.final_softcap;
  const at::Tensor out = parts::product(rows, {m.config.tied ? m.embedding : m.head}).view(shape);
  return cap > 0 ? (out / cap).tanh() * cap : out;
}

}  // namespace horner::nn
