#include "nn/model.h"

#include <ATen/ATen.h>

#include <cmath>

#include "attn/inputs.h"
#include "core/check.h"
#include "nn/parts.h"

namespace horner::nn {

static parts::Norm norm_of(const ModelConfig& c) {
  const NormKind kind = c.family->norm;
  return {kind == NormKind::layer, kind == NormKind::rms_plus_one ? 1. : 0., c.eps};
}

// The angles of T positions starting at `from`. Runs on the device only, so that a step can be
// captured as a CUDA graph.
static parts::Rotation rotation(const Rope& r, int64_t D, int64_t from, int64_t T,
                                at::TensorOptions on) {
  constexpr double kTurn = 2 * M_PI;
  at::Tensor f = at::pow(r.theta, at::arange(0, D, 2, on.dtype(at::kDouble)) * (-1. / double(D)));
  if (r.llama3) {
    const at::Tensor length = kTurn / f, slow = f / r.factor;
    const at::Tensor smooth = (r.original / length - r.low) / (r.high - r.low);
    const at::Tensor between = f * ((1 - smooth) / r.factor + smooth);
    f = at::where(length > r.original / r.low, slow,
                  at::where(length >= r.original / r.high, between, f));
  } else {
    f = f / r.factor;
  }
  const at::Tensor angle =
      at::arange(from, from + T, on.dtype(at::kFloat)).unsqueeze(1) * f.to(at::kFloat);
  return {angle.cos(), angle.sin()};
}

// The variant's inputs other than q, k and v, from x [B T, C]. Gates are float32: logarithms in
// bfloat16 are too coarse to sum.
static void variant_inputs(const LayerConfig& c, const Layer& l, const at::Tensor& x,
                           attn::Inputs& in) {
  const int64_t B = in.q.size(0), T = in.q.size(2);
  for (const attn::Input& input : attn::input_table()) {
    if (input.role == attn::Role::tensor || input.role == attn::Role::mask) continue;
    if (!input.wanted(c.attention)) continue;
    const std::string name = input.name;
    if (input.role == attn::Role::parameter) {
      in.*input.at = l.variant.at(name);
      continue;
    }
    at::Tensor gate =
        parts::product(x, {l.variant.at(name + ".weight")}, {l.variant.at(name + ".bias")});
    if (at::isReducedFloatingType(gate.scalar_type())) gate = gate.to(at::kFloat);
    gate = gate.view({B, T, -1}).transpose(1, 2);
    in.*input.at = input.role == attn::Role::gate ? gate.sigmoid() : at::log_sigmoid(gate);
  }
}

struct Pass {  // shared by the layers of one forward pass
  const Model& m;
  const Run& run;
  int64_t B, T;
};

// Keys come from the previous token; the first token's keys come from zeros.
static at::Tensor shifted_qkv(const Pass& p, const Layer& l, const at::Tensor& x) {
  const at::Tensor before =
      at::constant_pad_nd(x.view({p.B, p.T, -1}), {0, 0, 1, -1}).view(x.sizes());
  return at::cat({parts::product(x, {l.q}, {l.q_bias}), parts::product(before, {l.k}, {l.k_bias}),
                  parts::product(x, {l.v}, {l.v_bias})},
                 -1);
}

// Rows (q | k | v), [B T, (H + 2 G) D], with norms over whole projections where the family has
// them.
static at::Tensor project(const Pass& p, const Layer& l, const at::Tensor& x) {
  const ModelConfig& c = p.m.config;
  const at::Tensor qkv = c.key_shift
                             ? shifted_qkv(p, l, x)
                             : parts::product(x, {l.q, l.k, l.v}, {l.q_bias, l.k_bias, l.v_bias});
  if (!l.q_norm.defined() || c.family->query_key_norm == NormWidth::head) return qkv;
  const auto part = qkv.split_with_sizes({c.H * c.D, c.G * c.D, c.G * c.D}, 1);
  const auto normed = [&](const at::Tensor& y, const at::Tensor& weight) {
    return parts::norm(norm_of(c), y, weight, {}, y.scalar_type());
  };
  return at::cat({normed(part[0], l.q_norm), normed(part[1], l.k_norm), part[2]}, 1);
}

// [B T, C] -> [B T, C]
static at::Tensor attention(const Pass& p, size_t i, const at::Tensor& x,
                            const parts::Rotation& by) {
  const ModelConfig& c = p.m.config;
  const Layer& l = p.m.layers[i];
  const attn::Spec& spec = c.layers[i].attention;
  if (p.run.probe && p.run.probe->input) p.run.probe->input(int64_t(i), x);
  const bool each = c.family->query_key_norm == NormWidth::head;  // a norm of each head
  const auto [q, k, v] =
      parts::heads({p.B, p.T, c.H, c.G, c.D, norm_of(c)}, project(p, l, x),
                   each ? l.q_norm : at::Tensor(), each ? l.k_norm : at::Tensor(), by);
  attn::Inputs in{.q = q, .k = k, .v = v};
  variant_inputs(c.layers[i], l, x, in);
  const at::Tensor a =
      p.run.states ? attn::step((*p.run.states)[i], in) : attn::attend(spec, in, p.run.execution);
  if (p.run.probe && p.run.probe->attention) p.run.probe->attention(int64_t(i), spec, in, a);
  return parts::product(a.transpose(1, 2).reshape({p.B * p.T, c.H * c.D}), {l.o}, {l.o_bias});
}

static at::Tensor mlp(const ModelConfig& c, const Layer& l, const at::Tensor& x) {
  const auto f = c.silu ? parts::Activation::silu : parts::Activation::gelu;
  const at::Tensor y =
      l.gate.defined()
          ? parts::gated(f, parts::product(x, {l.gate, l.up}, {l.gate_bias, l.up_bias}))
          : parts::activated(f, parts::product(x, {l.up}, {l.up_bias}));
  return parts::product(y, {l.down}, {l.down_bias});
}

// A recurrent state where it takes no more memory than a KV cache of all positions of the model, a
// KV cache otherwise.
std::vector<attn::State> empty_states(const Model& m, int64_t batch) {
  check(!m.config.key_shift,
        "models with key_shift do not support token-by-token decoding: states do not keep the "
        "previous token");
  const ModelConfig& c = m.config;
  const at::ScalarType dtype = m.embedding.scalar_type();
  const double cache = double(c.positions * 2 * c.D) * double(c10::elementSize(dtype));
  std::vector<attn::State> out;
  for (const LayerConfig& l : c.layers) {
    const bool small = attn::state_bytes(l.attention, c.D, c.D) <= cache;
    out.push_back(attn::make_state(l.attention, {batch, c.G, c.D, c.D}, dtype, small ? 64 : 0,
                                   m.embedding.device()));
  }
  return out;
}

// Mixed precision is explicit, not at::autocast: each weight is cast once per forward pass, into
// the joined matrix that its product needs anyway. The residual stream x keeps the weights' dtype;
// products and the parts between them are in `compute`.
at::Tensor hidden(const Model& m, const at::Tensor& tokens, const Run& run) {
  const ModelConfig& c = m.config;
  check(tokens.dim() == 2, "tokens must have shape [B, T], got ", tokens.sizes());
  const Pass pass{m, run, tokens.size(0), tokens.size(1)};
  const int64_t T = pass.T, from = run.states ? (*run.states)[0].tokens : 0;
  check(!m.positions.defined() || from + T <= c.positions, "the model has ", c.positions,
        " positions, got ", from + T, " tokens");
  const at::ScalarType own = m.embedding.scalar_type(),
                       compute = run.compute == at::ScalarType::Undefined ? own : run.compute;
  at::Tensor x = at::embedding(m.embedding, tokens.reshape({-1}));  // [B T, C], as all rows here
  if (c.family->scaled_embedding)
    x = x * at::scalar_tensor(std::sqrt(double(c.C)), at::kFloat).to(own).item<double>();
  if (m.positions.defined())
    x = (x.view({pass.B, T, c.C}) + m.positions.narrow(0, from, T)).view({-1, c.C});
  // The layers share few kinds of rotary positions: each is computed once.
  std::vector<std::pair<Rope, parts::Rotation>> rotations;
  const auto rotation_of = [&](const Rope& r) -> const parts::Rotation& {
    for (const auto& [rope, by] : rotations)
      if (rope == r) return by;
    const parts::Rotation by =
        c.family->rotary() ? rotation(r, c.D, from, T, tokens.options()) : parts::Rotation{};
    return rotations.emplace_back(r, by).second;
  };
  const parts::Norm norm = norm_of(c);
  const auto normed = [&](const at::Tensor& y, const at::Tensor& weight, const at::Tensor& bias) {
    return weight.defined() ? parts::norm(norm, y, weight, bias, compute) : y.to(compute);
  };
  const auto add = [&](const at::Tensor& y, const at::Tensor& weight, const at::Tensor& bias) {
    if (weight.defined()) return parts::add_norm(norm, x, y, weight, bias);
    const at::Tensor sum = (x + y).to(own);
    return std::pair(sum, sum.to(compute));
  };
  const Layer last{.before_attention = m.last_norm, .before_attention_bias = m.last_norm_bias};
  at::Tensor y = normed(x, m.layers[0].before_attention, m.layers[0].before_attention_bias);
  for (size_t i = 0; i < m.layers.size(); ++i) {
    const Layer &l = m.layers[i], &next = i + 1 < m.layers.size() ? m.layers[i + 1] : last;
    y = attention(pass, i, y, rotation_of(c.layers[i].rope));
    y = normed(y, l.after_attention, l.after_attention_bias);
    std::tie(x, y) = add(y, l.before_mlp, l.before_mlp_bias);
    y = normed(mlp(c, l, y), l.after_mlp, l.after_mlp_bias);
    std::tie(x, y) = add(y, next.before_attention, next.before_attention_bias);
  }
  return y.view({pass.B, T, c.C});
}

at::Tensor logits(const Model& m, const at::Tensor& hidden) {
  const at::Tensor rows = hidden.reshape({-1, hidden.size(-1)});
  std::vector<int64_t> shape = hidden.sizes().vec();
  shape.back() = m.config.V;
  return parts::product(rows, {m.config.tied ? m.embedding : m.head}).view(shape);
}

}  // namespace horner::nn
