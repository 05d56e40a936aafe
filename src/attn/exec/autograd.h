// The one adapter between an execution and torch's autograd. An execution gives it
//   Tensors, whose fields(x) points to each differentiable input,
//   Result, whose outputs(r) points to what the caller uses and saved(r) to what backward needs,
//   Result forward(const Job&, const Tensors&, bool for_backward),
//   Tensors backward(const Job&, const Tensors&, const Result& saved, const Result& grads),
// where `grads` has the gradients of the outputs, all defined. Other tensors may be undefined. All
// inputs are saved, so changing one in place before backward is an error, as in torch.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/FunctionRef.h>

#include <array>
#include <functional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace horner::attn::exec {

using TensorVector = std::vector<at::Tensor>;

// Whether gradients are enabled and one of the tensors, of which some may be undefined, needs them.
bool needs_gradients(at::TensorList);

// Whether the current backward pass keeps its graph. Otherwise it may overwrite saved tensors.
bool keeps_graph();

// While one exists, the nodes that this thread records write what they save to `bytes`, or, if that
// is `filled`, read it from there and do not run forward. Nodes that save nothing run forward. The
// values of outputs that no later gradient needs are not there. On the CPU each tensor lies behind
// its dtype and sizes. On a GPU there are no sizes, for which the host would wait: the node
// allocates tensors like those it kept (Recorded::allocate). Nodes without it run forward there.
class Keeping {
 public:
  Keeping(const at::Tensor& bytes, bool filled);
  Keeping(const Keeping&) = delete;
  ~Keeping();

  void put(const at::Tensor& x, bool values = true);
  at::Tensor take(bool values = true);
  // The same without sizes, of tensors of which some may be undefined or the same.
  void put_values(at::TensorList);
  TensorVector take_values(at::TensorList like);
  bool filled() const { return filled_; }
  bool has_sizes() const { return bytes_.is_cpu(); }

 private:
  at::Tensor next(const at::Tensor& like);

  at::Tensor bytes_;
  bool filled_;
  int64_t at_ = 0;
  Keeping* before_;
};
c10::SymInt kept_bytes(const c10::SymInt& elements, int64_t size);  // of one tensor

// Runs forward under a name that torch.profiler shows.
void profiled(std::string_view execution, c10::function_ref<void()> forward);

// An execution without its types: tensors in the order of its fields.
struct Recorded {
  std::string_view execution;
  const TensorVector& inputs;
  size_t outputs, saved;  // how many tensors forward returns
  bool last;              // no gradient of what the execution makes of the outputs needs them
  std::function<std::pair<TensorVector, TensorVector>()> forward;  // outputs, saved
  std::function<TensorVector(at::TensorList inputs, at::TensorList saved, at::TensorList grads)>
      backward;
  std::function<std::pair<TensorVector, TensorVector>()> allocate = {};  // the same, unwritten
};
TensorVector record(const Recorded&);  // the outputs, as a node of the graph

// run(), a function of `inputs` with nodes of record(). Where a backward pass keeps a graph of its
// own or has a batch of gradients, which those nodes cannot, the gradients are those of
// again(inputs), made of torch's operators.
at::Tensor recorded_again(std::string_view execution, const TensorVector& inputs,
                          const std::function<at::Tensor()>& run,
                          const std::function<at::Tensor(const TensorVector&)>& again);

// What the kernels with an epilogue take. All but q, k and v may be undefined.
struct FusedTensors {
  at::Tensor q, k, v, centre, decay, gate, divisor, out_gate, post_gate, norm_weight, norm_bias,
      sink, bias;

  static auto fields(auto& x) {
    return std::array{&x.q,         &x.k,       &x.v,        &x.centre,    &x.decay,
                      &x.gate,      &x.divisor, &x.out_gate, &x.post_gate, &x.norm_weight,
                      &x.norm_bias, &x.sink,    &x.bias};
  }
};

// A result of one tensor, whose backward needs only the inputs.
struct Output {
  at::Tensor y;

  static auto outputs(auto& r) { return std::array{&r.y}; }
  static auto saved(auto& r) { return std::array<decltype(&r.y), 0>{}; }
};

template <class Fields>
TensorVector pack(const Fields& fields) {
  TensorVector out;
  for (const at::Tensor* x : fields) out.push_back(*x);
  return out;
}
template <class Fields>
void unpack(at::TensorList from, const Fields& fields) {
  for (size_t i = 0; i < fields.size(); ++i) *fields[i] = from[i];
}

// forward(job, x), of which only the outputs are defined where gradients are needed. `last` and
// `allocate`: see Recorded.
template <class Job, class Tensors, class Result>
Result differentiable(
    std::string_view execution, const Job& job, const Tensors& x,
    Result (*forward)(const Job&, const Tensors&, bool),
    Tensors (*backward)(const Job&, const Tensors&, const Result&, const Result&),
    bool last = false,
    std::type_identity_t<Result (*)(const Job&, const Tensors&)> allocate = nullptr) {
  const TensorVector inputs = pack(Tensors::fields(x));
  Result r;
  if (!needs_gradients(inputs)) {
    profiled(execution, [&] { r = forward(job, x, false); });
    return r;
  }
  const auto packed = [](const Result& r) {
    return std::pair(pack(Result::outputs(r)), pack(Result::saved(r)));
  };
  const auto run_forward = [&] { return packed(forward(job, x, true)); };
  const auto run_backward = [job, backward](at::TensorList inputs, at::TensorList saved,
                                            at::TensorList grads) {
    Tensors x;
    Result r, d;
    unpack(inputs, Tensors::fields(x));
    unpack(saved, Result::saved(r)), unpack(grads, Result::outputs(d));
    const Tensors dx = backward(job, x, r, d);
    return pack(Tensors::fields(dx));
  };
  const size_t outputs = Result::outputs(r).size(), saved = Result::saved(r).size();
  Recorded node{execution, inputs, outputs, saved, last, run_forward, run_backward};
  if (allocate) node.allocate = [&] { return packed(allocate(job, x)); };
  unpack(record(node), Result::outputs(r));
  return r;
}

}  // namespace horner::attn::exec
