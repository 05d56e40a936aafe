#include "nn/model.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <cmath>

#include "attn/inputs.h"
#include "core/check.h"
#include "nn/parts.h"

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

// A variant's own parameters. A norm begins with vectors of length 1, as l2 has them: those of
// RMSNorm, √D long, would drown the embeddings at first.
static at::Tensor variant_start(const std::string& name, const Slot& s, double D,
                                const at::Generator& random) {
  if (name == "norm_bias") return at::zeros(s.shape);
  if (name == "norm_weight") return at::full(s.shape, 1 / std::sqrt(D));
  if (s.shape.size() < 3) return at::ones(s.shape);
  return at::empty(s.shape).normal_(0, 1 / std::sqrt(D), random);
}

bool is_of_variant(const Slot& s) {
  return s.name.find(".horner.") != std::string::npos;
}

at::Tensor random_start(const Slot& s, const ModelConfig& config, const at::Generator& random) {
  const double range = config.json.value("initializer_range", 0.02);
  const std::string name = s.name.substr(s.name.rfind('.') + 1);
  const bool ours = is_of_variant(s), gate = name == "weight";
  if (name == "bias" ||
      (s.shape.size() == 1 && !ours && config.family->norm == Family::rms_plus_one))
    return at::zeros(s.shape);
  if (ours && !gate) return variant_start(name, s, double(config.D), random);
  if (s.shape.size() == 1) return at::ones(s.shape);  // norms
  return at::empty(s.shape).normal_(0, range, random);
}

Model random_model(const ModelConfig& config, uint64_t seed) {
  Model m{config};
  const at::Generator random = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (Slot& s : slots(m)) *s.at = random_start(s, config, random);
  if (config.tied) m.head = m.embedding;
  return m;
}

int64_t parameter_count(const Model& model) {
  Model m = model;
  int64_t n = 0;
  for (const Slot& s : slots(m)) n += s.at->numel();
  return n;
}

static parts::Norm norm_of(const ModelConfig& c) {
  return {c.family->norm == Family::layer, c.family->norm == Family::rms_plus_one ? 1. : 0., c.eps};
}

// Of the positions from `from` on. Operators of the device alone: a step can be captured.
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

// What the variant takes beside q, k and v, of x [B T, C]. Gates are float32: the logarithms of
// bfloat16 ones would be too coarse to be summed.
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

struct Pass {  // what the layers of one pass share
  const Model& m;
  const Run& run;
  int64_t B, T;
};

// Keys of the token before; the first has none.
static at::Tensor shifted_qkv(const Pass& p, const Layer& l, const at::Tensor& x) {
  const at::Tensor before =
      at::constant_pad_nd(x.view({p.B, p.T, -1}), {0, 0, 1, -1}).view(x.sizes());
  return at::cat({parts::product(x, {l.q}, {l.q_bias}), parts::product(before, {l.k}, {l.k_bias}),
                  parts::product(x, {l.v}, {l.v_bias})},
                 -1);
}

// [B T, C], normed -> [B T, C]
static at::Tensor attention(const Pass& p, size_t i, const at::Tensor& x,
                            const parts::Rotation& by) {
  const ModelConfig& c = p.m.config;
  const Layer& l = p.m.layers[i];
  const attn::Spec& spec = c.layers[i].attention;
  if (p.run.probe && p.run.probe->input) p.run.probe->input(int64_t(i), x);
  const at::Tensor qkv = c.key_shift
                             ? shifted_qkv(p, l, x)
                             : parts::product(x, {l.q, l.k, l.v}, {l.q_bias, l.k_bias, l.v_bias});
  const auto [q, k, v] =
      parts::heads({p.B, p.T, c.H, c.G, c.D, norm_of(c)}, qkv, l.q_norm, l.k_norm, by);
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
      c.family->gated_mlp
          ? parts::gated(f, parts::product(x, {l.gate, l.up}, {l.gate_bias, l.up_bias}))
          : parts::activated(f, parts::product(x, {l.up}, {l.up_bias}));
  return parts::product(y, {l.down}, {l.down_bias});
}

// A state of fixed size as long as it takes no more memory than the keys and values of all
// positions that the model is made for.
std::vector<attn::State> empty_states(const Model& m, int64_t batch) {
  check(!m.config.key_shift,
        "a model with key_shift cannot go on token by token: its states do not keep the token "
        "before");
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

// Mixed precision is explicit, not at::autocast: every weight is cast once in a forward pass, into
// the joined matrix that its product takes anyway, and no operator decides by itself. The residual
// stream keeps the weights' dtype; products, and what is between them, are in `compute`.
at::Tensor hidden(const Model& m, const at::Tensor& tokens, const Run& run) {
  const ModelConfig& c = m.config;
  check(tokens.dim() == 2, "tokens must be [B, T], not ", tokens.sizes());
  const Pass pass{m, run, tokens.size(0), tokens.size(1)};
  const int64_t T = pass.T, from = run.states ? (*run.states)[0].tokens : 0;
  check(c.family->rotary || from + T <= c.positions, "this model has ", c.positions,
        " positions, and the text ", from + T, " tokens");
  const at::ScalarType own = m.embedding.scalar_type(),
                       compute = run.compute == at::ScalarType::Undefined ? own : run.compute;
  at::Tensor x = at::embedding(m.embedding, tokens.reshape({-1}));  // [B T, C], as all rows here
  if (c.family->scaled_embedding)
    x = x * at::scalar_tensor(std::sqrt(double(c.C)), at::kFloat).to(own).item<double>();
  if (!c.family->rotary)
    x = (x.view({pass.B, T, c.C}) + m.positions.narrow(0, from, T)).view({-1, c.C});
  // Layers share few kinds of positions: each is computed once.
  std::vector<std::pair<Rope, parts::Rotation>> rotations;
  const auto rotation_of = [&](const Rope& r) -> const parts::Rotation& {
    for (const auto& [rope, by] : rotations)
      if (rope == r) return by;
    const parts::Rotation by =
        c.family->rotary ? rotation(r, c.D, from, T, tokens.options()) : parts::Rotation{};
    return rotations.emplace_back(r, by).second;
  };
  const parts::Norm norm = norm_of(c);
  const auto after = [&](const at::Tensor& y, const at::Tensor& weight) {
    return c.family->sandwich ? parts::norm(norm, y, weight, {}, compute) : y;
  };
  const Layer last{.before_attention = m.last_norm, .before_attention_bias = m.last_norm_bias};
  at::Tensor y = parts::norm(norm, x, m.layers[0].before_attention,
                             m.layers[0].before_attention_bias, compute);
  for (size_t i = 0; i < m.layers.size(); ++i) {
    const Layer &l = m.layers[i], &next = i + 1 < m.layers.size() ? m.layers[i + 1] : last;
    y = after(attention(pass, i, y, rotation_of(c.layers[i].rope)), l.after_attention);
    std::tie(x, y) = parts::add_norm(norm, x, y, l.before_mlp, l.before_mlp_bias);
    y = after(mlp(c, l, y), l.after_mlp);
    std::tie(x, y) = parts::add_norm(norm, x, y, next.before_attention, next.before_attention_bias);
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
