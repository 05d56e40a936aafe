// attn::State as torch.classes.horner.State.
#include "attn/state.h"

#include <ATen/ATen.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <map>

#include "attn/inputs.h"
#include "attn/join.h"
#include "attn/spec_text.h"
#include "core/check.h"
#include "python/spec.h"

namespace horner::python {

using attn::kInputCount;

struct Stream : torch::CustomClassHolder {
  attn::State state;
  explicit Stream(attn::State s) : state(std::move(s)) {}
};
using StreamPtr = c10::intrusive_ptr<Stream>;

static bool has_states(at::ScalarType t) {
  return t == at::kDouble || t == at::kFloat || t == at::kBFloat16 || t == at::kHalf;
}

// `shape`: B, G, D, E.
static StreamPtr make_stream(const std::string& variant, const Text& mask, Number scale,
                             Number temperature, Number clamp, const std::vector<int64_t>& shape,
                             at::ScalarType dtype, at::Device device) {
  const attn::StateShape s{shape.at(0), shape.at(1), shape.at(2), shape.at(3)};
  const attn::Spec spec = make_spec(variant, mask, scale, temperature, clamp);
  attn::check_spec(spec);
  check(has_states(dtype), "a state has dtype float64, float32, bfloat16 or float16, got ",
        attn::dtype_name(dtype));
  check(device.is_cpu() || device.is_cuda(), "a state is on the CPU or on a CUDA device, got ",
        device);
  return c10::make_intrusive<Stream>(attn::make_state(spec, s, dtype, attn::kWaiting, device));
}

// What a state holds keeps its dtype under autocast.
struct WithoutAutocast {
  c10::impl::ExcludeDispatchKeyGuard off{c10::autocast_dispatch_keyset};
};

// `tensors`: in the order of the table.
static at::Tensor step(const StreamPtr& self,
                       const std::vector<std::optional<at::Tensor>>& tensors) {
  check(tensors.size() == kInputCount, "step expects ", kInputCount, " inputs, got ",
        tensors.size());
  attn::Inputs in;
  for (size_t i = 0; i < kInputCount; ++i)
    in.*attn::input_table()[i].at = tensors[i].value_or(at::Tensor());
  const WithoutAutocast exact;
  return attn::step(self->state, in);
}

// A copy with these rows of the batch.
static StreamPtr select(const StreamPtr& self, const at::Tensor& rows) {
  return c10::make_intrusive<Stream>(attn::select(self->state, rows));
}

// The streams of all states as the rows of one batch.
static StreamPtr joined(const std::vector<StreamPtr>& all) {
  std::vector<attn::State> states;
  for (const StreamPtr& s : all) states.push_back(s->state);
  const WithoutAutocast exact;
  return c10::make_intrusive<Stream>(attn::joined(states));
}

// Appends the tokens of `later`.
static void merge(const StreamPtr& self, const StreamPtr& later) {
  const WithoutAutocast exact;
  attn::merge(self->state, self == later ? attn::snapshot(later->state) : later->state);
}

// A state as it is pickled: its spec, its numbers, and its tensors, of which some may be undefined.
using Pickled =
    std::tuple<std::string, std::vector<int64_t>, std::vector<std::optional<at::Tensor>>>;

static Pickled pickled(const StreamPtr& self) {
  attn::State s = attn::snapshot(self->state);
  std::vector<std::optional<at::Tensor>> held;
  for (const auto& [name, x] : attn::tensors_of(s))
    held.push_back(x->defined() ? std::optional(*x) : std::nullopt);
  return {attn::text(s.spec),
          {s.shape.B, s.shape.G, s.shape.D, s.shape.E, int64_t(s.dtype), s.tokens, s.room, s.held},
          held};
}

static at::ScalarType dtype_of(int64_t number) {
  const auto dtype = at::ScalarType(number);
  check(int64_t(dtype) == number && has_states(dtype),
        "a saved state has dtype float64, float32, bfloat16 or float16, got the number ", number,
        ": the file is damaged");
  return dtype;
}

static StreamPtr unpickled(const Pickled& from) {
  const auto& [spec, n, held] = from;
  attn::State names{attn::Spec{}, {}, at::kFloat, false};
  const auto all = attn::tensors_of(names);
  check(n.size() == 8 && held.size() == all.size(),
        "this state was saved by another version of horner");
  std::map<std::string, at::Tensor> tensors;
  for (size_t i = 0; i < all.size(); ++i)
    if (held[i]) tensors[all[i].first] = *held[i];
  return c10::make_intrusive<Stream>(attn::state_of(attn::with(attn::Spec{}, spec),
                                                    {n[0], n[1], n[2], n[3]}, dtype_of(n[4]),
                                                    {n[5], n[6], n[7]}, tensors, "a saved state"));
}

static int64_t bytes(const StreamPtr& self) {
  int64_t n = 0;
  for (const auto& [name, x] : attn::tensors_of(self->state))
    if (x->defined()) n += int64_t(x->nbytes());
  return n;
}

TORCH_LIBRARY_FRAGMENT(horner, m) {
  m.class_<Stream>("State")
      .def(torch::init(&make_stream))
      .def("step", &step)
      .def("select", &select)
      .def("merge", &merge)
      .def_static("joined", &joined)
      .def("tokens", [](const StreamPtr& self) { return self->state.tokens; })
      .def("bytes", &bytes)
      .def("pickled", &pickled)
      .def_static("unpickled", &unpickled);
}

}  // namespace horner::python
