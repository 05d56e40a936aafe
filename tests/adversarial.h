// What the tests of wrong and awkward inputs share: outcomes of calls, and when one is right.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <cctype>
#include <set>

#include "attn/catalog.h"
#include "attn/inputs.h"
#include "attn/spec_text.h"
#include "core/check.h"
#include "instruments/verify.h"

namespace horner::attn {

using namespace instruments;

inline void PrintTo(const Variant& v, std::ostream* out) {  // in the names of tests
  *out << v.name;
}

// A text with every number as one '#'.
inline std::string without_numbers(const std::string& s) {
  std::string out;
  for (const char c : s) {
    const bool digit = std::isdigit(static_cast<unsigned char>(c)) || c == '.';
    if (!digit)
      out += c;
    else if (!out.ends_with('#'))
      out += '#';
  }
  return out;
}
// One variant of each combination of stages, whatever their numbers.
inline std::vector<Variant> kinds() {
  std::set<std::string> known;
  std::vector<Variant> out;
  for (const Variant& v : variants())
    if (known.insert(without_numbers(text(v.spec))).second) out.push_back(v);
  return out;
}
// One variant of each set of inputs.
inline std::vector<Variant> sets_of_inputs() {
  std::set<std::string> known;
  std::vector<Variant> out;
  for (const Variant& v : variants()) {
    std::string names;
    for (const Input& i : input_table()) names += i.wanted && i.wanted(v.spec) ? '1' : '0';
    if (known.insert(names).second) out.push_back(v);
  }
  return out;
}

inline bool is_value(const Input& i) {
  return i.role != Role::mask;
}

// What came of a call: an error, or tensors.
struct Outcome {
  std::string error, foreign;                          // of horner::Error, and of any other
  std::vector<std::pair<std::string, at::Tensor>> of;  // "output", "d q", "entropy", ...
};

template <class F>
inline Outcome outcome_of(const F& call) {
  Outcome r;
  try {
    call(r);
  } catch (const Error& e) {
    r.error = e.what();
  } catch (const std::exception& e) {
    r.foreign = e.what();
  }
  return r;
}

inline Inputs in_dtype(Inputs in, at::ScalarType dtype) {
  for (const Input& i : input_table())
    if (is_value(i) && (in.*i.at).defined()) in.*i.at = (in.*i.at).to(dtype);
  return in;
}

inline Outcome forward_of(const Spec& spec, const Inputs& in, const Execution& e) {
  return outcome_of([&](Outcome& r) { r.of.emplace_back("output", attend(spec, in, e.name)); });
}

// Output, gradients and, if the execution has them, statistics.
inline Outcome attended(const Spec& spec, const Inputs& given, const Execution& e,
                        const at::Tensor& direction = {}) {
  return outcome_of([&](Outcome& r) {
    Inputs in = given;
    for (const Input& i : input_table()) {
      at::Tensor& x = in.*i.at;
      if (x.defined() && has_gradient(i) && x.is_floating_point()) x = x.detach().requires_grad_();
    }
    const at::Tensor o = attend(spec, in, e.name);
    r.of.emplace_back("output", o.detach());
    if (o.requires_grad())
      o.backward(direction.defined() ? direction.to(o.options())
                                     : at::cos(at::arange(o.numel(), o.options())).view_as(o));
    for (const Input& i : input_table()) {
      const at::Tensor& x = in.*i.at;
      if (x.defined() && x.requires_grad())
        r.of.emplace_back(std::string("d ") + i.name,
                          x.grad().defined() ? x.grad() : at::zeros_like(x));
    }
    if (!e.statistics) return;
    Statistics s;
    const c10::NoGradGuard without;
    attend(spec, in, e.name, &s);
    r.of.emplace_back("entropy", s.entropy), r.of.emplace_back("largest", s.largest);
    r.of.emplace_back("first", s.first), r.of.emplace_back("negative", s.negative);
  });
}

inline std::vector<const Execution*> able(const Spec& spec, const Inputs& in) {
  std::vector<const Execution*> out;
  for (const Execution* e : executions())
    if (e->name != "reference" && e->why_not(spec, in).empty()) out.push_back(e);
  return out;
}

// Whether a message has the name of an input as a word of its own.
inline bool names(const std::string& message, const std::string& input) {
  const auto part = [&](size_t i) {
    return i < message.size() &&
           (std::islower(static_cast<unsigned char>(message[i])) || message[i] == '_');
  };
  for (size_t at = message.find(input); at != std::string::npos; at = message.find(input, at + 1))
    if ((at == 0 || !part(at - 1)) && !part(at + input.size())) return true;
  return false;
}
inline bool names_any(const std::string& message) {
  return std::ranges::any_of(input_table(), [&](const Input& i) { return names(message, i.name); });
}

// 0 for a number, then NaN, inf and -inf.
inline at::Tensor kind(const at::Tensor& x) {
  return x.isnan().to(at::kInt) + 2 * x.isposinf().to(at::kInt) + 3 * x.isneginf().to(at::kInt);
}
inline at::Tensor numbers(const at::Tensor& x) {
  return x.nan_to_num(0, 0, 0).to(at::kDouble);
}

// What is right: the reference in the dtype of the inputs and in double, and before the inputs were
// spoiled. `affected` [B, H, T]: the rows that see what was spoiled.
struct Right {
  Outcome same, exact, clean;
  at::Tensor affected;
  at::Tensor empty;        // [1 or B, 1, T, 1]: rows that see no key, 0 or 0 * NaN
  bool parameter = false;  // one that multiplies all scores was spoiled: inf - inf in another order
  // The delta rule: one value that is not finite makes all later ones so, and what is NaN of a row
  // depends on the order of its sums.
  bool spreads = false;
};

// Tensor n of the outcomes: where it is right.
inline at::Tensor is_right(const at::Tensor& found, const Right& right, size_t n) {
  const std::string& of = right.same.of[n].first;
  const bool result = n == 0, gradient = of.starts_with("d ");
  const at::Tensor &same = right.same.of[n].second, &exact = right.exact.of[n].second;
  const at::Tensor& clean = (right.clean.of.empty() ? right.same : right.clean).of[n].second;
  const at::Tensor is = kind(found), should = kind(same), agreed = should == kind(exact);
  const at::Tensor no = at::zeros_like(agreed);
  at::Tensor affected = no;
  if (right.affected.defined() && !gradient)
    affected = (result ? right.affected.unsqueeze(-1) : right.affected).expand_as(found);
  // Within a multiple of the reference's own error, of the row or for sums over rows of all, and of
  // what rounding does to numbers of this size.
  const double ulp = found.scalar_type() == at::kDouble ? 2e-16 : 1e-7;
  const double few = result ? 256 * ulp : gradient ? 1024 * ulp : 1e-3;  // statistics: short cuts
  const at::Tensor own = (numbers(same) - numbers(exact)).abs().masked_fill(~agreed, 0);
  const at::Tensor usual = numbers(clean).square().mean().sqrt();
  const auto close = [&](const at::Tensor& to, const at::Tensor& own) {
    const at::Tensor all = numbers(to).abs(),
                     size = (gradient ? all.max() : all.amax(-1, true)) + usual;
    return (is == 0) & ((numbers(found) - numbers(to)).abs() <= 8 * own + few * size);
  };
  at::Tensor yes = (should == 0) & close(exact, gradient ? own.max() : own.amax(-1, true));
  yes = yes | ((should > 0) & (is > 0));
  yes = yes | ((should > 0) & ~affected & close(clean, no));
  // Overflow in one of the dtypes: not a number, or one of the two.
  yes = yes | (~agreed & ((is > 0) | close(exact, no) | close(same, no)));
  const at::Tensor bad = (kind(right.same.of[0].second) + kind(right.exact.of[0].second)) > 0;
  if (result && right.empty.defined()) yes = yes | (right.empty & (is > 0));
  if (right.parameter) yes = yes | (affected & (is > 0));
  if (result) yes = yes | (bad.any(-1, true) & (is > 0));  // inf - inf of another order, in a norm
  if (gradient) {  // of what has no numbers; other sequences of the batch keep theirs
    const bool by_batch = std::ranges::any_of(input_table(), [&](const Input& i) {
      return of == std::string("d ") + i.name && i.shape[0] == 'B';
    });
    at::Tensor none = by_batch ? bad.flatten(1).any(1) : bad.any();
    while (by_batch && none.dim() < found.dim()) none = none.unsqueeze(-1);
    yes = yes | none;
  }
  if (!result && !gradient) yes = yes | (bad.any(-1) & (is == 1));
  return yes;
}

// "" if the outcome is right, else what is wrong.
inline std::string difference(const Outcome& found, const Right& right) {
  if (!found.foreign.empty()) return "not a horner::Error: " + found.foreign;
  if (found.error != right.same.error)
    return "'" + found.error + "', not '" + right.same.error + "'";
  for (size_t n = 0; n < found.of.size(); ++n) {
    const auto& [of, x] = found.of[n];
    const at::Tensor same = right.same.of[n].second;
    if (x.sizes() != same.sizes()) return of + ": another shape";
    if (x.numel() == 0) continue;
    at::Tensor wrong = ~is_right(x, right, n);
    if (right.spreads) wrong = wrong.logical_and(same.isnan().logical_not());
    if (!wrong.any().item<bool>()) continue;
    const auto first = [&](const at::Tensor& y) {
      return y.masked_select(wrong)[0].item<double>();
    };
    std::ostringstream s;
    const at::Tensor place = wrong.nonzero()[0].contiguous();
    s << of << ": " << wrong.sum().item<int64_t>() << " of " << x.numel() << " wrong, the first at "
      << std::vector<int64_t>(place.data_ptr<int64_t>(), place.data_ptr<int64_t>() + place.numel())
      << ": " << first(x) << ", not " << first(same) << " (" << first(right.exact.of[n].second)
      << " in double)";
    return s.str();
  }
  return "";
}

}  // namespace horner::attn
