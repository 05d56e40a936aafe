// Every variant of the catalog, on every execution, in every dtype, against the reference in
// double.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "attn/catalog.h"
#include "instruments/verify.h"

namespace horner::attn {

using namespace instruments;
namespace {

struct Pair {
  Variant variant;
  const Execution* execution;
  at::ScalarType dtype;
};

std::vector<Pair> pairs() {
  std::vector<Pair> all;
  for (at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    for (const Execution* e : executions())
      for (const Variant& v : variants()) all.push_back({v, e, dtype});
  return all;
}

std::string name(const Pair& p) {
  std::string s =
      p.variant.name + "_" + std::string(p.execution->name) + "_" + c10::toString(p.dtype);
  std::replace(s.begin(), s.end(), '@', '_');
  return s;
}

void PrintTo(const Pair& p, std::ostream* out) {
  *out << name(p);
}

// Small matrices: one thread is the fastest, but the kernels of our own are to share their work
// too.
class Executions : public testing::TestWithParam<Pair> {
  void SetUp() override { at::set_num_threads(GetParam().execution->name == "reference" ? 1 : 2); }
};

TEST_P(Executions, MatchTheReference) {
  const auto& [variant, execution, dtype] = GetParam();
  int ran = 0;
  std::string why_not;
  for (const Case& c : standard_cases(dtype)) {
    const Verdict verdict = verify(variant.spec, *execution, c);
    why_not = verdict.why_not;
    ran += verdict.why_not.empty();
    for (const Difference& d : verdict.differences)
      EXPECT_LE(d.error, d.allowed) << d.of << " on " << text(c);
  }
  if (ran == 0) GTEST_SKIP() << why_not;
}

INSTANTIATE_TEST_SUITE_P(Catalog, Executions, testing::ValuesIn(pairs()),
                         [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace horner::attn
