// The operators of Python: torch.ops.load_library("libhorner_python.so"), then torch.ops.horner.*
//
// The arguments of `attend` are the rows of attn::input_table() and the settings of call.h. Its
// kernels are boxed and loop over that table, so a new input is a new row there.
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "attn/plan.h"
#include "python/call.h"

namespace horner::python {

static const c10::OperatorHandle& operator_of(const char* name) {
  return *new c10::OperatorHandle(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""));
}

// CPU and CUDA.

static void attend(const c10::OperatorHandle&, Stack* stack) {
  const Call c = Call::read(*stack);
  stack->emplace_back(
      attn::attend_again(c.spec(), c.inputs, c.execution(), nullptr, c.variant()).contiguous());
}

static void attend_rows(const c10::OperatorHandle&, Stack* stack) {
  const Call c = Call::read(*stack, 1);
  Rows rows(c.first[0].toInt(), c);
  stack->emplace_back(
      attn::attend_again(c.spec(), c.inputs, c.execution(), rows.wanted(), c.variant())
          .contiguous());
  stack->emplace_back(rows.tensor(c.inputs.q));
}

// Inside an operator, where torch has switched autograd off.
struct WithAutograd {
  c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  c10::impl::ForceDispatchKeyGuard keys{
      local.included_, local.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView};
  at::AutoGradMode mode{true};
};

// The two halves of `attend` for graphs that see operators: forward fills the bytes `kept` with
// what backward needs, as many as there are; backward reads them, or runs forward again.

static void attend_forward(const c10::OperatorHandle&, Stack* stack) {
  Call c = Call::read(*stack, 2);
  Rows rows(c.first[0].toInt(), c);
  const at::Tensor q = c.inputs.q;
  const at::Tensor kept = at::empty({c.first[1].toInt()}, q.options().dtype(at::kByte));
  if (q.is_cpu()) kept.zero_();  // the same bytes for the same inputs, which opcheck compares
  at::Tensor o;
  {
    std::optional<WithAutograd> autograd;
    if (kept.numel() > 0) {
      autograd.emplace();
      c.inputs.v = c.inputs.v.detach().requires_grad_();
    }
    o = attn::attend_kept(c.spec(), c.inputs, c.execution(), rows.wanted(), c.variant(), kept,
                          false);
  }
  stack->emplace_back(o.detach().contiguous());
  stack->emplace_back(rows.tensor(q));
  stack->emplace_back(kept);
}

static void attend_backward(const c10::OperatorHandle&, Stack* stack) {
  Call c = Call::read(*stack, 3);
  const at::Tensor grad = c.first[0].toTensor();
  const at::Tensor kept = c.first[2].isTensor() ? c.first[2].toTensor() : at::Tensor();
  const WithAutograd autograd;
  Tensors leaves;
  for (int64_t i : c.first[1].toIntVector()) {
    at::Tensor& x = c.input(i);
    x = x.detach().requires_grad_();
    leaves.push_back(x);
  }
  const at::Tensor o =
      attn::attend_kept(c.spec(), c.inputs, c.execution(), nullptr, c.variant(), kept, true);
  // A graph that may run again overwrites none of `kept`, which a later call may read.
  const bool again = kept.defined() && kept.numel() > 0;
  Tensors gradients = torch::autograd::grad({o}, leaves, {grad}, again, false, true);
  for (size_t i = 0; i < leaves.size(); ++i)
    gradients[i] = gradients[i].defined() ? gradients[i].contiguous()
                                          : at::zeros_like(leaves[i], at::MemoryFormat::Contiguous);
  stack->emplace_back(gradients);
}

// Meta: shapes alone, of tensors on the device "meta" and of those that stand for others in
// torch.compile. What is known of them is checked by the same code, on tensors of the same sizes
// without memory of their own.

// Plain tensors like these; plain ones as they are. A symbolic size takes that of another tensor,
// or a usual one, of batches and heads the least: it is checked when the graph runs.
static attn::Inputs stand_ins(const attn::Spec& spec, const attn::Inputs& in) {
  constexpr int64_t kUsual = 64;
  std::map<char, int64_t> known;
  for (const attn::Input& i : attn::input_table()) {
    const at::Tensor& x = in.*i.at;
    const std::string_view shape = attn::shape(i, spec);
    if (!x.defined() || x.dim() != int64_t(shape.size())) continue;
    for (int64_t d = 0; d < x.dim(); ++d)
      if (const auto n = x.sym_size(d).maybe_as_int(); n && std::isupper(shape[size_t(d)]))
        known.emplace(shape[size_t(d)], *n);
  }
  if (const auto* p = std::get_if<attn::Project>(&spec.features)) known.emplace('F', p->dim);
  if (const auto* p = std::get_if<attn::Hedgehog>(&spec.features)) known.emplace('F', p->dim);
  const auto usual = [&](char letter) -> int64_t {
    if (std::isdigit(letter)) return letter - '0';
    static const std::map<char, char> others{{'H', 'G'}, {'G', 'H'}, {'T', 'S'}, {'S', 'T'}};
    for (const char c : {letter, others.contains(letter) ? others.at(letter) : letter})
      if (const auto at = known.find(c); at != known.end()) return at->second;
    return std::string_view("BHG").find(letter) != std::string_view::npos ? 1 : kUsual;
  };
  attn::Inputs out;
  for (const attn::Input& i : attn::input_table()) {
    const at::Tensor& x = in.*i.at;
    if (!x.defined()) continue;
    check(x.device() == in.q.device(), i.name, " must be on the same device as q (", in.q.device(),
          "), got ", x.device());
    if (x.is_cpu() && x.has_storage() && !attn::is_wrapped(x)) {  // whose numbers can be read
      out.*i.at = x;
      continue;
    }
    std::vector<int64_t> sizes, strides(size_t(x.dim()));
    for (int64_t d = 0; d < x.dim(); ++d) {
      const std::string_view shape = attn::shape(i, spec);
      const bool named = x.dim() == int64_t(shape.size());
      const char letter = named ? char(std::toupper(shape[size_t(d)])) : '?';
      sizes.push_back(x.sym_size(d).maybe_as_int().value_or(letter == 'N' ? 2 : usual(letter)));
    }
    const bool keys = i.at == &attn::Inputs::cu_seqlens_k;
    const bool packing = keys || i.at == &attn::Inputs::cu_seqlens;
    if (packing) std::ranges::fill(strides, 1);
    at::Tensor like(at::detail::empty_strided_cpu(sizes, strides, x.scalar_type()));
    if (like.numel() > 0) std::memset(like.data_ptr(), 0, like.storage().nbytes());
    if (packing && x.dim() == 1 && like.numel() > 0) like[-1] = usual(keys ? 'S' : 'T');
    if (i.role == attn::Role::constant && x.requires_grad()) like.requires_grad_();
    out.*i.at = like;
  }
  return out;
}

// While one exists, this thread's operators on plain tensors are those of torch alone.
struct Plain {
  c10::impl::ForceDispatchKeyGuard keys{
      c10::default_included_set,
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView |
          c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

// The execution that tensors like these run, null where none does. What a GPU can run is known when
// the graph runs there.
static const attn::Execution* execution_of(const Call& c, bool statistics) {
  const Plain plain;
  const attn::Spec spec = c.spec();
  const at::Tensor& q = c.inputs.q;
  const bool of_a_gpu = q.is_cuda() || (q.is_meta() && at::hasCUDA());
  const auto waits = [&](const attn::Execution* e) {
    return of_a_gpu && e->name == c.execution() && e->name.ends_with("_cuda");
  };
  const bool is_any = std::ranges::any_of(attn::executions(), waits);
  return attn::checked(spec, stand_ins(spec, c.inputs), is_any ? "auto" : c.execution(), statistics,
                       c.variant());
}
static Call read_checked(Stack& stack, size_t first = 0, bool has_rows = false) {
  const Call c = Call::read(stack, first);
  execution_of(c, has_rows && Rows(c.first[0].toInt(), c).rows > 0);
  return c;
}

static at::Tensor unwritten(const at::Tensor& like, std::vector<c10::SymInt> shape) {
  return at::empty_symint(shape, like.options());
}
static at::Tensor unwritten_result(const attn::Inputs& in) {
  return unwritten(in.q, {in.q.sym_size(0), in.q.sym_size(1), in.q.sym_size(2), in.v.sym_size(3)});
}

static void attend_meta(const c10::OperatorHandle&, Stack* stack) {
  const Call c = read_checked(*stack);
  stack->emplace_back(unwritten_result(c.inputs));
}

static void attend_rows_meta(const c10::OperatorHandle&, Stack* stack) {
  const Call c = read_checked(*stack, 1, true);
  stack->emplace_back(unwritten_result(c.inputs));
  stack->emplace_back(Rows(c.first[0].toInt(), c).unwritten(c.inputs.q));
}

static void attend_forward_meta(const c10::OperatorHandle&, Stack* stack) {
  const Call c = read_checked(*stack, 2, true);
  stack->emplace_back(unwritten_result(c.inputs));
  stack->emplace_back(Rows(c.first[0].toInt(), c).unwritten(c.inputs.q));
  stack->emplace_back(
      at::empty_symint({c.first[1].toSymInt()}, c.inputs.q.options().dtype(at::kByte)));
}

static void attend_backward_meta(const c10::OperatorHandle&, Stack* stack) {
  Call c = read_checked(*stack, 3);
  Tensors gradients;
  for (int64_t i : c.first[1].toIntVector()) {
    const at::Tensor& x = c.input(i);
    gradients.push_back(unwritten(x, x.sym_sizes().vec()));
  }
  stack->emplace_back(gradients);
}

// The bytes that `attend_forward` is to keep on a GPU, where stand-ins do not show which execution
// runs: those of tiles, or 0 if another may run.
static c10::SymInt bytes_on_gpu(const Call& c) {
  const attn::Execution& tiles = attn::execution("fused_cuda");
  const bool named = c.execution() == tiles.name || c.execution() == "hopper_cuda";
  const bool only = c.execution() == "auto" && !attn::why_no_state(c.spec()).empty();
  return tiles.kept && (named || only) ? tiles.kept(c.spec(), c.inputs) : 0;
}

// Those of the execution that runs tensors like these.
static c10::SymInt bytes_to_keep(const Call& c, int64_t rows) {
  const at::Tensor& q = c.inputs.q;
  if (!q.is_cpu() && !q.is_cuda()) return 0;
  const attn::Execution* chosen = nullptr;
  try {
    chosen = execution_of(c, rows > 0);
  } catch (const Error&) {  // which the operator gives too
  }
  if (chosen && q.is_cuda()) return bytes_on_gpu(c);
  return chosen && chosen->kept ? chosen->kept(c.spec(), c.inputs) : 0;
}

// Autograd: `attend_forward` below it, `attend_backward` as its gradient.

struct Attend : torch::autograd::Function<Attend> {
  struct Options {
    const Settings& settings;
    int64_t rows;
    c10::SymInt bytes;
  };
  template <class... Rest>
  static Tensors forward(torch::autograd::AutogradContext* ctx, const Options& options,
                         const Rest&... inputs) {
    static const auto& op = operator_of("horner::attend_forward");
    Tensors tensors{inputs.value_or(at::Tensor())...};
    Call c = call(tensors, options.settings);
    c.first = {options.rows, options.bytes};
    Stack results;
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      results = c(op);
    }
    const at::Tensor rows = results.at(1).toTensor();
    ctx->mark_non_differentiable({rows});
    tensors.push_back(options.bytes.maybe_as_int() == 0 ? at::Tensor() : results.at(2).toTensor());
    ctx->save_for_backward(tensors);
    ctx->saved_data["settings"] = c10::ivalue::Tuple::create(
        std::vector<IValue>(options.settings.begin(), options.settings.end()));
    return {results.at(0).toTensor(), rows};
  }
  static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors& grads) {
    static const auto& op = operator_of("horner::attend_backward");
    Settings settings;
    const auto& saved = ctx->saved_data["settings"].toTupleRef().elements();
    std::copy(saved.begin(), saved.end(), settings.begin());
    const Tensors tensors = ctx->get_saved_variables();
    Call c = call(tensors, settings);
    std::vector<int64_t> wanted;
    size_t edge = 0;  // only inputs that are present have an edge
    for (size_t i = 0; i < kInputCount; ++i)
      if (c.input(int64_t(i)).defined() && ctx->needs_input_grad(edge++))
        wanted.push_back(int64_t(i));
    c.first = {grads.at(0), wanted, tensors.back().defined() ? IValue(tensors.back()) : IValue()};
    const Tensors gradients = c(op).at(0).toTensorVector();
    Tensors all(1 + kInputCount);  // the options come first and have none
    for (size_t i = 0; i < wanted.size(); ++i) all[1 + size_t(wanted[i])] = gradients[i];
    return all;
  }
  static Call call(const Tensors& tensors, const Settings& settings) {
    Call c{.settings = settings};
    for (size_t i = 0; i < kInputCount; ++i) c.input(int64_t(i)) = tensors[i];
    return c;
  }
};

template <size_t... I>
static Tensors apply(const Call& given, int64_t rows, std::index_sequence<I...>) {
  Call c = given;
  const bool differentiable =
      at::GradMode::is_enabled() && ((c.input(I).defined() && c.input(I).requires_grad()) || ...);
  auto optional = [](const at::Tensor& x) {
    return x.defined() ? std::optional<at::Tensor>(x) : std::nullopt;
  };
  return Attend::apply(
      Attend::Options{c.settings, rows, differentiable ? bytes_to_keep(c, rows) : c10::SymInt(0)},
      optional(c.input(I))...);
}

// Whether a graph is made of the operators that this thread calls, of plain tensors too.
static bool traced() {
  using Mode = c10::impl::TorchDispatchModeKey;
  const auto on = [](Mode m) { return c10::impl::TorchDispatchModeTLS::get_mode(m).has_value(); };
  return on(Mode::PROXY) || on(Mode::FAKE) || on(Mode::FUNCTIONAL);
}

// Plain tensors go straight to the library, whose executions save what their gradients need;
// stand-ins see an operator of each direction, as does a graph.
template <auto of_plain, size_t first>
static void with_autograd(const c10::OperatorHandle& op, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, kArguments);
  const at::Tensor& q = arguments[0].toTensor();
  bool plain = (q.is_cpu() || q.is_cuda()) && !traced();
  for (const IValue& x : arguments) {
    if (!x.isTensor()) continue;
    plain &= !attn::is_wrapped(x.toTensor());
    check(!x.toTensor().key_set().has(c10::DispatchKey::FuncTorchGradWrapper),
          "torch.func's grad, vjp and jvp are not supported in a compiled function: transform the "
          "compiled one, torch.func.grad(torch.compile(function))");
  }
  if (plain) return of_plain(op, stack);
  const Call c = Call::read(*stack, first);
  const Tensors results =
      apply(c, first ? c.first[0].toInt() : 0, std::make_index_sequence<kInputCount>());
  for (size_t i = 0; i < 1 + first; ++i) stack->emplace_back(results[i]);
}

// Autocast: q, k and v take the autocast dtype, gates and parameters keep theirs.
template <at::DeviceType device, size_t first>
static void autocast(const c10::OperatorHandle& op, Stack* stack) {
  Call c = Call::read(*stack, first);
  const c10::impl::ExcludeDispatchKeyGuard off(
      at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const auto dtype = at::autocast::get_autocast_dtype(device);
  for (const attn::Input& i : attn::input_table()) {
    at::Tensor& x = c.inputs.*i.at;
    if (x.defined() && x.has_storage() && !attn::is_wrapped(x)) attn::check_storage(i.name, x);
  }
  for (const attn::Input& i : attn::input_table())
    if (i.role == attn::Role::tensor)
      c.inputs.*i.at = at::autocast::cached_cast(dtype, c.inputs.*i.at, device);
  for (IValue& result : c(op)) stack->push_back(std::move(result));
}

// Checks what is known of tensors whose numbers cannot be read, as of meta.
static void check_call(const c10::OperatorHandle&, Stack* stack) {
  read_checked(*stack);
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
  m.def(schema("attend_rows", "(Tensor, Tensor)", "int rows, "));
  m.def(schema("attend_forward", "(Tensor, Tensor, Tensor)", "int rows, SymInt bytes, "));
  m.def(schema("attend_backward", "Tensor[]", "Tensor grad, int[] wanted, Tensor? kept, "));
  m.def(schema("attend_reference", "Tensor"));
  m.def(schema("check_call", "()"), boxed<&check_call>());
  m.def(schema("why_not", "str"), boxed<&why_not>());
}

TORCH_LIBRARY_IMPL(horner, CompositeExplicitAutograd, m) {  // what is not dense meets our own error
  m.impl("attend", boxed<&attend>());
  m.impl("attend_rows", boxed<&attend_rows>());
  m.impl("attend_forward", boxed<&attend_forward>());
  m.impl("attend_backward", boxed<&attend_backward>());
}
TORCH_LIBRARY_IMPL(horner, CompositeImplicitAutograd, m) {
  m.impl("attend_reference", boxed<&attend_reference>());
}
TORCH_LIBRARY_IMPL(horner, FuncTorchBatchedDecomposition, m) {  // vmap sees torch's operators too
  m.impl("check_call", boxed<&check_call>());
  m.impl("attend_reference", boxed<&attend_reference>());
}
TORCH_LIBRARY_IMPL(horner, Meta, m) {
  m.impl("attend", boxed<&attend_meta>());
  m.impl("attend_rows", boxed<&attend_rows_meta>());
  m.impl("attend_forward", boxed<&attend_forward_meta>());
  m.impl("attend_backward", boxed<&attend_backward_meta>());
}
TORCH_LIBRARY_IMPL(horner, Autograd, m) {
  m.impl("attend", boxed<&with_autograd<&attend, 0>>());
  m.impl("attend_rows", boxed<&with_autograd<&attend_rows, 1>>());
  m.impl("attend_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("attend_backward", torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(horner, AutocastCPU, m) {
  m.impl("attend", boxed<&autocast<at::kCPU, 0>>());
  m.impl("attend_rows", boxed<&autocast<at::kCPU, 1>>());
}
TORCH_LIBRARY_IMPL(horner, AutocastCUDA, m) {
  m.impl("attend", boxed<&autocast<at::kCUDA, 0>>());
  m.impl("attend_rows", boxed<&autocast<at::kCUDA, 1>>());
}

}  // namespace horner::python
