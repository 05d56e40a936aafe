#include "instruments/mutants.h"

#include <ATen/ATen.h>

#include <cmath>
#include <sstream>

#include "attn/stages.h"

namespace horner::instruments {

using at::Tensor;

// Hooks, made from a function that changes one thing. Where it changes the forward pass, the
// gradients are those of the changed pass.

// Whether the last case of this thread ran on `reference`.
static thread_local bool on_reference = false;

// Runs the execution, or `reference` where the execution does not support the changed operator.
static Tensor run(const Execution& e, const Spec& spec, const Inputs& in) {
  const bool fits = e.why_not(spec, in).empty();
  on_reference |= !fits;
  return (fits ? e : execution("reference")).run(spec, in, nullptr);
}
static Hook spec(void (*change)(Spec&)) {
  return {.forward = [change](const Execution& e, Spec spec, const Inputs& in) {
    change(spec);
    return run(e, spec, in);
  }};
}
static Hook inputs(void (*change)(Inputs&)) {
  return {.forward = [change](const Execution& e, const Spec& spec, Inputs in) {
    change(in);
    return run(e, spec, in);
  }};
}
static Hook output(void (*change)(Tensor&)) {
  return {.forward = [change](const Execution& e, const Spec& spec, const Inputs& in) {
    Tensor o = run(e, spec, in).clone();
    change(o);
    return o;
  }};
}
static Hook gradient(Tensor Inputs::* of, void (*change)(Tensor&, const Inputs&)) {
  return {.gradients = [of, change](const Inputs& in, Results& r) {
    for (auto& [input, gradient] : r.gradients)
      if (input->at == of) change(gradient, in);
  }};
}

// Parts that several mutants share.

static void copy_rows(const Tensor& x, int64_t from, int64_t to, int64_t count) {  // of tokens
  x.narrow(2, to, count).copy_(x.narrow(2, from, count).clone());
}
static int64_t block(const Tensor& x) {  // the length of a tile, for these tokens
  return std::min<int64_t>(64, x.size(2) / 2);
}
static Tensor without_keys(const Inputs& in, int64_t first, int64_t count) {  // a `keep`
  const auto options = in.q.options().dtype(at::kBool).requires_grad(false);
  Tensor keep =
      in.keep.defined() ? in.keep.clone() : at::ones({in.k.size(0), in.k.size(2)}, options);
  keep.narrow(1, first, count).fill_(false);
  return keep;
}
// Query t at the position of query t + shift, which makes a mask off by one.
static Hook shifted(int64_t shift) {
  return {.forward = [shift](const Execution& e, const Spec& spec, Inputs in) {
    for (const Input& i : input_table())
      if (const int64_t axis = axis_of(i, "T"); axis >= 0 && (in.*i.at).defined())
        in.*i.at = (in.*i.at).roll(shift, axis);
    return run(e, spec, in).roll(-shift, 2);
  }};
}
static Tensor constant(const Tensor& x, double value) {
  return at::full_like(x.detach(), value);
}
static Tensor rounded(const Tensor& x, at::ScalarType to) {
  return x.to(to).to(x.scalar_type());
}
// The next smaller dtype: too coarse for results in the given one.
static at::ScalarType coarser(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kFloat : at::kBFloat16;
}

// The output as the quotient of two sums over keys, each rounded to 16 bits (float64: to float32)
// after every key, as if a kernel accumulated in that dtype. The output is linear in v, so each key
// takes two runs.
static Tensor coarse_sums(const Execution& e, const Spec& spec, const Inputs& in) {
  const at::ScalarType own = in.q.scalar_type();
  const at::ScalarType dtype = own == at::kHalf ? own : coarser(own);
  Tensor N = at::zeros({}, in.q.options().requires_grad(false)), W = N;
  for (int64_t s = 0; s < in.v.size(2); ++s) {
    auto with_values = [&](const Tensor& v) {
      Inputs one = in;
      one.v = at::zeros_like(v).slice_scatter(v.narrow(2, s, 1), 2, s, s + 1);
      return run(e, spec, one);
    };
    N = rounded(N + with_values(in.v), dtype);
    W = rounded(W + with_values(constant(in.v, 1)), dtype);
  }
  return N / W;
}

// These remove the input with its stage: executions refuse an input that the spec does not use.
static Tensor without_count_power(const Execution& e, Spec spec, Inputs in) {
  spec.values = AsGiven{}, in.count_exponent = Tensor();
  return run(e, spec, in);
}

static Tensor without_near_share(const Execution& e, Spec spec, Inputs in) {
  spec.near_share = false, in.near_share = Tensor();
  return run(e, spec, in);
}
static Tensor without_near(const Execution& e, Spec spec, Inputs in) {
  spec.near = NoKeys{};
  return without_near_share(e, spec, in);
}

// Stick breaking whose scan is off by one: a key takes its share of what it leaves itself.
static Tensor broken_twice(const Execution&, const Spec& spec, const Inputs& given) {
  const Inputs in = one_key_head_each(given);
  const Tensor hidden = seen(spec.mask, in).hidden;
  const Tensor x = at::matmul(in.q, in.k.transpose(-1, -2)) * scale_factor(spec, in);
  const Tensor kept = at::log_sigmoid(-x).masked_fill(hidden, 0);
  const Tensor log = at::log_sigmoid(x) + kept.flip(-1).cumsum(-1).flip(-1);
  return at::matmul(log.masked_fill(hidden, -INFINITY).exp(), in.v);
}

// The correct output without the gradient through what later keys leave of a stick.
static Tensor sticks_apart(const Execution& e, const Spec& spec, const Inputs& given) {
  const Inputs in = one_key_head_each(given);
  const Tensor hidden = seen(spec.mask, in).hidden;
  const Tensor x = at::matmul(in.q, in.k.transpose(-1, -2)) * scale_factor(spec, in);
  const Tensor kept = at::log_sigmoid(-x.detach()).masked_fill(hidden, 0);
  const Tensor log = at::log_sigmoid(x) + kept.flip(-1).cumsum(-1).flip(-1) - kept;
  const Tensor o = at::matmul(log.masked_fill(hidden, -INFINITY).exp(), in.v);
  return run(e, spec, given).detach() + o - o.detach();
}
// Softpick whose denominator sums only the scores above 0, as its numerator does.
static Tensor picked_sums(const Execution&, const Spec& spec, const Inputs& given) {
  const Inputs in = one_key_head_each(given);
  const Tensor hidden = seen(spec.mask, in).hidden;
  const Tensor x = at::matmul(in.q, in.k.transpose(-1, -2)) * scale_factor(spec, in);
  const Tensor w = (x.exp() - 1).clamp_min(0).masked_fill(hidden, 0);
  return at::matmul(w / (w.sum(-1, true) + std::get<Sum>(spec.denominator).plus), in.v);
}

// A row with near keys, centred about the mean score of all its keys instead of its far keys.
static Tensor centred_by_all(const Execution&, const Spec& spec, const Inputs& given) {
  const Inputs in = one_key_head_each(given);
  const Seen all = seen(spec.mask, in), far = far_keys(spec, all);
  Tensor x = at::matmul(in.q, in.k.transpose(-1, -2)).to(all.count.scalar_type());
  x = x * scale_factor(spec, in);
  x = x - x.masked_fill(all.hidden, 0).sum(-1, true) / all.count.clamp_min(1);
  Tensor series = at::ones_like(x);
  for (int n = std::get<Taylor>(spec.weight).order; n > 0; --n) series = 1 + series * x / n;
  const Tensor w = at::where(far.hidden, x.exp(), series).masked_fill(all.hidden, 0);
  const Tensor W = w.sum(-1, true);
  return at::matmul(w / W.masked_fill(W == 0, 1), in.v.to(w.scalar_type())).to(in.v.scalar_type());
}

// The cases in which a mutant makes a difference.
static bool several_tokens(const Spec&, const Case& c) {
  return c.T > 1;
}
static bool several_batches(const Spec&, const Case& c) {
  return c.B > 1;
}
static bool grouped(const Spec&, const Case& c) {
  return c.G > 1 && c.H > c.G;
}
static bool two_heads(const Spec&, const Case& c) {
  return c.H <= 2;
}
static bool padded(const Spec&, const Case& c) {
  return c.padded;
}
static bool packed(const Spec&, const Case& c) {
  return c.packed;
}
static bool part_of_a_block(const Spec&, const Case& c) {
  return c.S % 16 != 0;
}
static bool is_finer(const Spec&, const Case& c) {  // than bfloat16
  return c.dtype != at::kBFloat16;
}
// Many keys, and an output that is linear in v with weights that sum to 1.
static bool many_keys(const Spec& s, const Case& c) {
  return c.S == 200 && is<NoNorm>(s.norm) && is<Sum>(s.denominator) &&
         std::get<Sum>(s.denominator).plus == 0;
}
static bool has_scale(const Spec& s, const Case&) {
  return is<RootDim>(s.scale) && !is<Cosine>(s.features);
}
static bool sees_length(const Spec& s, const Case&) {  // the length of queries matters
  return !is<Cosine>(s.features);
}
// The temperature matters. With the delta rule and one power it cancels in w(q·k) / w(k·k).
static bool sees_temperature(const Spec& s, const Case&) {
  return !is<Delta>(s.values) || !is<Power>(s.weight);
}
static bool has_window(const Spec& s, const Case& c) {
  const auto* mask = std::get_if<Window>(&s.mask);
  return mask && c.S > mask->size && mask->size > 1;
}
static bool has_series(const Spec& s, const Case&) {
  return is<Taylor>(s.weight) && std::get<Taylor>(s.weight).order > 0;
}
static bool has_clamp(const Spec& s, const Case& c) {
  return s.clamp != kNoClamp && c.hot;
}
static bool has_near(const Spec& s, const Case& c) {
  const auto* near = std::get_if<Window>(&s.near);
  return near && c.S > near->size + 1;
}
static bool is_centred(const Spec& s, const Case& c) {
  return s.centred && c.T > 1 && (is<NoKeys>(s.near) || has_near(s, c));
}
static bool has_far_centre(const Spec& s, const Case& c) {
  return s.centred && has_near(s, c);
}
static bool has_sharpness(const Spec& s, const Case&) {
  return is<LogLength>(s.sharpness) || is<LogPower>(s.sharpness);
}
static bool has_input_gate(const Spec& s, const Case&) {
  return s.input_gate;
}
static bool has_output_gate(const Spec& s, const Case& c) {  // and no norm that cancels it
  return s.output_gate && is<NoNorm>(s.norm) && c.T > 1;
}
static bool has_post_gate(const Spec& s, const Case&) {
  return s.post_gate;
}
static bool has_decay(const Spec& s, const Case& c) {
  return is<TokenGate>(s.decay) && c.T > 1;
}
static bool has_slope(const Spec& s, const Case& c) {
  return is<HeadSlope>(s.decay) && c.T > 1;
}
static bool has_slopes(const Spec& s, const Case& c) {
  return has_slope(s, c) && c.G > 1;
}
static bool has_log_count(const Spec& s, const Case& c) {  // the log of 1 is 0
  return s.less_log_count && c.T > 1;
}
static bool has_values(const Spec& s, const Case& c) {
  return is<CountPower>(s.values) && c.T > 1;
}
static bool has_floor(const Spec& s, const Case&) {
  return is<Sum>(s.denominator) && std::get<Sum>(s.denominator).floor > 0;
}
static bool has_sum(const Spec& s, const Case& c) {
  return is<Sum>(s.denominator) && !std::get<Sum>(s.denominator).detach && c.T > 1;
}
static bool has_plus(const Spec& s, const Case&) {
  return is<Sum>(s.denominator) && std::get<Sum>(s.denominator).plus >= 0.5;
}
static bool has_least(const Spec& s, const Case&) {
  return is<Sum>(s.denominator) && std::get<Sum>(s.denominator).least > 0;
}
static bool has_count(const Spec& s, const Case&) {
  return is<Count>(s.denominator) && is<NoNorm>(s.norm);
}
static bool has_softcap(const Spec& s, const Case& c) {  // and scores near it
  return s.softcap != 0 && c.hot;
}
static bool has_sink(const Spec& s, const Case&) {
  return is<Sum>(s.denominator) && std::get<Sum>(s.denominator).sink;
}
static bool has_sinks(const Spec& s, const Case& c) {
  return has_sink(s, c) && c.H > 1;
}
static bool has_bias(const Spec& s, const Case& c) {
  return s.bias && c.T > 1;
}
static bool has_square_bias(const Spec& s, const Case& c) {
  return has_bias(s, c) && c.T == c.S;
}
static bool has_bias_of_heads(const Spec& s, const Case& c) {
  return has_bias(s, c) && c.seed % 2 == 0;
}
static bool has_first_keys(const Spec& s, const Case& c) {
  const auto* mask = std::get_if<Streaming>(&s.mask);
  return mask && c.S > mask->first + mask->size + 1;
}
static bool has_prefix(const Spec& s, const Case& c) {
  return is<Prefix>(s.mask) && c.S > 30 && c.B > 1;
}
static bool has_dropout(const Spec& s, const Case& c) {
  return s.dropout != 0 && c.T > 1;
}
static bool has_sticks(const Spec& s, const Case& c) {
  return is<StickBreaking>(s.weight) && c.T > 1;
}
static bool picks(const Spec& s, const Case& c) {
  return is<Softpick>(s.weight) && c.T > 1;
}
static bool has_rms(const Spec& s, const Case&) {
  return is<Rms>(s.norm);
}
static bool has_norm_weight(const Spec& s, const Case&) {
  return is<Rms>(s.norm) || is<Layer>(s.norm);
}
static bool has_norm_bias(const Spec& s, const Case&) {
  return is<Layer>(s.norm);
}

static bool has_delta(const Spec& s, const Case& c) {
  return is<Delta>(s.values) && c.T > 1;
}
static bool has_channels(const Spec& s, const Case& c) {
  return is<ChannelGate>(s.decay) && c.T > 1;
}
// Without the correction u = beta v, because w(k·k) is 1 for keys of length 1.
static Tensor without_correction(const Execution& e, Spec spec, Inputs in) {
  in.v = in.v * (std::get<Delta>(spec.values).most * in.beta).unsqueeze(-1).to(in.v.scalar_type());
  spec.values = AsGiven{}, in.beta = Tensor();
  return run(e, spec, in);
}

// clang-format off
static const Mutant kMutants[] = {
    // The output, with gradients that follow it.
    {"zeros",              "the output is zero",                             "softmax taylor2",         output([](Tensor& o) { o = o * 0; })},
    {"output_scale",       "the output is 2 % too large",                    "softmax taylor2",         output([](Tensor& o) { o = o * 1.02; })},
    {"head_scale",         "one head is 1 % too large",                      "softmax taylor2",         output([](Tensor& o) { o.select(1, 0).mul_(1.01); }), two_heads},
    {"one_element",        "one element has the value of the next channel",  "softmax taylor2",         output([](Tensor& o) { Tensor x = o.select(2, o.size(2) / 2).flatten(); x[0].copy_(x[1].clone()); o.select(2, o.size(2) / 2).copy_(x.view_as(o.select(2, 0))); })},
    {"nan",                "one element is NaN",                             "softmax taylor2",         output([](Tensor& o) { o.select(2, o.size(2) / 2).select(1, 0).select(1, 0).fill_(NAN); })},
    {"neighbours_row",     "one row is that of the token before it",         "softmax taylor2",         output([](Tensor& o) { copy_rows(o, o.size(2) / 2 - 1, o.size(2) / 2, 1); }), several_tokens},
    {"neighbours_head",    "one head is the next one",                       "softmax taylor2",         output([](Tensor& o) { o.select(1, 0).copy_(o.select(1, 1).clone()); })},
    {"neighbours_channel", "the last channel is the first",                  "softmax taylor2",         output([](Tensor& o) { o.select(3, -1).copy_(o.select(3, 0).clone()); })},
    {"stale_tile",         "a tile of rows is the tile before it",           "softmax taylor2",         output([](Tensor& o) { copy_rows(o, 0, block(o), block(o)); }), several_tokens},
    {"lost_tail",          "the last rows are not written",                  "softmax taylor2",         output([](Tensor& o) { o.narrow(2, -(o.size(2) % 16 ? o.size(2) % 16 : 1), o.size(2) % 16 ? o.size(2) % 16 : 1).mul_(0); })},
    {"rounded_output",     "the output is rounded to a coarser dtype",       "softmax taylor2",         output([](Tensor& o) { o = rounded(o, coarser(o.scalar_type())); }), is_finer},
    {"coarse_sums",        "sums over keys are rounded after every key",     "softmax",                 {.forward = coarse_sums}, many_keys},

    // What is summed.
    {"score_scale",        "the scores are 2 % too large",                   "softmax taylor2",         inputs([](Inputs& in) { in.q = in.q * 1.02; }), sees_length},
    {"no_scale",           "the scale 1 / sqrt D is missing",                "softmax taylor2",         spec([](Spec& s) { s.scale = Fixed{1}; }), has_scale},
    {"temperature",        "the temperature is 5 % too low",                 "softmax taylor2",         spec([](Spec& s) { s.temperature *= 0.95f; }), sees_temperature},
    {"coarse_queries",     "queries and keys are rounded to a coarser dtype","softmax taylor2",         inputs([](Inputs& in) { in.q = rounded(in.q, coarser(in.q.scalar_type())), in.k = rounded(in.k, coarser(in.k.scalar_type())); }), is_finer},
    {"lost_channel",       "the last channel of the queries is not read",    "softmax taylor2",         inputs([](Inputs& in) { in.q = at::cat({in.q.narrow(3, 0, in.q.size(3) - 1), in.q.narrow(3, -1, 1) * 0}, 3); }), several_tokens},
    {"key_lost",           "a key in the middle is skipped",                 "softmax taylor2",         inputs([](Inputs& in) { in.keep = without_keys(in, in.k.size(2) / 2, 1); }), several_tokens},
    {"first_key_lost",     "the first key is skipped",                       "softmax taylor2",         inputs([](Inputs& in) { in.keep = without_keys(in, 0, 1); }), several_tokens},
    {"last_keys_lost",     "the last block of keys is skipped",              "softmax taylor2",         inputs([](Inputs& in) { in.keep = without_keys(in, in.k.size(2) - in.k.size(2) % 16, in.k.size(2) % 16); }), part_of_a_block},
    {"mask_ahead",         "the mask shows one key of the future",           "softmax taylor2",         shifted(1),  several_tokens},
    {"mask_behind",        "the mask hides a query's own key",               "softmax taylor2",         shifted(-1), several_tokens},
    {"window_short",       "the window is one key too short",                "softmax_window",          spec([](Spec& s) { --std::get<Window>(s.mask).size; }), has_window},
    {"window_long",        "the window is one key too long",                 "softmax_window",          spec([](Spec& s) { ++std::get<Window>(s.mask).size; }), has_window},
    {"padding_seen",       "hidden keys are seen",                           "softmax taylor2",         inputs([](Inputs& in) { in.keep = Tensor(); }), padded},
    {"packing_seen",       "packed sequences see each other",                "softmax taylor2",         inputs([](Inputs& in) { in.cu_seqlens = Tensor(); }), packed},
    {"wrong_group",        "query heads read the keys of another group",     "softmax taylor2",         inputs([](Inputs& in) { in.k = in.k.flip(1), in.v = in.v.flip(1); }), grouped},
    {"wrong_batch",        "keys come from another sequence of the batch",   "softmax taylor2",         inputs([](Inputs& in) { in.k = in.k.flip(0); }), several_batches},
    {"order_short",        "the last term of the series is missing",         "taylor2 taylor4 centred_taylor4", spec([](Spec& s) { --std::get<Taylor>(s.weight).order; }), has_series},
    {"no_clamp",           "the scores are not clamped",                     "clamped_sum by_count",    spec([](Spec& s) { s.clamp = kNoClamp; }), has_clamp},
    {"no_centre",          "the mean score is not subtracted",               "centred_taylor4 near_centred_taylor2", spec([](Spec& s) { s.centred = false; }), is_centred},
    {"no_sharpness",       "the logarithm of the length is missing",         "ssmax",                   spec([](Spec& s) { s.sharpness = Flat{}; }), has_sharpness},

    {"no_softcap",         "the scores are not capped",                      "softcap",                 spec([](Spec& s) { s.softcap = 0; }), has_softcap},
    {"no_bias",            "the bias is not added",                          "bias",                    inputs([](Inputs& in) { in.bias = in.bias * 0; }), has_bias},
    {"bias_transposed",    "the bias is that of key and query exchanged",    "bias",                    inputs([](Inputs& in) { in.bias = in.bias.transpose(2, 3).contiguous(); }), has_square_bias},
    {"bias_of_next_head",  "the bias is that of the next head",              "bias",                    inputs([](Inputs& in) { in.bias = in.bias.roll(1, 1); }), has_bias_of_heads},
    {"first_keys_short",   "one of the first keys is not seen",              "streaming",               spec([](Spec& s) { --std::get<Streaming>(s.mask).first; }), has_first_keys},
    {"first_keys_long",    "one key after the first is seen",                "streaming",               spec([](Spec& s) { ++std::get<Streaming>(s.mask).first; }), has_first_keys},
    {"prefix_short",       "the prefix is one key short",                    "prefix_lm",               inputs([](Inputs& in) { in.prefix = (in.prefix - 1).clamp_min(0); }), has_prefix},
    {"near_short",         "the near keys are one too few",                  "lolcats",                 spec([](Spec& s) { --std::get<Window>(s.near).size; }), has_near},
    {"near_long",          "the near keys are one too many",                 "lolcats",                 spec([](Spec& s) { ++std::get<Window>(s.near).size; }), has_near},
    {"no_near_share",      "the near keys' weights have no bound",           "lolcats",                 {.forward = without_near_share}, has_near},
    {"other_near_share",   "the share is that before the sigmoid",           "lolcats",                 inputs([](Inputs& in) { in.near_share = in.near_share.sigmoid().detach(); }), has_near},
    {"no_near",            "near keys weigh like the others",                "lolcats near_taylor2 near_centred_taylor2", {.forward = without_near}, has_near},
    {"centre_of_all",      "the mean score is that of near keys too",        "near_centred_taylor2",    {.forward = centred_by_all}, has_far_centre},
    {"no_dropout",         "nothing is dropped",                             "softmax:dropout=0.25",    spec([](Spec& s) { s.dropout = 0; }), has_dropout},
    {"other_dropout",      "other pairs are dropped",                        "softmax:dropout=0.25 entmax15:dropout=0.25", inputs([](Inputs& in) { in.seed = in.seed + 1; }), has_dropout},
    {"dropout_rate",       "one pair in a hundred more is dropped",          "softmax:dropout=0.25",    spec([](Spec& s) { s.dropout += 0.01; }), has_dropout},
    {"dropout_not_scaled", "what is kept is not scaled up",                  "softmax:dropout=0.25",    output([](Tensor& o) { o = o * 0.75; }), has_dropout},
    {"stick_off_by_one",   "a key takes its own part from its stick first",  "stick_breaking",          {.forward = broken_twice}, has_sticks},
    {"picked_sum",         "the sum has only the scores above 0",            "softpick",                {.forward = picked_sums}, picks},
    {"no_log_count",       "log n is not subtracted from the scores",        "sigmoid",                 spec([](Spec& s) { s.less_log_count = false; }), has_log_count},
    {"no_values",          "values are not divided by a power of the count", "linear_cosine",           {.forward = without_count_power}, has_values},

    // Gates, decay, denominators and norms.
    {"no_input_gate",      "the input gate is 1",                            "gated_in_only linear_mamba", inputs([](Inputs& in) { in.input_gate = constant(in.input_gate, 1); }), has_input_gate},
    {"no_output_gate",     "the output gate is 1",                           "softmax_out_gate",        inputs([](Inputs& in) { in.output_gate = constant(in.output_gate, 1); }), has_output_gate},
    {"no_post_gate",       "the gate after the norm is 1",                   "l2_post_gate",            inputs([](Inputs& in) { in.post_gate = constant(in.post_gate, 1); }), has_post_gate},
    {"late_gate",          "the output gate is that of the next token",      "softmax_out_gate",        inputs([](Inputs& in) { in.output_gate = in.output_gate.roll(-1, 2); }), has_output_gate},
    {"no_decay",           "nothing decays",                                 "gated_decay linear_decay", inputs([](Inputs& in) { in.decay = constant(in.decay, 0); }), has_decay},
    {"late_decay",         "the decay is one token late",                    "gated_decay linear_decay", inputs([](Inputs& in) { in.decay = in.decay.roll(1, 2); }), has_decay},
    {"no_slope",           "no head decays",                                 "retention",               inputs([](Inputs& in) { in.slope = constant(in.slope, 0); }), has_slope},
    {"wrong_slope",        "heads decay by the slope of their neighbour",    "retention",               inputs([](Inputs& in) { in.slope = in.slope.roll(1, 0); }), has_slopes},
    {"no_plus",            "the 1 of softmax1's sum is missing",             "softmax1",                spec([](Spec& s) { std::get<Sum>(s.denominator).plus = 0; }), has_plus},
    {"no_sink",            "the sink is missing",                            "sink",                    inputs([](Inputs& in) { in.sink = in.sink * 0 - 100; }), has_sink},
    {"wrong_sink",         "heads have the sink of their neighbour",         "sink",                    inputs([](Inputs& in) { in.sink = in.sink.roll(1, 0); }), has_sinks},
    {"no_least",           "the sum has no lower bound",                     "clamped_sum",             spec([](Spec& s) { std::get<Sum>(s.denominator).least = 0; }), has_least},
    {"no_floor",           "the sum has no floor",                           "taylor3",                 spec([](Spec& s) { std::get<Sum>(s.denominator).floor = 0; }), has_floor},
    {"count_off_by_one",   "rows are divided by one key more",               "by_count linear",         output([](Tensor& o) { const Tensor n = at::arange(1, o.size(2) + 1, o.options().requires_grad(false)).view({-1, 1}); o = o * (n / (n + 1)); }), has_count},
    {"eps",                "the norm adds 0.1 to the mean square",           "rms linear_decay",        spec([](Spec& s) { std::get<Rms>(s.norm).eps = 0.1f; }), has_rms},
    {"no_norm_weight",     "the norm's weight is 1",                         "rms linear_decay",        inputs([](Inputs& in) { in.norm_weight = constant(in.norm_weight, 1); }), has_norm_weight},
    {"no_norm_bias",       "the norm's bias is missing",                     "layer_norm",              inputs([](Inputs& in) { in.norm_bias = constant(in.norm_bias, 0); }), has_norm_bias},

    // Gradients only; the output is right.
    {"sum_constant",       "no gradient through the sum",                    "softmax taylor2",         spec([](Spec& s) { std::get<Sum>(s.denominator).detach = true; }), has_sum},
    {"dq_sign",            "d q has the wrong sign",                         "softmax taylor2",         gradient(&Inputs::q, [](Tensor& g, const Inputs&) { g = -g; }), several_tokens},
    {"dq_scale",           "d q is 2 % too large",                           "softmax taylor2",         gradient(&Inputs::q, [](Tensor& g, const Inputs&) { g = g * 1.02; }), several_tokens},
    {"dq_stale",           "one row of d q is that of the token before it",  "softmax taylor2",         gradient(&Inputs::q, [](Tensor& g, const Inputs&) { copy_rows(g, g.size(2) / 2 - 1, g.size(2) / 2, 1); }), several_tokens},
    {"dk_double",          "d k is added twice",                             "softmax taylor2",         gradient(&Inputs::k, [](Tensor& g, const Inputs&) { g = g * 2; }), several_tokens},
    {"dk_group",           "d k has the share of the first query heads only","softmax taylor2",         {.forward = [](const Execution& e, const Spec& spec, Inputs in) {
      // The value of q and k, with the gradient of k only from the first query head of each group.
      const int64_t each = in.q.size(1) / in.k.size(1);
      Inputs constant_k = in;
      constant_k.k = in.k.detach();
      const Tensor first = at::arange(in.q.size(1), in.q.options().dtype(at::kLong)).remainder(each).eq(0).view({-1, 1, 1});
      return at::where(first, run(e, spec, in), run(e, spec, constant_k));
    }}, grouped},
    {"dk_key_lost",        "d k of one key is not written",                  "softmax taylor2",         gradient(&Inputs::k, [](Tensor& g, const Inputs&) { g.select(2, g.size(2) / 2).fill_(0); }), several_tokens},
    {"dv_scale",           "d v is 2 % too large",                           "softmax taylor2",         gradient(&Inputs::v, [](Tensor& g, const Inputs&) { g = g * 1.02; })},
    {"dv_tile_lost",       "a tile of d v is not written",                   "softmax taylor2",         gradient(&Inputs::v, [](Tensor& g, const Inputs&) { g.narrow(2, 0, std::max<int64_t>(1, block(g))).fill_(0); })},
    {"dv_without_gate",    "d v lacks the input gate",                       "gated_in_only linear_mamba", gradient(&Inputs::v, [](Tensor& g, const Inputs& in) { g = g / in.input_gate.detach().unsqueeze(-1); }), has_input_gate},
    {"dv_coarse",          "d v is rounded to a coarser dtype",              "softmax taylor2",         gradient(&Inputs::v, [](Tensor& g, const Inputs&) { g = rounded(g, coarser(g.scalar_type())); }), is_finer},
    {"dv_nan",             "one element of d v is NaN",                      "softmax taylor2",         gradient(&Inputs::v, [](Tensor& g, const Inputs&) { g.select(2, g.size(2) / 2).select(1, 0).select(1, 0).fill_(NAN); })},
    {"d_input_gate_lost",  "the input gate has no gradient",                 "gated_in_only linear_mamba", gradient(&Inputs::input_gate, [](Tensor& g, const Inputs&) { g = g * 0; }), has_input_gate},
    {"d_output_gate_lost", "the output gate has no gradient",                "softmax_out_gate",        gradient(&Inputs::output_gate, [](Tensor& g, const Inputs&) { g = g * 0; }), has_output_gate},
    {"d_decay_late",       "the gradient of the decay is one token late",    "gated_decay linear_decay", gradient(&Inputs::decay, [](Tensor& g, const Inputs&) { g = g.roll(1, 2); }), has_decay},
    {"d_decay_scale",      "the gradient of the decay is 2 % too large",     "gated_decay linear_decay", gradient(&Inputs::decay, [](Tensor& g, const Inputs&) { g = g * 1.02; }), has_decay},
    {"d_cap_lost",         "the gradients are those of scores without a cap","softcap",                 {.forward = [](const Execution& e, Spec spec, const Inputs& in) {
      const Tensor o = run(e, spec, in);
      spec.softcap = 0;
      const Tensor straight = run(e, spec, in);
      return o.detach() + straight - straight.detach();
    }}, has_softcap},
    {"d_other_dropout",    "the gradients drop other pairs than the output", "softmax:dropout=0.25 entmax15:dropout=0.25", {.forward = [](const Execution& e, const Spec& spec, Inputs in) {
      const Tensor o = run(e, spec, in);
      in.seed = in.seed + 1;
      const Tensor other = run(e, spec, in);
      return o.detach() + other - other.detach();
    }}, has_dropout},
    {"d_stick_lost",       "no gradient through what later keys leave",      "stick_breaking",          {.forward = sticks_apart}, has_sticks},
    {"d_sink_lost",        "the sink has no gradient",                       "sink",                    gradient(&Inputs::sink, [](Tensor& g, const Inputs&) { g = g * 0; }), has_sink},
    {"d_bias_double",      "the gradient of the bias is added twice",        "bias",                    gradient(&Inputs::bias, [](Tensor& g, const Inputs&) { g = g * 2; }), has_bias},
    {"d_bias_row_lost",    "one row of d bias is not written",               "bias",                    gradient(&Inputs::bias, [](Tensor& g, const Inputs&) { g.select(2, g.size(2) / 2).fill_(0); }), has_bias},
    {"d_weight_batch",     "d norm_weight is half: one of two sequences",    "rms linear_decay",        gradient(&Inputs::norm_weight, [](Tensor& g, const Inputs&) { g = g / 2; }), has_norm_weight},

    // The delta rule and gates of channels.
    {"no_correction",      "values are not corrected",                       "delta kda",               {.forward = without_correction}, has_delta},
    {"own_correction",     "a value is corrected by itself too",             "delta kda",               inputs([](Inputs& in) { in.beta = in.beta / (1 + in.beta); }), has_delta},
    {"channels_late",      "the gates of channels are one token late",       "gla kda",                 inputs([](Inputs& in) { in.channel_decay = in.channel_decay.roll(1, 2); }), has_channels},
    {"d_beta_lost",        "beta has no gradient",                           "delta kda",               gradient(&Inputs::beta, [](Tensor& g, const Inputs&) { g = g * 0; }), has_delta},
    {"d_channels_late",    "the gradient of the channels is one token late", "gla kda",                 gradient(&Inputs::channel_decay, [](Tensor& g, const Inputs&) { g = g.roll(1, 2); }), has_channels},
};
// clang-format on

std::span<const Mutant> mutants() {
  return kMutants;
}

std::vector<std::string> variants_of(const Mutant& m) {
  std::istringstream words(m.variants);
  return {std::istream_iterator<std::string>(words), {}};
}

Hunt hunt(const Mutant& m, const Execution& e, std::span<const Trial> trials, bool compare) {
  Hunt h;
  for (const Trial& t : trials) {
    if (!m.applies(t.spec, t.on) || (!h.caught.empty() && (h.by_old_rule || !compare))) continue;
    on_reference = false;
    const Verdict v = verify(t, e, m.hook);
    if (!v.why_not.empty()) continue;
    ++h.ran;
    h.by_old_rule = h.by_old_rule || !v.old_rule_ok;
    if (h.caught.empty() && !v.ok())
      h.caught = v.worst()->of + " on " + text(t.on), h.on_reference = on_reference;
  }
  return h;
}

std::vector<Trial> trials(const Spec& spec, at::ScalarType dtype, at::Device device,
                          uint64_t seed) {
  std::vector<Trial> all;
  for (const Case& c : standard_cases(dtype, device, seed)) all.push_back(trial(spec, c));
  return all;
}

}  // namespace horner::instruments
