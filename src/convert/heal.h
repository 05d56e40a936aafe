// End to end: the model learns from the next tokens and from the teacher's predictions. Projections
// change by a low rank, W + B A, or all weights learn.
#pragma once

#include "convert/tune.h"

namespace horner::convert {

// Resumes from and writes `file`; leaves the learned weights in the model. Returns the losses of
// the steps.
std::vector<double> heal(const Task&, nn::Model&, int64_t steps, const std::filesystem::path& file,
                         const std::string& what);

}  // namespace horner::convert
