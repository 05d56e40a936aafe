// Bad input gives one horner::Error that says what was wanted and what came.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <sstream>

#include "attn/catalog.h"
#include "attn/inputs.h"
#include "attn/spec_text.h"
#include "core/check.h"
#include "instruments/verify.h"

namespace horner::attn {

using namespace instruments;
namespace {

// What the call throws.
template <class F>
std::string message(F call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  } catch (const std::exception& e) {
    return std::string("not a horner::Error: ") + e.what();
  }
  return "no error";
}
std::string of_name(std::string_view name) {
  return message([&] { find(name); });
}
std::string of_stages(std::string_view stages) {
  return message([&] { with(Spec{}, stages); });
}

// The message of a run whose inputs were right until `spoil` changed them.
template <class F>
std::string of_inputs(const char* variant, F spoil) {
  const Spec spec = find(variant).spec;
  Inputs in = random_inputs(spec, {.B = 2, .H = 4, .G = 2, .T = 5, .S = 7, .D = 3, .E = 6});
  spoil(in);
  return message([&] { attend(spec, in); });
}
// The same with as many keys as queries, and packed.
std::string of_packing(const at::Tensor& cu_seqlens) {
  Inputs in = random_inputs(Spec{}, {.T = 5, .S = 5, .D = 3, .E = 3});
  in.cu_seqlens = cu_seqlens;
  return message([&] { attend(Spec{}, in); });
}

void expect_parts(const std::string& message, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
  EXPECT_EQ(message.find("not a horner::Error"), std::string::npos) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

TEST(Inputs, ThatAreRightGiveNoError) {
  EXPECT_EQ(of_inputs("softmax", [](Inputs&) {}), "no error");
  EXPECT_EQ(of_packing(at::tensor({0, 2, 5}, at::kInt)), "no error");
  EXPECT_EQ(of_packing(at::tensor({0, 2, 2, 5}, at::kLong)), "no error");
}

TEST(Shapes, OfQueriesKeysAndValues) {
  EXPECT_EQ(of_inputs("softmax", [](Inputs& in) { in.q = in.q[0]; }),
            "q must have shape [B, H, T, D], got [4, 5, 3]");
  EXPECT_EQ(of_inputs("softmax", [](Inputs& in) { in.k = in.k.narrow(3, 0, 2); }),
            "k must have shape [B, G, S, D] with D = 3, got [2, 2, 7, 2]");
  EXPECT_EQ(of_inputs("softmax", [](Inputs& in) { in.v = in.v.narrow(2, 0, 6); }),
            "v must have shape [B, G, S, E] with S = 7, got [2, 2, 6, 6]");
  EXPECT_EQ(of_inputs("softmax", [](Inputs& in) { in.v = in.v.narrow(1, 0, 1); }),
            "v must have shape [B, G, S, E] with G = 2, got [2, 1, 7, 6]");
  EXPECT_EQ(of_inputs("softmax", [](Inputs& in) { in.k = in.k.narrow(0, 0, 1); }),
            "k must have shape [B, G, S, D] with B = 2, got [1, 2, 7, 3]");
  EXPECT_EQ(
      of_inputs("softmax", [](Inputs& in) { in.q = in.q.narrow(1, 0, 3); }),
      "the heads of q must be a multiple of the heads of k and v, both at least 1, got 3 and 2");
  expect_parts(
      of_inputs("softmax",
                [](Inputs& in) { in.q = in.q.narrow(3, 0, 0), in.k = in.k.narrow(3, 0, 0); }),
      {"head dimensions must be at least 1, got D = 0 and E = 6"});
  expect_parts(
      of_inputs("softmax",
                [](Inputs& in) { in.k = in.k.narrow(1, 0, 0), in.v = in.v.narrow(1, 0, 0); }),
      {"the heads of q must be a multiple of the heads of k and v, both at least 1, got 4 and 0"});
}

TEST(Shapes, OfGatesParametersAndMasks) {
  EXPECT_EQ(of_inputs("gate", [](Inputs& in) { in.output_gate = in.output_gate.narrow(2, 0, 4); }),
            "output_gate must have shape [B, H, T] with T = 5, got [2, 4, 4]");
  EXPECT_EQ(of_inputs("gated", [](Inputs& in) { in.input_gate = in.input_gate.unsqueeze(-1); }),
            "input_gate must have shape [B, G, S], got [2, 2, 7, 1]");
  EXPECT_EQ(of_inputs("linear_decay", [](Inputs& in) { in.decay = in.decay.repeat({1, 2, 1}); }),
            "decay must have shape [B, G, S] with G = 2, got [2, 4, 7]");
  EXPECT_EQ(of_inputs("rms", [](Inputs& in) { in.norm_weight = at::ones({3}); }),
            "norm_weight must have shape [E] with E = 6, got [3]");
  EXPECT_EQ(of_inputs("asentmax", [](Inputs& in) { in.log_power = at::ones({4, 2}); }),
            "log_power must have shape [H, 3], got [4, 2]");
  EXPECT_EQ(of_inputs("based", [](Inputs& in) { in.query_projection = at::ones({4, 3, 8}); }),
            "query_projection must have shape [H, D, F] with F = 16, got [4, 3, 8]");
  EXPECT_EQ(of_inputs("softmax", [](Inputs& in) { in.keep = at::ones({2, 5}, at::kBool); }),
            "keep must have shape [B, S] with S = 7, got [2, 5]");
}

TEST(Types, AreNamed) {
  expect_parts(of_inputs("softmax", [](Inputs& in) { in.q = in.q.to(at::kInt); }),
               {"q must have dtype float64, float32, bfloat16 or float16, got int32"});
  expect_parts(of_inputs("softmax", [](Inputs& in) { in.k = in.k.to(at::kDouble); }),
               {"q, k and v must have the same dtype", "q is float32", "k is float64"});
  expect_parts(of_inputs("gate", [](Inputs& in) { in.output_gate = in.output_gate.to(at::kLong); }),
               {"output_gate must have dtype float64, float32, bfloat16 or float16, got int64"});
  expect_parts(of_inputs("softmax", [](Inputs& in) { in.keep = at::ones({2, 7}, at::kFloat); }),
               {"keep must have dtype bool, got float32"});
  expect_parts(of_packing(at::tensor({0.f, 5.f})),
               {"cu_seqlens must have dtype int32 or int64, got float32"});
}

TEST(Presence, IsWhatTheVariantTakes) {
  expect_parts(of_inputs("softmax", [](Inputs& in) { in.v = at::Tensor(); }),
               {"missing input 'v' [B, G, S, E] (values), required by this variant"});
  expect_parts(message([] { attend(Spec{}, Inputs{}); }),
               {"missing input 'q' [B, H, T, D] (queries), required by this variant"});
  expect_parts(of_inputs("gate", [](Inputs& in) { in.output_gate = at::Tensor(); }),
               {"missing input 'output_gate' [B, H, T] (factor of each output, before the norm)"});
  expect_parts(of_inputs("layer_norm", [](Inputs& in) { in.norm_bias = at::Tensor(); }),
               {"missing input 'norm_bias' [E]"});
  Inputs plain = random_inputs(Spec{}, {});
  EXPECT_EQ(message([&] { check_inputs(find("linear_decay").spec, plain, "linear_decay"); }),
            "missing input 'decay' [B, G, S] (log of each token's gate), required by variant "
            "'linear_decay'");
  expect_parts(of_inputs("softmax", [](Inputs& in) { in.output_gate = at::ones({2, 4, 5}); }),
               {"input 'output_gate' was given, but this variant does not use it"});
  expect_parts(of_inputs("rms", [](Inputs& in) { in.norm_bias = at::ones({6}); }),
               {"input 'norm_bias' was given, but this variant does not use it"});
}

TEST(Shapes, MayHaveNoKey) {
  for (const Variant& v : variants()) {
    Inputs in = random_inputs(v.spec, {.T = 5, .S = 5, .D = 3, .E = 6});
    for (const Input& i : input_table())
      if (const int64_t axis = axis_of(i, "S"); axis >= 0 && (in.*i.at).defined())
        in.*i.at = (in.*i.at).narrow(axis, 0, 0);
    in.q = in.q.detach().requires_grad_();
    Statistics rows;
    const at::Tensor o = attend(v.spec, in, "auto", &rows);
    EXPECT_TRUE(at::equal(o, at::zeros({2, 4, 5, 6}))) << v.name;
    EXPECT_TRUE(at::equal(rows.log_sum, at::full({2, 4, 5}, -INFINITY))) << v.name;
    o.sum().backward();
    EXPECT_TRUE(at::equal(in.q.grad(), at::zeros_like(in.q))) << v.name;
  }
  Inputs none = random_inputs(Spec{}, {.T = 5, .S = 0});
  expect_parts(message([&] { attend(Spec{}, none, "fast"); }), {"no execution 'fast'; possible"});
}

TEST(Packing, IsASequenceFromZeroToTheEnd) {
  EXPECT_EQ(of_packing(at::tensor({0, 4, 2, 5}, at::kInt)),
            "cu_seqlens must not decrease, got 4 before 2");
  EXPECT_EQ(of_packing(at::tensor({0, 2, 4}, at::kInt)),
            "cu_seqlens must go from 0 to 5, got 0 to 4");
  EXPECT_EQ(of_packing(at::tensor({1, 5}, at::kInt)), "cu_seqlens must go from 0 to 5, got 1 to 5");
  EXPECT_EQ(of_packing(at::tensor({5}, at::kInt)),
            "cu_seqlens must have at least 2 elements, 0 and the length, got 1");
  EXPECT_EQ(of_packing(at::zeros({1, 2}, at::kInt)), "cu_seqlens must have shape [n], got [1, 2]");
  EXPECT_EQ(
      of_inputs("softmax", [](Inputs& in) { in.cu_seqlens = at::tensor({0, 5}, at::kInt); }),
      "cu_seqlens requires as many keys as queries, got 5 queries and 7 keys; cu_seqlens_k gives "
      "the keys cuts of their own");
}

TEST(Names, OfVariantsHaveASuggestion) {
  expect_parts(of_name("sofmax"), {"no attention variant 'sofmax'; did you mean 'softmax'"});
  expect_parts(of_name("l2_post_gat"), {"no attention variant 'l2_post_gat'", "'l2_post_gate'"});
  expect_parts(of_name("taylorx"), {"no attention variant 'taylorx'", "'taylor"});
  expect_parts(of_name("taylor"), {"no attention variant 'taylor'", "'taylor"});
  expect_parts(of_name(""), {"no attention variant ''"});
  expect_parts(of_name("softmax@code"), {"no attention variant 'softmax@code'", "'softmax"});
  expect_parts(of_name("sofmax:norm=l2"), {"no attention variant 'sofmax'"});
}

TEST(Names, OfTheFieldAreThoseOfOneRow) {
  const std::pair<const char*, const char*> kNames[] = {
      {"fox", "forgetting"},  {"gdn", "gated_delta"},        {"deltanet", "delta"},
      {"kda", "kda"},         {"kimi_linear", "kda"},        {"gla", "gla"},
      {"hgrn2", "hgrn2"},     {"retnet", "retention"},       {"alibi", "alibi"},
      {"lolcats", "lolcats"}, {"mamba2", "linear_mamba"},    {"gpt_oss", "sink"},
      {"gemma2", "softcap"},  {"sb_attn", "stick_breaking"}, {"streaming_llm", "streaming"},
      {"FoX", "forgetting"},  {"GPT-OSS", "sink"},           {"Gated DeltaNet", "gated_delta"}};
  for (const auto& [name, row] : kNames) EXPECT_EQ(find(name).name, row) << name;
  EXPECT_EQ(matching("*deltanet").size(), 2u);  // globs match aliases
  expect_parts(of_name("gpt_os"), {"did you mean 'gpt_oss'"});
  std::map<std::string, std::string> rows;  // by name
  const auto claim = [&](const std::string& name, const Variant& v) {
    EXPECT_TRUE(rows.emplace(name, v.name).second)
        << "'" << name << "' is " << rows[name] << " and " << v.name;
    EXPECT_EQ(find(name).name, v.name);
  };
  for (const Variant& v : variants()) {
    claim(v.name, v);
    std::istringstream aliases(v.aliases);
    for (std::string alias; aliases >> alias;) claim(alias, v);
  }
}

TEST(Names, OfExecutionsAreListed) {
  expect_parts(message([] { execution("refrence"); }),
               {"no execution 'refrence'; possible: '", "'reference'"});
  Inputs in = random_inputs(Spec{}, {});
  expect_parts(message([&] { attend(Spec{}, in, "refrence"); }),
               {"no execution 'refrence'; possible: 'auto', ", "'reference'"});
}

TEST(Ranges, OfParametersAreSaid) {
  EXPECT_EQ(of_name("taylor-1"), "variant 'taylor-1': order must be 0 to 170, not -1");
  EXPECT_EQ(of_name("taylor171"), "variant 'taylor171': order must be 0 to 170, not 171");
  EXPECT_EQ(of_name("power999"), "variant 'power999': degree must be 0 to 170, not 999");
  EXPECT_EQ(of_name("topk0"), "variant 'topk0': k must be 1 to 1073741824, not 0");
  expect_parts(of_name("taylor99999999999"), {"order must be 0 to 170", "99999999999"});
  expect_parts(of_stages("mask=window(0)"), {"size must be 1 to", "not 0"});
  expect_parts(of_stages("temperature=0"), {"temperature must be", "not 0"});
  expect_parts(of_stages("temperature=nan"), {"temperature must be", "not nan"});
  expect_parts(of_stages("temperature=inf"), {"temperature must be", "not inf"});
  expect_parts(of_stages("clamp=nan"), {"clamp must be", "not nan"});
  expect_parts(of_stages("weight=entmax(alpha=3)"), {"alpha must be 1.01 to 2, not 3"});
  expect_parts(of_stages("weight=taylor(1.5)"),
               {"order must be a number without a fraction, not '1.5'"});
  expect_parts(of_stages("weight=taylor(order=x)"), {"order must be a number", "not 'x'"});
  expect_parts(of_stages("temperature"), {"temperature must be a number, not ''"});
  expect_parts(of_stages("centred=maybe"), {"centred must be yes or no, not 'maybe'"});
}

TEST(Ranges, NumbersWithoutNamesStandInTheirPlace) {
  EXPECT_EQ(text(with({}, "mask=streaming(3,7)")), "mask=streaming(first=3,size=7)");
  EXPECT_EQ(text(with({}, "mask=window(9,2)")), "mask=window(size=9,ahead=2)");
  expect_parts(of_stages("mask=window(9,2,1)"), {"window takes 'size' or 'ahead', not '1'"});
}

TEST(Ranges, HoldForASpecMadeInCode) {
  const Inputs in = random_inputs(Spec{}, {});
  auto of_spec = [&](const Spec& spec) { return message([&] { attend(spec, in); }); };
  expect_parts(of_spec({.temperature = NAN}), {"temperature must be", "not nan"});
  expect_parts(of_spec({.temperature = 0}), {"temperature must be", "not 0"});
  expect_parts(of_spec({.weight = Taylor{-1}}), {"order must be 0 to 170, not -1"});
  expect_parts(of_spec({.mask = Window{0}}), {"size must be 1 to", "not 0"});
  expect_parts(of_spec({.scale = Fixed{NAN}}), {"factor must be", "not nan"});
  expect_parts(of_spec({.denominator = Sum{.plus = -1}}), {"plus must be", "not -1"});
}

TEST(Stages, ThatAreUnknownAreAnsweredWithTheKnownOnes) {
  expect_parts(of_stages("wieght=exp"),
               {"no stage 'wieght'", "'features'", "'weight'", "'post_gate'"});
  expect_parts(of_stages("weight=expo"), {"no weight 'expo'; possible: 'exp'", "'taylor'"});
  expect_parts(of_stages("norm=batch"),
               {"no norm 'batch'; possible: 'none', 'l2', 'rms' or 'layer'"});
  expect_parts(of_stages("norm"), {"no norm ''; possible:", "'l2'"});
  expect_parts(of_stages("weight=taylor(degree=2)"), {"taylor takes 'order', not 'degree=2'"});
  expect_parts(of_stages("weight=exp(2)"), {"exp takes no parameter, not '2'"});
  expect_parts(of_stages("denominator=sum(detached)"),
               {"sum takes 'plus', 'least', 'floor', 'detach' or 'sink', not 'detached'"});
  expect_parts(of_name("softmax:norm=l3"), {"no norm 'l3'"});
}

TEST(Stages, HaveParenthesesThatMatch) {
  EXPECT_EQ(of_stages("weight=taylor(4"), "parentheses do not match in 'weight=taylor(4'");
  EXPECT_EQ(of_stages("weight=taylor4)"), "parentheses do not match in 'weight=taylor4)'");
  expect_parts(of_stages("weight=taylor)4("), {"parenthes"});
  expect_parts(of_stages("weight=taylor((4)"), {"parentheses do not match"});
  expect_parts(of_stages("weight=taylor(4)x"), {"'taylor(4)x'", "closing parenthesis"});
}

}  // namespace
}  // namespace horner::attn
