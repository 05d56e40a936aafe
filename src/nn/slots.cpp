#include "nn/slots.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <cstring>
#include <numbers>

#include "attn/inputs.h"
#include "core/check.h"
#include "core/random.h"

namespace horner::nn {

// The tensors of a layer.
struct LayerTensor {
  at::Tensor Layer::* at;
  const char* TensorNames::* name;
  const char* shape;  // C, M as in ModelConfig; Q: H D, K: G D; q, k: their norms
  bool ModelConfig::* biased = nullptr;  // for a bias: whether the model has it
};

// clang-format off
static const LayerTensor kLayerTensors[] = {
    {&Layer::before_attention,      &TensorNames::before_attention, "C"},
    {&Layer::before_attention_bias, &TensorNames::before_attention, "C", &ModelConfig::norm_bias},
    {&Layer::q,                     &TensorNames::q,                "QC"},
    {&Layer::k,                     &TensorNames::k,                "KC"},
    {&Layer::v,                     &TensorNames::v,                "KC"},
    {&Layer::q_bias,                &TensorNames::q,                "Q", &ModelConfig::query_bias},
    {&Layer::k_bias,                &TensorNames::k,                "K", &ModelConfig::query_bias},
    {&Layer::v_bias,                &TensorNames::v,                "K", &ModelConfig::query_bias},
    {&Layer::q_norm,                &TensorNames::q_norm,           "q"},
    {&Layer::k_norm,                &TensorNames::k_norm,           "k"},
    {&Layer::o,                     &TensorNames::o,                "CQ"},
    {&Layer::o_bias,                &TensorNames::o,                "C", &ModelConfig::out_bias},
    {&Layer::after_attention,       &TensorNames::after_attention,  "C"},
    {&Layer::after_attention_bias,  &TensorNames::after_attention,  "C", &ModelConfig::norm_bias},
    {&Layer::before_mlp,            &TensorNames::before_mlp,       "C"},
    {&Layer::before_mlp_bias,       &TensorNames::before_mlp,       "C", &ModelConfig::norm_bias},
    {&Layer::gate,                  &TensorNames::gate,             "MC"},
    {&Layer::gate_bias,             &TensorNames::gate,             "M", &ModelConfig::mlp_bias},
    {&Layer::up,                    &TensorNames::up,               "MC"},
    {&Layer::up_bias,               &TensorNames::up,               "M", &ModelConfig::mlp_bias},
    {&Layer::down,                  &TensorNames::down,             "CM"},
    {&Layer::down_bias,             &TensorNames::down,             "C", &ModelConfig::mlp_bias},
    {&Layer::after_mlp,             &TensorNames::after_mlp,        "C"},
    {&Layer::after_mlp_bias,        &TensorNames::after_mlp,        "C", &ModelConfig::norm_bias},
};

static int64_t size(const ModelConfig& c, char letter) {
  const bool head = c.family->query_key_norm == NormWidth::head;
  switch (letter) {
    case 'C': return c.C;
    case 'M': return c.M;
    case 'Q': return c.H * c.D;
    case 'K': return c.G * c.D;
    case 'q': return head ? c.D : c.H * c.D;
    default: return head ? c.D : c.G * c.D;
  }
}
// clang-format on

static Start uniform(double most) {
  return {Start::uniform, -most, most};
}

// Where channel d of ours is among a head's D channels as they are stored, where only the first R
// of them are rotated. Rotated channels are pairs (i, i + D / 2) here and (i, i + R / 2) there.
static int64_t stored_channel(int64_t d, int64_t D, int64_t R) {
  const int64_t i = d % (D / 2), half = d / (D / 2);
  return i < R / 2 ? half * (R / 2) + i : R + half * ((D - R) / 2) + i - R / 2;
}

// Steps of Mamba-2 are log-uniform in [0.001, 0.1]; the bias gives them through a softplus.
static double inverse_softplus_of_exp(double log_step) {
  const double step = std::exp(log_step);
  return step + std::log(-std::expm1(-step));
}

// RetNet (arXiv 2307.08621): head h keeps 1 - 2^(-5 - h) of a weight per token of distance.
static double retnet_slope(double head) {
  return -std::log1p(-std::exp2(-5 - head));
}

// ALiBi (arXiv 2108.12409): 2^(-8 (h + 1) / heads).
static double alibi_slope(double share) {
  return std::exp2(-8 * share);
}

namespace {

struct Adder {  // fills the list of slots
  const ModelConfig& c;
  std::vector<Slot> out = {};
  struct Seen {
    int parts = 0;
    int64_t rows = 0;
  };
  std::map<std::string, Seen> seen = {};

  void add(const std::string& name, at::Tensor& at, std::vector<int64_t> shape, Start start) {
    out.push_back({name, &at, std::move(shape), start});
    Slot& s = out.back();
    s.part = seen[name].parts++, s.first = seen[name].rows;
    seen[name].rows += s.shape[0];
  }

  // Tables of tokens and positions, and the head.
  Start table_start() const { return {Start::normal, c.json.value("initializer_range", 0.02)}; }
  // The weight of a product in a layer, or its bias, with `in` channels before it.
  Start product_start(int64_t in, bool bias = false) const {
    if (c.torch_init) return uniform(1 / std::sqrt(double(in)));
    return bias ? Start{} : table_start();
  }
  Start norm_start(bool bias) const {
    return {Start::constant, bias || c.family->norm == NormKind::rms_plus_one ? 0. : 1.};
  }
  // A variant's own parameters. Norms start with outputs of length 1, as l2 gives them: RMSNorm's
  // outputs have length √D and would dominate the embeddings at first.
  Start parameter_start(const Part& part, const attn::Input& i) const {
    const attn::Spec& spec = part.attention;
    const double G = double(part.key_heads.size());
    const std::string_view name = i.name;
    const double unit = 1 / std::sqrt(double(c.D));
    if (name == "norm_bias") return {};
    if (name == "norm_weight") return {Start::constant, c.torch_init ? 1 : unit};
    if (name == "sink") return {};
    if (name == "slope" && attn::is<attn::Exp>(spec.weight))
      return {Start::index, 1. / G, 1. / G, alibi_slope};
    if (name == "slope") return {Start::index, 0, 1, retnet_slope};
    if (name == "count_exponent") return {Start::constant, 0.5};
    if (name == "near_share") return {Start::constant, std::log(0.1 / 0.9)};  // as LoLCATs
    if (std::strlen(i.shape) == 3) return {Start::normal, unit};              // projections
    return {Start::constant, 1};
  }

  Start layer_start(const LayerTensor& t) const {
    if (std::strlen(t.shape) == 2) return product_start(size(c, t.shape[1]));
    if (!t.biased || t.biased == &ModelConfig::norm_bias) return norm_start(t.biased);
    for (const LayerTensor& weight : kLayerTensors)
      if (weight.name == t.name) return product_start(size(c, weight.shape[1]), /*bias=*/true);
    return {};
  }
  void add_layer(const std::string& prefix, const LayerConfig& layer, Layer& l) {
    const TensorNames& names = c.family->tensors;
    for (const LayerTensor& t : kLayerTensors) {
      const bool of_heads = t.name == &TensorNames::q || t.name == &TensorNames::k ||
                            t.name == &TensorNames::v || t.name == &TensorNames::q_norm ||
                            t.name == &TensorNames::k_norm;
      if (!(names.*t.name) || (t.biased && !(c.*t.biased))) continue;
      if (layer.around().mamba && of_heads) continue;  // it has its own projections
      std::vector<int64_t> shape;
      for (const char* letter = t.shape; *letter; ++letter) shape.push_back(size(c, *letter));
      add(prefix + names.*t.name + (t.biased ? ".bias" : ".weight"), l.*t.at, shape,
          layer_start(t));
      out.back().transposed = c.family->transposed && shape.size() == 2;
      if (of_heads) order_rows(layer, t.name != &TensorNames::v, out.back());
    }
  }
  // The rows of heads: those of a head together, and the channels that are rotated apart.
  void order_rows(const LayerConfig& layer, bool rotated, Slot& s) const {
    const int64_t R = rotated ? rotated_channels(layer.rope, c.D) : c.D;
    if (R == c.D && !c.family->by_head) return;
    for (int64_t i = 0; i < s.shape[0]; ++i) {
      const int64_t head = i / c.D, d = stored_channel(i % c.D, c.D, R);
      s.rows.push_back(c.family->by_head ? (head * 3 + s.part) * c.D + d
                                         : s.first + head * c.D + d);
    }
  }

  void add_own(const std::string& prefix, Layer& l, const std::string& name,
               std::vector<int64_t> shape, Start start) {
    add(prefix + "horner." + name, l.variant[name], std::move(shape), start);
  }
  // The own weights of a part's variant, by the table of inputs.
  void add_variant(const std::string& prefix, const LayerConfig& layer, size_t n, Layer& l) {
    const Part& part = layer.parts[n];
    const attn::Spec& spec = part.attention;
    const bool mamba = part.around.mamba;
    const std::string before = layer.uniform() ? "" : std::to_string(n) + ".";
    const auto letter = [&](char name) -> int64_t {
      const auto* projected = std::get_if<attn::Project>(&spec.features);
      const auto* hedgehog = std::get_if<attn::Hedgehog>(&spec.features);
      return name == 'H'                  ? int64_t(part.heads.size())
             : name == 'G'                ? (mamba ? c.H : int64_t(part.key_heads.size()))
             : name == 'D' || name == 'E' ? c.D
             : name == 'F' && projected   ? projected->dim
             : name == 'F' && hedgehog    ? hedgehog->dim
                                          : name - '0';
    };
    const auto add_gate = [&](const std::string& name, int64_t heads) {  // from the token
      add_own(prefix, l, before + name + ".weight", {heads, c.C}, product_start(c.C));
      add_own(prefix, l, before + name + ".bias", {heads}, product_start(c.C, /*bias=*/true));
    };
    if (part.around.raw_decay) add_gate("decay", c.G);
    for (const attn::Input& i : attn::input_table()) {
      const bool given =
          i.role == attn::Role::tensor || i.role == attn::Role::score || i.role == attn::Role::mask;
      if (given || !i.wanted(spec)) continue;
      if (part.around.tied_keys && i.at == &attn::Inputs::channel_decay) continue;
      if (mamba && (i.at == &attn::Inputs::decay || i.at == &attn::Inputs::input_gate)) continue;
      const std::string name = i.name;
      check(!std::strchr(attn::shape(i, spec), 'D') || rotated_channels(layer.rope, c.D) == c.D,
            "variant '", part.variant, "' has a weight for each channel of a key ('", name,
            "'), which is not supported where only some channels are rotated");
      if (i.role == attn::Role::parameter || i.role == attn::Role::constant) {
        std::vector<int64_t> shape;
        for (const char* l = i.shape; *l; ++l) shape.push_back(letter(*l));
        add_own(prefix, l, before + name, shape, parameter_start(part, i));
        out.back().fixed = i.role == attn::Role::constant;
        continue;
      }
      const char* shape = attn::shape(i, spec);
      add_gate(name, letter(shape[1]) * (std::strlen(shape) == 4 ? c.D : 1));
    }
  }
  // A convolution starts as torch's does.
  void add_convolution(const std::string& prefix, const LayerConfig& layer, Layer& l) {
    const int64_t n = layer.around().short_conv;
    if (n == 0 || layer.around().mamba) return;
    add_own(prefix, l, "short_conv.weight", {(c.H + 2 * c.G) * c.D, n},
            uniform(1 / std::sqrt(double(n))));
  }
  void add_mamba(const std::string& prefix, const LayerConfig& layer, Layer& l) {
    if (!layer.around().mamba) return;
    const int64_t inner = c.H * c.D, n = layer.around().short_conv;
    const Start product = product_start(c.C), conv = uniform(1 / std::sqrt(double(n)));
    const struct {
      const char* name;
      std::vector<int64_t> shape;
      Start start;
    } all[] = {
        {"z.weight", {inner, c.C}, product},
        {"x.weight", {inner, c.C}, product},
        {"B.weight", {c.D, c.C}, product},
        {"C.weight", {c.D, c.C}, product},
        {"dt.weight", {c.H, c.C}, product},
        {"dt.bias",
         {c.H},
         {Start::uniform, std::log(0.001), std::log(0.1), inverse_softplus_of_exp}},
        {"conv.weight", {inner + 2 * c.D, n}, conv},
        {"conv.bias", {inner + 2 * c.D}, conv},
        {"A_log", {c.H}, {Start::uniform, 1, 16, std::log}},
        {"D", {inner}, {Start::constant, 1}},
        {"norm.weight", {inner}, {Start::constant, 1}},
    };
    for (const auto& t : all) add_own(prefix, l, std::string("mamba.") + t.name, t.shape, t.start);
  }
};

}  // namespace

std::vector<Slot> slots(Model& m) {
  const ModelConfig& c = m.config;
  const TensorNames& names = c.family->tensors;
  Adder all{c};
  const auto add = [&](const char* name, const char* kind, at::Tensor& at,
                       std::vector<int64_t> shape, Start start) {
    all.add(std::string(name) + kind, at, std::move(shape), start);
  };
  add(names.embedding, ".weight", m.embedding, {c.V, c.C}, all.table_start());
  if (names.positions)
    add(names.positions, ".weight", m.positions, {c.positions, c.C}, all.table_start());
  m.layers.resize(c.layers.size());
  for (size_t i = 0; i < c.layers.size(); ++i) {
    const std::string prefix = names.layers + ("." + std::to_string(i)) + ".";
    all.add_layer(prefix, c.layers[i], m.layers[i]);
    for (size_t part = 0; part < c.layers[i].parts.size(); ++part)
      all.add_variant(prefix, c.layers[i], part, m.layers[i]);
    all.add_convolution(prefix, c.layers[i], m.layers[i]);
    all.add_mamba(prefix, c.layers[i], m.layers[i]);
  }
  add(names.last_norm, ".weight", m.last_norm, {c.C}, all.norm_start(false));
  if (c.norm_bias) add(names.last_norm, ".bias", m.last_norm_bias, {c.C}, all.norm_start(true));
  if (!c.tied) add(names.head, ".weight", m.head, {c.V, c.C}, all.table_start());
  return all.out;
}

std::string Slot::unique_name() const {
  return part == 0 ? name : name + "#" + std::to_string(part);
}

bool is_of_variant(const Slot& s) {
  return s.name.find(".horner.") != std::string::npos;
}

// In [0, 1), from the 53 highest bits.
static double fraction(uint64_t bits) {
  return double(bits >> 11) * 0x1p-53;
}

// Values 2i and 2i + 1 come from the numbers 2i and 2i + 1 of the stream; two normal ones from
// both (Box and Muller 1958).
static std::pair<double, double> drawn(const Start& s, uint64_t seed, uint64_t stream, int64_t i) {
  const auto first = uint64_t(2 * i);
  if (s.kind == Start::constant) return {s.a, s.a};
  if (s.kind == Start::index) return {s.a + s.b * double(first), s.a + s.b * double(first + 1)};
  const double x = fraction(random_bits(seed, stream, first)),
               y = fraction(random_bits(seed, stream, first + 1));
  if (s.kind == Start::uniform) return {s.a + x * (s.b - s.a), s.a + y * (s.b - s.a)};
  const double length = s.a * std::sqrt(-2 * std::log(1 - x)), angle = 2 * std::numbers::pi * y;
  return {length * std::cos(angle), length * std::sin(angle)};
}

at::Tensor random_start(const Slot& s, uint64_t seed) {
  const uint64_t stream = stream_of(s.unique_name());
  const at::Tensor out = at::empty(s.shape, at::kFloat);
  float* const x = out.data_ptr<float>();
  const int64_t n = out.numel();
  const auto value = [&](double given) { return float(s.start.map ? s.start.map(given) : given); };
  at::parallel_for(0, (n + 1) / 2, 1 << 14, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const auto [a, b] = drawn(s.start, seed, stream, i);
      x[2 * i] = value(a);
      if (2 * i + 1 < n) x[2 * i + 1] = value(b);
    }
  });
  return out;
}

Model random_model(const ModelConfig& config, uint64_t seed) {
  Model m{config};
  for (const Slot& s : slots(m)) *s.at = random_start(s, seed);
  if (config.tied) m.head = m.embedding;
  return m;
}

int64_t parameter_count(const Model& model) {
  Model m = model;
  int64_t n = 0;
  for (const Slot& s : slots(m)) n += s.at->numel();
  return n;
}

}  // namespace horner::nn
