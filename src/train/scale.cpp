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

Travels travels(const nn::Part& part, const ModelConfig& c, const Layout& l) {
  const attn::Spec& spec = part.attention;
  const bool state = attn::why_no_scan(spec, /*on_gpu=*/!l.cpu).empty() &&
                     attn::why_too_large(spec, {l.sequences, c.G, c.D, c.D}).empty();
  return state                             ? Travels::states
         : attn::why_no_ring(spec).empty() ? Travels::blocks_of_keys
                                           : Travels::all_keys;
}

// Bytes of one layer's weights that a product joins or casts, and keeps.
static double joined_bytes(const ModelConfig& c, const Layout& l) {
  const double qkv = double((c.H + 2 * c.G) * c.D * c.C), o = double(c.H * c.D * c.C);
  const double up = double(2 * c.M * c.C), down = double(c.M * c.C);
  return l.bfloat16 ? 2 * (qkv + o + up + down) : kFloat * (qkv + up);
}

static bool is_delta(const nn::Part& part) {
  return attn::is<attn::Delta>(part.attention.values);
}

// Whether attention keeps only its inputs and states, and runs again in backward, a piece at a
// time.
static bool in_chain(const ModelConfig& c, const nn::Part& part, const Layout& l) {
  return l.context > 1 && travels(part, c, l) == Travels::states;
}

// What such a piece of the delta rule takes: about 42 rows, some as wide as a key and a value
// together; 54 with a decay, whose backward is in double.
static double piece_bytes(const ModelConfig& c, const nn::Part& part, const Layout& l) {
  if (!is_delta(part) || !in_chain(c, part, l)) return 0;
  const auto tokens = double(l.sequences * std::min<int64_t>(l.length / l.context, 2048));
  const double rows = attn::is<attn::NoDecay>(part.attention.decay) ? 42 : 54;
  return kFloat * rows * double(int64_t(part.heads.size()) * c.D) * tokens;
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
  }
  // Of a short convolution, its input behind the tokens before it and its output.
  const double convolution = layer.around().short_conv > 0 ? kFloat * 2 * heads : 0;
  return rows + attention + gates + others + delta + convolution + e * 3 * M + kFloat * 2;
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
  const double N = double(l.sequences * l.length / l.context), C = double(c.C);
  double all = 0, largest = 0, piece = 0;
  for (const LayerConfig& layer : c.layers) {
    const double kept = N * kept_per_token(c, layer, l) + joined_bytes(c, l);
    all += l.recompute ? N * C * (kFloat + e) : kept;
    largest = std::max(largest, kept);
    for (const nn::Part& part : layer.parts) piece = std::max(piece, piece_bytes(c, part, l));
  }
  // The gradients of the widest rows, on top of what is kept; with recomputation, of one layer.
  const double work = std::max(N * e * double(3 * c.M) + N * C * kFloat, piece);
  m.activations = all + (l.recompute ? largest : 0) + work + N * C * (kFloat + e);
  // One process has no gradients before backward: they take the place of what it frees.
  if (l.processes == 1) m.activations = std::max(m.activations, m.gradients + work) - m.gradients;
  const double slice = std::clamp(double(int64_t(1) << 24) / double(c.V), 128., 8192.);
  m.loss = std::min(N, slice) * double(c.V) * e + N * C * e + double(c.V * c.C) * kFloat;
  return m;
}

// Bytes that a process sends for each other one in a part's forward pass and in its backward.
struct Sent {
  double forward = 0, backward = 0;
};

static double padded(double n, double multiple = 16) {
  return std::ceil(n / multiple) * multiple;
}

static double state_bytes(const ModelConfig& c, const attn::Spec& spec, double B, double G) {
  const double F = attn::feature_count(spec, c.D), D = double(c.D);
  const double width = attn::is<attn::Delta>(spec.values) ? padded(padded(D) + F) : padded(D);
  double exact = B;  // the count, and other sums in double
  if (spec.centred) exact += B * G * double(attn::mapped_channels(spec, c.D));
  if (attn::is<attn::CumulativeGate>(spec.denominator)) exact += B * G;
  if (attn::is<attn::ChannelGate>(spec.decay))
    exact += B * G * F;
  else if (!attn::is<attn::NoDecay>(spec.decay))
    exact += B * G;
  return B * G * F * (width + 1) * (attn::sums_in_double(spec) ? kDouble : kFloat) +
         kDouble * exact;
}

static Sent sequence_bytes(const ModelConfig& c, const nn::Part& part, const Layout& l) {
  const attn::Spec& spec = part.attention;
  const double B = double(l.sequences),
               G = double(part.around.mamba ? c.H : int64_t(part.key_heads.size())),
               e = l.bfloat16 ? 2 : kFloat, tokens = B * double(l.length / l.context);
  double halo = 0;
  if (part.around.short_conv > 0)
    halo = B * double((part.around.short_conv - 1) * (c.H + 2 * c.G) * c.D) * e;
  const auto both = [&](double bytes) { return Sent{halo + bytes, halo + bytes}; };
  const Travels what = travels(part, c, l);
  if (what == Travels::states) return both(state_bytes(c, spec, B, G));
  if (what == Travels::all_keys)
    return both(tokens * (G * 2 * double(c.D) * e + gate_bytes(part, c, true)));
  // Keys and values, with their gates and running sums; in backward once more, with gradients.
  const bool decays = !attn::is<attn::NoDecay>(spec.decay);
  const double multiple = l.cpu ? 16 : 8;  // of the kernels
  const double channels =
      padded(double(attn::mapped_channels(spec, c.D)), multiple) + padded(double(c.D), multiple);
  const double gates = spec.input_gate * kFloat + decays * kDouble;
  const double block = tokens * G * (channels * e + gates),
               gradients = tokens * G * (channels * kFloat + gates);
  Sent out = both(decays * kDouble * B * G);  // the decay of all tokens of a rank
  out.forward += block, out.backward += block + gradients;
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
