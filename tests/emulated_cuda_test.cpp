// The CUDA kernels of compute capability 8.0, forward and backward, on a CPU (emulator/): every
// variant of the catalog against the reference in double, by the rule of every execution. What a
// CPU cannot show is how threads race: that takes a GPU (scripts/test-cuda).
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "attn/catalog.h"
#include "instruments/verify.h"
#include "nan_gates.h"
#include "near_ones.h"
#include "streams.h"

namespace emulator {
int64_t launches();
}

namespace horner::attn {

using namespace instruments;
namespace {

struct Row {
  Variant variant;
  at::ScalarType dtype;
  const char* execution;
};

std::vector<Row> rows() {
  std::vector<Row> all;
  for (const char* execution : {"fused_cuda", "chunked_cuda"})
    for (at::ScalarType dtype : {at::kBFloat16, at::kFloat, at::kHalf})
      for (const Variant& v : variants()) all.push_back({v, dtype, execution});
  return all;
}

std::string name(const Row& row) {
  std::string s = row.variant.name + "_" + c10::toString(row.dtype) + "_" + row.execution;
  std::replace(s.begin(), s.end(), '@', '_');
  return s;
}
void PrintTo(const Row& row, std::ostream* out) {
  *out << name(row);
}

// What may miss the rule, by a twentieth on some CPUs, as docs/testing.md says: hot scores.
constexpr double kMost = 1.25;  // times what is allowed
const char* const kMisses[] = {"forgetting_Float_fused_cuda"};

class EmulatedCuda : public testing::TestWithParam<Row> {};

TEST_P(EmulatedCuda, MatchesTheReference) {
  const auto& [variant, dtype, execution_name] = GetParam();
  const bool misses = std::ranges::find(kMisses, name(GetParam())) != std::end(kMisses);
  const int64_t longest = std::getenv("HORNER_LONG") ? 1024 : 37;
  bool ran = false;
  for (const Case& c : standard_cases(dtype)) {
    if (c.T > longest) continue;
    const Verdict v = verify(variant.spec, execution(execution_name), c);
    ran |= v.why_not.empty();
    for (const Difference& d : v.differences)
      EXPECT_LE(d.error, d.allowed * (misses ? kMost : 1)) << d.of << " on " << text(c);
  }
  if (!ran) GTEST_SKIP() << "refused";
}

// torch.use_deterministic_algorithms(True): dq by a kernel of its own.
class EmulatedCudaInOrder : public testing::Test {
 protected:
  void SetUp() override { at::globalContext().setDeterministicAlgorithms(true, true); }
  void TearDown() override { at::globalContext().setDeterministicAlgorithms(false, false); }
};

TEST_F(EmulatedCudaInOrder, MatchesTheReferenceWithoutAtomicAdditions) {
  for (const char* variant : {"softmax", "gated_decay", "centred_taylor4", "entmax15", "softpick"})
    for (at::ScalarType dtype : {at::kBFloat16, at::kFloat})
      for (const Case& c : standard_cases(dtype)) {
        if (c.T > (std::getenv("HORNER_LONG") ? 200 : 37)) continue;
        const Verdict v = verify(find(variant).spec, execution("fused_cuda"), c);
        EXPECT_TRUE(v.why_not.empty()) << v.why_not;
        for (const Difference& d : v.differences)
          EXPECT_LE(d.error, d.allowed) << variant << " " << d.of << " on " << text(c);
      }
}

TEST(EmulatedCudaGates, NanIsWhereTheDefinitionHasIt) {
  for (at::ScalarType dtype : {at::kBFloat16, at::kFloat})
    expect_nan_where_defined({"fused_cuda", "chunked_cuda"}, dtype, at::kCPU);
}
TEST(EmulatedCudaGates, NanIsWhereTheDefinitionHasItInStreams) {
  for (at::ScalarType dtype : {at::kBFloat16, at::kFloat}) expect_nan_in_streams(dtype, at::kCPU);
}

TEST(EmulatedCudaNearKeys, GiveMeansOfOnes) {
  for (at::ScalarType dtype : {at::kBFloat16, at::kFloat})
    expect_means_of_ones({"fused_cuda", "chunked_cuda"}, dtype, at::kCPU);
}

class EmulatedStream : public testing::TestWithParam<const char*> {};

TEST_P(EmulatedStream, GivesWhatTheReferenceGives) {
  const std::string name = GetParam();
  uint64_t seed = name.size();
  for (at::ScalarType dtype : {at::kBFloat16, at::kFloat, at::kHalf}) {
    Case c{.H = 3, .G = 1, .D = 24, .E = 24, .dtype = dtype, .seed = ++seed};
    c.padded = seed % 2 == 0;
    if (dtype == at::kFloat) c.B = 1, c.H = c.G = 2, c.D = c.E = name == "taylor3" ? 16 : 64;
    expect_stream(find(name).spec, c, name);
  }
}

TEST(EmulatedStreams, AreThoseOfAGpu) {
  for (const char* name : {"softmax", "forgetting", "taylor2", "linear_decay"}) {
    const Inputs in = random_inputs(find(name).spec, {.T = 3, .S = 3});
    State state = make_state(find(name).spec, {2, 2, 16, 16});
    stream(state, in, {1, 2});
    const int64_t before = emulator::launches();
    step(state, tokens(in, 2, 3));
    EXPECT_EQ(emulator::launches() - before, 2) << name << ": attend and combine";
  }
  const Inputs in = random_inputs(find("taylor2").spec, {.T = 60, .S = 60});
  State state = make_state(find("taylor2").spec, {2, 2, 16, 16});
  stream(state, in, {40});
  const int64_t before = emulator::launches();
  step(state, tokens(in, 40, 60));
  EXPECT_EQ(emulator::launches(), before) << "a second prompt goes token by token";
  const State sums = make_state(find("centred_taylor2").spec, {2, 2, 16, 16});
  EXPECT_FALSE(sums.finite) << "sums in double";
  EXPECT_FALSE(sums.carry.keys.defined());
}

TEST(EmulatedStreams, OfBfloat16KeepTheirKeysAsGiven) {
  for (const char* name : {"softmax", "forgetting", "alibi", "sigmoid", "taylor2", "softcap"})
    expect_kept_as_given(find(name).spec, at::kCPU, name);
}

INSTANTIATE_TEST_SUITE_P(Catalog, EmulatedStream, testing::ValuesIn(kStreamsOnGpu),
                         [](const auto& info) { return std::string(info.param); });

INSTANTIATE_TEST_SUITE_P(Catalog, EmulatedCuda, testing::ValuesIn(rows()),
                         [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace horner::attn
