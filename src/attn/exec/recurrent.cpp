// One token after another through a State, as a decoder runs. Its gradients are those of `chunked`,
// which computes the same sums.
#include <ATen/ATen.h>

#include "attn/exec/autograd.h"
#include "attn/exec/chunked.h"
#include "attn/exec/exec.h"
#include "attn/inputs.h"
#include "attn/state.h"

namespace horner::attn::exec {

static at::Tensor one_by_one(const Spec& spec, const Inputs& in) {
  const int64_t T = in.q.size(2), S = in.k.size(2), B = in.q.size(0), G = in.k.size(1);
  Inputs whole = in;  // with unused queries for the first keys
  for (const Input& i : input_table()) {
    at::Tensor& x = whole.*i.at;
    const int64_t axis = axis_of(i, "T");
    if (S == T || !x.defined() || axis < 0) continue;
    std::vector<int64_t> shape = x.sizes().vec();
    shape[size_t(axis)] = S - T;
    x = at::cat({at::zeros(shape, x.options()), x}, axis);
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

static at::Tensor run(const Spec& spec, const Inputs& in, Statistics*) {
  const at::Tensor o = one_by_one(spec, in);
  TensorVector all;
  for (const Input& i : input_table()) all.push_back(in.*i.at);
  if (!needs_gradients(all)) return o;
  const TensorVector chunks{attend_in_chunks(spec, in, cut(spec, in))};
  return record({"recurrent", chunks, 1, 0, true,
                 [&] { return std::pair(TensorVector{o.clone()}, TensorVector{}); },
                 [](auto, auto, at::TensorList grads) { return grads.vec(); }})[0];
}

// Each token reads and writes the whole state, at about a tenth of the speed of matrix products,
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
    .about = "one token after another, through a state",
    .why_not = why_not,
    .run = run,
    .statistics = false,
    .work = work,
};

}  // namespace horner::attn::exec
