// The table of tasks. All but `text` are synthetic: a sequence is a function of seed and index (and
// of a text, for `needle`).
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "train/source.h"

namespace horner::study {

struct Shape {
  int64_t vocabulary, pairs;  // pairs, triggers, entries or tokens to copy; 0: none
  int64_t values = 0;         // of mqar; 0: half of the vocabulary
  int64_t curriculum = 0;     // of mqar: sequences over which the number of pairs grows; 0: none
  int64_t used = 0;           // tokens before the rest, which is blank; 0: all
};
using Random = std::function<uint64_t(uint64_t below)>;

struct Task {
  const char *name, *about;
  Shape shape;             // defaults
  const char* parameters;  // of the shape that a text may set, by name
  // Writes one sequence; `targets` come filled with -1, and `tokens` with text if `over_text`.
  void (*fill)(const Shape&, const Random&, std::span<int64_t> tokens, std::span<int64_t> targets);
  // Changes the shape of a training sequence; null: it is that of validation.
  void (*practice)(Shape&, const Random&, uint64_t index);
  void (*check)(const Shape&, size_t length);
  double (*chance)(const Shape&);  // the accuracy of guessing
  bool over_text = false;          // its tokens are bytes, among those of a text
};
std::span<const Task> tasks();

// Parses a task such as "recall:pairs=8,vocabulary=64". Throws, with the possible names, if it
// is invalid.
struct Chosen {
  std::string text;
  const Task* task;  // null: text
  Shape shape;
};
Chosen find_task(std::string_view);

// The hash of a sequence decides its split, so none is in both, whatever the seed. `data`, for
// text and tasks over text: a token file, or "" for the default text; `validation`: a token file,
// or "" to hold parts of the data out.
train::Source make_source(std::string_view task, const std::string& data, uint64_t seed,
                          const std::string& validation = "");

}  // namespace horner::study
