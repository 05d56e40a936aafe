// One pass over the rows of a model: what diagnose.cpp hands to the measurements of a block of rows
// of one layer. Private to the diagnosis.
#pragma once

#include "diag/diagnose.h"

namespace horner::diag {

// The points of a layer: one set for all heads, or one per key head.
struct Clouds {
  std::vector<Points> plain, unit;  // `plain` is empty if unit points serve for both
};

struct Pass {
  Diagnosis& out;
  const std::vector<nn::Query> queries, few, growth;
  at::Generator random;
  const Say& say;
  Clouds clouds = {};
  std::vector<std::map<std::string, Crossed>> crossed = {};  // [H]
};

inline void count(Crossed& c, bool crossed) {
  ++c.of;
  c.times += crossed;
}

// Rounding of float32 sums: less than this above a bound is not a violation.
inline constexpr double kRounding = 1e-5;

// heads [H]: null for a head that is not measured.
using LayerHeads = std::vector<Head*>;

// pass_points.cpp: distances, separability and coverage; distances with N in proportion to n.
void measure_points(Pass&, int64_t layer, const LayerHeads&, const nn::Rows&);
void measure_growth(Pass&, const LayerHeads&, const nn::Rows&);

// pass_rows.cpp: entropy and other metrics of rows, the 1/L law and the picture; g(T, eps);
// Lemma 2.
void measure_rows(Pass&, const LayerHeads&, const nn::Rows&, bool softmax);
void measure_sensitivity(Pass&, const attn::Spec&, bool softmax, const LayerHeads&,
                         const nn::Rows&);
void measure_jacobians(Pass&, const attn::Spec& own, const LayerHeads&, const nn::Rows&);

}  // namespace horner::diag
