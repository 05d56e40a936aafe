#include "nn/model.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <cmath>

#include "attn/inputs.h"
#include "core/check.h"

namespace horner::nn {

// The tensors of a layer: where, shape, and the name in each way of naming ("" for none there).
struct LayerTensor {
  at::Tensor Layer::* at;
  const char* shape;  // C, M, D as in ModelConfig; Q: H D, K: G D
  const char *llama, *gemma, *gpt2;
  bool (*has)(const ModelConfig&);
};

static bool always(const ModelConfig&) {
  return true;
}
static bool layer_norm(const ModelConfig& c) {
  return c.family->norm == Family::layer;
}
static bool query_bias(const ModelConfig& c) {
  return c.query_bias;
}
static bool query_key_norm(const ModelConfig& c) {
  return c.family->query_key_norm;
}
static bool sandwich(const ModelConfig& c) {
  return c.family->sandwich;
}
static bool gated(const ModelConfig& c) {
  return c.family->gated_mlp;
}
static bool mlp_bias(const ModelConfig& c) {
  return c.mlp_bias;
}

// clang-format off
static const LayerTensor kLayerTensors[] = {
    {&Layer::before_attention,      "C",  "input_layernorm.weight",          "input_layernorm.weight",            "ln_1.weight",        always},
    {&Layer::before_attention_bias, "C",  "",                                "",                                  "ln_1.bias",          layer_norm},
    {&Layer::q,                     "QC", "self_attn.q_proj.weight",         "self_attn.q_proj.weight",           "attn.c_attn.weight", always},
    {&Layer::k,                     "KC", "self_attn.k_proj.weight",         "self_attn.k_proj.weight",           "attn.c_attn.weight", always},
    {&Layer::v,                     "KC", "self_attn.v_proj.weight",         "self_attn.v_proj.weight",           "attn.c_attn.weight", always},
    {&Layer::q_bias,                "Q",  "self_attn.q_proj.bias",           "self_attn.q_proj.bias",             "attn.c_attn.bias",   query_bias},
    {&Layer::k_bias,                "K",  "self_attn.k_proj.bias",           "self_attn.k_proj.bias",             "attn.c_attn.bias",   query_bias},
    {&Layer::v_bias,                "K",  "self_attn.v_proj.bias",           "self_attn.v_proj.bias",             "attn.c_attn.bias",   query_bias},
    {&Layer::q_norm,                "D",  "self_attn.q_norm.weight",         "self_attn.q_norm.weight",           "",                   query_key_norm},
    {&Layer::k_norm,                "D",  "self_attn.k_norm.weight",         "self_attn.k_norm.weight",           "",                   query_key_norm},
    {&Layer::o,                     "CQ", "self_attn.o_proj.weight",         "self_attn.o_proj.weight",           "attn.c_proj.weight", always},
    {&Layer::o_bias,                "C",  "self_attn.o_proj.bias",           "self_attn.o_proj.bias",             "attn.c_proj.bias",   [](const ModelConfig& c) { return c.out_bias; }},
    {&Layer::after_attention,       "C",  "",                                "post_attention_layernorm.weight",   "",                   sandwich},
    {&Layer::before_mlp,            "C",  "post_attention_layernorm.weight", "pre_feedforward_layernorm.weight",  "ln_2.weight",        always},
    {&Layer::before_mlp_bias,       "C",  "",                                "",                                  "ln_2.bias",          layer_norm},
    {&Layer::gate,                  "MC", "mlp.gate_proj.weight",            "mlp.gate_proj.weight",              "",                   gated},
    {&Layer::gate_bias,             "M",  "mlp.gate_proj.bias",              "",                                  "",                   [](const ModelConfig& c) { return gated(c) && c.mlp_bias; }},
    {&Layer::up,                    "MC", "mlp.up_proj.weight",              "mlp.up_proj.weight",                "mlp.c_fc.weight",    always},
    {&Layer::up_bias,               "M",  "mlp.up_proj.bias",                "",                                  "mlp.c_fc.bias",      mlp_bias},
    {&Layer::down,                  "CM", "mlp.down_proj.weight",            "mlp.down_proj.weight",              "mlp.c_proj.weight",  always},
    {&Layer::down_bias,             "C",  "mlp.down_proj.bias",              "",                                  "mlp.c_proj.bias",    mlp_bias},
    {&Layer::after_mlp,             "C",  "",                                "post_feedforward_layernorm.weight", "",                   sandwich},
};
// clang-format on

static int64_t size(const ModelConfig& c, char letter) {
  switch (letter) {
      // clang-format off
    case 'C': return c.C;
    case 'M': return c.M;
    case 'D': return c.D;
    case 'Q': return c.H * c.D;
    default: return c.G * c.D;
      // clang-format on
  }
}

// What the variant of a layer takes beside q, k and v: its shape, for each tensor that learns it.
static std::vector<std::pair<std::string, std::vector<int64_t>>> variant_tensors(
    const ModelConfig& c, const attn::Spec& spec) {
  std::vector<std::pair<std::string, std::vector<int64_t>>> out;
  for (const attn::Input& i : attn::input_table()) {
    if (i.role == attn::Role::tensor || i.role == attn::Role::mask || !i.wanted(spec)) continue;
    const auto letter = [&](char l) -> int64_t {
      const auto* projected = std::get_if<attn::Project>(&spec.features);
      return l == 'H'                ? c.H
             : l == 'G'              ? c.G
             : l == 'D' || l == 'E'  ? c.D
             : l == 'F' && projected ? projected->dim
                                     : l - '0';
    };
    if (i.role == attn::Role::parameter) {
      std::vector<int64_t> shape;
      for (const char* l = i.shape; *l; ++l) shape.push_back(letter(*l));
      out.emplace_back(i.name, shape);
    } else {  // a gate of each head and token, from the token
      const int64_t heads = letter(i.shape[1]);
      out.emplace_back(std::string(i.name) + ".weight", std::vector<int64_t>{heads, c.C});
      out.emplace_back(std::string(i.name) + ".bias", std::vector<int64_t>{heads});
    }
  }
  return out;
}

std::vector<Slot> slots(Model& m) {
  const ModelConfig& c = m.config;
  const bool gpt2 = c.family->names == Family::gpt2;
  const std::string prefix = gpt2 ? "transformer." : "model.";
  std::vector<Slot> out;
  out.push_back({prefix + (gpt2 ? "wte.weight" : "embed_tokens.weight"), &m.embedding, {c.V, c.C}});
  if (!c.family->rotary) out.push_back({prefix + "wpe.weight", &m.positions, {c.positions, c.C}});
  m.layers.resize(c.layers.size());
  for (size_t i = 0; i < c.layers.size(); ++i) {
    const std::string layer = prefix + (gpt2 ? "h." : "layers.") + std::to_string(i) + ".";
    for (const LayerTensor& t : kLayerTensors) {
      const char* names[] = {t.llama, t.gemma, t.gpt2};
      if (!t.has(c)) continue;
      std::vector<int64_t> shape;
      for (const char* l = t.shape; *l; ++l) shape.push_back(size(c, *l));
      out.push_back({layer + names[c.family->names], &(m.layers[i].*t.at), shape});
    }
    for (const auto& [name, shape] : variant_tensors(c, c.layers[i].attention))
      out.push_back({layer + "horner." + name, &m.layers[i].variant[name], shape});
  }
  out.push_back({prefix + (gpt2 ? "ln_f.weight" : "norm.weight"), &m.last_norm, {c.C}});
  if (layer_norm(c)) out.push_back({prefix + "ln_f.bias", &m.last_norm_bias, {c.C}});
  if (!c.tied) out.push_back({"lm_head.weight", &m.head, {c.V, c.C}});
  return out;
}

Model random_model(const ModelConfig& config, uint64_t seed) {
  Model m{config};
  const at::Generator random = at::make_generator<at::CPUGeneratorImpl>(seed);
  const double range = config.json.value("initializer_range", 0.02);
  for (Slot& s : slots(m)) {
    const size_t dims = s.shape.size();
    const bool ours = s.name.find(".horner.") != std::string::npos,
               bias = s.name.ends_with(".bias");
    const bool parameter = ours && !bias && !s.name.ends_with(".weight");
    if (bias || (dims == 1 && !ours && config.family->norm == Family::rms_plus_one))
      *s.at = at::zeros(s.shape);
    else if (dims == 1 || (parameter && dims == 2))
      *s.at = at::ones(s.shape);  // norms, and the parameters of variants
    else
      *s.at = at::empty(s.shape).normal_(0, parameter ? 1 / std::sqrt(double(config.D)) : range,
                                         random);
  }
  if (config.tied) m.head = m.embedding;
  return m;
}

int64_t parameter_count(const Model& model) {
  Model m = model;
  int64_t n = 0;
  for (const Slot& s : slots(m)) n += s.at->numel();
  return n;
}

static at::Tensor normed(const ModelConfig& c, const at::Tensor& x, const at::Tensor& weight,
                         const at::Tensor& bias = {}) {
  if (c.family->norm == Family::layer) return at::layer_norm(x, {x.size(-1)}, weight, bias, c.eps);
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor unit = wide * (wide.square().mean(-1, true) + c.eps).rsqrt();
  if (c.family->norm == Family::rms_plus_one)
    return (unit * (1 + weight.to(at::kFloat))).to(x.scalar_type());
  return unit.to(x.scalar_type()) * weight;
}

struct Rotation {
  at::Tensor cos, sin;  // [T, D / 2]
};
// Of the positions from `from` on.
static Rotation rotation(const Rope& r, int64_t D, int64_t from, int64_t T) {
  constexpr double kTurn = 2 * M_PI;
  const at::Tensor f = at::empty({D / 2}, at::kFloat);
  float* const frequency = f.data_ptr<float>();
  for (int64_t i = 0; i < D / 2; ++i) {
    double inverse = 1 / std::pow(r.theta, double(2 * i) / double(D));
    if (r.llama3) {
      const double length = kTurn / inverse;
      const double smooth = (r.original / length - r.low) / (r.high - r.low);
      if (length > r.original / r.low)
        inverse /= r.factor;
      else if (length >= r.original / r.high)
        inverse *= (1 - smooth) / r.factor + smooth;
    } else {
      inverse /= r.factor;
    }
    frequency[i] = float(inverse);
  }
  const at::Tensor angle = at::arange(from, from + T, at::kFloat).unsqueeze(1) * f;
  return {angle.cos(), angle.sin()};
}
// The two halves of the channels turn together.
static at::Tensor turned(const at::Tensor& x, const Rotation& by) {
  const at::Tensor cos = by.cos.to(x.scalar_type()), sin = by.sin.to(x.scalar_type());
  const auto half = x.chunk(2, -1);
  return at::cat({half[0] * cos - half[1] * sin, half[1] * cos + half[0] * sin}, -1);
}

static at::Tensor heads_of(const at::Tensor& x, int64_t heads) {  // [B, T, n D] -> [B, n, T, D]
  return x.view({x.size(0), x.size(1), heads, -1}).transpose(1, 2);
}

static attn::Inputs attention_inputs(const Model& m, size_t i, const at::Tensor& x,
                                     const Rotation& by) {
  const ModelConfig& c = m.config;
  const Layer& l = m.layers[i];
  attn::Inputs in;
  in.q = heads_of(at::linear(x, l.q, l.q_bias), c.H);
  const at::Tensor before = c.key_shift ? at::constant_pad_nd(x, {0, 0, 1, -1}) : x;
  in.k = heads_of(at::linear(before, l.k, l.k_bias), c.G);
  in.v = heads_of(at::linear(x, l.v, l.v_bias), c.G);
  if (c.family->query_key_norm) in.q = normed(c, in.q, l.q_norm), in.k = normed(c, in.k, l.k_norm);
  if (c.family->rotary) in.q = turned(in.q, by), in.k = turned(in.k, by);
  for (const attn::Input& input : attn::input_table()) {
    if (input.role == attn::Role::tensor || input.role == attn::Role::mask) continue;
    if (!input.wanted(c.layers[i].attention)) continue;
    const std::string name = input.name;
    if (input.role == attn::Role::parameter) {
      in.*input.at = l.variant.at(name);
      continue;
    }
    const at::Tensor gate =
        at::linear(x, l.variant.at(name + ".weight"), l.variant.at(name + ".bias")).transpose(1, 2);
    in.*input.at = input.role == attn::Role::gate ? gate.sigmoid() : at::log_sigmoid(gate);
  }
  return in;
}

static at::Tensor mlp(const ModelConfig& c, const Layer& l, const at::Tensor& x) {
  const auto act = [&](const at::Tensor& y) { return c.silu ? at::silu(y) : at::gelu(y, "tanh"); };
  const at::Tensor up = at::linear(x, l.up, l.up_bias);
  return at::linear(c.family->gated_mlp ? act(at::linear(x, l.gate, l.gate_bias)) * up : act(up),
                    l.down, l.down_bias);
}

std::vector<attn::State> empty_states(const Model& m, int64_t batch) {
  check(!m.config.key_shift,
        "a model with key_shift cannot go on token by token: its states do not keep the token "
        "before");
  std::vector<attn::State> out;
  for (const LayerConfig& l : m.config.layers)
    out.push_back(attn::make_state(l.attention, {batch, m.config.G, m.config.D, m.config.D},
                                   m.embedding.scalar_type()));
  return out;
}

at::Tensor hidden(const Model& m, const at::Tensor& tokens, const Run& run) {
  const ModelConfig& c = m.config;
  check(tokens.dim() == 2, "tokens must be [B, T], not ", tokens.sizes());
  const int64_t T = tokens.size(1), from = run.states ? (*run.states)[0].tokens : 0;
  check(c.family->rotary || from + T <= c.positions, "this model has ", c.positions,
        " positions, and the text ", from + T, " tokens");
  at::Tensor x = at::embedding(m.embedding, tokens);
  if (c.family->scaled_embedding)
    x = x * at::scalar_tensor(std::sqrt(double(c.C)), at::kFloat).to(x.scalar_type());
  if (!c.family->rotary) x = x + m.positions.narrow(0, from, T);
  // Layers share few kinds of positions: each is computed once.
  std::vector<std::pair<Rope, Rotation>> rotations;
  const auto rotation_of = [&](const Rope& r) -> const Rotation& {
    for (const auto& [rope, by] : rotations)
      if (rope == r) return by;
    const Rotation by = c.family->rotary ? rotation(r, c.D, from, T) : Rotation{};
    return rotations.emplace_back(r, by).second;
  };
  for (size_t i = 0; i < m.layers.size(); ++i) {
    const Layer& l = m.layers[i];
    const attn::Spec& spec = c.layers[i].attention;
    const attn::Inputs in =
        attention_inputs(m, i, normed(c, x, l.before_attention, l.before_attention_bias),
                         rotation_of(c.layers[i].rope));
    at::Tensor a =
        run.states ? attn::step((*run.states)[i], in) : attn::attend(spec, in, run.execution);
    if (run.probe && run.probe->attention) run.probe->attention(int64_t(i), spec, in, a);
    a = at::linear(a.transpose(1, 2).reshape({tokens.size(0), T, c.H * c.D}), l.o, l.o_bias);
    if (c.family->sandwich) a = normed(c, a, l.after_attention);
    x = x + a;
    at::Tensor y = mlp(c, l, normed(c, x, l.before_mlp, l.before_mlp_bias));
    if (c.family->sandwich) y = normed(c, y, l.after_mlp);
    x = x + y;
  }
  return normed(c, x, m.last_norm, m.last_norm_bias);
}

at::Tensor logits(const Model& m, const at::Tensor& hidden) {
  return at::linear(hidden, m.config.tied ? m.embedding : m.head);
}

}  // namespace horner::nn
