// The CUDA kernels of compute capability 8.0, forward and backward, on a CPU (emulator/): every
// variant of the catalog against the reference in double, by the rule of every execution. What a
// CPU cannot show is how threads race: that takes a GPU (scripts/test-cuda).
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "attn/catalog.h"
#include "attn/plan.h"
#include "attn/state.h"
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

const std::set<std::string> kRefused = {"gla", "hgrn2", "kda", "lolcats", "near_centred_taylor2"};

// Whether an execution has to run the case: fused_cuda all but a few rows, chunked_cuda what
// `chunked` runs on a CPU, but near keys of packed sequences and states that are too large.
bool has_to_run(const Row& row, const Case& c) {
  const Spec& spec = row.variant.spec;
  if (row.execution == std::string("fused_cuda")) return !kRefused.contains(row.variant.name);
  if (c.packed && !is<NoKeys>(spec.near)) return false;
  return execution("chunked").why_not(spec, random_inputs(spec, c)).empty() &&
         why_too_large(spec, {c.B, c.G, c.D, c.E}).empty();
}

class EmulatedCuda : public testing::TestWithParam<Row> {};

TEST_P(EmulatedCuda, MatchesTheReference) {
  const auto& [variant, dtype, execution_name] = GetParam();
  const int64_t longest = std::getenv("HORNER_LONG") ? 1024 : 37;
  bool ran = false;
  for (const Case& c : standard_cases(dtype)) {
    if (c.T > longest) continue;
    const Verdict v = verify(variant.spec, execution(execution_name), c);
    ran |= v.why_not.empty();
    EXPECT_EQ(v.why_not.empty(), has_to_run(GetParam(), c)) << v.why_not << text(c);
    for (const Difference& d : v.differences)
      EXPECT_LE(d.error, d.allowed) << d.of << " on " << text(c);
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

void expect_right_in_chunks(const char* variant, const Case& c) {
  const Verdict v = verify(find(variant).spec, execution("chunked_cuda"), c);
  EXPECT_EQ(v.why_not, "") << variant;
  for (const Difference& d : v.differences)
    EXPECT_LE(d.error, d.allowed) << variant << " " << d.of << " on " << text(c);
}

// Sequences that end at, before and after the end of a chunk, one of a token, and twenty in a
// chunk.
TEST(EmulatedCudaPacked, SequencesOfEveryLengthAreRight) {
  std::vector<int64_t> cuts{0, 1, 64, 127, 128, 129};
  while (cuts.size() < 26) cuts.push_back(cuts.back() + 6);
  cuts.insert(cuts.end(), {256, 256, 300});
  std::vector<int64_t> of_order_2 = cuts;  // whose chunks are longer
  of_order_2.insert(of_order_2.end(), {511, 513, 530});
  for (const char* variant : {"linear", "based", "taylor2", "retention", "linear_decay",
                              "gated_delta", "gla", "kda", "taylor2:decay=token_gate"})
    for (at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
      const bool second = facts(find(variant).spec.weight).orders->last == 2;
      if (second && dtype == at::kFloat && !std::getenv("HORNER_LONG")) continue;
      Case c{.B = 1, .H = 2, .G = 1, .D = 6, .E = 5, .dtype = dtype, .seed = 7, .packed = true};
      c.cuts = second ? of_order_2 : cuts, c.T = c.S = c.cuts.back();
      expect_right_in_chunks(variant, c);
    }
}

// What a state has of the sequences before is 0, not only small.
TEST(EmulatedCudaPacked, LargeValuesStayInTheirSequence) {
  for (const char* variant : {"linear_decay", "taylor2", "gated_delta", "gla", "taylor3"})
    for (at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
      const Spec spec = find(variant).spec;
      Case c{.B = 1, .H = 1, .G = 1, .T = 150, .S = 150, .D = 4, .E = 4, .dtype = dtype};
      c.packed = true, c.cuts = {0, 70, 140, 150};
      Inputs in = random_inputs(spec, c);
      const auto last = [&] { return attend(spec, in, "chunked_cuda").narrow(2, 140, 10).clone(); };
      const at::Tensor alone = last();
      in.v = in.v.clone();
      in.v.narrow(2, 0, 140).mul_(1e25);
      const double error = (last() - alone).abs().max().item<double>();
      EXPECT_LE(error, 1e-6) << variant << " " << c10::toString(dtype);
    }
}

// More channels than the kernels of chunked.h have, and fewer queries than keys.
TEST(EmulatedCudaWide, HeadsAreRight) {
  for (const char* variant : {"linear", "linear_decay", "retention", "linear_elu", "taylor2"})
    for (at::ScalarType dtype : {at::kBFloat16, at::kFloat})
      for (int64_t late : {0, 50})
        expect_right_in_chunks(variant, {.B = 1,
                                         .H = 2,
                                         .G = 1,
                                         .T = 130 - late,
                                         .S = 130,
                                         .D = 72,
                                         .E = late ? 5 : 100,
                                         .dtype = dtype,
                                         .seed = uint64_t(late),
                                         .padded = late == 0});
}

// A stream of prompts and single tokens, with a state of centred scores.
TEST(EmulatedCudaNearKeys, OfCentredScoresLeaveAState) {
  const Spec spec = find("near_centred_taylor2:near=window(9)").spec;
  const Trial t = trial(spec, {.T = 60, .S = 60, .D = 5, .E = 4, .gradients = false});
  State state = make_state(spec, {2, 2, 5, 4}, at::kFloat, 16, at::kCPU);
  ASSERT_TRUE(state.finite);
  std::vector<at::Tensor> rows;
  int64_t from = 0;
  for (const int64_t to : {20, 21, 22, 50, 60})
    rows.push_back(step(state, tokens(t.in, from, to))), from = to;
  for (const Difference& d : judge(t, {at::cat(rows, 2), {}}).differences)
    EXPECT_LE(d.error, d.allowed) << d.of;
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
