// Layer by layer: the new weights of converted heads learn to give what the teacher's heads give
// for the same queries, keys and values. Nothing else changes.
#pragma once

#include "convert/tune.h"

namespace horner::convert {

// The teacher with other forms of its heads; their weights are random.
nn::Model make_student(const nn::Model& teacher, const Assignment&, int64_t near, uint64_t seed);

// |result - teacher's|^2 / |teacher's|^2 of each head, [layer][head], over the tokens [B, T]; 0 for
// a head that is not converted.
std::vector<std::vector<double>> output_errors(const nn::Model& teacher, const nn::Model& student,
                                               const at::Tensor& tokens, const nn::Run&);

// Resumes from and writes `file`. Returns the losses of the steps.
std::vector<double> transfer(const Task&, nn::Model& student, int64_t steps,
                             const std::filesystem::path& file, const std::string& what);

}  // namespace horner::convert
