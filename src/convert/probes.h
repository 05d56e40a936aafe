// What a model has left of its past: losses of text by position, and of copies whose first
// occurrence lies a given distance back.
#pragma once

#include "convert/settings.h"

namespace horner::convert {

// A model under test.
struct Candidate {
  std::string name;
  const nn::Model* model;
};

// For one model: the loss of each validation sequence; and for each distance the loss of a copied
// passage, of each copy.
struct Probed {
  std::string name;
  std::vector<double> losses;               // of sequences
  std::vector<std::vector<double>> copies;  // [distance][sequence]

  double loss() const;  // mean
};
struct Probes {
  std::vector<int64_t> distances;
  std::vector<Probed> models;
};

// The same sequences for every model. A copy: a passage of 24 tokens, text of `distance` tokens,
// the passage again; its loss is that of the last 20 tokens of the second. Distances are those
// from 8 tokens to the length of the sequences, a power of 2 each.
Probes probe(const Task&, const std::vector<Candidate>&);

Json to_json(const Probes&);

}  // namespace horner::convert
