// Guarantees of the CPU kernels: every instruction set is correct, the bits do not depend on the
// number of threads, memory is linear in T, and NaN propagates.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "attn/catalog.h"
#include "attn/inputs.h"
#include "attn/parallel.h"
#include "core/check.h"
#include "core/simd/isa.h"
#include "instruments/bench.h"

namespace horner::attn {

using namespace instruments;
namespace {

const char* const kVariants[] = {"softmax",
                                 "taylor3",
                                 "gated_decay",
                                 "centred_taylor4",
                                 "rms",
                                 "softmax1",
                                 "sigmoid",
                                 "entmax15",
                                 "sa_softmax",
                                 "softcap",
                                 "sink",
                                 "bias",
                                 "streaming",
                                 "softpick",
                                 "stick_breaking",
                                 "near_taylor2",
                                 "near_centred_taylor2",
                                 "softmax:dropout=0.2",
                                 "entmax15:dropout=0.2",
                                 "softmax:mask=streaming(first=3,size=70)",
                                 "softmax:softcap=3,bias=yes,centred=yes",
                                 "entmax15:softcap=3,bias=yes,mask=prefix"};

struct Forced {
  explicit Forced(std::string_view isa) { setenv("HORNER_CPU", std::string(isa).c_str(), 1); }
  ~Forced() { unsetenv("HORNER_CPU"); }
};

TEST(InstructionSets, EachRunsWhenForcedAndIsRight) {
  int ran = 0;
  for (const simd::Isa isa : simd::supported()) {
    ++ran;
    const std::string_view set = simd::name(isa);
    const Forced forced(set);
    EXPECT_EQ(cpu_kernels(), set);
    for (const char* name : kVariants)
      for (at::ScalarType dtype : {at::kFloat, at::kBFloat16})
        for (const Case& c : standard_cases(dtype)) {
          if (c.T > 200) continue;
          const Verdict v = verify(find(name).spec, execution("fused_cpu"), c);
          EXPECT_TRUE(v.why_not.empty()) << v.why_not;
          EXPECT_TRUE(v.ok()) << set << " " << name << " " << v.worst()->of << " " << text(c);
        }
  }
  EXPECT_GE(ran, 1);
}

TEST(InstructionSets, AnUnknownOneIsAnError) {
  const Forced forced("mmx");
  try {
    simd::isa();
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(
                  "HORNER_CPU='mmx' is not an instruction set of this CPU; expected '"),
              std::string::npos);
    EXPECT_NE(std::string(e.what()).find("'portable'"), std::string::npos);
  }
}

TEST(Threads, TwoRunAtOnce) {
  at::set_num_threads(2);
  std::atomic<int> here = 0, together = 0;
  for_each_task(2, [&](int64_t) {
    ++here;
    const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (here < 2 && std::chrono::steady_clock::now() < patience) std::this_thread::yield();
    if (here == 2) ++together;
  });
  EXPECT_EQ(together, 2);
}

TEST(Threads, TheirNumberDoesNotChangeABit) {
  for (const char* name : kVariants)
    for (at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const Case c{.T = 300, .S = 300, .D = 24, .E = 40, .dtype = dtype, .seed = 5};
      const Spec spec = find(name).spec;
      std::vector<at::Tensor> first;
      for (int threads : {1, 2, 3}) {
        at::set_num_threads(threads);
        Inputs in = random_inputs(spec, c);
        for (const Input& i : input_table())
          if ((in.*i.at).defined() && has_gradient(i)) (in.*i.at).requires_grad_();
        const at::Tensor o = attend(spec, in);
        o.backward(at::ones_like(o));
        std::vector<at::Tensor> now = {o.detach()};
        for (const Input& i : input_table())
          if ((in.*i.at).defined() && (in.*i.at).grad().defined()) now.push_back((in.*i.at).grad());
        EXPECT_GE(now.size(), 4u);
        if (first.empty()) first = now;
        for (size_t i = 0; i < now.size(); ++i)
          EXPECT_TRUE(at::equal(now[i], first[i])) << name << " " << i << " " << threads;
      }
    }
  at::set_num_threads(2);
}

// Four times the tokens take about four times the memory, not sixteen times.
TEST(Memory, IsLinearInTheTokens) {
  auto bytes = [](int64_t T) {
    const Case c{.B = 1, .H = 2, .G = 2, .T = T, .S = T, .D = 32, .E = 32};
    return double(bench(Spec{}, execution("fused_cpu"), c, {.repeats = 1}, false).extra_bytes);
  };
  const double at_1k = bytes(1024), at_4k = bytes(4096);
  EXPECT_GT(at_1k, 0);
  EXPECT_LT(at_4k, 4.5 * at_1k);
  EXPECT_LT(at_4k, 0.2 * 2 * 4096 * 4096 * sizeof(float));
}

// Six tensors of the size of q: the result, N, dN and the gradients of q, k and v. The rest is one
// number per row.
TEST(Memory, IsSixTensorsForForwardAndBackward) {
  const Case c{.B = 1, .H = 4, .G = 4, .T = 1024, .S = 1024, .D = 64, .E = 64};
  const double q = double(c.B * c.H * c.T * c.D * int64_t(sizeof(float)));
  for (const char* name : {"softmax", "l2", "taylor2", "gated"}) {
    const Spec spec = find(name).spec;
    const auto b = bench(spec, execution("fused_cpu"), c, {.repeats = 1}, false);
    EXPECT_LT(double(b.extra_bytes), 6.3 * q) << name;
  }
}

// The third of three equal runs takes its large tensors from the second. Otherwise it would be
// given 7 of 8,192 pages.
TEST(Memory, OfLargeTensorsIsUsedAgain) {
  prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);  // pages of 4 KB
  std::vector<at::Tensor> x;
  for (int i = 0; i < 3; ++i) x.push_back(at::rand({1, 2, 65536, 64}).requires_grad_());
  const at::Tensor grad = at::ones_like(x[0]);
  const auto pages = [] {
    rusage used;
    getrusage(RUSAGE_SELF, &used);
    return used.ru_minflt;
  };
  const auto run = [&] {
    const long before = pages();
    const Spec spec = find("linear_elu").spec;
    attend(spec, {x[0], x[1], x[2]}, "chunked").backward(grad);
    for (at::Tensor& y : x) y.mutable_grad().reset();
    return pages() - before;
  };
  run(), run();
  EXPECT_LT(run(), 4000);
  prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0);
}

TEST(Statistics, AreThoseOfTheReferenceInDouble) {
  for (const Variant& v : variants())
    for (const Case& c : standard_cases(at::kFloat)) {
      if (c.T > 200 || c.hot) continue;
      const Inputs in = random_inputs(v.spec, c);
      if (!execution("fused_cpu").why_not(v.spec, in).empty()) continue;
      Inputs exact = in;
      for (const Input& i : input_table())
        if ((in.*i.at).defined() && i.role != Role::mask) exact.*i.at = (in.*i.at).to(at::kDouble);
      Statistics found, truth;
      attend(v.spec, in, "fused_cpu", &found);
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

TEST(Statistics, OfKnownRows) {
  Inputs in = random_inputs(Spec{}, {.D = 8, .E = 8});
  in.q.zero_();  // equal weights: row t has t + 1 keys
  Statistics s;
  attend(Spec{}, in, "auto", &s);
  const at::Tensor n = at::arange(1, 38, at::kFloat);
  EXPECT_TRUE(at::allclose(s.entropy.select(0, 0).select(0, 0), n.log(), 1e-5, 1e-6));
  EXPECT_TRUE(at::allclose(s.largest.select(0, 1).select(0, 2), 1 / n));
  EXPECT_TRUE(at::allclose(s.first.select(0, 1).select(0, 2), 1 / n));
  EXPECT_EQ(s.negative.abs().max().item<float>(), 0);
}

TEST(Values, NanStaysVisible) {
  for (const char* name : {"softmax", "l2", "taylor2", "by_count", "entmax15"}) {
    const Spec spec = find(name).spec;
    Inputs in = random_inputs(spec, {});
    in.q.select(2, 20).fill_(NAN);
    const at::Tensor o = attend(spec, in);
    EXPECT_TRUE(o.select(2, 20).isnan().all().item<bool>()) << name;
    EXPECT_FALSE(o.select(2, 19).isnan().any().item<bool>()) << name;
  }
}

TEST(Sizes, MayBeZero) {
  for (Case c : {Case{.B = 0}, Case{.T = 0, .S = 5}}) {
    Inputs in = random_inputs(Spec{}, c);
    in.q.requires_grad_();
    const at::Tensor o = attend(Spec{}, in);
    EXPECT_EQ(o.sizes(), (std::vector<int64_t>{c.B, c.H, c.T, c.E}));
    o.sum().backward();
    EXPECT_EQ(in.q.grad().sizes(), in.q.sizes());
  }
}

}  // namespace
}  // namespace horner::attn
