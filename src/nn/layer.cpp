#include "nn/layer.h"

#include <ATen/ATen.h>

#include <cstring>
#include <numeric>

#include "attn/inputs.h"
#include "attn/stages.h"

namespace horner::nn {

parts::Norm norm_of(const ModelConfig& c) {
  const NormKind kind = c.family->norm;
  return {kind == NormKind::layer, kind == NormKind::rms_plus_one ? 1. : 0., c.eps};
}

// A weight of the variant of a part.
static at::Tensor own_weight(const Pass& p, size_t i, size_t part, const std::string& name) {
  const bool uniform = p.m.config.layers[i].uniform();
  return p.m.layers[i].variant.at(uniform ? name : std::to_string(part) + "." + name);
}

// W x + b of the variant's gate `name`, [B, heads, T] or [B, heads, T, channels], in float32:
// logarithms in bfloat16 are too coarse to sum.
static at::Tensor gate_logits(const Pass& p, size_t i, size_t part, const std::string& name,
                              const at::Tensor& x, int64_t channels = 0) {
  at::Tensor out = parts::product(x, {own_weight(p, i, part, name + ".weight")},
                                  {own_weight(p, i, part, name + ".bias")});
  if (at::isReducedFloatingType(out.scalar_type())) out = out.to(at::kFloat);
  return (channels > 0 ? out.view({p.B, p.T, -1, channels}) : out.view({p.B, p.T, -1}))
      .transpose(1, 2);
}

void add_variant_inputs(const Pass& p, size_t i, size_t part, const at::Tensor& x,
                        attn::Inputs& in) {
  const Part& layer = p.m.config.layers[i].parts[part];
  for (const attn::Input& input : attn::input_table()) {
    if (!input.wanted || !input.wanted(layer.attention) || (in.*input.at).defined()) continue;
    at::Tensor& to = in.*input.at;
    const bool each = std::strlen(attn::shape(input, layer.attention)) == 4;
    const auto logits = [&] {
      return gate_logits(p, i, part, input.name, x, each ? p.m.config.D : 0);
    };
    switch (input.role) {
      case attn::Role::tensor:
      case attn::Role::score:
      case attn::Role::mask:
        break;
      case attn::Role::parameter:
        to = own_weight(p, i, part, input.name);
        break;
      case attn::Role::constant:
        to = own_weight(p, i, part, input.name).detach();
        break;
      case attn::Role::logit:
        to = logits();
        break;
      case attn::Role::log_gate:
        to = at::log_sigmoid(logits()) / layer.around.gate_root;
        break;
      case attn::Role::gate:
        to = logits();
        if (layer.around.exp_gate && &to == &in.output_gate)
          to = (-to).exp();
        else
          to = layer.around.silu_gate && &to == &in.post_gate ? at::silu(to) : to.sigmoid();
        break;
    }
  }
}

// e^(c_t - c_s), with c_t the sum of (W x + b) / 1024 over the tokens before t, as a factor of the
// output gate and one of the input gate: it may grow, which executions do not expect of a decay.
static void add_raw_decay(const Pass& p, size_t i, const at::Tensor& x, attn::Inputs& in) {
  constexpr double kTokens = 1024;
  const at::Tensor each = gate_logits(p, i, 0, "decay", x).to(at::kDouble) / kTokens;  // [B, G, T]
  at::Tensor sums = each.cumsum(-1);
  if (LayerState* const state = p.state(i)) {
    if (state->decay.defined()) sums = sums + state->decay;
    state->decay = sums.narrow(-1, p.T - 1, 1).clone();
  }
  if (p.run.split) sums = sums + attn::sum_before(*p.run.split, each.sum(-1, true));
  sums = sums - each;
  const at::Tensor of_query = sums.repeat_interleave(in.q.size(1) / in.k.size(1), 1);
  in.input_gate = in.input_gate * (-sums).exp().to(in.input_gate.scalar_type());
  in.output_gate = in.output_gate * of_query.exp().to(in.output_gate.scalar_type());
}

at::Tensor operate(const Pass& p, size_t i, size_t part, const attn::Inputs& in) {
  const Part& own = p.m.config.layers[i].parts[part];
  LayerState* const state = p.state(i);
  const at::Tensor a = state ? attn::step(state->parts[part], in)  // [B, heads, T, E]
                       : p.run.split
                           ? attn::attend_split(own.attention, in, *p.run.split, p.run.execution)
                           : attn::attend(own.attention, in, p.run.execution);
  if (p.run.probe && p.run.probe->attention) p.run.probe->attention({int64_t(i), own, in, a});
  return a;
}

at::Tensor rows_of(const at::Tensor& heads) {
  return heads.transpose(1, 2).reshape({heads.size(0) * heads.size(2), -1});
}

// x [B, T, channels] after the n rows before it: those in `past`, those of the rank before this
// one, or zeros. The last n rows of all replace `past`, unless that is null.
static at::Tensor with_past(const Pass& p, const at::Tensor& x, int64_t n, at::Tensor* past) {
  const at::Tensor before = past && past->defined() ? *past
                            : p.run.split           ? attn::rows_before(*p.run.split, x, 1, n)
                                          : at::zeros({x.size(0), n, x.size(2)}, x.options());
  const at::Tensor all = at::cat({before, x}, 1);
  if (past) *past = all.narrow(1, x.size(1), n).clone();
  return all;
}

// The sum is in the dtype of the weight, float32 in mixed precision.
at::Tensor convolved(const Pass& p, size_t i, const at::Tensor& rows, const at::Tensor& weight,
                     const at::Tensor& bias) {
  const int64_t n = weight.size(1);
  LayerState* const state = p.state(i);
  const at::Tensor x = with_past(p, rows.view({p.B, p.T, rows.size(1)}), n - 1,
                                 state ? &state->projections : nullptr);
  at::Tensor y;
  for (int64_t j = 0; j < n; ++j) {
    const at::Tensor term = x.narrow(1, j, p.T) * weight.select(1, j);
    y = y.defined() ? y + term : term;
  }
  if (bias.defined()) y = y + bias;
  return at::silu(y).to(rows.scalar_type()).view(rows.sizes());
}

// Keys come from the previous token; the first token's keys come from zeros.
static at::Tensor shifted_qkv(const Pass& p, size_t i, const at::Tensor& x) {
  const Layer& l = p.m.layers[i];
  LayerState* const state = p.state(i);
  const at::Tensor before =
      with_past(p, x.view({p.B, p.T, -1}), 1, state ? &state->inputs : nullptr).narrow(1, 0, p.T);
  return at::cat({parts::product(x, {l.q}, {l.q_bias}),
                  parts::product(before.reshape(x.sizes()), {l.k}, {l.k_bias}),
                  parts::product(x, {l.v}, {l.v_bias})},
                 -1);
}

// Rows (q | k | v), [B T, (H + 2 G) D]; then the convolution, if the layer has one, and norms over
// whole projections where the family has them.
static at::Tensor project(const Pass& p, size_t i, const at::Tensor& x) {
  const ModelConfig& c = p.m.config;
  const Layer& l = p.m.layers[i];
  at::Tensor qkv = c.key_shift ? shifted_qkv(p, i, x)
                               : parts::product(x, {l.q, l.k, l.v}, {l.q_bias, l.k_bias, l.v_bias});
  if (c.layers[i].around().short_conv > 0)
    qkv = convolved(p, i, qkv, l.variant.at("short_conv.weight"));
  if (!l.q_norm.defined() || c.family->query_key_norm == NormWidth::head) return qkv;
  const auto part = qkv.split_with_sizes({c.H * c.D, c.G * c.D, c.G * c.D}, 1);
  const auto normed = [&](const at::Tensor& y, const at::Tensor& weight) {
    return parts::norm(norm_of(c), y, weight, {}, y.scalar_type());
  };
  return at::cat({normed(part[0], l.q_norm), normed(part[1], l.k_norm), part[2]}, 1);
}

// Some of the heads of x, or all of them as they are. A head may repeat.
static at::Tensor some_heads(const at::Tensor& x, const std::vector<int64_t>& heads) {
  std::vector<int64_t> all(size_t(x.size(1)));
  std::iota(all.begin(), all.end(), 0);
  if (heads == all) return x;
  return x.index_select(1, at::tensor(heads, at::kLong).to(x.device()));
}

// The parts of a layer, each with its heads: [B, H, T, E].
static at::Tensor operate_parts(const Pass& p, size_t i, const at::Tensor& x,
                                const attn::Inputs& all) {
  const std::vector<Part>& parts = p.m.config.layers[i].parts;
  at::Tensor out;
  for (size_t n = 0; n < parts.size(); ++n) {
    attn::Inputs in{.q = some_heads(all.q, parts[n].heads),
                    .k = some_heads(all.k, parts[n].key_heads),
                    .v = some_heads(all.v, parts[n].key_heads)};
    add_variant_inputs(p, i, n, x, in);
    const at::Tensor a = operate(p, i, n, in);
    if (!out.defined())
      out = at::zeros({a.size(0), all.q.size(1), a.size(2), a.size(3)}, a.options());
    out = out.index_add(1, at::tensor(parts[n].heads, at::kLong).to(a.device()), a);
  }
  return out;
}

at::Tensor heads_of_layer(const Model& m, size_t layer, const at::Tensor& x,
                          const attn::Inputs& qkv) {
  const Run run;
  return operate_parts({m, run, qkv.q.size(0), qkv.q.size(2)}, layer, x, qkv);
}

at::Tensor attention(const Pass& p, size_t i, const at::Tensor& x, const parts::Rotation& by) {
  const ModelConfig& c = p.m.config;
  const LayerConfig& layer = c.layers[i];
  const Layer& l = p.m.layers[i];
  if (p.run.probe && p.run.probe->input) p.run.probe->input(int64_t(i), x);
  if (layer.around().mamba) return mamba(p, i, x);
  const bool each = c.family->query_key_norm == NormWidth::head;  // a norm of each head
  // Texts with positions of their own, of one token each, are rotated as tokens of one text.
  const bool own = p.run.positions.defined();
  auto [q, k, v] =
      parts::heads({own ? 1 : p.B, own ? p.B : p.T, c.H, c.G, c.D, norm_of(c)}, project(p, i, x),
                   each ? l.q_norm : at::Tensor(), each ? l.k_norm : at::Tensor(), by);
  if (own) q = q.transpose(0, 2), k = k.transpose(0, 2), v = v.transpose(0, 2);
  attn::Inputs in{.q = q, .k = k, .v = v};
  if (!layer.uniform())
    return parts::product(rows_of(operate_parts(p, i, x, in)), {l.o}, {l.o_bias});
  if (layer.around().tied_keys)
    in.q = at::silu(q), in.k = (-k).sigmoid(),
    in.channel_decay = at::log_sigmoid(k.to(attn::wide(k.scalar_type())));
  add_variant_inputs(p, i, 0, x, in);
  if (layer.around().raw_decay) add_raw_decay(p, i, x, in);
  return parts::product(rows_of(operate(p, i, 0, in)), {l.o}, {l.o_bias});
}

}  // namespace horner::nn
