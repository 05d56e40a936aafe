// Layers whose heads have different operators, and the parts of a conversion that are arithmetic:
// the loss, the plan, rank correlations, swapped heads.
#include "convert/convert.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "convert/swap.h"
#include "core/check.h"
#include "nn/checkpoint.h"
#include "nn/pattern.h"
#include "small_llama.h"

namespace horner::convert {
namespace {

// 6 heads on 3 key heads, so that parts may share key heads evenly or not.
nn::Json six_heads(const std::string& variant = "softmax") {
  nn::Json j = small_llama();
  j["hidden_size"] = 48, j["num_attention_heads"] = 6, j["num_key_value_heads"] = 3;
  j["horner_variant"] = variant;
  return j;
}

nn::Model model_of(const std::string& variant) {
  nn::Model m = nn::random_model(nn::model_config(six_heads(variant)), 7);
  for (const nn::Slot& s : nn::slots(m))
    *s.at = s.at->to(at::kDouble) * (s.shape.size() > 1 ? 4 : 1);
  if (m.config.tied) m.head = m.embedding;
  return m;
}

const at::Tensor kTokens = (at::arange(22, at::kLong) * 7 % 20).view({2, 11});

TEST(Heads, TextsAreRead) {
  using Forms = std::vector<std::vector<std::string>>;
  EXPECT_EQ(nn::variants_of_heads("l2", 2), (Forms{{"l2"}, {"l2"}}));
  EXPECT_EQ(nn::variants_of_heads("softmax^2|l2", 3), (Forms{{"softmax"}, {"softmax"}, {"l2"}}));
  EXPECT_EQ(nn::variants_of_heads("softmax+l2", 1), (Forms{{"softmax", "l2"}}));
  EXPECT_EQ(nn::variants_of_heads("a:near=window(4,2)|b+c", 2),
            (Forms{{"a:near=window(4,2)"}, {"b", "c"}}));
  EXPECT_EQ(nn::heads_text({"a", "a", "b"}), "a^2|b");
  EXPECT_EQ(nn::heads_text({"a", "a"}), "a");
  EXPECT_THROW(nn::variants_of_heads("softmax^2|l2", 4), Error);
  EXPECT_THROW(nn::variants_of_heads("softmax^0|l2", 1), Error);
  EXPECT_THROW(nn::variants_of_heads("softmax||l2", 3), Error);
  EXPECT_THROW(nn::variants_of_heads("softmax^x|l2", 2), Error);
}

TEST(Heads, CommasOfChangesStayWithTheirHead) {
  const std::string layer =
      "lolcats:features=hedgehog(16),near=window(16)^2|softmax|lolcats:near=window(8),temperature="
      "2";
  EXPECT_EQ(nn::pattern(layer + ",l2"), (std::vector<std::string>{layer, "l2"}));
  EXPECT_EQ(nn::pattern("taylor2:norm=l2,post_gate|l2,softmax|linear*2"),
            (std::vector<std::string>{"taylor2:norm=l2,post_gate|l2", "softmax|linear",
                                      "softmax|linear"}));
}

// Every head gives what it gives in a layer of its operator alone.
TEST(Heads, OfALayerAreThoseOfUniformLayers) {
  const c10::NoGradGuard none;
  const std::string forms[] = {"softmax", "taylor2", "taylor2", "l2", "softmax", "l2"};
  const nn::Model mixed = model_of("softmax|taylor2^2|l2|softmax|l2");
  ASSERT_EQ(mixed.config.layers[0].parts.size(), 3u);
  EXPECT_EQ(mixed.config.layers[0].parts[1].key_heads, (std::vector<int64_t>{0, 1}));
  attn::Inputs qkv;
  at::Tensor rows;
  std::map<std::string, at::Tensor> alone;
  for (const char* form : {"softmax", "taylor2", "l2"}) {
    const nn::Model m = model_of(form);
    nn::Probe probe{[&](const nn::Operated& o) {
      if (o.layer == 0) qkv = o.in, alone[form] = o.result;
    }};
    probe.input = [&](int64_t i, const at::Tensor& x) {
      if (i == 0) rows = x;
    };
    nn::hidden(m, kTokens, {.probe = &probe});
  }
  const at::Tensor all = nn::heads_of_layer(mixed, 0, rows, qkv);
  for (int64_t h = 0; h < 6; ++h)
    EXPECT_LT((all.select(1, h) - alone.at(forms[h]).select(1, h)).abs().max().item<double>(),
              1e-12)
        << h;
}

// Three heads of a part that two key heads serve unevenly, in a layer with three key heads.
TEST(Heads, RepeatTheirKeyHeadsWhereTheseAreSharedUnevenly) {
  const c10::NoGradGuard none;
  const nn::Model mixed = model_of("softmax^3|l2^3"), a = model_of("softmax"), b = model_of("l2");
  EXPECT_EQ(mixed.config.layers[0].parts[0].key_heads, (std::vector<int64_t>{0, 0, 1}));
  const at::Tensor x = at::randn({22, 48}, at::kDouble);
  const attn::Inputs qkv{at::randn({2, 6, 11, 8}, at::kDouble),
                         at::randn({2, 3, 11, 8}, at::kDouble),
                         at::randn({2, 3, 11, 8}, at::kDouble)};
  const at::Tensor found = nn::heads_of_layer(mixed, 0, x, qkv);
  const at::Tensor wanted = at::cat({nn::heads_of_layer(a, 0, x, qkv).narrow(1, 0, 3),
                                     nn::heads_of_layer(b, 0, x, qkv).narrow(1, 3, 3)},
                                    1);
  EXPECT_TRUE(at::allclose(found, wanted));
}

TEST(Heads, OfASumAdd) {
  const c10::NoGradGuard none;
  const nn::Model sum = model_of("softmax+l2"), a = model_of("softmax"), b = model_of("l2");
  const at::Tensor x = at::randn({22, 48}, at::kDouble);
  const attn::Inputs qkv{at::randn({2, 6, 11, 8}, at::kDouble),
                         at::randn({2, 3, 11, 8}, at::kDouble),
                         at::randn({2, 3, 11, 8}, at::kDouble)};
  EXPECT_TRUE(at::allclose(nn::heads_of_layer(sum, 0, x, qkv),
                           nn::heads_of_layer(a, 0, x, qkv) + nn::heads_of_layer(b, 0, x, qkv)));
}

// States and caches together give what the whole text gives, and the weights survive a folder.
TEST(Heads, DecodeAndReopen) {
  const c10::NoGradGuard none;
  const nn::Model m = model_of(
      "softmax|lolcats:features=hedgehog(4),near=window(3)^3|softmax:mask=window(3)+gated_delta^2");
  const at::Tensor whole = nn::hidden(m, kTokens);
  std::vector<nn::LayerState> states = nn::empty_states(m, 2);
  std::vector<at::Tensor> steps{nn::hidden(m, kTokens.narrow(1, 0, 4), {.states = &states})};
  for (int64_t t = 4; t < 11; ++t)
    steps.push_back(nn::hidden(m, kTokens.narrow(1, t, 1), {.states = &states}));
  EXPECT_LT((at::cat(steps, 1) - whole).abs().max().item<double>(), 1e-6);
  const auto folder =
      std::filesystem::temp_directory_path() / ("horner_heads_" + std::to_string(getpid()));
  nn::save_model(m, folder);
  const nn::Model again = nn::load_model(folder);
  std::filesystem::remove_all(folder);
  EXPECT_LT((nn::hidden(again, kTokens) - whole).abs().max().item<double>(), 1e-12);
}

TEST(Heads, VariantsThatChangeMoreThanTheOperatorAreRefused) {
  for (const char* layer :
       {"linear_mamba^3|softmax^3", "hgrn2|softmax^5", "gated_decay@code^3|l2^3"})
    EXPECT_THROW(nn::model_config(six_heads(layer)), Error) << layer;
}

// (1 - share) cross-entropy + share KL, as written in torch's operators.
TEST(Distillation, IsItsDefinition) {
  const nn::Model teacher = model_of("softmax");
  nn::Model m = model_of("l2");
  m.head = (m.head * 0.5).set_requires_grad(true);
  at::Tensor x = at::randn({9, 48}, at::kDouble).set_requires_grad(true);
  const at::Tensor y = at::randn({9, 48}, at::kDouble);
  const at::Tensor targets = at::tensor({3, -1, 5, 0, 19, 7, -1, 2, 2}, at::kLong);
  const at::Tensor loss = nn::distillation(m, x, teacher, y, targets, 0.3);
  loss.backward();
  const at::Tensor dx = x.grad().clone(), dhead = m.head.grad().clone();
  x.mutable_grad().reset(), m.head.mutable_grad().reset();
  const at::Tensor log_p = at::matmul(x, m.head.t()).log_softmax(-1);
  const at::Tensor log_q = at::matmul(y, teacher.head.t()).log_softmax(-1);
  at::Tensor want = at::zeros({}, at::kDouble);
  for (int64_t i = 0; i < 9; ++i) {
    const int64_t target = targets[i].item<int64_t>();
    if (target < 0) continue;
    want = want - 0.7 * log_p[i][target] + 0.3 * (log_q[i].exp() * (log_q[i] - log_p[i])).sum();
  }
  want = want / 7;
  EXPECT_NEAR(loss.item<double>(), want.item<double>(), 1e-12);
  want.backward();
  EXPECT_TRUE(at::allclose(dx, x.grad(), 1e-10, 1e-12));
  EXPECT_TRUE(at::allclose(dhead, m.head.grad(), 1e-10, 1e-12));
}

TEST(Swap, AllHeadsOfAStudentAreTheStudent) {
  const nn::Model teacher = model_of("softmax"), student = model_of("l2");
  Heads all;
  for (int64_t i = 0; i < 2; ++i)
    for (int64_t h = 0; h < 6; ++h) all.emplace_back(i, h);
  const Swap swap{&student, all};
  EXPECT_TRUE(
      at::allclose(hidden_with(teacher, kTokens, {&swap, 1}), nn::hidden(student, kTokens)));
  EXPECT_TRUE(at::equal(hidden_with(teacher, kTokens, {}), nn::hidden(teacher, kTokens)));
}

Measures made_up(const std::vector<std::string>& forms) {
  Measures m;
  for (int64_t i = 0; i < 2; ++i)
    for (int64_t h = 0; h < 6; ++h) {
      HeadMeasures x{i, h};
      x.kl = double(i * 6 + h), x.order = -x.kl, x.entropy = double(h % 2);
      double error = 0.1;
      for (const std::string& form : forms) x.errors[form] = error, error += 0.1;
      x.costs[forms[0]] = x.kl * x.kl;
      m.heads.push_back(x);
    }
  return m;
}

TEST(Plan, KeepsTheBudgetAndTheMeasure) {
  const nn::Model teacher = model_of("softmax");
  const Measures m = made_up({"hedgehog4", "near"});
  Settings s;
  s.near = 4, s.tokens = 1024, s.share = 0.4;
  const Plan p = make_plan(s, teacher, m);
  EXPECT_LE(p.bytes, 0.4 * p.cache_bytes);
  EXPECT_EQ(p.heads[11].form, kCache);  // the largest kl
  EXPECT_EQ(p.heads[0].form, "hedgehog4");
  EXPECT_EQ(p.cache_bytes, 2. * 3 * 2 * 8 * 2 * 1024);
  s.keep = 5;
  const Plan five = make_plan(s, teacher, m);
  for (size_t i = 0; i < 12; ++i) EXPECT_EQ(five.heads[i].form == kCache, i >= 7) << i;
  s.keep = -1, s.bytes = 10;
  EXPECT_THROW(make_plan(s, teacher, m), Error);
  const Plan read = read_plan(to_json(five), teacher.config);
  EXPECT_EQ(assignment_of(read, teacher.config), assignment_of(five, teacher.config));
  Json other = to_json(five);
  other["heads"][0]["form"] = "hedgehogs";
  EXPECT_THROW(read_plan(other, teacher.config), Error);
  other["heads"][0]["form"] = "near", other["heads"][0]["head"] = 6;
  EXPECT_THROW(read_plan(other, teacher.config), Error);
}

TEST(Measures, AreRankedAndCorrelated) {
  const Measures m = made_up({"near"});
  EXPECT_EQ(ranked(m, "kl", 0)[0], 11u);
  EXPECT_EQ(ranked(m, "order", 0)[0], 0u);
  const std::vector<size_t> uniform = ranked(m, "uniform", 0);
  EXPECT_EQ((std::set<size_t>{uniform[0], uniform[1]}), (std::set<size_t>{0, 6}));
  EXPECT_NE(ranked(m, "random", 0), ranked(m, "random", 1));
  EXPECT_THROW(ranked(m, "kll", 0), Error);
  const std::map<std::string, double> expected{{"kl", 1}, {"order", -1}};
  for (const Correlation& c : correlations(m, 0)) {
    if (expected.contains(c.measure)) {
      EXPECT_NEAR(c.rho, expected.at(c.measure), 1e-12);
    }
    EXPECT_LE(c.low, c.rho + 1e-12);
    EXPECT_GE(c.high, c.rho - 1e-12);
  }
  const Measures again = read_measures(to_json(m));
  EXPECT_EQ(to_json(again), to_json(m));
}

}  // namespace
}  // namespace horner::convert
