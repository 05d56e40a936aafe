// What a model can be asked to learn: a table of tasks. All but `text` are made up, sequence by
// sequence, from random bits that depend on the seed and the sequence's number alone.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "train/source.h"

namespace horner::study {

// A made-up task: `tokens` and `targets` (filled with -1) of one sequence, from a stream of random
// numbers.
struct Shape {
  int64_t vocabulary, pairs;  // pairs: of recall, triggers of induction
};
using Random = std::function<uint64_t(uint64_t below)>;

struct Task {
  const char *name, *about;
  Shape shape;  // what is not given
  void (*fill)(const Shape&, const Random&, std::span<int64_t> tokens, std::span<int64_t> targets);
  void (*check)(const Shape&, size_t length);
  double (*chance)(const Shape&);  // the accuracy of a guess
};
std::span<const Task> tasks();

// What "recall:pairs=8,vocabulary=64" names. Throws, with what is possible, where it names nothing.
struct Chosen {
  std::string text;
  const Task* task;  // null: text
  Shape shape;
};
Chosen find_task(std::string_view);

// A sequence belongs to validation if its hash says so: none is in both splits, whatever the seed.
// `data` is for text: a file of tokens, or "" for the default text.
train::Source make_source(std::string_view task, const std::string& data, uint64_t seed);

}  // namespace horner::study
