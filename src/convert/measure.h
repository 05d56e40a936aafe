// What each head of a trained model does, and what it costs to convert it: the numbers from which a
// plan is made. measures.json has them. They choose, so they are of training text.
#pragma once

#include <map>
#include <span>

#include "convert/transfer.h"

namespace horner::convert {

struct HeadMeasures {
  int64_t layer = 0, head = 0;
  // Before anything is learned:
  double order = 0;      // of the centred series for an output error of 5 %
  double entropy = 0;    // of its weights, as a share of log n
  double distance = 0;   // mean distance of the keys that it attends to, in tokens
  double retrieval = 0;  // more loss on repeated tokens, the head replaced by its mean
  double kl = 0;         // of the predictions, the head cut to its near keys
  // After trials in which every head learns every form:
  std::map<std::string, double> errors = {};  // of its output, squared, relative
  std::map<std::string, double> costs = {};   // more loss with this head alone in that form
};

std::string best_form(const HeadMeasures&);  // with the least error in the trials
double cheapest(const HeadMeasures&);  // the least cost of its forms; infinite if none is known

struct Measures {
  double loss = 0;                  // of the teacher, on the measured tokens
  std::vector<HeadMeasures> heads;  // of the layers to convert
  int64_t done = 0;                 // heads measured, while it is not finished
};

// The measures that do not need a trial, by name.
struct Measure {
  const char *name, *about;
  double HeadMeasures::* at;
};
std::span<const Measure> measure_table();

Json to_json(const Measures&);
Measures read_measures(const Json&);

// Resumes from measures.json, and writes it as it goes.
Measures measure(const Task&);

// A teacher all of whose heads (of the layers to convert) have learned one form, for each form.
std::map<std::string, nn::Model> trials(const Task&);
void measure_trials(const Task&, const std::map<std::string, nn::Model>&, Measures&);

// Random tokens of the model's own text, then the same again: [1, T].
at::Tensor repeated_tokens(const Task&, int64_t T);

}  // namespace horner::convert
