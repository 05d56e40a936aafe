// What the heads of a trained model select, at the length of training and beyond it: a few numbers
// of the diagnosis (diag/findings.h), medians over heads, for the study's report.
#pragma once

#include <span>

#include "nn/model.h"
#include "study/study.h"
#include "train/source.h"

namespace horner::study {

// The metrics that are kept, by their names in diag::metrics().
std::span<const char* const> head_metrics();

// [{"length": 512, "heads": 8, "entropy ratio": …, …}, …] of the first sequence of validation, cut
// to each length; null for a metric that the weights do not have.
Json heads_of(const nn::Model&, const train::Source&, std::span<const int64_t> lengths);

// Writes RUN/taylor.json (taylor.h) and, if the study asks for it, RUN/heads.json for a finished
// run that still has its weights, unless they exist. A model whose weights cannot be analysed
// leaves
// {"why": …}.
void measure_run(const Run&);

}  // namespace horner::study
