// The table of inputs: the name, shape, role and meaning of each, and which variants require it.
// C++, the operator of Python, its keywords and its documentation are all made from these rows.
#pragma once

#include <span>

#include "attn/attend.h"

namespace horner::attn {

// How an input is used, hence which values make sense in it: a gate is in (0, 1), a log_gate its
// logarithm, a logit any number, a constant a parameter that is not learned. What is added to
// scores and what masks them is not a layer's own.
enum class Role { tensor, gate, log_gate, logit, parameter, constant, score, mask };

struct Input {
  const char* name;
  at::Tensor Inputs::* at;
  // Letters of attend.h, one a dimension; 'n' is any length, a digit is itself. An axis in lower
  // case may have size 1, for all.
  const char* shape;
  Role role;
  bool (*wanted)(const Spec&);  // null: optional for every variant
  const char* about;
  const char* with_channels = nullptr;  // its shape in a spec with channel_gates, where it differs
};

inline const char* shape(const Input& i, const Spec& s) {
  return i.with_channels && s.channel_gates ? i.with_channels : i.shape;
}

inline bool has_gradient(const Input& i) {
  return i.role != Role::mask && i.role != Role::constant;
}

inline constexpr size_t kInputCount = sizeof(Inputs) / sizeof(at::Tensor);
std::span<const Input, kInputCount> input_table();  // q, k and v come first

// The first axis of an input whose letter is one of `letters`; -1 for none.
int64_t axis_of(const Input&, std::string_view letters);

std::string shape_text(const char* shape);  // "bH3" as "[B or 1, H, 3]"

// Tokens from <= t < to of one stream: of every input that has tokens, keys' and queries' alike.
Inputs tokens(Inputs, int64_t from, int64_t to);

std::string dtype_name(at::ScalarType);  // "float32"

// Whether a transform or a mode of torch, or a subclass, is at work on the tensor: its memory is
// not that of its numbers, which cannot be read.
bool is_wrapped(const at::Tensor&);      // of the tensor itself
bool is_transformed(const at::Tensor&);  // or of this thread

// An error if the storage of a plain tensor was freed or made smaller.
void check_storage(const char* name, const at::Tensor&);

// Throws unless the inputs are those that the spec requires. The messages name `variant` where it
// is given.
void check_inputs(const Spec&, const Inputs&, std::string_view variant = {});

}  // namespace horner::attn
