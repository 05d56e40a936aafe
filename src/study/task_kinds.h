// The sequences of the tasks, by kind; tasks.cpp has the table of them.
#pragma once

#include "study/tasks.h"

namespace horner::study {

using Tokens = std::span<int64_t>;

// n distinct numbers below `all`, in random order.
std::vector<int64_t> drawn(const Random&, int64_t n, int64_t all);

// clang-format off
// tasks_recall.cpp
void recall(const Shape&, const Random&, Tokens tokens, Tokens targets);
void copy(const Shape&, const Random&, Tokens tokens, Tokens targets);
void induction(const Shape&, const Random&, Tokens tokens, Tokens targets);
void mqar(const Shape&, const Random&, Tokens tokens, Tokens targets);
void phone_book(const Shape&, const Random&, Tokens tokens, Tokens targets);
void needle(const Shape&, const Random&, Tokens tokens, Tokens targets);
void practise_mqar(Shape&, const Random&, uint64_t index);
int64_t mqar_values(const Shape&);
void check_recall(const Shape&, size_t length);
void check_copy(const Shape&, size_t length);
void check_induction(const Shape&, size_t length);
void check_mqar(const Shape&, size_t length);
void check_phone_book(const Shape&, size_t length);
void check_needle(const Shape&, size_t length);

// tasks_state.cpp
void parity(const Shape&, const Random&, Tokens tokens, Tokens targets);
void s3(const Shape&, const Random&, Tokens tokens, Tokens targets);
void s5(const Shape&, const Random&, Tokens tokens, Tokens targets);
void modular(const Shape&, const Random&, Tokens tokens, Tokens targets);
void automata(const Shape&, const Random&, Tokens tokens, Tokens targets);
void check_bits(const Shape&, size_t length);
void check_automata(const Shape&, size_t length);

// tasks_mad.cpp
void mad_recall(const Shape&, const Random&, Tokens tokens, Tokens targets);
void mad_noisy_recall(const Shape&, const Random&, Tokens tokens, Tokens targets);
void mad_fuzzy_recall(const Shape&, const Random&, Tokens tokens, Tokens targets);
void mad_memorize(const Shape&, const Random&, Tokens tokens, Tokens targets);
void mad_compress(const Shape&, const Random&, Tokens tokens, Tokens targets);
void mad_select(const Shape&, const Random&, Tokens tokens, Tokens targets);
void check_mad(const Shape&, size_t length);
// clang-format on

}  // namespace horner::study
