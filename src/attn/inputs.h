// The table of inputs: what each is called, who needs it and what shape it has.
#pragma once

#include <span>

#include "attn/attend.h"

namespace horner::attn {

// How an input is used, hence what values make sense in it.
enum class Role { tensor, gate, log_gate, parameter, mask };

struct Input {
  const char* name;
  at::Tensor Inputs::* at;
  const char* shape;  // letters of attend.h, one a dimension; 'n' is any length; a digit is itself
  Role role;
  bool (*wanted)(const Spec&);  // null: every variant may have it
  const char* about;
};

std::span<const Input> input_table();

// Tokens from <= t < to of one stream: of every input that has tokens, keys' and queries' alike.
Inputs tokens(Inputs, int64_t from, int64_t to);

std::string dtype_name(at::ScalarType);  // "float32"

// Throws, naming what was wanted and what came, unless the inputs are those that the spec takes.
void check_inputs(const Spec&, const Inputs&);

}  // namespace horner::attn
