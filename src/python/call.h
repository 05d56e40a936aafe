// The arguments of the operators of Python on torch's stack, and the statistics of rows: what all
// kernels of ops.cpp read and return.
#pragma once

#include <ATen/ATen.h>
#include <torch/library.h>

#include "attn/inputs.h"
#include "core/check.h"
#include "python/spec.h"

namespace horner::python {

using attn::kInputCount;
using c10::IValue;
using torch::jit::Stack;
using Tensors = std::vector<at::Tensor>;

inline constexpr size_t kTensors = 3;  // q, k and v: the rows before the settings
inline constexpr const char* kSettings[] = {"str variant",  "str execution",      "str? mask",
                                            "float? scale", "float? temperature", "float? clamp"};
using Settings = std::array<IValue, std::size(kSettings)>;
inline constexpr size_t kArguments = kInputCount + std::size(kSettings);

// The arguments on the stack: what only this operator takes, q, k, v, the settings, the other
// inputs.
struct Call {
  std::vector<IValue> first;
  attn::Inputs inputs;
  Settings settings;

  static Call read(Stack& stack, size_t first = 0) {
    const size_t n = first + kArguments;
    auto at = stack.end() - std::ptrdiff_t(n);
    Call c;
    for (; c.first.size() < first; ++at) c.first.push_back(std::move(*at));
    for (const attn::Input& i : attn::input_table()) {
      if (&i == &attn::input_table()[kTensors])
        for (IValue& setting : c.settings) setting = std::move(*at++);
      if (at->isTensor()) c.inputs.*i.at = std::move(*at).toTensor();
      ++at;
    }
    torch::jit::drop(stack, n);
    return c;
  }
  // Calls an operator with these arguments.
  Stack operator()(const c10::OperatorHandle& op) const {
    Stack stack = first;
    stack.reserve(first.size() + kArguments);
    for (const attn::Input& i : attn::input_table()) {
      if (&i == &attn::input_table()[kTensors])
        stack.insert(stack.end(), settings.begin(), settings.end());
      const at::Tensor& x = inputs.*i.at;
      stack.push_back(x.defined() ? IValue(x) : IValue());
    }
    op.callBoxed(&stack);
    return stack;
  }
  at::Tensor& input(int64_t i) { return inputs.*attn::input_table()[size_t(i)].at; }
  const std::string& variant() const { return settings[0].toStringRef(); }
  const std::string& execution() const { return settings[1].toStringRef(); }
  attn::Spec spec() const {
    return make_spec(variant(), settings[2].toOptional<std::string>(),
                     settings[3].toOptional<double>(), settings[4].toOptional<double>(),
                     settings[5].toOptional<double>());
  }
};

// Statistics of each row, as one tensor [rows, B, H, T]: 0 none, 1 the log of its sum, 4 those of
// its weights.
struct Rows {
  int64_t rows;
  attn::Statistics found{.only_log_sum = rows == 1};

  Rows(int64_t rows, const Call& c) : rows(rows) {
    check(rows == 0 || rows == 1 || rows == 4, "rows must be 0, 1 or 4, got ", rows);
    if (rows == 1)
      check(attn::is<attn::Exp>(c.spec().weight), "variant '", c.variant(),
            "' has no log of a sum of exponentials: return_lse requires weight=exp");
  }
  std::vector<c10::SymInt> shape(const at::Tensor& q) const {
    return {rows, q.sym_size(0), q.sym_size(1), q.sym_size(2)};
  }
  static at::TensorOptions options(const at::Tensor& q) {
    return q.options().dtype(q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  }
  attn::Statistics* wanted() { return rows ? &found : nullptr; }
  at::Tensor tensor(const at::Tensor& q) const {
    if (rows == 0) return unwritten(q);
    if (rows == 1) return found.log_sum.unsqueeze(0);
    return at::stack({found.entropy, found.largest, found.first, found.negative});
  }
  at::Tensor unwritten(const at::Tensor& q) const { return at::empty_symint(shape(q), options(q)); }
};

}  // namespace horner::python
