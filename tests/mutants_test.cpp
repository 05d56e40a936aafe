// Every fault of the table is noticed, on every CPU execution and in every dtype. executions_test
// shows that the check passes without a fault.
#include "instruments/mutants.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <set>

#include "attn/catalog.h"

namespace horner::attn {

using namespace instruments;
namespace {

struct Row {
  std::string variant;
  at::ScalarType dtype;
};

std::vector<Row> rows() {
  std::vector<Row> all;
  std::set<std::string> named;
  for (const Mutant& m : mutants())
    for (const std::string& v : variants_of(m)) named.insert(v);
  for (at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    for (const std::string& v : named) all.push_back({v, dtype});
  return all;
}

std::string name(const Row& row) {
  std::string s = row.variant + "_" + c10::toString(row.dtype);
  std::ranges::replace_if(s, [](char c) { return !std::isalnum(c); }, '_');
  return s;
}

void PrintTo(const Row& row, std::ostream* out) {
  *out << name(row);
}

class Mutants : public testing::TestWithParam<Row> {
  void SetUp() override { at::set_num_threads(1); }
};

TEST_P(Mutants, AreCaught) {
  const auto& [variant, dtype] = GetParam();
  const std::vector<Trial> all = trials(find(variant).spec, dtype);
  for (const Execution* e : executions())
    for (const Mutant& m : mutants()) {
      const std::vector<std::string> on = variants_of(m);
      if (std::ranges::find(on, variant) == on.end()) continue;
      const Hunt h = hunt(m, *e, all, false);
      EXPECT_TRUE(h.ran == 0 || !h.caught.empty()) << m.name << " on " << e->name;
      EXPECT_FALSE(h.on_reference) << m.name << ": " << e->name << " refuses the changed operator";
    }
}

TEST(Table, EveryMutantMakesADifferenceToEveryVariantThatItNames) {
  EXPECT_GE(mutants().size(), 30u);
  for (const Mutant& m : mutants()) {
    EXPECT_FALSE(variants_of(m).empty()) << m.name;
    for (const std::string& v : variants_of(m)) {
      const Spec spec = find(v).spec;
      const auto applies = [&](const Case& c) { return m.applies(spec, c); };
      EXPECT_TRUE(std::ranges::any_of(standard_cases(at::kFloat), applies)) << m.name << " " << v;
    }
  }
}

// e^30 is no float16, and a bfloat16.
TEST(Rule, AsksOnlyForWhatTheDtypeHasAValueFor) {
  const Spec unbounded{.denominator = Nothing{}};
  const Execution& reference = execution("reference");
  for (bool hot : {false, true})
    for (at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
      const Verdict v = verify(unbounded, reference, {.dtype = dtype, .hot = hot});
      EXPECT_EQ(v.why_not.empty(), dtype == at::kBFloat16 || !hot) << dtype << " " << v.why_not;
      EXPECT_TRUE(v.ok()) << dtype << " " << v.worst()->of;
    }
  const at::Tensor x = at::full({1}, 65504., at::kDouble);
  EXPECT_TRUE(in_range(x, at::kHalf));
  EXPECT_FALSE(in_range(2 * x, at::kHalf));
  EXPECT_TRUE(in_range(INFINITY * x, at::kHalf));  // wrong in every dtype
}

INSTANTIATE_TEST_SUITE_P(Table, Mutants, testing::ValuesIn(rows()),
                         [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace horner::attn
