// What the CUDA kernels promise beyond the cases of `horner check`: every width of heads, strided
// inputs, deterministic results where torch requires them, statistics, memory that does not grow
// with T squared. Without a GPU every test is skipped.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include "attn/catalog.h"
#include "attn/inputs.h"
#include "attn/state.h"
#include "instruments/bench.h"
#include "streams.h"

namespace horner::attn {

using namespace instruments;
namespace {

const char* const kVariants[] = {"softmax",
                                 "taylor3",
                                 "gated",
                                 "gated_decay",
                                 "gated_decay@code",
                                 "linear_mamba",
                                 "linear_decay",
                                 "retention",
                                 "centred_taylor4",
                                 "rms",
                                 "l2",
                                 "softmax1",
                                 "sigmoid",
                                 "entmax15",
                                 "topk8",
                                 "topk_raw8",
                                 "sa_softmax",
                                 "adaptive_temperature",
                                 "linear_elu",
                                 "taylor2",
                                 "cosine_softmax",
                                 "linear_cosine",
                                 "linear_cosine@code",
                                 "relu_l2",
                                 "ssmax",
                                 "asentmax",
                                 "cumulative_gate",
                                 "cumulative_gate_count",
                                 "softpick",
                                 "near_taylor2",
                                 "lolcats:no_near_share",
                                 "stick_breaking",
                                 "delta_exp"};
const at::ScalarType kDtypes[] = {at::kBFloat16, at::kHalf, at::kFloat};

class Cuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  }
};

// torch.use_deterministic_algorithms(True)
struct Deterministic {
  Deterministic() { at::globalContext().setDeterministicAlgorithms(true, true); }
  ~Deterministic() { at::globalContext().setDeterministicAlgorithms(false, false); }
};

// By the kernels that run everything, and by the others where they run it.
void expect_right(const char* name, const Spec& spec, const Case& c) {
  for (const char* kernels : {"fused_cuda", "hopper_cuda", "chunked_cuda"}) {
    const Verdict v = verify(spec, execution(kernels), c);
    const bool must_run = kernels == std::string_view("fused_cuda");
    EXPECT_TRUE(!must_run || v.why_not.empty()) << v.why_not;
    EXPECT_TRUE(v.ok()) << kernels << " " << name << " " << c10::toString(c.dtype) << " "
                        << v.worst()->of << ": " << v.worst()->error << ", allowed "
                        << v.worst()->allowed << ", on " << text(c);
  }
}

void expect_right(const char* name, const Case& c) {
  expect_right(name, find(name).spec, c);
}

// For the sanitizers: no kernels but our own and torch's simplest.
void expect_finite(const char* name, const Case& c) {
  Inputs in = random_inputs(find(name).spec, c);
  for (at::Tensor* x : {&in.q, &in.k, &in.v}) x->requires_grad_();
  for (const char* kernels : {"fused_cuda", "hopper_cuda", "chunked_cuda"}) {
    if (!execution(kernels).why_not(find(name).spec, in).empty()) continue;
    const at::Tensor o = attend(find(name).spec, in, kernels);
    o.backward(at::ones_like(o));
    for (const at::Tensor& x : {o.detach(), in.q.grad(), in.k.grad(), in.v.grad()})
      EXPECT_TRUE(x.isfinite().all().item<bool>()) << name << " " << text(c);
  }
}

TEST_F(Cuda, SmallRunsAreFinite) {
  for (const char* name : kVariants)
    for (at::ScalarType dtype : kDtypes)
      for (const Case& c : standard_cases(dtype, at::kCUDA))
        if (c.T <= 200 && !c.hot) expect_finite(name, c);
}

// Each kernel of every execution once, in seconds even under racecheck.
TEST_F(Cuda, FewRunsAreFinite) {
  for (const char* name :
       {"softmax", "taylor4", "gated", "taylor2", "gated_decay", "retention", "centred_taylor2"})
    for (int64_t D : {64, 128})
      expect_finite(name, {.B = 1,
                           .H = 2,
                           .G = 1,
                           .T = 150,
                           .S = 150,
                           .D = D,
                           .E = D,
                           .dtype = at::kBFloat16,
                           .device = at::kCUDA});
}

TEST_F(Cuda, SmallCasesAreRight) {
  for (const char* name : kVariants)
    for (at::ScalarType dtype : kDtypes)
      for (const Case& c : standard_cases(dtype, at::kCUDA))
        if (c.T < 200) expect_right(name, c);
}

TEST_F(Cuda, SmallCasesAreRightWithoutAtomicAdditions) {
  const Deterministic guard;
  for (const char* name : kVariants)
    for (at::ScalarType dtype : kDtypes)
      expect_right(
          name,
          {.T = 130, .S = 130, .D = 24, .E = 40, .dtype = dtype, .device = at::kCUDA, .seed = 3});
}

TEST_F(Cuda, EveryWidthOfHeadsIsRight) {
  for (const char* name : {"softmax", "taylor4", "gated_decay", "retention", "centred_taylor2",
                           "entmax15", "softpick", "near_taylor2", "stick_breaking"})
    for (at::ScalarType dtype : kDtypes)
      for (int64_t D : {16, 33, 64, 80, 128, 160, 256})
        for (int64_t E : {D, 64 + D / 4})
          expect_right(name, {.T = 150,
                              .S = 170,
                              .D = D,
                              .E = E,
                              .dtype = dtype,
                              .device = at::kCUDA,
                              .seed = uint64_t(D)});
}

// Blocks of queries and keys that end anywhere, and rows that see few of them.
TEST_F(Cuda, EveryLengthIsRight) {
  for (const char* name : {"softmax", "softmax_window", "taylor4", "l2", "gated", "gated_decay",
                           "linear_mamba", "retention", "centred_taylor1", "centred_taylor2",
                           "softpick", "near_taylor2", "stick_breaking"})
    for (int64_t D : {64, 128})
      for (int64_t T : {63, 64, 65, 128, 190, 257, 520})
        for (int64_t S : {T, T + 70})
          expect_right(name, {.B = 1,
                              .T = T,
                              .S = S,
                              .D = D,
                              .E = D,
                              .dtype = at::kBFloat16,
                              .device = at::kCUDA,
                              .seed = uint64_t(T)});
}

// Where it runs softmax, it also runs decay, unless the denominator is a sum of other weights than
// exp, centred scores without decay, and what changes the scores of exp or adds to their sum.
TEST_F(Cuda, HopperRunsDecayAndCentredScores) {
  const Case c{.D = 64, .E = 64, .dtype = at::kBFloat16, .device = at::kCUDA};
  const auto why_not = [&](const Spec& spec) {
    return execution("hopper_cuda").why_not(spec, random_inputs(spec, c));
  };
  if (!why_not(find("softmax").spec).empty()) GTEST_SKIP() << "no GPU of compute capability 9.0";
  for (const char* name : {"gated_decay", "linear_mamba", "linear_decay", "retention"}) {
    Spec spec = find(name).spec;
    EXPECT_EQ(why_not(spec), "") << name;
    spec.denominator = Sum{};
    EXPECT_EQ(why_not(spec).empty(), is<Exp>(spec.weight)) << name;
    spec = find(name).spec;
    spec.centred = true;
    EXPECT_NE(why_not(spec), "") << name;
  }
  for (const char* name : {"centred_taylor1", "centred_taylor2", "centred_taylor10", "forgetting",
                           "alibi", "softcap", "sink", "chunk_window"})
    EXPECT_EQ(why_not(find(name).spec), "") << name;
}

// No row of the catalog has these: an exponential, with a clamp of centred scores.
TEST_F(Cuda, CentredExponentialsAreRight) {
  for (float clamp : {kNoClamp, 0.5})
    for (int64_t D : {64, 128})
      expect_right(
          "centred exp", {.centred = true, .clamp = clamp},
          {.T = 150, .S = 170, .D = D, .E = D, .dtype = at::kBFloat16, .device = at::kCUDA});
}

// Of one chunk, of several, and of a last one that is not full.
TEST_F(Cuda, EveryNumberOfChunksIsRight) {
  for (const char* name : {"linear", "linear_elu", "linear_relu", "linear_cosine", "taylor1",
                           "relu_l2", "retention", "based", "taylor2", "power2", "elu_taylor2"})
    for (at::ScalarType dtype : kDtypes)
      for (int64_t D : {16, 40, 64})
        for (int64_t T : {256, 700, 1200}) {
          const Case c{.B = 1,
                       .H = 2,
                       .G = 1,
                       .T = T,
                       .S = T,
                       .D = D,
                       .E = 72 - D / 2,
                       .dtype = dtype,
                       .device = at::kCUDA,
                       .seed = 5,
                       .padded = T == 700};
          EXPECT_EQ(
              execution("chunked_cuda").why_not(find(name).spec, random_inputs(find(name).spec, c)),
              "");
          expect_right(name, c);
        }
}

// The row's log n is a constant centre.
TEST_F(Cuda, ScoresLessLogCountAreRight) {
  const std::pair<const char*, Spec> rows[] = {
      {"sigmoid", find("sigmoid").spec},
      {"exp", {.less_log_count = true, .clamp = 1, .denominator = Nothing{}}},
      {"order 2", {.less_log_count = true, .weight = Taylor{2}, .denominator = Nothing{}}},
      {"centred", {.centred = true, .less_log_count = true, .weight = Taylor{2}}}};
  for (const auto& [name, spec] : rows)
    for (at::ScalarType dtype : kDtypes)
      for (int64_t D : {64, 128})
        for (bool padded : {false, true})
          expect_right(name, spec,
                       {.T = 150,
                        .S = 170,
                        .D = D,
                        .E = D,
                        .dtype = dtype,
                        .device = at::kCUDA,
                        .padded = padded});
}

TEST_F(Cuda, StatesGiveWhatTheReferenceGives) {
  uint64_t seed = 0;
  for (const char* name : kStreamsOnGpu)
    for (at::ScalarType dtype : kDtypes)
      for (int64_t D : {24, 64}) {
        Case c{.H = 6, .G = 2, .D = D, .E = D, .dtype = dtype, .device = at::kCUDA, .seed = ++seed};
        c.padded = seed % 4 > 1;
        expect_stream(find(name).spec, c, name);
      }
}

TEST_F(Cuda, TheSameBitsComeOutWhenTorchAsks) {
  const Deterministic guard;
  for (const char* name : kVariants) {
    const Case c{.T = 700, .S = 700, .D = 64, .E = 64, .dtype = at::kBFloat16, .device = at::kCUDA};
    const Spec spec = find(name).spec;
    std::vector<at::Tensor> first;
    for (int run = 0; run < 3; ++run) {
      Inputs in = random_inputs(spec, c);
      for (at::Tensor* x : {&in.q, &in.k, &in.v}) x->requires_grad_();
      const at::Tensor o = attend(spec, in);
      o.backward(at::ones_like(o));
      const std::vector<at::Tensor> now = {o.detach(), in.q.grad(), in.k.grad(), in.v.grad()};
      if (first.empty()) first = now;
      for (size_t i = 0; i < now.size(); ++i) EXPECT_TRUE(at::equal(now[i], first[i])) << name << i;
    }
  }
}

// As a model makes them: [B, T, H, D], transposed.
TEST_F(Cuda, StridedInputsGiveWhatContiguousOnesGive) {
  const Case c{.T = 90, .S = 90, .D = 64, .E = 64, .dtype = at::kBFloat16, .device = at::kCUDA};
  const Inputs in = random_inputs(Spec{}, c);
  Inputs strided = in;
  for (at::Tensor* x : {&strided.q, &strided.k, &strided.v})
    *x = x->transpose(1, 2).contiguous().transpose(1, 2);
  EXPECT_FALSE(strided.q.is_contiguous());
  EXPECT_TRUE(at::equal(attend(Spec{}, in, "fused_cuda"), attend(Spec{}, strided, "fused_cuda")));
}

TEST_F(Cuda, StatisticsAreThoseOfTheReferenceInDouble) {
  for (const Variant& v : variants())
    for (const Case& c : standard_cases(at::kFloat, at::kCUDA)) {
      if (c.T > 200 || c.hot) continue;
      const Inputs in = random_inputs(v.spec, c);
      if (!execution("fused_cuda").why_not(v.spec, in).empty()) continue;
      Inputs exact = in;
      for (const Input& i : input_table())
        if ((in.*i.at).defined() && i.role != Role::mask) exact.*i.at = (in.*i.at).to(at::kDouble);
      Statistics found, truth;
      attend(v.spec, in, "fused_cuda", &found);
      attend(v.spec, exact, "reference", &truth);
      const std::pair<at::Tensor, at::Tensor> pairs[] = {{found.entropy, truth.entropy},
                                                         {found.largest, truth.largest},
                                                         {found.first, truth.first},
                                                         {found.negative, truth.negative}};
      for (const auto& [x, y] : pairs)
        EXPECT_LT((x - y).abs().max().item<double>(), 2e-5)
            << v.name << " " << &x - &pairs[0].first << " " << text(c);
    }
}

TEST_F(Cuda, MemoryIsLinearInTheTokens) {
  auto bytes = [](const char* name, int64_t T) {
    const Case c{.B = 1,
                 .H = 2,
                 .G = 2,
                 .T = T,
                 .S = T,
                 .D = 64,
                 .E = 64,
                 .dtype = at::kBFloat16,
                 .device = at::kCUDA};
    const Spec spec = find(name).spec;
    return double(bench(spec, execution("fused_cuda"), c, {.repeats = 1}, false).extra_bytes);
  };
  for (const char* name : {"softmax", "near_taylor2", "stick_breaking"}) {
    const double at_4k = bytes(name, 4096), at_16k = bytes(name, 16384);
    EXPECT_GT(at_4k, 0) << name;
    EXPECT_LT(at_16k, 4.5 * at_4k) << name;
  }
}

TEST_F(Cuda, NanStaysVisible) {
  for (const char* name : {"softmax", "l2", "taylor2", "by_count", "entmax15", "softpick",
                           "near_taylor2", "stick_breaking"}) {
    const Spec spec = find(name).spec;
    Inputs in = random_inputs(spec, {.device = at::kCUDA});
    in.q.select(2, 20).fill_(NAN);
    const at::Tensor o = attend(spec, in, "fused_cuda");
    EXPECT_TRUE(o.select(2, 20).isnan().all().item<bool>()) << name;
    EXPECT_FALSE(o.select(2, 19).isnan().any().item<bool>()) << name;
  }
}

// Scores far above those of the first keys: what rows are relative to is raised on the way.
TEST_F(Cuda, ScoresMayGrow) {
  const Spec spec = find("softmax").spec;
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat})
    for (int64_t D : {64, 128}) {
      Inputs in = random_inputs(
          spec, {.T = 400, .S = 400, .D = D, .E = D, .dtype = dtype, .device = at::kCUDA});
      const at::Tensor growth = at::linspace(1, 40, 400, in.k.options());
      in.k = in.k * growth.unsqueeze(-1);
      Inputs exact = in;
      for (at::Tensor* x : {&exact.q, &exact.k, &exact.v}) *x = x->to(at::kDouble);
      const at::Tensor truth = execution("reference").run(spec, exact, nullptr);
      const at::Tensor o = attend(spec, in, "fused_cuda").to(at::kDouble);
      EXPECT_LE((o - truth).abs().max().item<double>(), 0.05) << dtype << ", D = " << D;
    }
}

TEST_F(Cuda, SizesMayBeZero) {
  const Case cases[] = {{.B = 0}, {.T = 0, .S = 5}};
  for (const char* name : {"softmax", "taylor2", "gated", "gated_decay", "retention",
                           "cosine_softmax", "cumulative_gate", "centred_taylor2", "gated_delta",
                           "kda", "softpick", "near_taylor2", "stick_breaking"})
    for (Case c : cases) {
      c.D = c.E = 64, c.dtype = at::kBFloat16, c.device = at::kCUDA;
      const Spec spec = find(name).spec;
      for (const char* kernels : {"fused_cuda", "hopper_cuda", "chunked_cuda"}) {
        Inputs in = random_inputs(spec, c);
        for (at::Tensor* x : {&in.q, &in.k, &in.v}) x->requires_grad_();
        if (!execution(kernels).why_not(spec, in).empty()) continue;
        const at::Tensor o = attend(spec, in, kernels);
        EXPECT_EQ(o.sizes(), (std::vector<int64_t>{c.B, c.H, c.T, c.E})) << kernels << " " << name;
        EXPECT_EQ(o.count_nonzero().item<int64_t>(), 0) << kernels << " " << name;
        o.sum().backward();
        for (const at::Tensor& x : {in.q, in.k, in.v}) {
          EXPECT_EQ(x.grad().sizes(), x.sizes()) << kernels << " " << name;
          EXPECT_EQ(x.grad().count_nonzero().item<int64_t>(), 0) << kernels << " " << name;
        }
      }
    }
}

// What backward overwrites of what forward has kept is still there where it is wanted again.
TEST_F(Cuda, AGraphThatIsKeptRunsTwice) {
  const Deterministic guard;
  for (const char* name :
       {"gated", "gated_decay", "l2_post_gate", "rms", "cosine_softmax", "ssmax", "centred_taylor2",
        "linear", "retention", "taylor2", "softpick", "near_taylor2", "stick_breaking"})
    for (const char* kernels : {"fused_cuda", "hopper_cuda", "chunked_cuda"}) {
      const Spec spec = find(name).spec;
      Inputs in = random_inputs(
          spec,
          {.T = 1100, .S = 1100, .D = 64, .E = 64, .dtype = at::kBFloat16, .device = at::kCUDA});
      if (!execution(kernels).why_not(spec, in).empty()) continue;
      for (at::Tensor* x : {&in.q, &in.k, &in.v}) x->requires_grad_();
      const at::Tensor o = attend(spec, in, kernels), direction = at::randn_like(o);
      o.backward(direction, /*retain_graph=*/true);
      const std::vector<at::Tensor> first = {in.q.grad(), in.k.grad(), in.v.grad()};
      for (at::Tensor* x : {&in.q, &in.k, &in.v}) x->mutable_grad() = at::Tensor();
      o.backward(direction);
      const at::Tensor second[] = {in.q.grad(), in.k.grad(), in.v.grad()};
      for (size_t i = 0; i < 3; ++i)
        EXPECT_TRUE(at::equal(first[i], second[i])) << kernels << " " << name << " " << i;
    }
}

}  // namespace
}  // namespace horner::attn
