// The size of the terms of exp's series in a model: the mean of |x|^n / n! over the visible scores
// x of each layer (diag/series.h). A series cut below the dominant order misses most of the
// weights.
#pragma once

#include "nn/model.h"
#include "train/settings.h"
#include "train/source.h"

namespace horner::study {

using train::Json;

inline constexpr int kHighestOrder = 100;

// [layers][orders 0 to kHighestOrder], diag::log_term_means of each layer.
std::vector<std::vector<double>> log_term_means(const nn::Model&, const at::Tensor& tokens);

// {"about": …, "layers": [[…], …]}: the content of RUN/taylor.json.
Json measure(const nn::Model&, const train::Source&, int64_t length);

// Writes taylor.json for a finished run that still has its weights, unless it exists.
void measure_run(const std::filesystem::path& run, const train::Settings&);

}  // namespace horner::study
