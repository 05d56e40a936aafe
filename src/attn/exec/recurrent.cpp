// One token after the other through a State, as a decoder goes. Its gradients are those of the same
// sums, in chunks.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "attn/exec/chunked.h"
#include "attn/exec/exec.h"
#include "attn/inputs.h"
#include "attn/state.h"

namespace horner::attn::exec {

static at::Tensor one_by_one(const Spec& spec, const Inputs& in) {
  const int64_t T = in.q.size(2), S = in.k.size(2), B = in.q.size(0), G = in.k.size(1);
  Inputs whole = in;  // with queries for the first keys, which nobody asks
  for (const Input& i : input_table()) {
    at::Tensor& x = whole.*i.at;
    const size_t axis = std::string_view(i.shape).find('T');
    if (S == T || !x.defined() || axis == std::string_view::npos) continue;
    std::vector<int64_t> shape = x.sizes().vec();
    shape[axis] = S - T;
    x = at::cat({at::zeros(shape, x.options()), x}, int64_t(axis));
  }
  whole.cu_seqlens = at::Tensor();
  std::vector<int64_t> cuts{0, S};
  if (in.cu_seqlens.defined()) {
    const at::Tensor c = in.cu_seqlens.to(at::kLong).contiguous();
    cuts.assign(c.data_ptr<int64_t>(), c.data_ptr<int64_t>() + c.numel());
  }
  std::vector<at::Tensor> results;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    State state = make_state(spec, {B, G, in.k.size(3), in.v.size(3)}, in.q.scalar_type(), 1);
    for (int64_t t = cuts[i]; t < cuts[i + 1]; ++t)
      results.push_back(step(state, tokens(whole, t, t + 1)));
  }
  return at::cat(results, 2).narrow(2, S - T, T);
}

// A value, with the gradients of another way to compute it.
struct WithGradients : torch::autograd::Function<WithGradients> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& value,
                            const at::Tensor&) {
    return value.clone();
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*,
                                          const std::vector<at::Tensor>& grads) {
    return {at::Tensor(), grads[0]};
  }
};

static at::Tensor run(const Spec& spec, const Inputs& in, Statistics*) {
  const at::Tensor o = one_by_one(spec, in);
  bool gradients = false;
  for (const Input& i : input_table())
    gradients |= (in.*i.at).defined() && (in.*i.at).requires_grad();
  if (!gradients || !at::GradMode::is_enabled()) return o;
  return WithGradients::apply(o, attend_in_chunks(spec, in, cut(spec, in)));
}

// Each token reads and writes the whole state, at some tenth of the speed of products of matrices,
// and takes a few dozen tensor operations.
static double work(const Spec& spec, const Inputs& in) {
  constexpr double kSlower = 10, kOverhead = 1e6;
  const double sums = work_by_token(spec, in.k.size(2), in.q.size(-1), in.v.size(-1));
  return double(in.q.size(0) * in.q.size(1)) * sums * kSlower + kOverhead * double(in.k.size(2));
}

static std::string why_not(const Spec& spec, const Inputs& in) {
  const std::string reason = why_no_sums(spec, in);
  if (!reason.empty()) return reason;
  return why_too_large(spec, {in.q.size(0), in.k.size(1), in.q.size(-1), in.v.size(-1)});
}

const Execution recurrent{
    .name = "recurrent",
    .about = "one token after the other, through a state",
    .why_not = why_not,
    .run = run,
    .statistics = false,
    .work = work,
};

}  // namespace horner::attn::exec
