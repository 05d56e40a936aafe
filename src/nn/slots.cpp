#include "nn/slots.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <cstring>
#include <numbers>

#include "attn/inputs.h"
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

// A variant's own parameters. Norms start with outputs of length 1, as l2 gives them: RMSNorm's
// outputs have length √D and would dominate the embeddings at first.
static Start parameter_start(const attn::Input& i, const ModelConfig& c) {
  const std::string_view name = i.name;
  if (name == "norm_bias") return {};
  if (name == "norm_weight") return {Start::constant, 1 / std::sqrt(double(c.D))};
  if (std::strlen(i.shape) == 3) return {Start::normal, 1 / std::sqrt(double(c.D))};  // projections
  return {Start::constant, 1};
}

// Weights of products.
static Start matrix_start(const ModelConfig& c) {
  return {Start::normal, c.json.value("initializer_range", 0.02)};
}

namespace {

struct Adder {  // fills the list of slots
  const ModelConfig& c;
  std::vector<Slot> out = {};
  std::map<std::string, int> seen = {};

  void add(const std::string& name, at::Tensor& at, std::vector<int64_t> shape, Start start) {
    out.push_back({name, &at, std::move(shape), start});
    out.back().part = seen[name]++;
  }
  // A norm or a bias [n], or the weight of a product [out, in].
  void add_weight(const std::string& name, at::Tensor& at, std::vector<int64_t> shape) {
    const bool zero = name.ends_with(".bias") || c.family->norm == NormKind::rms_plus_one;
    add(name, at, shape,
        shape.size() == 2 ? matrix_start(c) : Start{Start::constant, zero ? 0. : 1.});
  }
  void add_layer(const std::string& prefix, Layer& l) {
    const TensorNames& names = c.family->tensors;
    for (const LayerTensor& t : kLayerTensors) {
      if (!(names.*t.name) || (t.biased && !(c.*t.biased))) continue;
      std::vector<int64_t> shape;
      for (const char* letter = t.shape; *letter; ++letter) shape.push_back(size(c, *letter));
      add_weight(prefix + names.*t.name + (t.biased ? ".bias" : ".weight"), l.*t.at, shape);
      out.back().transposed = c.family->transposed && shape.size() == 2;
    }
  }
  // The variant's own weights, by the table of inputs.
  void add_variant(const std::string& prefix, const attn::Spec& spec, Layer& l) {
    const auto letter = [&](char name) -> int64_t {
      const auto* projected = std::get_if<attn::Project>(&spec.features);
      return name == 'H'                  ? c.H
             : name == 'G'                ? c.G
             : name == 'D' || name == 'E' ? c.D
             : name == 'F' && projected   ? projected->dim
                                          : name - '0';
    };
    const auto add_own = [&](const std::string& name, std::vector<int64_t> shape, Start start) {
      add(prefix + "horner." + name, l.variant[name], std::move(shape), start);
    };
    for (const attn::Input& i : attn::input_table()) {
      if (i.role == attn::Role::tensor || i.role == attn::Role::mask || !i.wanted(spec)) continue;
      if (i.role == attn::Role::parameter) {
        std::vector<int64_t> shape;
        for (const char* name = i.shape; *name; ++name) shape.push_back(letter(*name));
        add_own(i.name, shape, parameter_start(i, c));
        continue;
      }
      const int64_t heads = letter(i.shape[1]);  // one number per head and token, from the token
      add_own(std::string(i.name) + ".weight", {heads, c.C}, matrix_start(c));
      add_own(std::string(i.name) + ".bias", {heads}, {});
    }
  }
};

}  // namespace

std::vector<Slot> slots(Model& m) {
  const ModelConfig& c = m.config;
  const TensorNames& names = c.family->tensors;
  Adder all{c};
  all.add_weight(names.embedding + std::string(".weight"), m.embedding, {c.V, c.C});
  if (names.positions)
    all.add_weight(names.positions + std::string(".weight"), m.positions, {c.positions, c.C});
  m.layers.resize(c.layers.size());
  for (size_t i = 0; i < c.layers.size(); ++i) {
    const std::string prefix = names.layers + ("." + std::to_string(i)) + ".";
    all.add_layer(prefix, m.layers[i]);
    all.add_variant(prefix, c.layers[i].attention, m.layers[i]);
  }
  all.add_weight(names.last_norm + std::string(".weight"), m.last_norm, {c.C});
  if (c.norm_bias) all.add_weight(names.last_norm + std::string(".bias"), m.last_norm_bias, {c.C});
  if (!c.tied) all.add_weight(names.head + std::string(".weight"), m.head, {c.V, c.C});
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
  if (s.kind == Start::index) return {double(first), double(first + 1)};
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
