// What each head of a trained model does and what its conversion costs. A plan is made from these
// numbers (measures.json). They are measured on training text, because they select forms.
#pragma once

#include <map>
#include <span>

#include "convert/transfer.h"

namespace horner::convert {

struct HeadMeasures {
  int64_t layer = 0, head = 0;
  // Before training:
  double order = 0;      // the order of the centred series that gives an output error of 5 %
  double entropy = 0;    // the entropy of its weights, divided by log n
  double distance = 0;   // the mean distance of the keys that it attends to, in tokens
  double retrieval = 0;  // the increase of the loss on repeated tokens with the head's mean output
  double kl = 0;         // the KL divergence of the predictions when it sees only its near keys
  // After trials in which every head learns every form, by form:
  std::map<std::string, double> errors = {};  // the relative squared error of its output
  std::map<std::string, double> costs = {};   // the increase of the loss with only it converted
};

std::string best_form(const HeadMeasures&);  // the form with the least error in the trials
double cheapest(const HeadMeasures&);        // the least cost of its forms; infinite if unknown

struct Measures {
  double loss = 0;                  // the loss of the teacher on the measured tokens
  std::vector<HeadMeasures> heads;  // the heads of the layers to convert
  int64_t done = 0;                 // the number of heads measured so far
};

// The measures that require no trial, by name.
struct Measure {
  const char *name, *about;
  double HeadMeasures::* at;
};
std::span<const Measure> measure_table();

Json to_json(const Measures&);
Measures read_measures(const Json&);

// Resumes from measures.json and writes its progress there.
Measures measure(const Task&);

// For each form: the teacher, in which all heads of the layers to convert have learned that form.
std::map<std::string, nn::Model> trials(const Task&);
void measure_trials(const Task&, const std::map<std::string, nn::Model>&, Measures&);

// Random tokens of the training text, repeated once: [1, T].
at::Tensor repeated_tokens(const Task&, int64_t T);

}  // namespace horner::convert
