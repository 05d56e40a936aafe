#include "attn/attend.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "attn/exec/autograd.h"
#include "attn/exec/exec.h"
#include "attn/inputs.h"
#include "core/check.h"
#include "core/names.h"

namespace horner::attn {

// To add an execution, define it in exec/<name>.cpp and add it here.
static const Execution* const kExecutions[] = {
    &exec::hopper_cuda, &exec::fused_cuda, &exec::chunked_cuda, &exec::fused_cpu,
    &exec::chunked,     &exec::recurrent,  &exec::reference,
};

std::span<const Execution* const> executions() {
  return kExecutions;
}

[[noreturn]] static void fail_unknown(std::string_view name, std::vector<std::string> possible) {
  for (const Execution* e : kExecutions) possible.emplace_back(e->name);
  fail("no execution '", name, "'; possible: ", quoted(possible));
}

const Execution& execution(std::string_view name) {
  for (const Execution* e : kExecutions)
    if (name == e->name) return *e;
  fail_unknown(name, {});
}

std::string exec::why_lacking(const Spec& s, const Has& has) {
  const auto* sum = std::get_if<Sum>(&s.denominator);
  const struct {
    bool wanted, there;
    const char* name;
  } stages[] = {
      {s.softcap != 0, has.softcap, "softcap"},
      {s.bias, has.bias, "bias"},
      {sum && sum->sink, has.sink, "a sink"},
      {!is<NoKeys>(s.near), has.near, "near keys"},
      {s.near_share, has.near_share, "near_share"},
      {is<Delta>(s.values), has.delta, "values=delta"},
      {s.dropout != 0, has.dropout, "dropout"},
      {is<ChannelGate>(s.decay), has.channel_decay, "decay=channel_gate"},
      {!is_interval(s.mask), has.first_keys, "a mask of more than one interval"},
      {is<Softpick>(s.weight), has.softpick, "its weight"},
      {is<StickBreaking>(s.weight), has.stick, "its weight"},
  };
  for (const auto& stage : stages)
    if (stage.wanted && !stage.there) return std::string("does not support ") + stage.name;
  return "";
}

// An output gate is a post gate where no norm stands between them.
exec::WithoutChannelGates::WithoutChannelGates(const Spec& given, const Inputs& inputs)
    : spec(given), in(inputs) {
  if (!spec.channel_gates) return;
  if (spec.output_gate) after = std::exchange(in.output_gate, at::Tensor());
  if (spec.post_gate) {
    const at::Tensor post = std::exchange(in.post_gate, at::Tensor());
    after = after.defined() ? after * post : post;
  }
  spec.output_gate = spec.post_gate = spec.channel_gates = false;
}
std::string exec::WithoutChannelGates::why_not(const Spec& s) {
  return s.channel_gates && s.output_gate && !is<NoNorm>(s.norm)
             ? "does not support an output gate of each channel before a norm"
             : "";
}
at::Tensor exec::WithoutChannelGates::gated(const at::Tensor& o) const {
  return (o * after).to(o.scalar_type());
}

const Execution& choose(const Spec& spec, const Inputs& in, std::string_view wanted,
                        bool statistics) {
  const auto reason = [&](const Execution& e) {
    return statistics && !e.statistics ? "does not compute row statistics" : e.why_not(spec, in);
  };
  const auto considered = [&](const Execution& e) { return wanted == "auto" || wanted == e.name; };
  const Execution* best = nullptr;
  double least = 0;  // work of the best
  for (const Execution* e : kExecutions) {
    if (!considered(*e) || (best && (!best->work || !e->work)) || !reason(*e).empty()) continue;
    const double work = e->work && wanted == "auto" ? e->work(spec, in) : 0;
    if (!best || work < least) best = e, least = work;
  }
  if (best) return *best;
  std::string reasons;
  for (const Execution* e : kExecutions)
    if (considered(*e)) reasons.append("\n  ").append(e->name).append(": ").append(reason(*e));
  if (reasons.empty()) fail_unknown(wanted, {"auto"});
  fail("cannot run on q ", in.q.sizes(), " ", dtype_name(in.q.scalar_type()), ":", reasons);
}

const Execution* checked(const Spec& spec, const Inputs& in, std::string_view wanted,
                         bool statistics, std::string_view variant) {
  check_inputs(spec, in, variant);
  if (in.k.size(2) > 0) return &choose(spec, in, wanted, statistics);
  const auto is_wanted = [&](const Execution* e) { return wanted == e->name; };
  if (wanted != "auto" && std::ranges::none_of(kExecutions, is_wanted))
    fail_unknown(wanted, {"auto"});
  return nullptr;
}

at::Tensor attend(const Spec& spec, const Inputs& in, std::string_view wanted,
                  Statistics* statistics) {
  const Execution* e = checked(spec, in, wanted, statistics != nullptr);
  return e ? exec::run_with_gates(*e, spec, in, statistics) : exec::without_keys(in, statistics);
}

at::Tensor attend_again(const Spec& spec, const Inputs& in, std::string_view wanted,
                        Statistics* statistics, std::string_view variant) {
  const Execution* e = checked(spec, in, wanted, statistics != nullptr, variant);
  if (!e) return exec::without_keys(in, statistics);
  const auto run = [&] { return exec::run_with_gates(*e, spec, in, statistics); };
  if (e == &exec::reference || !c10::GradMode::is_enabled()) return run();
  const auto needs = [&](const Input& i) {
    return (in.*i.at).defined() && (in.*i.at).requires_grad();
  };
  if (!std::ranges::any_of(input_table(), needs)) return run();
  exec::TensorVector inputs;
  for (const Input& i : input_table()) inputs.push_back(in.*i.at);
  return exec::recorded_again(e->name, inputs, run, [spec](const exec::TensorVector& inputs) {
    Inputs in;
    for (size_t i = 0; i < kInputCount; ++i) in.*input_table()[i].at = inputs[i];
    return exec::reference.run(spec, in, nullptr);
  });
}

at::Tensor attend_kept(const Spec& spec, const Inputs& in, std::string_view wanted,
                       Statistics* statistics, std::string_view variant, const at::Tensor& kept,
                       bool filled) {
  const Execution* e = checked(spec, in, wanted, statistics != nullptr, variant);
  if (!e) return exec::without_keys(in, statistics);
  const int64_t needed = e->kept && kept.defined() ? e->kept(spec, in).expect_int() : 0;
  std::optional<exec::Keeping> keeping;
  if (needed > 0 && needed <= kept.numel()) keeping.emplace(kept, filled);
  return exec::run_with_gates(*e, spec, in, statistics);
}

}  // namespace horner::attn
