// Every variant of the catalog, on every execution, against the reference in double: in float32 and
// bfloat16; in float64 and float16 one of each kind, since series differ by their orders only
// (HORNER_LONG=1: all).
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "adversarial.h"
#include "attn/catalog.h"
#include "instruments/verify.h"

namespace horner::attn {

using namespace instruments;
namespace {

struct Row {
  Variant variant;
  at::ScalarType dtype;
};

std::vector<Row> rows() {
  std::vector<Row> all;
  const bool whole = std::getenv("HORNER_LONG") != nullptr;
  for (at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const bool few = !whole && (dtype == at::kDouble || dtype == at::kHalf);
    const auto every = variants();
    for (const Variant& v : few ? kinds() : std::vector<Variant>(every.begin(), every.end()))
      all.push_back({v, dtype});
  }
  return all;
}

std::string name(const Row& row) {
  std::string s = row.variant.name + "_" + c10::toString(row.dtype);
  std::replace(s.begin(), s.end(), '@', '_');
  return s;
}

void PrintTo(const Row& row, std::ostream* out) {
  *out << name(row);
}

class Executions : public testing::TestWithParam<Row> {};

TEST_P(Executions, MatchTheReference) {
  const auto& [variant, dtype] = GetParam();
  for (const Case& c : standard_cases(dtype)) {
    at::set_num_threads(1);  // the fastest for small matrices
    const Trial t = trial(variant.spec, c);
    for (const Execution* e : executions()) {
      at::set_num_threads(e->name == "reference" ? 1 : 2);  // the kernels are to share their work
      for (const Difference& d : verify(t, *e).differences)
        EXPECT_LE(d.error, d.allowed) << e->name << ", " << d.of << " on " << text(c);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Catalog, Executions, testing::ValuesIn(rows()),
                         [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace horner::attn
