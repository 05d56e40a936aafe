// horner::attend of q, k and v alone, the most common call: to read the thirty arguments of the
// whole operator takes longer than attention to a few tokens.
#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "attn/inputs.h"
#include "python/spec.h"

namespace horner::python {

// Whether nothing but autograd stands between these tensors and their kernels: no transform,
// tracing, autocast or mode.
static bool plain(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  using Key = c10::DispatchKey;
  static const c10::DispatchKeySet expected({Key::CPU, Key::CUDA, Key::AutogradCPU,
                                             Key::AutogradCUDA, Key::ADInplaceOrView,
                                             Key::BackendSelect});
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  const c10::DispatchKeySet keys =
      (q.key_set() | k.key_set() | v.key_set() | local.included_) - local.excluded_;
  return (keys.raw_repr() & ~expected.raw_repr()) == 0;
}

static at::Tensor attend_quick(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const std::string& variant, const std::string& execution) {
  if (plain(q, k, v)) {
    attn::Inputs in;
    in.q = q, in.k = k, in.v = v;
    return attn::attend_again(make_spec(variant, std::nullopt), in, execution, nullptr, variant)
        .contiguous();
  }
  static const auto& op = *new c10::OperatorHandle(
      c10::Dispatcher::singleton().findSchemaOrThrow("horner::attend", ""));
  torch::jit::Stack stack{q, k, v, variant, execution};
  stack.resize(op.schema().arguments().size());  // the rest are None
  op.callBoxed(&stack);
  return stack.at(0).toTensor();
}

TORCH_LIBRARY_FRAGMENT(horner, m) {
  m.def("attend_quick(Tensor q, Tensor k, Tensor v, str variant, str execution) -> Tensor",
        &attend_quick);
}

}  // namespace horner::python
