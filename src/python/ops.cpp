// The whole Python binding: torch.ops.load_library("libhorner_python.so"), then torch.ops.horner.*
//
// The arguments of `attend` are the rows of attn::input_table() and kSettings below. Its kernels
// are boxed and loop over that table, so a new input is a new row there.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <map>
#include <mutex>

#include "attn/catalog.h"
#include "attn/inputs.h"
#include "attn/spec_text.h"
#include "attn/state.h"
#include "core/check.h"

namespace horner::python {

using attn::kInputCount;
using c10::IValue;
using torch::jit::Stack;
using Tensors = std::vector<at::Tensor>;
using Text = std::optional<std::string>;
using Number = std::optional<double>;

constexpr size_t kTensors = 3;  // q, k and v: the rows before the settings
constexpr const char* kSettings[] = {"str variant",  "str execution",      "str? mask",
                                     "float? scale", "float? temperature", "float? clamp"};
using Settings = std::array<IValue, std::size(kSettings)>;
constexpr size_t kArguments = kInputCount + std::size(kSettings);

// Every text is parsed once: calls with the same variant and mask share its Spec.
static attn::Spec parsed(const std::string& variant, const Text& mask) {
  constexpr size_t kMost = 1000;
  static std::mutex mutex;
  static std::map<std::pair<std::string, Text>, attn::Spec> known;
  const std::lock_guard lock(mutex);
  std::pair key(variant, mask);
  if (const auto at = known.find(key); at != known.end()) return at->second;
  attn::Spec spec = attn::find(variant).spec;
  if (mask) spec = attn::with(spec, "mask=" + *mask);
  if (known.size() == kMost) known.clear();
  return known[std::move(key)] = spec;
}

static attn::Spec make_spec(const std::string& variant, const Text& mask, Number scale,
                            Number temperature, Number clamp) {
  attn::Spec spec = parsed(variant, mask);
  if (scale) spec.scale = attn::Fixed{float(*scale)};
  if (temperature) spec.temperature = float(*temperature);
  if (clamp) spec.clamp = float(*clamp);
  return spec;
}

// The arguments on the stack: [grad, wanted], q, k, v, the settings, the other inputs.
struct Call {
  at::Tensor grad;              // `attend_backward` only
  std::vector<int64_t> wanted;  // `attend_backward` only: the inputs whose gradients to return
  attn::Inputs inputs;
  Settings settings;

  static Call read(Stack& stack, bool backward = false) {
    const size_t n = kArguments + 2 * backward;
    auto at = stack.end() - std::ptrdiff_t(n);
    Call c;
    if (backward) c.grad = (at++)->toTensor(), c.wanted = (at++)->toIntVector();
    for (const attn::Input& i : attn::input_table()) {
      if (&i == &attn::input_table()[kTensors])
        for (IValue& setting : c.settings) setting = std::move(*at++);
      if (at->isTensor()) c.inputs.*i.at = std::move(*at).toTensor();
      ++at;
    }
    torch::jit::drop(stack, n);
    return c;
  }
  Stack write(bool backward = false) const {
    Stack stack;
    stack.reserve(kArguments + 2 * backward);
    if (backward) stack.emplace_back(grad), stack.emplace_back(wanted);
    for (const attn::Input& i : attn::input_table()) {
      if (&i == &attn::input_table()[kTensors])
        stack.insert(stack.end(), settings.begin(), settings.end());
      const at::Tensor& x = inputs.*i.at;
      stack.push_back(x.defined() ? IValue(x) : IValue());
    }
    return stack;
  }
  at::Tensor& input(int64_t i) { return inputs.*attn::input_table()[size_t(i)].at; }
  const std::string& variant() const { return settings[0].toStringRef(); }
  const std::string& execution() const { return settings[1].toStringRef(); }
  attn::Spec spec() const {
    return make_spec(variant(), settings[2].toOptional<std::string>(),
                     settings[3].toOptional<double>(), settings[4].toOptional<double>(),
                     settings[5].toOptional<double>());
  }
  at::Tensor run(attn::Statistics* statistics = nullptr) const {
    return attn::attend_again(spec(), inputs, execution(), statistics, variant());
  }
};

static at::Tensor call_attend(const Call& c) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("horner::attend", "");
  Stack stack = c.write();
  op.callBoxed(&stack);
  return stack.at(0).toTensor();
}
static Tensors call_backward(const Call& c) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("horner::attend_backward", "");
  Stack stack = c.write(true);
  op.callBoxed(&stack);
  return stack.at(0).toTensorVector();
}

// CPU and CUDA.

static void attend(const c10::OperatorHandle&, Stack* stack) {
  stack->emplace_back(Call::read(*stack).run().contiguous());
}

// Runs forward again, this time with autograd.
static void attend_backward(const c10::OperatorHandle&, Stack* stack) {
  Call c = Call::read(*stack, true);
  const auto local = c10::impl::tls_local_dispatch_key_set();
  const c10::impl::ForceDispatchKeyGuard with_autograd(
      local.included_, local.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const at::AutoGradMode mode(true);
  Tensors leaves;
  for (int64_t i : c.wanted) {
    at::Tensor& x = c.input(i);
    x = x.detach().requires_grad_();
    leaves.push_back(x);
  }
  Tensors gradients = torch::autograd::grad({c.run()}, leaves, {c.grad}, false, false, true);
  for (size_t i = 0; i < leaves.size(); ++i)
    gradients[i] = gradients[i].defined() ? gradients[i].contiguous()
                                          : at::zeros_like(leaves[i], at::MemoryFormat::Contiguous);
  stack->emplace_back(gradients);
}

// Meta: shapes alone.

static at::Tensor unwritten(const at::Tensor& like, std::vector<c10::SymInt> shape) {
  return at::empty_symint(shape, like.options());
}

static void attend_meta(const c10::OperatorHandle&, Stack* stack) {
  const Call c = Call::read(*stack);
  const at::Tensor &q = c.inputs.q, &v = c.inputs.v;
  check(q.dim() == 4, "q must have shape [B, H, T, D], got ", q.sym_sizes());
  check(v.dim() == 4, "v must have shape [B, G, S, E], got ", v.sym_sizes());
  stack->emplace_back(unwritten(q, {q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)}));
}

static void attend_backward_meta(const c10::OperatorHandle&, Stack* stack) {
  Call c = Call::read(*stack, true);
  Tensors gradients;
  for (int64_t i : c.wanted) {
    const at::Tensor& x = c.input(i);
    gradients.push_back(unwritten(x, x.sym_sizes().vec()));
  }
  stack->emplace_back(gradients);
}

// Autograd: `attend` below it, `attend_backward` as its gradient.

struct Attend : torch::autograd::Function<Attend> {
  template <class... Rest>
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const Settings& settings,
                            const Rest&... inputs) {
    const Tensors tensors{inputs.value_or(at::Tensor())...};
    ctx->save_for_backward(tensors);
    ctx->saved_data["settings"] =
        c10::ivalue::Tuple::create(std::vector<IValue>(settings.begin(), settings.end()));
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_attend(call(tensors, settings));
  }
  static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors& grads) {
    Settings settings;
    const auto& saved = ctx->saved_data["settings"].toTupleRef().elements();
    std::copy(saved.begin(), saved.end(), settings.begin());
    Call c = call(ctx->get_saved_variables(), settings);
    c.grad = grads.at(0);
    size_t edge = 0;  // only inputs that are present have an edge
    for (size_t i = 0; i < kInputCount; ++i)
      if (c.input(int64_t(i)).defined() && ctx->needs_input_grad(edge++))
        c.wanted.push_back(int64_t(i));
    const Tensors gradients = call_backward(c);
    Tensors all(1 + kInputCount);  // the settings come first and have none
    for (size_t i = 0; i < c.wanted.size(); ++i) all[1 + size_t(c.wanted[i])] = gradients[i];
    return all;
  }
  static Call call(const Tensors& tensors, const Settings& settings) {
    Call c{.settings = settings};
    for (size_t i = 0; i < kInputCount; ++i) c.input(int64_t(i)) = tensors[i];
    return c;
  }
};

template <size_t... I>
static at::Tensor apply(Call c, std::index_sequence<I...>) {
  auto optional = [](const at::Tensor& x) {
    return x.defined() ? std::optional<at::Tensor>(x) : std::nullopt;
  };
  return Attend::apply(c.settings, optional(c.input(I))...);
}

// A tensor that stands for another, in torch.compile and the like.
static bool is_stand_in(const at::Tensor& x) {
  static const c10::DispatchKeySet keys =
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize}) |
      c10::functorch_transforms_ks;
  return x.key_set().has_any(keys);
}

// Plain tensors go straight to the library, whose executions save what their gradients need;
// stand-ins see one operator and its gradient.
static void attend_autograd(const c10::OperatorHandle& op, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, kArguments);
  const at::Tensor& q = arguments[0].toTensor();
  bool plain = q.is_cpu() || q.is_cuda();
  for (const IValue& x : arguments) plain &= !x.isTensor() || !is_stand_in(x.toTensor());
  if (plain)
    attend(op, stack);
  else
    stack->emplace_back(apply(Call::read(*stack), std::make_index_sequence<kInputCount>()));
}

// Autocast: q, k and v take the autocast dtype, gates and parameters keep theirs.
template <at::DeviceType device>
static void attend_autocast(const c10::OperatorHandle&, Stack* stack) {
  Call c = Call::read(*stack);
  const c10::impl::ExcludeDispatchKeyGuard off(
      at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const auto dtype = at::autocast::get_autocast_dtype(device);
  for (const attn::Input& i : attn::input_table()) {
    at::Tensor& x = c.inputs.*i.at;
    if (x.defined() && x.has_storage() && !is_stand_in(x)) attn::check_storage(i.name, x);
  }
  for (const attn::Input& i : attn::input_table())
    if (i.role == attn::Role::tensor)
      c.inputs.*i.at = at::autocast::cached_cast(dtype, c.inputs.*i.at, device);
  stack->emplace_back(call_attend(c));
}

// The definition, made of torch's operators: every transform of torch sees those.
static void attend_reference(const c10::OperatorHandle&, Stack* stack) {
  const Call c = Call::read(*stack);
  stack->emplace_back(attn::execution("reference").run(c.spec(), c.inputs, nullptr));
}

// What can run, and why not.

static void why_not(const c10::OperatorHandle&, Stack* stack) {
  const Call c = Call::read(*stack);
  const attn::Spec spec = c.spec();
  attn::check_inputs(spec, c.inputs, c.variant());
  stack->emplace_back(attn::execution(c.execution()).why_not(spec, c.inputs));
}

static void statistics(const c10::OperatorHandle&, Stack* stack) {
  attn::Statistics s;
  stack->emplace_back(Call::read(*stack).run(&s));
  for (const at::Tensor& x : {s.entropy, s.largest, s.first, s.negative}) stack->emplace_back(x);
}

// attn::State as a Python object.
struct Stream : torch::CustomClassHolder {
  attn::State state;
  explicit Stream(attn::State s) : state(std::move(s)) {}
};
using StreamPtr = c10::intrusive_ptr<Stream>;

// `shape`: B, G, D, E.
static StreamPtr make_stream(const std::string& variant, const Text& mask, Number scale,
                             Number temperature, Number clamp, const std::vector<int64_t>& shape,
                             at::ScalarType dtype, at::Device device) {
  const attn::StateShape s{shape.at(0), shape.at(1), shape.at(2), shape.at(3)};
  const attn::Spec spec = make_spec(variant, mask, scale, temperature, clamp);
  attn::check_spec(spec);
  check(dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf,
        "a state has dtype float64, float32, bfloat16 or float16, got ", attn::dtype_name(dtype));
  check(device.is_cpu() || device.is_cuda(), "a state is on the CPU or on a CUDA device, got ",
        device);
  check(double(s.B) * double(s.G) * sizeof(double) <= attn::kMostStateBytes, "a state of batch ",
        s.B, " with ", s.G, " heads is too large");
  return c10::make_intrusive<Stream>(attn::make_state(spec, s, dtype, attn::kWaiting, device));
}

// `tensors`: in the order of the table.
static at::Tensor step(const StreamPtr& self,
                       const std::vector<std::optional<at::Tensor>>& tensors) {
  check(tensors.size() == kInputCount, "step expects ", kInputCount, " inputs, got ",
        tensors.size());
  attn::Inputs in;
  for (size_t i = 0; i < kInputCount; ++i)
    in.*attn::input_table()[i].at = tensors[i].value_or(at::Tensor());
  return attn::step(self->state, in);
}

// Every tensor that a state may hold; the batch is the first dimension of those that it does.
static std::vector<at::Tensor*> tensors(attn::State& s) {
  attn::Carry& c = s.carry;
  std::vector<at::Tensor*> all{&c.S, &c.z, &c.count, &c.keys, &c.gates, &c.decay, &s.decay_sums};
  for (const attn::Input& i : attn::input_table()) all.push_back(&(s.recent.*i.at));
  return all;
}

static Tensors parts(attn::State& s, const std::function<at::Tensor(const at::Tensor&)>& change) {
  Tensors held;
  for (at::Tensor* x : tensors(s))
    if (x->defined()) held.push_back(*x = change(*x));
  return held;
}

// A copy with these rows of the batch.
static StreamPtr select(const StreamPtr& self, const at::Tensor& rows) {
  attn::State s = self->state;
  check(rows.dim() == 1 && at::isIntegralType(rows.scalar_type(), false) && !rows.is_meta(),
        "rows must have shape [n] and dtype int32 or int64, got ", rows.sizes(), " ",
        attn::dtype_name(rows.scalar_type()));
  const at::Tensor index = rows.to(s.carry.count.device()).to(at::kLong);
  check(index.numel() == 0 ||
            (index.min().item<int64_t>() >= 0 && index.max().item<int64_t>() < s.shape.B),
        "rows must be 0 to ", s.shape.B - 1, ", the batch of this state");
  parts(s, [&](const at::Tensor& x) { return x.index_select(0, index); });
  s.shape.B = rows.numel();
  return c10::make_intrusive<Stream>(std::move(s));
}

// A state as it is pickled: its spec, its numbers, and its tensors, of which some may be undefined.
using Pickled =
    std::tuple<std::string, std::vector<int64_t>, std::vector<std::optional<at::Tensor>>>;

static Pickled pickled(const StreamPtr& self) {
  attn::State s = self->state;
  std::vector<std::optional<at::Tensor>> held;
  for (const at::Tensor* x : tensors(s))
    held.push_back(x->defined() ? std::optional(x->clone()) : std::nullopt);
  return {attn::text(s.spec),
          {s.shape.B, s.shape.G, s.shape.D, s.shape.E, int64_t(s.dtype), s.finite, s.tokens, s.room,
           s.held},
          held};
}

static StreamPtr unpickled(const Pickled& from) {
  const auto& [spec, n, held] = from;
  attn::State s{attn::with(attn::Spec{}, spec), {}, at::kFloat, false};
  const std::vector<at::Tensor*> all = tensors(s);
  check(n.size() == 9 && held.size() == all.size(),
        "this state was pickled by another version of horner");
  s.shape = {n[0], n[1], n[2], n[3]};
  s.dtype = at::ScalarType(n[4]), s.finite = n[5], s.tokens = n[6], s.room = n[7], s.held = n[8];
  for (size_t i = 0; i < all.size(); ++i) *all[i] = held[i].value_or(at::Tensor());
  return c10::make_intrusive<Stream>(std::move(s));
}

static int64_t bytes(const StreamPtr& self) {
  int64_t n = 0;
  for (const at::Tensor& x : parts(self->state, [](const at::Tensor& x) { return x; }))
    n += int64_t(x.nbytes());
  return n;
}

static std::vector<std::string> variants() {
  std::vector<std::string> names;
  for (const attn::Variant& v : attn::variants()) names.push_back(v.name);
  return names;
}

static std::vector<std::string> executions() {
  std::vector<std::string> names;
  for (const attn::Execution* e : attn::executions()) names.emplace_back(e->name);
  return names;
}

static c10::Dict<std::string, std::string> describe(const std::string& name) {
  const attn::Variant v = attn::find(name);
  std::string notes, inputs;
  for (const std::string& note : attn::notes(v.spec)) notes += (notes.empty() ? "" : "; ") + note;
  for (const attn::Input& i : attn::input_table())
    if (i.wanted && i.role != attn::Role::tensor && i.wanted(v.spec))
      inputs += (inputs.empty() ? "" : " ") + std::string(i.name);
  c10::Dict<std::string, std::string> out;
  out.insert("name", v.name);
  out.insert("about", v.about);
  out.insert("source", v.source);
  out.insert("spec", attn::text(v.spec));
  out.insert("notes", notes);
  out.insert("inputs", inputs);
  out.insert("no_state", attn::why_no_state(v.spec));
  return out;
}

// What a model puts around the operator (catalog.h), and the features that a projection has.
static c10::Dict<std::string, int64_t> around(const std::string& name) {
  const attn::Variant v = attn::find(name);
  const auto* projected = std::get_if<attn::Project>(&v.spec.features);
  c10::Dict<std::string, int64_t> out;
  out.insert("short_conv", v.around.short_conv);
  out.insert("rope", v.around.rope);
  out.insert("mamba", v.around.mamba);
  out.insert("raw_decay", v.around.raw_decay);
  out.insert("exp_gate", v.around.exp_gate);
  out.insert("features", projected ? projected->dim : 0);
  return out;
}

// The table of inputs: name, shape, role and meaning.
static std::vector<std::tuple<std::string, std::string, std::string, std::string>> inputs() {
  static constexpr const char* kRoles[] = {"tensor",    "gate",     "log_gate", "logit",
                                           "parameter", "constant", "mask"};
  std::vector<std::tuple<std::string, std::string, std::string, std::string>> rows;
  for (const attn::Input& i : attn::input_table())
    rows.emplace_back(i.name, i.shape, kRoles[size_t(i.role)], i.about);
  return rows;
}

// The variant's mask ("full", "causal" or "window"), the size of its window, and whether its scale
// is a fixed number.
static std::tuple<std::string, std::optional<int64_t>, bool> mask_and_scale(const std::string& of) {
  const attn::Spec spec = parsed(of, std::nullopt);
  const bool fixed = attn::is<attn::Fixed>(spec.scale);
  if (const auto* window = std::get_if<attn::Window>(&spec.mask))
    return {"window", window->size, fixed};
  return {attn::is<attn::Full>(spec.mask) ? "full" : "causal", std::nullopt, fixed};
}

static c10::FunctionSchema schema(const std::string& name, const std::string& result,
                                  const std::string& first = "") {
  std::string s = "horner::" + name + "(" + first;
  for (const attn::Input& i : attn::input_table().first<kTensors>())
    s += "Tensor " + std::string(i.name) + ", ";
  for (const char* setting : kSettings) s += setting + std::string(", ");
  s += "*";
  for (const attn::Input& i : attn::input_table().subspan<kTensors>())
    s += ", Tensor? " + std::string(i.name) + "=None";
  return torch::schema((s + ") -> " + result).c_str());
}

template <auto function>
static torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<function>();
}

TORCH_LIBRARY(horner, m) {
  m.def(schema("attend", "Tensor"));
  m.def(schema("attend_backward", "Tensor[]", "Tensor grad, int[] wanted, "));
  m.def(schema("attend_reference", "Tensor"));
  m.def(schema("why_not", "str"), boxed<&why_not>());
  m.def(schema("statistics", "(Tensor, Tensor, Tensor, Tensor, Tensor)"), boxed<&statistics>());
  m.def("inputs", &inputs);
  m.def("mask_and_scale(str variant) -> (str, int?, bool)", &mask_and_scale);
  m.def("version() -> str", [] { return std::string(HORNER_VERSION); });
  m.def("variants() -> str[]", &variants);
  m.def("executions() -> str[]", &executions);
  m.def("describe(str variant) -> Dict(str, str)", &describe);
  m.def("around(str variant) -> Dict(str, int)", &around);
  m.class_<Stream>("State")
      .def(torch::init(&make_stream))
      .def("step", &step)
      .def("select", &select)
      .def("tokens", [](const StreamPtr& self) { return self->state.tokens; })
      .def("bytes", &bytes)
      .def_pickle([](const StreamPtr& self) { return pickled(self); },
                  [](const Pickled& from) { return unpickled(from); });
}

TORCH_LIBRARY_IMPL(horner, CompositeExplicitAutograd, m) {  // what is not dense meets our own error
  m.impl("attend", boxed<&attend>());
  m.impl("attend_backward", boxed<&attend_backward>());
}
TORCH_LIBRARY_IMPL(horner, CompositeImplicitAutograd, m) {
  m.impl("attend_reference", boxed<&attend_reference>());
}
TORCH_LIBRARY_IMPL(horner, Meta, m) {
  m.impl("attend", boxed<&attend_meta>());
  m.impl("attend_backward", boxed<&attend_backward_meta>());
}
TORCH_LIBRARY_IMPL(horner, Autograd, m) {
  m.impl("attend", boxed<&attend_autograd>());
  m.impl("attend_backward", torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(horner, AutocastCPU, m) {
  m.impl("attend", boxed<&attend_autocast<at::kCPU>>());
}
TORCH_LIBRARY_IMPL(horner, AutocastCUDA, m) {
  m.impl("attend", boxed<&attend_autocast<at::kCUDA>>());
}

}  // namespace horner::python
