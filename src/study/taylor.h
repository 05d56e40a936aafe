// How large the terms of exp's series are in a model: mean over the visible scores x of |x|^n / n!,
// for each layer and order. The order with the largest is the layer's dominant one: a series cut
// below it misses most of the weights.
#pragma once

#include "nn/model.h"
#include "train/settings.h"
#include "train/source.h"

namespace horner::study {

using train::Json;

inline constexpr int kHighestOrder = 100;

// [layers][orders from 0 on], as natural logarithms: they outgrow a double.
std::vector<std::vector<double>> log_magnitudes(const nn::Model&, const at::Tensor& tokens);

// Of visible scores [n] in double: the logarithm of the mean of |x|^n / n!, for n = 0, 1, …
std::vector<double> log_magnitudes(const at::Tensor& scores);

size_t dominant_order(const std::vector<double>& log_magnitudes);

// {"layers": [[…], …], "largest": [the largest |x| of each layer]}: what RUN/taylor.json holds.
Json measure(const nn::Model&, const train::Source&, int64_t length);

// Writes taylor.json beside a finished run that still has its weights and has none.
void measure_run(const std::filesystem::path& run, const train::Settings&);

}  // namespace horner::study
