// The only source of attn that knows torch::autograd::Function, whose header is slow to compile.
#include "attn/exec/autograd.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstring>

#include "core/check.h"

namespace horner::attn::exec {

using torch::autograd::AutogradContext;

bool needs_gradients(at::TensorList tensors) {
  return at::GradMode::is_enabled() &&
         std::ranges::any_of(tensors, [](auto& x) { return x.defined() && x.requires_grad(); });
}

bool keeps_graph() {
  return torch::autograd::get_current_graph_task_keep_graph();
}

static bool is_stand_in(const at::Tensor& x) {  // of a defined one
  static const c10::DispatchKeySet keys =
      c10::DispatchKeySet({c10::DispatchKey::Batched, c10::DispatchKey::Functionalize}) |
      c10::functorch_transforms_ks;
  return x.key_set().has_any(keys);
}

static bool is_batch(const at::Tensor& x) {
  return x.defined() && is_stand_in(x);
}

static thread_local Keeping* keeping = nullptr;

Keeping::Keeping(const at::Tensor& bytes, bool filled)
    : bytes_(bytes), filled_(filled), before_(std::exchange(keeping, this)) {}

Keeping::~Keeping() {
  keeping = before_;
}

// Before the values of a tensor.
struct Head {
  static constexpr int64_t kMostDims = 6;
  int64_t dtype, dims, sizes[kMostDims];  // dtype -1: undefined
};
constexpr int64_t kAlignment = 64;
static_assert(sizeof(Head) % kAlignment == 0);

c10::SymInt kept_bytes(const c10::SymInt& elements, int64_t size) {
  return elements * size + int64_t(sizeof(Head)) + kAlignment;
}

static int64_t aligned(int64_t n) {
  return (n + kAlignment - 1) / kAlignment * kAlignment;
}

void Keeping::put(const at::Tensor& x, bool values) {
  Head head{-1, 0, {}};
  int64_t size = 0;
  if (x.defined()) {
    check(x.dim() <= Head::kMostDims, "a kept tensor has at most 6 dimensions, got ", x.sizes());
    head.dtype = int64_t(x.scalar_type()), head.dims = x.dim();
    std::ranges::copy(x.sizes(), head.sizes);
    if (values) size = int64_t(x.nbytes());
  }
  const int64_t next = at_ + int64_t(sizeof(Head)) + aligned(size);
  check(next <= bytes_.numel(), "what backward needs takes more than the ", bytes_.numel(),
        " bytes kept for it");
  auto* to = static_cast<char*>(bytes_.data_ptr()) + at_;
  std::memcpy(to, &head, sizeof head);
  if (size) std::memcpy(to + sizeof head, x.contiguous().const_data_ptr(), size_t(size));
  at_ = next;
}

at::Tensor Keeping::take(bool values) {
  Head head;
  std::memcpy(&head, static_cast<const char*>(bytes_.const_data_ptr()) + at_, sizeof head);
  at_ += int64_t(sizeof head);
  if (head.dtype < 0) return {};
  const auto dtype = at::ScalarType(head.dtype);
  const at::IntArrayRef sizes(head.sizes, size_t(head.dims));
  if (!values) return at::empty(sizes, dtype);
  const int64_t size = c10::multiply_integers(sizes) * int64_t(c10::elementSize(dtype));
  const at::Tensor x = bytes_.narrow(0, at_, size).view(dtype).view(sizes);
  at_ += aligned(size);
  return x;
}

// The bytes of a tensor with the sizes of `like`, and what follows them.
at::Tensor Keeping::next(const at::Tensor& like) {
  const int64_t size = like.numel() * int64_t(like.element_size());
  check(at_ + size <= bytes_.numel(), "what backward needs takes more than the ", bytes_.numel(),
        " bytes kept for it");
  const at::Tensor x = bytes_.narrow(0, at_, size).view(like.scalar_type()).view(like.sizes());
  at_ += aligned(size);
  return x;
}

// The place of the first tensor that is x.
static size_t first_same(at::TensorList tensors, const at::Tensor& x) {
  return size_t(std::ranges::find_if(tensors, [&](auto& y) { return y.is_same(x); }) -
                tensors.begin());
}

void Keeping::put_values(at::TensorList tensors) {
  for (size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].defined() && first_same(tensors, tensors[i]) == i)
      next(tensors[i]).copy_(tensors[i]);
}

TensorVector Keeping::take_values(at::TensorList like) {
  TensorVector out(like.size());
  for (size_t i = 0; i < like.size(); ++i) {
    if (!like[i].defined()) continue;
    const size_t first = first_same(like, like[i]);
    out[i] = first < i ? out[first] : next(like[i]);
  }
  return out;
}

static void named(std::string_view execution, const char* pass, c10::function_ref<void()> run) {
  at::RecordFunction record(at::RecordScope::FUNCTION);
  if (record.isActive()) record.before(std::string(execution) + pass);
  run();
}

void profiled(std::string_view execution, c10::function_ref<void()> forward) {
  named(execution, " forward", forward);
}

static TensorVector both(std::pair<TensorVector, TensorVector> results) {
  auto& [all, saved] = results;
  all.insert(all.end(), saved.begin(), saved.end());
  return all;
}

// What forward of r returns.
static std::pair<TensorVector, TensorVector> run_forward(const Recorded& r) {
  const bool values = !r.last;
  const bool sized = keeping && r.saved > 0 && r.allocate;
  const bool kept = keeping && r.saved > 0 && !r.allocate && keeping->has_sizes();
  std::pair<TensorVector, TensorVector> results;
  if (sized && keeping->filled()) {
    const TensorVector all = keeping->take_values(both(r.allocate()));
    results.first.assign(all.begin(), all.begin() + int64_t(r.outputs));
    results.second.assign(all.begin() + int64_t(r.outputs), all.end());
    return results;
  }
  if (kept && keeping->filled()) {
    for (size_t i = 0; i < r.outputs; ++i) results.first.push_back(keeping->take(values));
    for (size_t i = 0; i < r.saved; ++i) results.second.push_back(keeping->take());
    return results;
  }
  profiled(r.execution, [&] { results = r.forward(); });
  if (kept) {
    for (const at::Tensor& x : results.first) keeping->put(x, values);
    for (const at::Tensor& x : results.second) keeping->put(x);
  } else if (sized) {
    keeping->put_values(both(results));
  }
  return results;
}

// A function of the inputs of recorded_again(), made of torch's operators.
using OfInputs = std::function<at::Tensor(const TensorVector&)>;

// The gradients of function(inputs) by those of `leaves` that need one, given that of its result.
static TensorVector gradients_of(std::string_view execution, const OfInputs& function,
                                 const TensorVector& inputs, const TensorVector& leaves,
                                 const at::Tensor& grad, bool keep) {
  TORCH_WARN_ONCE("'", std::string(execution), "' has only first gradients, one at a time: this ",
                  "backward pass runs 'reference' instead, which builds the T x S matrix");
  const at::Tensor o = function(inputs);
  TensorVector wanted, out(leaves.size());
  std::ranges::copy_if(leaves, std::back_inserter(wanted),
                       [](auto& x) { return x.defined() && x.requires_grad(); });
  const TensorVector d = torch::autograd::grad({o}, wanted, {grad}, true, keep, true);
  for (size_t i = 0, n = 0; i < leaves.size(); ++i)
    if (leaves[i].defined() && leaves[i].requires_grad()) out[i] = d[n++];
  return out;
}

// Another node for each, so that none is reached through another.
static TensorVector views(at::TensorList from) {
  TensorVector out;
  for (const at::Tensor& x : from)
    out.push_back(x.defined() && x.requires_grad() ? x.view_as(x) : x);
  return out;
}

// Whether nodes are recorded inside recorded_again().
static thread_local bool again_follows = false;

// The shape of a tensor that may be undefined.
struct Like {
  bool defined = false;
  std::vector<int64_t> sizes{};
  at::TensorOptions options{};

  static Like of(const at::Tensor& x) {
    return x.defined() ? Like{true, x.sizes().vec(), x.options()} : Like{};
  }
  at::Tensor zeros() const { return defined ? at::zeros(sizes, options) : at::Tensor(); }
};

struct Backward : torch::CustomClassHolder {
  explicit Backward(const Recorded& r)
      : execution(r.execution),
        inputs(r.inputs.size()),
        defined(size_t(std::ranges::count_if(r.inputs, &at::Tensor::defined))),
        run(r.backward) {}
  std::string_view execution;
  size_t inputs, defined;
  std::vector<Like> outputs;
  bool has_again = again_follows;
  decltype(Recorded::backward) run;

  // Of a node that is the whole of recorded_again(): its function, with the place of each of its
  // inputs among those of the node, or -1 and the input, a constant.
  OfInputs again;
  std::vector<int> places;
  TensorVector constants;

  TensorVector run_again(at::TensorList inputs, const at::Tensor& grad) const {
    const bool keep = c10::GradMode::is_enabled();
    const at::AutoGradMode mode(true);
    const TensorVector leaves = views(inputs);
    TensorVector all = constants;
    for (size_t i = 0; i < all.size(); ++i)
      if (places[i] >= 0) all[i] = leaves[size_t(places[i])];
    return gradients_of(execution, again, all, leaves, grad, keep);
  }
};

// The last node of this thread with one output.
struct LastNode {
  Backward* node = nullptr;  // alive as long as the output's graph
  const c10::TensorImpl* output = nullptr;
  std::vector<const c10::TensorImpl*> inputs;
};
static thread_local LastNode last_node;

struct Record : torch::autograd::Function<Record> {
  // torch takes the tensors of a TensorList as variables, and requires them to be defined.
  static TensorVector forward(AutogradContext* ctx, const Recorded& r, at::TensorList) {
    auto [outputs, saved] = run_forward(r);
    saved.insert(saved.begin(), r.inputs.begin(), r.inputs.end());
    ctx->save_for_backward(std::move(saved));
    const auto backward = c10::make_intrusive<Backward>(r);
    for (const at::Tensor& x : outputs) backward->outputs.push_back(Like::of(x));
    ctx->set_materialize_grads(false);
    ctx->saved_data["backward"] = c10::IValue::make_capsule(backward);
    last_node = {};
    if (again_follows && outputs.size() == 1) {
      last_node.node = backward.get(), last_node.output = outputs[0].unsafeGetTensorImpl();
      for (const at::Tensor& x : r.inputs) last_node.inputs.push_back(x.unsafeGetTensorImpl());
    }
    return outputs;
  }
  static TensorVector backward(AutogradContext* ctx, TensorVector grads) {
    const auto held = ctx->saved_data["backward"].toCapsule();
    const auto& backward = static_cast<const Backward&>(*held);
    if (std::ranges::none_of(grads, &at::Tensor::defined))  // behind a node of `Again`
      return TensorVector(1 + backward.defined);
    const bool again = c10::GradMode::is_enabled() || std::ranges::any_of(grads, is_batch);
    if (backward.has_again && again && !backward.again)
      return TensorVector(1 + backward.defined);  // `Again` has given them
    const TensorVector saved = ctx->get_saved_variables();
    const at::TensorList all = saved, inputs = all.slice(0, backward.inputs);
    const auto with_none = [&](const TensorVector& d) {
      TensorVector out(1);  // for `Recorded`
      for (size_t i = 0; i < d.size(); ++i)
        if (inputs[i].defined()) out.push_back(d[i]);
      return out;
    };
    if (again && backward.again) return with_none(backward.run_again(inputs, grads[0]));
    check(!c10::GradMode::is_enabled(), "double backward is supported only by 'reference', not '",
          backward.execution, "'");
    for (const at::Tensor& x : grads)  // kernels read its memory
      check(!x.defined() || (x.layout() == at::kStrided && x.has_storage() && !is_stand_in(x)),
            "a gradient of '", backward.execution,
            "' must be a plain dense tensor: vmap over gradients is not supported");
    const c10::DeviceGuard guard(inputs[0].device());
    for (size_t i = 0; i < grads.size(); ++i)
      if (!grads[i].defined()) grads[i] = backward.outputs[i].zeros();
    TensorVector d;
    named(backward.execution, " backward",
          [&] { d = backward.run(inputs, all.slice(backward.inputs), grads); });
    return with_none(d);
  }
};

TensorVector record(const Recorded& r) {
  TensorVector defined;
  std::ranges::copy_if(r.inputs, std::back_inserter(defined), &at::Tensor::defined);
  return Record::apply(r, at::TensorList(defined));
}

// Behind the last node of a run: passes the gradient on to it, or gives those of the inputs itself
// and none to the run.
struct Again : torch::autograd::Function<Again> {
  struct Held : torch::CustomClassHolder {
    std::string_view execution;
    OfInputs run;
  };
  struct Call {
    const TensorVector& inputs;
    c10::intrusive_ptr<Held> held;
  };

  static at::Tensor forward(AutogradContext* ctx, const Call& call, at::TensorList variables) {
    ctx->save_for_backward(call.inputs);
    ctx->saved_data["again"] = c10::IValue::make_capsule(call.held);
    return variables[0];  // the result; the others are the inputs that are defined
  }
  static TensorVector backward(AutogradContext* ctx, const TensorVector& grads) {
    constexpr size_t kFirst = 1;  // after `Call`
    const TensorVector saved = ctx->get_saved_variables();
    const size_t defined = size_t(std::ranges::count_if(saved, &at::Tensor::defined));
    TensorVector out(kFirst + 1 + defined);
    const bool keep = c10::GradMode::is_enabled();
    if (!keep && !is_batch(grads[0])) {
      out[kFirst] = grads[0];
      return out;
    }
    const auto held = ctx->saved_data["again"].toCapsule();
    const auto& again = static_cast<const Held&>(*held);
    const at::AutoGradMode mode(true);
    const TensorVector inputs = views(saved);
    const TensorVector d = gradients_of(again.execution, again.run, inputs, inputs, grads[0], keep);
    size_t place = kFirst;
    for (size_t i = 0; i < d.size(); ++i)
      if (saved[i].defined()) out[++place] = d[i];
    return out;
  }
};

// Lets the last node run `again` itself, if its result is o and it takes the inputs as they are.
static bool adopted(const at::Tensor& o, const TensorVector& inputs, const OfInputs& again) {
  const LastNode last = std::exchange(last_node, {});
  if (!last.node || last.output != o.unsafeGetTensorImpl()) return false;
  std::vector<int> places(inputs.size(), -1);
  TensorVector constants(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) continue;
    const auto at = std::ranges::find(last.inputs, inputs[i].unsafeGetTensorImpl());
    if (at != last.inputs.end())
      places[i] = int(at - last.inputs.begin());
    else if (inputs[i].requires_grad())
      return false;
    else
      constants[i] = inputs[i];
  }
  last.node->again = again, last.node->places = places, last.node->constants = constants;
  return true;
}

at::Tensor recorded_again(std::string_view execution, const TensorVector& inputs,
                          const std::function<at::Tensor()>& run, const OfInputs& again) {
  if (!needs_gradients(inputs)) return run();
  const struct Follows {
    bool before = std::exchange(again_follows, true);
    ~Follows() { again_follows = before; }
  } guard;
  last_node = {};
  const at::Tensor o = run();
  if (!o.requires_grad() || adopted(o, inputs, again)) return o;
  TensorVector variables{o};
  std::ranges::copy_if(inputs, std::back_inserter(variables), &at::Tensor::defined);
  const auto held = c10::make_intrusive<Again::Held>();
  held->execution = execution, held->run = again;
  return Again::apply(Again::Call{inputs, held}, at::TensorList(variables));
}

}  // namespace horner::attn::exec
