// Every input of every variant, wrong or awkward in every way of a table, on every execution, in a
// state and with statistics. Wrong: one horner::Error, the same for all, that names the input.
// Otherwise: what the definition gives. Where the reference has a number, in float32 and in double,
// every execution has this number; where it has none (NaN, infinities), none has one. Gradients are
// compared where all results are numbers, and for the sequences of a batch of which all are.
//
// A NaN or infinity may reach rows that do not see it: 0 * NaN in a product of matrices. The
// reference is the limit of that.
#include "adversarial.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "attn/stages.h"
#include "attn/state.h"

namespace horner::attn {
namespace {

const bool kOneThread = (at::set_num_threads(1), true);  // the inputs are small

// A case for each kind of mask: more tokens than a tile of fused_cpu and than a chunk.
constexpr int64_t kTokens = 70;
// Padding and packing for one variant of each set of inputs.
std::vector<Case> cases_of(const Variant& v) {
  const Case plain{.B = 1, .H = 2, .G = 2, .T = kTokens, .S = kTokens, .D = 5, .E = 6, .seed = 1};
  Case padded = plain, packed = plain;
  padded.padded = true, padded.T = 40, padded.B = 2, padded.G = 1, packed.packed = true;
  for (const Variant& other : sets_of_inputs())
    if (other.name == v.name) return {plain, padded, packed};
  return {plain};
}

// Wrong.

struct Wrong {
  const char* name;
  bool (*applies)(const Input&);
  at::Tensor (*of)(const Input&, const at::Tensor&);
};
bool any(const Input&) {
  return true;
}
template <at::ScalarType dtype>
at::Tensor as(const Input&, const at::Tensor& x) {
  return x.to(dtype);
}
// clang-format off
const Wrong kWrong[] = {
    {"one dimension less", any, [](const Input&, const at::Tensor& x) { return x.select(0, 0).clone(); }},
    {"one dimension more", any, [](const Input&, const at::Tensor& x) { return x.unsqueeze(-1); }},
    {"no dimension", any, [](const Input&, const at::Tensor& x) { return x.flatten()[0].clone(); }},
    {"int64", is_value, as<at::kLong>},
    {"bool", is_value, as<at::kBool>},
    {"complex64", is_value, as<at::kComplexFloat>},
    {"float8", is_value, as<at::kFloat8_e4m3fn>},
    {"int16", [](const Input& i) { return !is_value(i); }, as<at::kShort>},
    {"float32", [](const Input& i) { return !is_value(i); }, as<at::kFloat>},
    {"another float", [](const Input& i) { return i.role == Role::tensor; }, as<at::kDouble>},
    {"on no device", any, [](const Input&, const at::Tensor& x) { return x.to(at::kMeta); }},
    {"sparse", any, [](const Input&, const at::Tensor& x) { return x.to_sparse(); }},
    {"lazily negated", is_value, [](const Input&, const at::Tensor& x) { return at::_neg_view(x); }},
    {"lazily zero", is_value, [](const Input&, const at::Tensor& x) { return at::_efficientzerotensor(x.sizes(), x.options()); }},
    {"missing", [](const Input& i) { return i.wanted != nullptr; }, [](const Input&, const at::Tensor&) { return at::Tensor(); }},
};
// clang-format on

// The same error from every execution, of attention and statistics.
void expect_error(const Spec& spec, const Inputs& in, const std::string& input) {
  std::string first;
  for (const Execution* e : executions())
    for (const bool statistics : {false, true}) {
      Statistics s;
      const Outcome r =
          outcome_of([&](Outcome&) { attend(spec, in, e->name, statistics ? &s : nullptr); });
      EXPECT_EQ(r.foreign, "");
      EXPECT_NE(r.error, "") << e->name << " runs it";
      if (first.empty()) first = r.error;
      EXPECT_EQ(r.error, first) << e->name;
      EXPECT_TRUE(input.empty() ? names_any(r.error) : names(r.error, input)) << r.error;
    }
}

TEST(Wrong, IsTheSameErrorOfEveryExecution) {
  for (const Variant& v : sets_of_inputs()) {
    const Inputs good =
        random_inputs(v.spec, {.T = 7, .S = 7, .D = 3, .E = 5, .padded = true, .packed = true});
    for (const Input& i : input_table()) {
      if (!(good.*i.at).defined()) continue;
      for (const Wrong& w : kWrong) {
        if (!w.applies(i)) continue;
        SCOPED_TRACE(v.name + ", " + i.name + ": " + w.name);
        Inputs in = good;
        in.*i.at = w.of(i, good.*i.at);
        // dtype and device are compared with those of q
        expect_error(v.spec, in, i.at == &Inputs::q ? "" : i.name);
      }
    }
  }
}

TEST(Wrong, InputsThatAVariantDoesNotUse) {
  for (const Variant& v : sets_of_inputs())
    for (const Variant& other : sets_of_inputs()) {
      const Case c{.T = 7, .S = 7, .D = 3, .E = 5};
      const Inputs foreign = random_inputs(other.spec, c);
      for (const Input& i : input_table()) {
        if (!i.wanted || i.wanted(v.spec) || !i.wanted(other.spec)) continue;
        SCOPED_TRACE(v.name + ", " + i.name);
        Inputs in = random_inputs(v.spec, c);
        in.*i.at = foreign.*i.at;
        expect_error(v.spec, in, i.name);
      }
    }
}

TEST(Wrong, Packing) {
  const std::vector<std::vector<int64_t>> all = {{},
                                                 {0},
                                                 {7},
                                                 {0, 6},
                                                 {0, 8},
                                                 {1, 7},
                                                 {-1, 7},
                                                 {0, 5, 3, 7},
                                                 {0, 9, 7},
                                                 {0, -3, 7},
                                                 {0, int64_t(1) << 40, 7},
                                                 {int64_t(1) << 32, 7},
                                                 {7, 0}};
  for (const std::vector<int64_t>& cuts : all) {
    Inputs in = random_inputs(Spec{}, {.T = 7, .S = 7});
    in.cu_seqlens = at::tensor(cuts, at::kLong);
    SCOPED_TRACE(cuts);
    expect_error(Spec{}, in, "cu_seqlens");
  }
}

// What an axis of another length gives: an error that names an input, or the right result.
TEST(Wrong, LengthsOfAxes) {
  for (const Variant& v : sets_of_inputs()) {
    const Inputs good = random_inputs(v.spec, {.T = 7, .S = 7, .D = 3, .E = 5, .padded = true});
    for (const Input& i : input_table()) {
      const at::Tensor& x = good.*i.at;
      for (int64_t axis = 0; x.defined() && axis < x.dim(); ++axis)
        for (const int64_t length : {int64_t(0), x.size(axis) + 1}) {
          SCOPED_TRACE(v.name + ", " + i.name + ": axis " + std::to_string(axis) + " of " +
                       std::to_string(length));
          Inputs in = good;
          in.*i.at = at::cat({x, x}, axis).narrow(axis, 0, length);
          const Outcome r = attended(v.spec, in, execution("reference"));
          EXPECT_EQ(r.foreign, "");
          if (!r.error.empty()) {
            expect_error(v.spec, in, i.role == Role::tensor ? "" : i.name);
            continue;
          }
          const Right right{
              r, attended(v.spec, in_dtype(in, at::kDouble), execution("reference")), {}, {}};
          for (const Execution* e : able(v.spec, in))
            EXPECT_EQ(difference(attended(v.spec, in, *e), right), "") << e->name;
        }
    }
  }
}

TEST(Wrong, AxesOfLengthZero) {
  for (const Variant& v : sets_of_inputs()) {
    const Case c{.T = 7, .S = 7, .D = 3, .E = 5};
    for (int64_t Case::* size :
         {&Case::B, &Case::H, &Case::G, &Case::T, &Case::S, &Case::D, &Case::E}) {
      Case empty = c;
      empty.*size = 0;
      const Inputs in = random_inputs(v.spec, empty);
      SCOPED_TRACE(v.name + ", " + text(empty));
      const Outcome r = attended(v.spec, in, execution("reference"));
      EXPECT_EQ(r.foreign, "");
      const bool refused = size != &Case::B && size != &Case::T && size != &Case::S;
      EXPECT_EQ(!r.error.empty(), refused) << r.error;
      if (refused) expect_error(v.spec, in, "");
      for (const Execution* e : refused ? std::vector<const Execution*>() : able(v.spec, in))
        EXPECT_EQ(difference(attended(v.spec, in, *e), {r, r}), "") << e->name;
    }
  }
}

// Awkward layouts: the same as from contiguous memory.

struct Layout {
  const char* name;
  at::Tensor (*of)(const at::Tensor&);
};
const Layout kLayouts[] = {
    {"every second number",
     [](const at::Tensor& x) { return at::stack({x, x}, -1).select(-1, 1); }},
    {"transposed",
     [](const at::Tensor& x) {
       return x.dim() < 2 ? x : x.transpose(0, -1).contiguous().transpose(0, -1);
     }},
    {"from an odd place",
     [](const at::Tensor& x) {
       return at::cat({x.flatten().narrow(0, 0, 1), x.flatten()})
           .narrow(0, 1, x.numel())
           .view_as(x);
     }},
    {"backwards", [](const at::Tensor& x) { return x.flip({0}).flip({0}); }},
};

TEST(Awkward, Layouts) {
  for (const Variant& v : sets_of_inputs())
    for (const bool packed : {false, true}) {
      const Case c{.T = 7, .S = 7, .D = 3, .E = 5, .padded = true, .packed = packed};
      const Inputs good = random_inputs(v.spec, c);
      for (const Execution* e : able(v.spec, good)) {
        const Outcome right = attended(v.spec, good, *e);
        for (const Input& i : input_table())
          for (const Layout& l : kLayouts) {
            if (!(good.*i.at).defined()) continue;
            Inputs in = good;
            in.*i.at = l.of(good.*i.at);
            const Outcome found = attended(v.spec, in, *e);
            SCOPED_TRACE(v.name + ", " + i.name + " " + l.name + ", " + std::string(e->name));
            ASSERT_EQ(found.error + found.foreign, "");
            EXPECT_EQ(difference(found, {right, right}), "");
          }
      }
    }
}

// An input, or the gradient of the result, of which every axis may be one number expanded.
TEST(Awkward, ExpandedInputsAndGradients) {
  for (const Variant& v : sets_of_inputs()) {
    const Case c{.T = 7, .S = 7, .D = 3, .E = 5};
    const Inputs good = random_inputs(v.spec, c);
    const at::Tensor ones = at::ones({1, 1, 1, 1}).expand({c.B, c.H, c.T, c.E});
    for (const Execution* e : able(v.spec, good)) {
      SCOPED_TRACE(v.name + ", " + std::string(e->name));
      const Outcome a = attended(v.spec, good, *e, ones),
                    b = attended(v.spec, good, *e, ones.contiguous());
      EXPECT_EQ(difference(a, {b, b}), "");
      for (const Input& i : input_table()) {
        const at::Tensor& x = good.*i.at;
        for (int64_t axis = 0; x.defined() && axis < x.dim(); ++axis) {
          Inputs in = good, copied = good;
          in.*i.at = x.narrow(axis, 0, 1).expand_as(x),
          copied.*i.at = (in.*i.at).clone(at::MemoryFormat::Contiguous);
          const Outcome a = attended(v.spec, in, *e), b = attended(v.spec, copied, *e);
          ASSERT_EQ(a.error + a.foreign, "") << i.name;
          EXPECT_EQ(difference(a, {b, b}), "") << i.name << " axis " << axis;
        }
      }
    }
  }
}

// Values.

struct Values {
  const char* name;
  bool (*applies)(const Input&);
  void (*set)(at::Tensor& all, at::Tensor one);  // one: of one token, in one channel
};
bool is_log_gate(const Input& i) {
  return i.role == Role::log_gate;
}
// Squares and cubes of large numbers leave no digits of the others in a sum, in double either.
bool is_no_score(const Input& i) {
  return is_value(i) && i.at != &Inputs::q && i.at != &Inputs::k;
}
bool is_gate(const Input& i) {
  return i.role == Role::gate;
}
const float kNoise = std::bit_cast<float>(0xffffffffu);  // a NaN of all ones
// clang-format off
const Values kValues[] = {
    {"NaN",       is_value, [](at::Tensor&, at::Tensor one) { one.fill_(NAN); }},
    {"NaN noise", [](const Input& i) { return i.role == Role::tensor; }, [](at::Tensor&, at::Tensor one) { one.fill_(kNoise); }},
    {"inf",       is_value, [](at::Tensor&, at::Tensor one) { one.fill_(INFINITY); }},
    {"-inf",      is_value, [](at::Tensor&, at::Tensor one) { one.fill_(-INFINITY); }},
    {"8",         is_value, [](at::Tensor&, at::Tensor one) { one.fill_(8); }},
    {"1e30",      is_no_score, [](at::Tensor&, at::Tensor one) { one.fill_(1e30); }},
    {"-1e30",     is_no_score, [](at::Tensor&, at::Tensor one) { one.fill_(-1e30); }},
    {"1e-40",     is_value, [](at::Tensor&, at::Tensor one) { one.fill_(1e-40); }},
    {"0",         is_value, [](at::Tensor&, at::Tensor one) { one.zero_(); }},
    {"all 0",     is_value, [](at::Tensor& all, at::Tensor) { all.zero_(); }},
    {"negative",  is_gate, [](at::Tensor& all, at::Tensor) { all.neg_(); }},
    {"all 0.1",   is_log_gate, [](at::Tensor& all, at::Tensor) { all.fill_(0.1); }},
    {"all 0.97",  is_log_gate, [](at::Tensor& all, at::Tensor) { all.fill_(0.97); }},
    {"all 20",    is_log_gate, [](at::Tensor& all, at::Tensor) { all.fill_(20); }},
    {"all -3",    is_log_gate, [](at::Tensor& all, at::Tensor) { all.fill_(-3); }},
    {"all -20",   is_log_gate, [](at::Tensor& all, at::Tensor) { all.fill_(-20); }},
};
// clang-format on

// One number of an input: that of token s or t, of the first batch and an inner head and channel.
at::Tensor one_of(const Input& i, at::Tensor x, int64_t s, int64_t t) {
  for (size_t n = 0; x.dim() > 0; ++n) {
    const char letter = std::string_view(i.shape).size() > n ? i.shape[n] : 'E';
    const int64_t at = letter == 'S'                    ? s
                       : letter == 'T'                  ? t
                       : letter == 'B' || letter == 'G' ? 0
                                                        : 1;
    x = x.select(0, std::min(at, x.size(0) - 1));
  }
  return x;
}
// [B, H, T]: the rows that see token s or t of an input.
at::Tensor rows_of(const Spec& spec, const Input& i, const Inputs& in, int64_t s, int64_t t) {
  const int64_t B = in.q.size(0), H = in.q.size(1), T = in.q.size(2), S = in.k.size(2);
  at::Tensor rows = at::ones({B, H, T}, at::kBool);
  const at::Tensor position = at::arange(T) + S - T;
  if (axis_of(i, "S") >= 0) {
    const at::Tensor hidden = seen(spec.mask, in).hidden.select(3, s).expand({B, H, T});
    rows = hidden.logical_not();
    if (is_log_gate(i)) rows = rows.logical_and(position > s);
  }
  // one key: a count of 1 to any power is 1, and so is the gate of any slope
  if (i.at == &Inputs::count_exponent || i.at == &Inputs::slope)
    rows = (seen(spec.mask, in).count > 1).squeeze(-1).expand({B, H, T});
  if (axis_of(i, "T") >= 0) rows = (at::arange(T) == t).expand({B, H, T});
  return rows;
}

// Calls f with each input spoiled by each of the values.
template <class F>
void each_value(const Inputs& good, const F& f) {
  for (const Input& i : input_table())
    for (const Values& values : kValues)
      for (const int64_t s : {3, 66}) {
        // one place for each value: an early token, or one in the last chunk
        const bool early =
            (&values - kValues) % 2 == 0 && !good.keep.defined() && !good.cu_seqlens.defined();
        if (early != (s == 3)) continue;
        if (!(good.*i.at).defined() || !values.applies(i)) continue;
        const int64_t t = s == 3 ? 1 : good.q.size(2) - 2;
        Inputs in = good;
        at::Tensor& x = in.*i.at;
        x = x.clone();
        values.set(x, one_of(i, x, s, t));
        SCOPED_TRACE(std::string(i.name) + " " + values.name + " at " + std::to_string(s));
        f(in, i, s, t);
      }
}
using Run = Outcome (*)(const Spec&, const Inputs&, const Execution&);
Right right_of(const Spec& spec, const Inputs& in, const Input& i, int64_t s, int64_t t,
               const Outcome& clean, Run run) {
  const Execution& reference = execution("reference");
  return {.same = run(spec, in, reference),
          .exact = run(spec, in_dtype(in, at::kDouble), reference),
          .clean = clean,
          .affected = rows_of(spec, i, in, s, t),
          .empty = seen(spec.mask, in).count == 0,
          .parameter = i.role == Role::parameter && !(in.*i.at).isfinite().all().item<bool>(),
          .spreads = is<Delta>(spec.values)};
}
Outcome all_of(const Spec& spec, const Inputs& in, const Execution& e) {
  return attended(spec, in, e);
}

class ValuesOf : public testing::TestWithParam<Variant> {};

TEST_P(ValuesOf, EveryInputGiveWhatTheReferenceGives) {
  const Spec spec = GetParam().spec;
  for (const Case& c : cases_of(GetParam())) {
    SCOPED_TRACE(GetParam().name + ", " + text(c));
    const Inputs good = random_inputs(spec, c);
    const Outcome clean = attended(spec, good, execution("reference"));
    each_value(good, [&](const Inputs& in, const Input& i, int64_t s, int64_t t) {
      const Right right = right_of(spec, in, i, s, t, clean, all_of);
      EXPECT_EQ(right.same.foreign, "");
      if (!right.same.error.empty()) return expect_error(spec, in, i.name);
      for (const Execution* e : able(spec, in))
        EXPECT_EQ(difference(attended(spec, in, *e), right), "") << e->name;
    });
  }
}

// States.

bool is_stream(const Spec& spec) {
  return !sees_future(spec.mask) && !spec.bias;
}
// One with sums of fixed size, where there is one, or a KV cache.
State state_for(const Spec& spec, const Inputs& in, bool finite) {
  const StateShape shape{in.k.size(0), in.k.size(1), in.k.size(3), in.v.size(3)};
  return make_state(spec, shape, in.q.scalar_type(), finite ? kWaiting : 0);
}

TEST(States, RefuseWhatIsWrongAndStayAsTheyAre) {
  for (const Variant& v : sets_of_inputs()) {
    if (!is_stream(v.spec)) continue;
    const Inputs good = random_inputs(v.spec, {.T = 7, .S = 7, .D = 3, .E = 5, .padded = true});
    for (const bool finite : {true, false}) {
      State state = state_for(v.spec, good, finite), same = state_for(v.spec, good, finite);
      for (const Input& i : input_table())
        for (const Wrong& w : kWrong) {
          if (!(good.*i.at).defined() || !w.applies(i)) continue;
          SCOPED_TRACE(v.name + ", " + i.name + ": " + w.name);
          Inputs in = good;
          in.*i.at = w.of(i, good.*i.at);
          const Outcome r = outcome_of([&](Outcome&) { step(state, in); });
          EXPECT_EQ(r.foreign, "");
          EXPECT_TRUE(i.at == &Inputs::q ? names_any(r.error) : names(r.error, i.name)) << r.error;
        }
      EXPECT_TRUE(at::equal(step(state, good), step(same, good))) << v.name;
      EXPECT_EQ(state.tokens, 7);
    }
  }
}

Outcome streamed(const Spec& spec, const Inputs& in, bool finite) {
  return outcome_of([&](Outcome& r) {
    State state = state_for(spec, in, finite);
    std::vector<at::Tensor> parts;
    constexpr int64_t kCuts[] = {0, 20, 21, 22, 62, 63, 64, 65, 66, 67, 68, kTokens};
    for (size_t n = 0; n + 1 < std::size(kCuts); ++n)
      parts.push_back(step(state, tokens(in, kCuts[n], kCuts[n + 1])));
    r.of.emplace_back("output", at::cat(parts, 2));
  });
}

TEST_P(ValuesOf, AStreamGiveWhatTheReferenceGives) {
  const Spec spec = GetParam().spec;
  if (!is_stream(spec)) GTEST_SKIP() << "sees later tokens";
  for (Case c : cases_of(GetParam())) {
    if (c.packed) continue;
    c.T = c.S;
    const Inputs good = random_inputs(spec, c);
    const Outcome clean = forward_of(spec, good, execution("reference"));
    each_value(good, [&](const Inputs& in, const Input& i, int64_t s, int64_t t) {
      const Right right = right_of(spec, in, i, s, t, clean, forward_of);
      for (const bool finite : {true, false}) {
        const Outcome found = streamed(spec, in, finite);
        if (finite && found.error.starts_with("its state would take")) continue;
        EXPECT_EQ(difference(found, right), "") << (finite ? "sums" : "KV cache");
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, ValuesOf, testing::ValuesIn(kinds()), [](const auto& info) {
  std::string name = info.param.name;
  std::ranges::replace(name, '@', '_');
  return name;
});

}  // namespace
}  // namespace horner::attn
