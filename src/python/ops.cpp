// The whole Python binding: torch.ops.load_library("libhorner_python.so"), then torch.ops.horner.*
//
// The arguments of `attend` are the rows of attn::input_table(), then the variant and the
// execution. Its kernels are boxed and loop over that table, so a new input is a new row there.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include "attn/catalog.h"
#include "attn/inputs.h"
#include "attn/spec_text.h"
#include "attn/state.h"
#include "core/check.h"

namespace horner::python {

using torch::jit::Stack;
using Tensors = std::vector<at::Tensor>;  // in the order of the table; undefined where absent

constexpr size_t kInputs = 17;  // checked against the table when the library is loaded

// What stands on the stack: [grad], the inputs, variant, execution, [wanted].
struct Call {
  at::Tensor grad;  // of `attend_backward` alone
  Tensors inputs;
  std::string variant, execution;
  std::vector<int64_t> wanted;  // of `attend_backward` alone: the inputs whose gradients to return

  static Call read(Stack& stack, bool backward) {
    const size_t n = kInputs + 2 + 2 * backward;
    auto arguments = torch::jit::last(stack, n);
    Call c;
    size_t i = 0;
    if (backward) c.grad = arguments[i++].toTensor();
    for (; c.inputs.size() < kInputs; ++i)
      c.inputs.push_back(arguments[i].isTensor() ? arguments[i].toTensor() : at::Tensor());
    c.variant = arguments[i++].toStringRef();
    c.execution = arguments[i++].toStringRef();
    if (backward) c.wanted = arguments[i].toIntVector();
    torch::jit::drop(stack, n);
    return c;
  }
  Stack write(bool backward) const {
    Stack stack;
    if (backward) stack.emplace_back(grad);
    for (const at::Tensor& x : inputs)
      stack.push_back(x.defined() ? c10::IValue(x) : c10::IValue());
    stack.emplace_back(variant);
    stack.emplace_back(execution);
    if (backward) stack.emplace_back(wanted);
    return stack;
  }
};

static attn::Inputs as_inputs(const Tensors& tensors) {
  attn::Inputs in;
  for (size_t i = 0; i < kInputs; ++i) in.*attn::input_table()[i].at = tensors[i];
  return in;
}

static at::Tensor call_attend(const Call& c) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("horner::attend", "");
  Stack stack = c.write(false);
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
  const Call c = Call::read(*stack, false);
  const attn::Spec spec = attn::find(c.variant).spec;
  stack->emplace_back(attn::attend(spec, as_inputs(c.inputs), c.execution).contiguous());
}

// By running forward again, this time with autograd.
static void attend_backward(const c10::OperatorHandle&, Stack* stack) {
  Call c = Call::read(*stack, true);
  const auto local = c10::impl::tls_local_dispatch_key_set();
  const c10::impl::ForceDispatchKeyGuard with_autograd(
      local.included_, local.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const at::AutoGradMode mode(true);
  Tensors leaves;
  for (int64_t i : c.wanted) {
    at::Tensor& x = c.inputs.at(size_t(i));
    x = x.detach().requires_grad_();
    leaves.push_back(x);
  }
  const at::Tensor out = attn::attend(attn::find(c.variant).spec, as_inputs(c.inputs), c.execution);
  Tensors gradients = torch::autograd::grad({out}, leaves, {c.grad}, false, false, true);
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
  const Call c = Call::read(*stack, false);
  const at::Tensor &q = c.inputs[0], &v = c.inputs[2];
  stack->emplace_back(unwritten(q, {q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)}));
}

static void attend_backward_meta(const c10::OperatorHandle&, Stack* stack) {
  const Call c = Call::read(*stack, true);
  Tensors gradients;
  for (int64_t i : c.wanted) {
    const at::Tensor& x = c.inputs.at(size_t(i));
    gradients.push_back(unwritten(x, x.sym_sizes().vec()));
  }
  stack->emplace_back(gradients);
}

// Autograd: `attend` below it, `attend_backward` as its gradient.

struct Attend : torch::autograd::Function<Attend> {
  template <class... Rest>
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const Rest&... arguments) {
    Call c;
    (take(c, arguments), ...);
    ctx->save_for_backward(c.inputs);
    ctx->saved_data["variant"] = c.variant;
    ctx->saved_data["execution"] = c.execution;
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_attend(c);
  }
  static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors& grads) {
    Call c{grads.at(0),
           ctx->get_saved_variables(),
           ctx->saved_data["variant"].toStringRef(),
           ctx->saved_data["execution"].toStringRef(),
           {}};
    size_t edge = 0;  // the inputs that are there are numbered
    for (size_t i = 0; i < kInputs; ++i)
      if (c.inputs[i].defined() && ctx->needs_input_grad(edge++)) c.wanted.push_back(int64_t(i));
    const Tensors gradients = call_backward(c);
    Tensors all(kInputs + 2);  // the variant and the execution have none
    for (size_t i = 0; i < c.wanted.size(); ++i) all[size_t(c.wanted[i])] = gradients[i];
    return all;
  }
  static void take(Call& c, const std::optional<at::Tensor>& x) {
    c.inputs.push_back(x.value_or(at::Tensor()));
  }
  static void take(Call& c, const std::string& s) {
    (c.variant.empty() ? c.variant : c.execution) = s;
  }
};

template <size_t... I>
static at::Tensor apply(const Call& c, std::index_sequence<I...>) {
  auto optional = [](const at::Tensor& x) {
    return x.defined() ? std::optional<at::Tensor>(x) : std::nullopt;
  };
  return Attend::apply(optional(c.inputs[I])..., c.variant, c.execution);
}

// Plain tensors go straight to the library, whose executions save what their gradients need;
// tensors that stand for others (in torch.compile and the like) see one operator and its gradient.
static void attend_autograd(const c10::OperatorHandle& op, Stack* stack) {
  const Call c = Call::read(*stack, false);
  bool plain = true;
  for (const at::Tensor& x : c.inputs)
    plain &= !x.defined() ||
             !x.key_set().has_any(
                 c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize}) |
                 c10::functorch_transforms_ks);
  if (plain && (c.inputs[0].is_cpu() || c.inputs[0].is_cuda())) {
    *stack = c.write(false);
    attend(op, stack);
  } else {
    stack->emplace_back(apply(c, std::make_index_sequence<kInputs>()));
  }
}

// Autocast: q, k and v take the autocast dtype, gates and parameters keep theirs.
template <at::DeviceType device>
static void attend_autocast(const c10::OperatorHandle&, Stack* stack) {
  Call c = Call::read(*stack, false);
  const c10::impl::ExcludeDispatchKeyGuard off(
      at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const auto dtype = at::autocast::get_autocast_dtype(device);
  for (size_t i = 0; i < kInputs; ++i)
    if (attn::input_table()[i].role == attn::Role::tensor)
      c.inputs[i] = at::autocast::cached_cast(dtype, c.inputs[i], device);
  stack->emplace_back(call_attend(c));
}

// What can run, and why not.

static void why_not(const c10::OperatorHandle&, Stack* stack) {
  const Call c = Call::read(*stack, false);
  const attn::Spec spec = attn::find(c.variant).spec;
  const attn::Inputs in = as_inputs(c.inputs);
  attn::check_inputs(spec, in);
  stack->emplace_back(attn::execution(c.execution).why_not(spec, in));
}

static void statistics(const c10::OperatorHandle&, Stack* stack) {
  const Call c = Call::read(*stack, false);
  attn::Statistics s;
  stack->emplace_back(
      attn::attend(attn::find(c.variant).spec, as_inputs(c.inputs), c.execution, &s));
  for (const at::Tensor& x : {s.entropy, s.largest, s.first, s.negative}) stack->emplace_back(x);
}

// attn::State, as an object of Python.
struct Stream : torch::CustomClassHolder {
  attn::State state;
  explicit Stream(attn::State s) : state(std::move(s)) {}
};
using StreamPtr = c10::intrusive_ptr<Stream>;

// `shape`: B, G, D, E.
static StreamPtr make_stream(const std::string& variant, const std::vector<int64_t>& shape,
                             at::ScalarType dtype, at::Device device) {
  const attn::StateShape s{shape.at(0), shape.at(1), shape.at(2), shape.at(3)};
  return c10::make_intrusive<Stream>(
      attn::make_state(attn::find(variant).spec, s, dtype, attn::kWaiting, device));
}

static at::Tensor step(const StreamPtr& self, const std::vector<std::optional<at::Tensor>>& rows) {
  check(rows.size() == kInputs, "a step takes ", kInputs, " inputs, not ", rows.size());
  Tensors tensors;
  for (const auto& x : rows) tensors.push_back(x.value_or(at::Tensor()));
  return attn::step(self->state, as_inputs(tensors));
}

// All that it holds; the batch is the first dimension of each.
static Tensors parts(attn::State& s, const std::function<at::Tensor(const at::Tensor&)>& change) {
  attn::Carry& c = s.carry;
  std::vector<at::Tensor*> all{&c.S, &c.z, &c.count, &c.keys, &c.gates, &c.decay, &s.decay_sums};
  for (const attn::Input& i : attn::input_table())
    if (i.shape[0] == 'B') all.push_back(&(s.recent.*i.at));
  Tensors held;
  for (at::Tensor* x : all)
    if (x->defined()) held.push_back(*x = change(*x));
  return held;
}

// Another, of these rows of the batch.
static StreamPtr select(const StreamPtr& self, const at::Tensor& rows) {
  attn::State s = self->state;
  const at::Tensor index = rows.to(s.carry.count.device());
  parts(s, [&](const at::Tensor& x) { return x.index_select(0, index); });
  s.shape.B = rows.numel();
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

static std::string schema(const std::string& name, const std::string& first,
                          const std::string& last, const std::string& result) {
  std::string s = "horner::" + name + "(" + first;
  for (const attn::Input& i : attn::input_table())
    s += (i.role == attn::Role::tensor ? "Tensor " : "Tensor? ") + std::string(i.name) + ", ";
  return s + "str variant, str execution" + last + ") -> " + result;
}

template <auto function>
static torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<function>();
}

TORCH_LIBRARY(horner, m) {
  TORCH_CHECK(attn::input_table().size() == kInputs, "kInputs must be ",
              attn::input_table().size());
  m.def(torch::schema(schema("attend", "", "", "Tensor").c_str()));
  m.def(torch::schema(
      schema("attend_backward", "Tensor grad, ", ", int[] wanted", "Tensor[]").c_str()));
  m.def(torch::schema(schema("why_not", "", "", "str").c_str()), boxed<&why_not>());
  m.def(torch::schema(
            schema("statistics", "", "", "(Tensor, Tensor, Tensor, Tensor, Tensor)").c_str()),
        boxed<&statistics>());
  m.def("variants() -> str[]", &variants);
  m.def("executions() -> str[]", &executions);
  m.def("describe(str variant) -> Dict(str, str)", &describe);
  m.class_<Stream>("State")
      .def(torch::init(&make_stream))
      .def("step", &step)
      .def("select", &select)
      .def("tokens", [](const StreamPtr& self) { return self->state.tokens; })
      .def("bytes", &bytes);
}

TORCH_LIBRARY_IMPL(horner, CPU, m) {
  m.impl("attend", boxed<&attend>());
  m.impl("attend_backward", boxed<&attend_backward>());
}
TORCH_LIBRARY_IMPL(horner, CUDA, m) {
  m.impl("attend", boxed<&attend>());
  m.impl("attend_backward", boxed<&attend_backward>());
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
