// What must hold between variants, and between the inputs of one variant: limits, invariances,
// masks, packing, padding and grouped heads.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>

#include "attn/catalog.h"
#include "attn/inputs.h"
#include "attn/plan.h"
#include "attn/spec_text.h"
#include "instruments/verify.h"
#include "near_ones.h"

namespace horner::attn {

using namespace instruments;
namespace {

constexpr double kExact = 1e-12;

at::Tensor run(const Spec& spec, const Inputs& in) {
  at::set_num_threads(1);  // tiny matrices: on a busy machine, threads cost 30 times the work
  return attend(spec, in, "reference");
}
at::Tensor run(const char* variant, const Inputs& in) {
  return run(find(variant).spec, in);
}

// The largest distance relative to 1 + |b|; infinite where either is not finite.
double distance(const at::Tensor& a, const at::Tensor& b) {
  EXPECT_EQ(a.sizes(), b.sizes());
  if (a.numel() == 0) return 0;
  const double d = ((a - b).abs() / (1 + b.abs())).max().item<double>();
  return std::isfinite(d) ? d : INFINITY;
}
bool finite(const at::Tensor& x) {
  return x.isfinite().all().item<bool>();
}

Case small(uint64_t seed) {
  return {.T = 9, .S = 9, .D = 4, .E = 3, .dtype = at::kDouble, .seed = seed};
}

// `change` of every input that has the axis `letter` (attend.h), given the number of that axis.
template <class F>
Inputs along(Inputs in, char letter, F change) {
  for (const Input& i : input_table()) {
    const size_t axis = std::string_view(i.shape).find(letter);
    at::Tensor& x = in.*i.at;
    if (x.defined() && axis != std::string_view::npos) x = change(x, int64_t(axis));
  }
  return in;
}
Inputs cut(const Inputs& in, char letter, int64_t from, int64_t length) {
  return along(in, letter,
               [&](const at::Tensor& x, int64_t axis) { return x.narrow(axis, from, length); });
}

// Leaves, with gradients where an input has them.
Inputs leaves(Inputs in) {
  for (const Input& i : input_table()) {
    at::Tensor& x = in.*i.at;
    if (x.defined()) x = x.detach().clone().requires_grad_(has_gradient(i));
  }
  return in;
}

// q, k and v alone.
Inputs plain(const Case& c) {
  return random_inputs(Spec{}, c);
}

template <class F>
void for_every_variant(F f) {
  for (const Variant& v : variants()) {
    SCOPED_TRACE(v.name);
    try {
      f(v.spec);
    } catch (const std::exception& e) {
      ADD_FAILURE() << e.what();
    }
  }
}

// Softmax and its stand-ins.

TEST(Softmax, IsScaledDotProductAttention) {
  const Case c{.H = 2, .G = 2, .T = 13, .S = 13, .D = 6, .E = 5, .dtype = at::kDouble, .seed = 1};
  for (const bool causal : {true, false}) {
    const Inputs a = leaves(plain(c)), b = leaves(a);
    const at::Tensor ours = run(causal ? "softmax" : "softmax:mask=full", a);
    const at::Tensor theirs = at::scaled_dot_product_attention(b.q, b.k, b.v, {}, 0, causal);
    const at::Tensor direction = at::randn_like(ours);
    ours.backward(direction), theirs.backward(direction);
    EXPECT_LT(distance(ours, theirs), kExact);
    EXPECT_LT(distance(a.q.grad(), b.q.grad()), kExact);
    EXPECT_LT(distance(a.k.grad(), b.k.grad()), kExact);
    EXPECT_LT(distance(a.v.grad(), b.v.grad()), kExact);
  }
}

TEST(Norms, OfExpAreThoseOfSoftmax) {
  const Inputs in = plain(small(2));
  EXPECT_LT(distance(run("l2", in), run("softmax:norm=l2", in)), kExact);
  EXPECT_EQ(text(find("softmax:norm=l2,denominator=nothing").spec), text(find("l2").spec));
  EXPECT_TRUE(at::equal(run("softmax:norm=l2,denominator=nothing", in), run("l2", in)));
  for (const char* norm : {"rms(eps=0)", "layer(eps=0)"}) {
    const Spec divided = find(std::string("softmax:norm=") + norm).spec;
    Spec bare = divided;
    bare.denominator = Nothing{};
    const Inputs with_weights = random_inputs(bare, small(3));
    EXPECT_LT(distance(run(bare, with_weights), run(divided, with_weights)), kExact) << norm;
  }
}

// One query against keys whose scores are `scores`, in float.
Inputs with_scores(const Spec& spec, std::vector<float> scores) {
  const int64_t S = int64_t(scores.size());
  Inputs in =
      random_inputs(spec, {.B = 1, .H = 1, .G = 1, .T = 1, .S = S, .D = 1, .E = 3, .seed = 4});
  in.q = at::ones({1, 1, 1, 1});
  in.k = at::tensor(scores).reshape({1, 1, S, 1});
  return in;
}

TEST(Norms, OfScoresBeyondTheRangeOfExpAreFinite) {
  for (const char* name : {"l2", "rms:clamp=inf", "layer_norm:clamp=inf"})
    for (const float size : {200.f, -200.f}) {
      SCOPED_TRACE(testing::Message() << name << " with scores of " << size);
      const Variant v = find(name);
      const Inputs in = leaves(with_scores(v.spec, {size, size - 1, size - 2, size - 60}));
      const at::Tensor o = run(v.spec, in);
      o.sum().backward();
      EXPECT_TRUE(finite(o)) << o;
      EXPECT_TRUE(finite(in.q.grad()) && finite(in.k.grad()) && finite(in.v.grad()));
      if (v.name != "l2" || size < 0) continue;  // at e^-200 the floor under the length takes over
      const Inputs near = with_scores(v.spec, {0, -1, -2, -60});
      EXPECT_LT(distance(o, run(v.spec, near)), 1e-5);
    }
}

TEST(Sum, DetachedIsAConstantToGradients) {
  for (const char* name : {"detached_sum", "detached_sum_gate"}) {
    const Spec spec = find(name).spec, bare = find(std::string(name) + ":denominator=nothing").spec;
    const Inputs a = leaves(random_inputs(spec, small(5))), b = leaves(a);
    const at::Tensor o = run(spec, a), N = run(bare, b);
    const at::Tensor direction = at::randn_like(o);
    o.backward(direction), N.backward(direction * (o / N).detach());
    for (const auto at : {&Inputs::q, &Inputs::k, &Inputs::v})
      EXPECT_LT(distance((a.*at).grad(), (b.*at).grad()), 1e-10) << name;
  }
}

TEST(Softmax1, IsSoftmaxWithOneMoreKey) {
  const Inputs in = plain(small(6));
  Inputs more = in;
  more.k = at::constant_pad_nd(in.k, {0, 0, 1, 0});
  more.v = at::constant_pad_nd(in.v, {0, 0, 1, 0});
  EXPECT_LT(distance(run("softmax1", in), run("softmax", more)), kExact);
}

// The series.

// o_N - o = sum_s r_s (v_s - o) / sum_s w_s, where |r_s| <= e^max(x, 0) |x|^(N + 1) / (N + 1)!.
TEST(Taylor, ComesToSoftmaxAtLeastAsFastAsItsRemainder) {
  const Inputs in = plain(
      {.B = 1, .H = 1, .G = 1, .T = 12, .S = 12, .D = 4, .E = 3, .dtype = at::kDouble, .seed = 7});
  const at::Tensor x = at::matmul(in.q[0][0], in.k[0][0].t()) / 2;
  const at::Tensor limit = run("softmax", in)[0][0];
  for (int order = 1; order <= 30; ++order) {
    const Spec spec{.weight = Taylor{order}};
    const at::Tensor o = run(spec, in)[0][0];
    const at::Tensor r = x.clamp_min(0).exp() * x.abs().pow(order + 1) / std::tgamma(order + 2.0);
    const at::Tensor e = x.exp().tril(), bound_r = r.tril();
    const at::Tensor least = e.sum(1) - bound_r.sum(1);                              // of sum_s w_s
    const at::Tensor spread = (in.v[0][0].unsqueeze(0) - limit.unsqueeze(1)).abs();  // [t, s, E]
    const at::Tensor bound = (bound_r.unsqueeze(2) * spread).sum(1) / least.unsqueeze(1);
    const at::Tensor holds = (o - limit).abs() <= bound * (1 + 1e-9) + 1e-13;
    EXPECT_TRUE((holds | (least <= 0).unsqueeze(1)).all().item<bool>()) << "order " << order;
    if (order == 30) {
      EXPECT_LT(distance(o, limit), 1e-10);
    }
  }
}

TEST(Taylor, OnlyTheCentredOneIgnoresAShiftOfTheScores) {
  for (int order = 1; order <= 8; ++order) {
    const Spec plain_spec{.weight = Taylor{order}},
        centred{.centred = true, .weight = Taylor{order}};
    const Inputs in = random_inputs(plain_spec, small(8));
    Inputs shifted = in;
    shifted.k = in.k + at::tensor({0.5, 0.25, 1.0, 0.75}, at::kDouble);  // by q_t.u in row t
    EXPECT_LT(distance(run(centred, shifted), run(centred, in)), 1e-11) << order;
    EXPECT_GT(distance(run(plain_spec, shifted), run(plain_spec, in)), 1e-6) << order;
    EXPECT_LT(distance(run("softmax", shifted), run("softmax", in)), kExact);
  }
}

// The series of the far keys, and with it the row.
TEST(NearAndFar, OnlyTheCentredOnesIgnoreAShiftOfTheScores) {
  const at::Tensor u = at::tensor({0.5, 0.25, 1.0, 0.75}, at::kDouble);
  for (int order = 1; order <= 6; ++order)
    for (const char* rest : {":near=window(3)", ":near=window(3),decay=token_gate"}) {
      const std::string n = std::to_string(order) + rest;
      const Spec plain_spec = find("near_taylor" + n).spec;
      const Spec centred = find("near_centred_taylor" + n).spec;
      const Inputs in = random_inputs(plain_spec, small(21));
      Inputs shifted = in;
      shifted.k = in.k + u;  // by q_t.u in row t
      EXPECT_LT(distance(run(centred, shifted), run(centred, in)), 1e-11) << n;
      EXPECT_GT(distance(run(plain_spec, shifted), run(plain_spec, in)), 1e-6) << n;
    }
}

// What is left of the difference to softmax is that of the far keys, about their mean.
TEST(NearAndFar, TheCentredOnesStayNearSoftmaxWhateverTheMeanScore) {
  Inputs in = plain({.T = 60, .S = 60, .D = 4, .E = 3, .dtype = at::kDouble, .seed = 22});
  in.q = at::cat({0.25 * in.q, at::ones_like(in.q.narrow(3, 0, 1))}, 3);
  const at::Tensor k = in.k;
  double before = 0;
  for (const double mean : {0.0, 3.0, -3.0, 12.0}) {  // of the scores
    in.k = at::cat({k, at::full_like(k.narrow(3, 0, 1), mean * std::sqrt(5))}, 3);
    const at::Tensor limit = run("softmax", in);
    const auto error = [&](const char* name) {
      return (run(name, in) - limit).square().mean().sqrt().item<double>();
    };
    const double centred = error("near_centred_taylor2:near=window(8)");
    EXPECT_LT(centred, 0.01);
    if (mean == 0) {
      before = centred;
    } else {
      EXPECT_NEAR(centred, before, 1e-12);
      EXPECT_GT(error("near_taylor2:near=window(8)"), 10 * centred) << mean;
    }
    EXPECT_LT(error("near_centred_taylor20:near=window(8)"), 1e-12) << mean;
    EXPECT_LT(error("near_centred_taylor3:near=window(60)"), 1e-12) << mean;  // none is far
  }
}

TEST(Taylor, TheDerivativeIsOneOrderLower) {
  for (int order = 1; order <= 20; ++order)
    for (const double x : {-3.0, -1.596, -0.5, 0.0, 0.25, 1.0, 4.0}) {
      Inputs in;
      in.q = at::full({1, 1, 1, 1}, x, at::kDouble).requires_grad_();
      in.k = in.v = at::ones({1, 1, 1, 1}, at::kDouble);
      run(Spec{.weight = Taylor{order}, .denominator = Nothing{}}, in).backward();
      const at::Tensor lower = run(Spec{.weight = Taylor{order - 1}, .denominator = Nothing{}}, in);
      EXPECT_LT(distance(in.q.grad(), lower.detach()), kExact) << order << " at " << x;
    }
}

// Masks.

// [T, S]: the weights themselves, as values that are unit vectors give them.
at::Tensor weights(const char* variant, int64_t T, int64_t S) {
  Inputs in = plain(
      {.B = 1, .H = 1, .G = 1, .T = T, .S = S, .D = 4, .E = S, .dtype = at::kDouble, .seed = 9});
  in.v = at::eye(S, at::kDouble).reshape({1, 1, S, S});
  return run(variant, in)[0][0];
}

TEST(Masks, ShowWhatTheyShould) {
  for (const auto& [T, S] : {std::pair{8, 8}, {3, 8}, {1, 5}, {6, 4}}) {
    const at::Tensor distance = at::arange(S - T, S).unsqueeze(1) - at::arange(S).unsqueeze(0);
    const at::Tensor all = at::ones({T, S}, at::kBool);
    EXPECT_TRUE(at::equal(weights("softmax", T, S) > 0, distance >= 0));
    EXPECT_TRUE(at::equal(weights("softmax:mask=full", T, S) > 0, all));
    EXPECT_TRUE(at::equal(weights("softmax:mask=window(1)", T, S) > 0, distance == 0));
    EXPECT_TRUE(
        at::equal(weights("softmax:mask=window(3)", T, S) > 0, (distance >= 0) & (distance < 3)));
    EXPECT_TRUE(at::equal(weights("softmax:mask=window(99)", T, S), weights("softmax", T, S)));
  }
}

// What the interpreters read from a mask is what the reference shows.
TEST(Masks, HaveIntervalsThatTheReferenceShows) {
  for (const char* mask : {"full", "causal", "window(1)", "window(3)", "window(99)"})
    for (const auto& [T, S] : {std::pair{8, 8}, {3, 8}, {1, 5}, {6, 4}}) {
      const Spec spec = find(std::string("softmax:mask=") + mask).spec;
      const at::Tensor seen = weights(("softmax:mask=" + std::string(mask)).c_str(), T, S) > 0;
      int64_t pairs = 0;
      for (int64_t t = 0; t < T; ++t) {
        const auto [lo, hi] = interval(spec.mask, t, S, T);
        const at::Tensor s = at::arange(S);
        EXPECT_TRUE(at::equal(seen[t], (s >= lo) & (s < hi))) << mask << " " << t;
        pairs += std::max<int64_t>(0, hi - lo);
      }
      // seen_pairs counts the end of an interval half, and is meant for T <= S.
      if (T > S) continue;
      EXPECT_NEAR(seen_pairs(spec.mask, T, S), double(pairs), T / 2.0) << mask;
    }
}

TEST(EveryVariant, SeesTheFutureOnlyIfItsMaskDoes) {
  for_every_variant([](const Spec& spec) {
    if (sees_future(spec.mask)) return;
    const Inputs in = random_inputs(spec, small(10)), other = random_inputs(spec, small(11));
    for (const int64_t t : {0, 3, 7}) {
      Inputs changed = in;
      for (const Input& i : input_table()) {
        const std::string_view shape = i.shape;
        const size_t axis = shape.find_first_of("TS");
        if (!(in.*i.at).defined() || axis == std::string_view::npos) continue;
        (changed.*i.at) = (in.*i.at).clone();
        (changed.*i.at)
            .select(int64_t(axis), t + 1)
            .copy_((other.*i.at).select(int64_t(axis), t + 1));
      }
      const at::Tensor before = run(spec, in), after = run(spec, changed);
      EXPECT_TRUE(at::equal(before.narrow(2, 0, t + 1), after.narrow(2, 0, t + 1))) << t;
      EXPECT_FALSE(at::equal(before.select(2, t + 1), after.select(2, t + 1))) << t;
    }
  });
}

TEST(EveryVariant, GivesTheLastRowsWhereQueriesAreFewer) {
  for_every_variant([](const Spec& spec) {
    const Inputs in = random_inputs(spec, small(12));
    EXPECT_LT(distance(run(spec, cut(in, 'T', 6, 3)), run(spec, in).narrow(2, 6, 3)), kExact);
  });
}

TEST(EveryVariant, GivesZeroAndNoGradientsWhereNoKeyIsSeen) {
  for_every_variant([](const Spec& spec) {
    for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
      Case c = small(13);
      c.dtype = dtype;
      Inputs in = leaves(random_inputs(spec, c));
      in.keep = at::ones({c.B, c.S}, at::kBool);
      in.keep[0].fill_(false);                  // all of the first sequence
      in.keep[1].narrow(0, 0, 2).fill_(false);  // and the first rows of the second
      const at::Tensor o = run(spec, in);
      o.backward(at::randn_like(o));
      EXPECT_TRUE(finite(o));
      EXPECT_EQ(o[0].abs().max().item<double>(), 0);
      const at::Tensor first_rows = o[1].narrow(1, 0, 2);
      EXPECT_TRUE(sees_future(spec.mask) || first_rows.abs().max().item<double>() == 0);
      for (const Input& i : input_table()) {
        if (i.role == Role::mask || !(in.*i.at).defined()) continue;
        const at::Tensor gradient = (in.*i.at).grad();
        if (!gradient.defined()) continue;
        EXPECT_TRUE(finite(gradient)) << i.name;
        const bool of_batch = i.shape[0] == 'B';
        EXPECT_TRUE(!of_batch || gradient[0].abs().max().item<double>() == 0) << i.name;
      }
    }
  });
}

// Inputs that mean the same.

TEST(EveryVariant, GivesForAPackedBatchWhatItsSequencesGive) {
  for_every_variant([](const Spec& spec) {
    if (is<Prefix>(spec.mask)) return;  // refused: a prefix belongs to a sequence of the batch
    Inputs in =
        random_inputs(spec, {.T = 13, .S = 13, .D = 4, .E = 3, .dtype = at::kDouble, .seed = 14});
    const std::vector<int64_t> begins = {0, 4, 4, 5, 13};
    std::vector<at::Tensor> parts;
    for (size_t i = 0; i + 1 < begins.size(); ++i)
      if (const int64_t length = begins[i + 1] - begins[i])
        parts.push_back(run(spec, cut(cut(in, 'T', begins[i], length), 'S', begins[i], length)));
    for (const at::ScalarType dtype : {at::kInt, at::kLong}) {
      in.cu_seqlens = at::tensor(begins).to(dtype);
      EXPECT_LT(distance(run(spec, in), at::cat(parts, 2)), kExact);
    }
  });
}

TEST(EveryVariant, GivesForGroupedHeadsWhatRepeatedOnesGive) {
  for_every_variant([](const Spec& spec) {
    const Inputs in = random_inputs(spec, small(15));
    const Inputs repeated = along(
        in, 'G', [](const at::Tensor& x, int64_t axis) { return x.repeat_interleave(2, axis); });
    ASSERT_EQ(repeated.k.size(1), in.q.size(1));
    EXPECT_LT(distance(run(spec, in), run(spec, repeated)), kExact);
  });
}

TEST(EveryVariant, DoesWithoutHiddenKeysAsIfTheyWereNotThere) {
  for_every_variant([](Spec spec) {
    if (!is<NoDecay>(spec.decay)) return;  // a hidden token's gate still scales what came before
    if (is<Delta>(spec.values) || !is<NoKeys>(spec.near)) return;  // these need a causal mask
    spec.mask = Full{};
    Inputs in = random_inputs(spec, small(16));
    const at::Tensor kept = at::tensor({1, 2, 5, 7}, at::kLong);
    const Inputs fewer = along(
        in, 'S', [&](const at::Tensor& x, int64_t axis) { return x.index_select(axis, kept); });
    in.keep = at::zeros({2, 9}, at::kBool).index_fill(1, kept, true);
    EXPECT_LT(distance(run(spec, in), run(spec, fewer)), kExact);
  });
}

TEST(EveryVariant, SeesNothingInRowsThatStandBeforeTheFirstKey) {
  for_every_variant([](const Spec& spec) {
    if (sees_future(spec.mask)) return;
    Inputs in = random_inputs(spec, small(20));
    const at::Tensor o = run(spec, cut(in, 'S', 3, 6));  // 9 queries, the last 6 keys
    in.keep = at::ones({2, 9}, at::kBool);
    in.keep.narrow(1, 0, 3).fill_(false);
    EXPECT_LT(distance(o, run(spec, in)), kExact);
    EXPECT_EQ(o.narrow(2, 0, 3).abs().max().item<double>(), 0);
  });
}

TEST(EveryVariant, IsItsText) {
  for_every_variant([](const Spec& spec) {
    const Spec again = with(Spec{}, text(spec));
    EXPECT_EQ(text(again), text(spec));
    const Inputs in = random_inputs(spec, small(17));
    EXPECT_TRUE(at::equal(run(spec, in), run(again, in)));
  });
}

TEST(EveryVariant, DividesItsScoresByTheTemperature) {
  for_every_variant([](Spec spec) {
    if (!is<NoKeys>(spec.near) && !is<Identity>(spec.features)) return;  // two kinds of scores
    const Inputs in = random_inputs(spec, small(18));
    Spec halved = spec;
    const auto* fixed = std::get_if<Fixed>(&spec.scale);
    halved.scale = Fixed{fixed                        ? fixed->factor / 2
                         : is<Project>(spec.features) ? 0.125f   // 1 / (2 sqrt 16)
                                                      : 0.25f};  // 1 / (2 sqrt 4)
    spec.temperature = 2;
    EXPECT_LT(distance(run(spec, in), run(halved, in)), kExact);
  });
}

TEST(EveryVariant, WithOpenGatesDoesNotDecay) {
  for_every_variant([](Spec spec) {
    if (sees_future(spec.mask)) return;
    spec.decay = TokenGate{};
    Inputs in = random_inputs(spec, small(19));
    in.decay.zero_();
    const at::Tensor with_gates = run(spec, in);
    spec.decay = NoDecay{};
    in.decay = at::Tensor();
    EXPECT_LT(distance(with_gates, run(spec, in)), kExact);
  });
}

TEST(NearKeys, GiveMeansOfOnes) {
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    expect_means_of_ones({"reference", "fused_cpu", "chunked", "recurrent"}, dtype, at::kCPU);
}

// A hidden score may be too large for exp.
TEST(Softpick, HasFiniteGradientsOfHotScores) {
  Inputs in =
      random_inputs(find("softpick").spec, {.T = 64, .S = 64, .D = 16, .dtype = at::kFloat});
  in.q = (in.q * 40).detach().requires_grad_();
  run("softpick", in).sum().backward();
  EXPECT_TRUE(finite(in.q.grad()));
}

}  // namespace
}  // namespace horner::attn
