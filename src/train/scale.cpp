#include "train/scale.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "attn/inputs.h"
#include "attn/plan.h"
#include "attn/split.h"
#include "nn/slots.h"
#include "train/shards.h"

namespace horner::train {

using attn::Travels;
using nn::LayerConfig;
using nn::ModelConfig;

static constexpr double kFloat = 4, kDouble = 8;

// The elements of every trained tensor, in the order of the forward pass.
static std::vector<int64_t> sizes_of(const ModelConfig& c) {
  nn::Model m{.config = c};
  std::vector<int64_t> out;
  for (const nn::Slot& s : nn::slots(m)) {
    int64_t n = 1;
    for (const int64_t size : s.shape) n *= size;
    if (!s.fixed) out.push_back(n);
  }
  return out;
}

// Of a micro-batch, of each process.
static double tokens_of(const Layout& l) {
  return double(l.sequences) * double(l.length) / double(l.context);
}

static double sum_of(const std::vector<int64_t>& sizes) {
  double sum = 0;
  for (const int64_t n : sizes) sum += double(n);
  return sum;
}

double parameters_of(const ModelConfig& c) {
  return sum_of(sizes_of(c));
}

// Elements with the padding of buckets, and of the largest bucket.
struct Buckets {
  double all = 0, largest = 0, piece = 0;
};
static Buckets buckets_of(const ModelConfig& c, const Layout& l) {
  Buckets out;
  for (const BucketPlan& b : plan_buckets(sizes_of(c), int64_t(l.bucket), int(l.processes))) {
    const double n = double(b.chunk * l.processes);
    out.all += n, out.largest = std::max(out.largest, n);
  }
  return out;
}

// Bytes of the inputs with one row per token of a key head or a query head, beside q, k and v.
static double gate_bytes(const nn::Part& part, const ModelConfig& c, bool of_keys) {
  double sum = 0;
  for (const attn::Input& i : attn::input_table()) {
    if (!i.wanted || !i.wanted(part.attention) || i.role == attn::Role::tensor) continue;
    const std::string shape = attn::shape(i, part.attention);
    if (shape.find(of_keys ? 'S' : 'T') == shape.npos) continue;
    const size_t heads = (of_keys ? part.key_heads : part.heads).size();
    sum += kFloat * double(int64_t(heads) * (shape.size() == 4 ? c.D : 1));
  }
  return sum;
}

static attn::SplitShape split_shape(const nn::Part& part, const ModelConfig& c, const Layout& l) {
  const int64_t G = part.around.mamba ? c.H : int64_t(part.key_heads.size());
  return {l.sequences, G, c.D, c.D, l.length / l.context, l.bfloat16 ? 2 : 4, !l.cpu};
}

Travels travels(const nn::Part& part, const ModelConfig& c, const Layout& l) {
  return attn::travels(part.attention, split_shape(part, c, l));
}

// Rows of the MLP that forward keeps: of a plain one, those before and after its activation.
static double mlp_rows(const ModelConfig& c) {
  return c.family->tensors.gate ? 3 : 2;
}

// Bytes of one layer's weights that a product joins or casts, and keeps.
static double joined_bytes(const ModelConfig& c, const Layout& l) {
  const double qkv = double((c.H + 2 * c.G) * c.D * c.C), o = double(c.H * c.D * c.C);
  const double mlp = mlp_rows(c) * double(c.M * c.C), up = c.family->tensors.gate ? mlp * 2 / 3 : 0;
  return l.bfloat16 ? 2 * (qkv + o + mlp) : kFloat * (qkv + up);
}

static bool is_delta(const nn::Part& part) {
  return attn::is<attn::Delta>(part.attention.values);
}

// Whether attention keeps only its inputs and states, and runs again in backward, a piece at a
// time.
static bool in_chain(const ModelConfig& c, const nn::Part& part, const Layout& l) {
  return l.context > 1 && travels(part, c, l) == Travels::states;
}

// What such a piece takes: the states of all ranks and five more, and rows. Of the delta rule about
// 30, some as wide as a key and a value together, 54 with a decay, whose backward is in double; of
// other sums with a decay or in double 10 of these.
static double piece_bytes(const ModelConfig& c, const nn::Part& part, const Layout& l) {
  if (!in_chain(c, part, l)) return 0;
  const double tokens = double(l.sequences) * double(std::min<int64_t>(l.length / l.context, 2048));
  const attn::Spec& spec = part.attention;
  const bool decays = !attn::is<attn::NoDecay>(spec.decay);
  const double rows = is_delta(part)                         ? (decays ? 54 : 30)
                      : decays || attn::sums_in_double(spec) ? 20
                                                             : 0;
  return double(l.context + 5) * attn::state_message(spec, split_shape(part, c, l)) +
         kFloat * rows * double(int64_t(part.heads.size()) * c.D) * tokens;
}

// The state that the tokens start from; those of all ranks, where they are multiplied: by a decay,
// or with the delta rule, which begins with two of its own.
static double kept_states(const ModelConfig& c, const nn::Part& part, const Layout& l) {
  if (!in_chain(c, part, l)) return 0;
  const bool decays = !attn::is<attn::NoDecay>(part.attention.decay);
  const int64_t n = is_delta(part) ? l.context + 3 : decays ? l.context + 1 : 1;
  return double(n) * attn::state_message(part.attention, split_shape(part, c, l));
}

// What the forward pass of a layer keeps for one token, in bytes.
static double kept_per_token(const ModelConfig& c, const LayerConfig& layer, const Layout& l) {
  const double e = l.bfloat16 ? 2 : kFloat, C = double(c.C), M = double(c.M);
  const double heads = double((c.H + 2 * c.G) * c.D);
  const double rows = kFloat * 2 * C + e * 2 * C;  // sums and their norms
  double attention = e * heads, gates = 0, others = 0, delta = 0;
  for (const nn::Part& part : layer.parts) {
    const double rows = double(int64_t(part.heads.size()) * c.D),
                 of_keys = gate_bytes(part, c, true);
    attention += e * (in_chain(c, part, l) ? 1 : 2) * rows + kFloat * 3 * double(part.heads.size());
    gates += 2 * (of_keys + gate_bytes(part, c, false));
    // On a GPU the result of a ring is tensor code of its sums, in float32.
    if (!l.cpu && l.context > 1 && travels(part, c, l) == Travels::blocks_of_keys)
      attention += kFloat * rows;
    // The keys of all ranks, where they are gathered.
    if (l.context > 1 && travels(part, c, l) == Travels::all_keys)
      others +=
          double(l.context - 1) * (e * double(2 * int64_t(part.key_heads.size()) * c.D) + of_keys);
    // The delta rule keeps about ten rows: keys, values, corrected values and what they leave, in
    // padded copies.
    if (is_delta(part) && !in_chain(c, part, l)) delta += kFloat * 10 * rows;
    // Gates of channels: mapped queries and keys, and their sums, some in double.
    if (attn::is<attn::ChannelGate>(part.attention.decay))
      gates += kFloat * rows *
               (is_delta(part)         ? (in_chain(c, part, l) ? 0 : 10)
                : in_chain(c, part, l) ? 4
                                       : 14);
  }
  // Of a short convolution, its input behind the tokens before it and its output.
  const double convolution = layer.around().short_conv > 0 ? kFloat * 2 * heads : 0;
  return rows + attention + gates + others + delta + convolution + e * mlp_rows(c) * M + kFloat * 2;
}

Memory memory_of(const ModelConfig& c, const Layout& l) {
  const double P = parameters_of(c), w = double(l.processes), e = l.bfloat16 ? 2 : kFloat;
  const bool sharded = l.shard != "none" && l.processes > 1;
  const Buckets b = sharded ? buckets_of(c, l) : Buckets{P, P};
  Memory m;
  m.weights = kFloat * b.all;
  m.optimizer = 2 * kFloat * (sharded ? b.all / w : P);
  m.gradients = kFloat * (sharded && l.shard == "gradients" ? b.all / w : b.all);
  if (sharded && l.shard == "gradients") m.buffers += 2 * kFloat * b.largest;
  if (sharded && l.cpu) m.buffers += kFloat * b.largest;
  const double N = tokens_of(l), C = double(c.C);
  double all = 0, largest = 0, piece = 0;
  for (const LayerConfig& layer : c.layers) {
    double kept = N * kept_per_token(c, layer, l) + joined_bytes(c, l);
    for (const nn::Part& part : layer.parts) kept += kept_states(c, part, l);
    all += l.recompute ? N * C * (kFloat + e) : kept;
    largest = std::max(largest, kept);
    for (const nn::Part& part : layer.parts) piece = std::max(piece, piece_bytes(c, part, l));
  }
  const double slice = std::clamp(double(int64_t(1) << 24) / double(c.V), 128., 8192.);
  m.loss = std::min(N, slice) * double(c.V) * e + N * C * e + double(c.V * c.C) * kFloat;
  // The gradients of the widest rows, on top of what is kept; with recomputation, of one layer. The
  // loss has made room for them.
  const double mlp = N * e * mlp_rows(c) * double(c.M) + N * C * kFloat;
  const double work = std::max(0., std::max(mlp, piece) - m.loss);
  m.activations = all + (l.recompute ? largest : 0) + work + N * C * (kFloat + e);
  // One process has no gradients before its first backward: they take the place of what it frees.
  if (l.processes == 1 && l.parts == 1)
    m.activations = std::max(m.activations, m.gradients + work) - m.gradients;
  return m;
}

// Bytes that a process sends for each other one in a part's forward pass and in its backward.
struct Sent {
  double forward = 0, backward = 0;
};

static Sent sequence_bytes(const ModelConfig& c, const nn::Part& part, const Layout& l) {
  const attn::Spec& spec = part.attention;
  const attn::SplitShape shape = split_shape(part, c, l);
  const double B = double(l.sequences), G = double(shape.G);
  double halo = 0;
  if (part.around.short_conv > 0)
    halo = B * double((part.around.short_conv - 1) * (c.H + 2 * c.G) * c.D * shape.element);
  const auto both = [&](double bytes) { return Sent{halo + bytes, halo + bytes}; };
  const Travels what = travels(part, c, l);
  if (what == Travels::states) return both(attn::state_message(spec, shape));
  if (what == Travels::all_keys)
    return both(tokens_of(l) * (G * double(2 * c.D * shape.element) + gate_bytes(part, c, true)));
  // Keys and values, with their gates and running sums; in backward once more, with gradients.
  const double block = attn::block_message(spec, shape);
  attn::SplitShape wide = shape;
  wide.element = int64_t(kFloat);
  const bool decays = !attn::is<attn::NoDecay>(spec.decay);
  Sent out = both(decays * kDouble * B * G);  // the decay of all tokens of a rank
  out.forward += block, out.backward += block + attn::block_message(spec, wide);
  return out;
}

Traffic traffic_of(const ModelConfig& c, const Layout& l) {
  Traffic t;
  const double w = double(l.processes), share = (w - 1) / w;
  if (l.processes == 1) return t;
  const std::vector<int64_t> sizes = sizes_of(c);
  if (l.shard == "none") {
    t.gradients = 2 * share * kFloat * sum_of(sizes);
  } else {
    const double bytes = kFloat * buckets_of(c, l).all;
    t.gradients = share * bytes * double(l.shard == "gradients" ? l.parts : 1);
    t.weights = share * bytes;
    t.numbers = 2 * share * kDouble * double(sizes.size());
  }
  for (const LayerConfig& layer : c.layers)
    for (const nn::Part& part : layer.parts) {
      const Sent sent = sequence_bytes(c, part, l);
      t.sequence += double(l.parts * (l.context - 1)) *
                    (sent.forward * (l.recompute ? 2 : 1) + sent.backward);
    }
  return t;
}

int64_t largest_batch(const ModelConfig& c, Layout l, double bytes) {
  const auto fits = [&](int64_t n) {
    l.sequences = n;
    return memory_of(c, l).all() <= bytes;
  };
  if (!fits(1)) return 0;
  int64_t most = 1;
  while (most < (int64_t(1) << 40) && fits(2 * most)) most *= 2;
  for (int64_t step = most / 2; step > 0; step /= 2)
    if (fits(most + step)) most += step;
  return most;
}

double flops_per_token(const ModelConfig& c, const Layout& l) {
  double weights = double(c.V * c.C);
  nn::Model m{.config = c};
  for (const nn::Slot& s : nn::slots(m)) {
    const bool table = s.at == &m.embedding || s.at == &m.positions || s.at == &m.head;
    if (s.shape.size() == 2 && !table) weights += double(s.shape[0] * s.shape[1]);
  }
  const double products = weights + double(int64_t(c.layers.size()) * c.H * c.D * l.length);
  return (l.recompute ? 8 : 6) * products;
}

}  // namespace horner::train
