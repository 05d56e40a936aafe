// What backward of `fused_cuda` needs of forward, kept as bytes between the two (attend_kept): on
// the emulated GPU, the gradients of a graph in two halves are those of one graph.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "attn/catalog.h"
#include "attn/inputs.h"
#include "instruments/verify.h"

namespace horner::attn {

using namespace instruments;
namespace {

using Tensors = std::vector<at::Tensor>;

// The inputs without their graph, and those that have gradients, which require them.
std::pair<Inputs, Tensors> leaves_of(Inputs in) {
  Tensors leaves;
  for (const Input& i : input_table()) {
    at::Tensor& x = in.*i.at;
    if (!x.defined()) continue;
    x = x.detach();
    if (has_gradient(i)) leaves.push_back(x.requires_grad_());
  }
  return {in, leaves};
}

// The result, then the gradients of the inputs.
Tensors results(const Spec& spec, const Inputs& given, const at::Tensor& grad,
                const at::Tensor& kept) {
  const auto [in, leaves] = leaves_of(given);
  const at::Tensor o = attend_kept(spec, in, "fused_cuda", nullptr, {}, kept, true);
  Tensors all = torch::autograd::grad({o}, leaves, {grad}, true, false, true);
  all.push_back(o.detach());
  return all;
}

bool equal(const Tensors& a, const Tensors& b) {
  return std::ranges::equal(a, b, [](auto& x, auto& y) {
    return x.defined() == y.defined() && (!x.defined() || at::equal(x, y));
  });
}

TEST(EmulatedKept, BackwardReadsWhatForwardKept) {
  int ran = 0;
  for (at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kFloat})
    for (const Variant& v : variants()) {
      const Case c{1, 2, 1, 13, 13, 8, 8, dtype, at::kCPU, 0, false, true};
      const Inputs in = random_inputs(v.spec, c);
      const Execution& e = execution("fused_cuda");
      const int64_t needed = e.kept(v.spec, in).expect_int();
      if (needed == 0 || !e.why_not(v.spec, in).empty()) continue;
      SCOPED_TRACE(v.name + " " + c10::toString(dtype));
      ++ran;
      Inputs first = leaves_of(in).first;
      const at::Tensor kept = at::empty({needed}, at::kByte).fill_(0xff);
      const at::Tensor o = attend_kept(v.spec, first, "fused_cuda", nullptr, {}, kept, false);
      const at::Tensor grad = at::randn_like(o);
      const Tensors whole = results(v.spec, in, grad, {});
      EXPECT_TRUE(at::equal(o, whole.back()));
      for (int time = 0; time < 2; ++time)
        EXPECT_TRUE(equal(results(v.spec, in, grad, kept), whole));
      kept.fill_(0xff);  // as NaN: without a forward pass of its own, the result is one
      EXPECT_TRUE(results(v.spec, in, grad, kept).back().isnan().any().item<bool>());
    }
  EXPECT_GT(ran, 3 * 70);
}

}  // namespace
}  // namespace horner::attn
