// A byte-level BPE tokenizer from text: words are counted once, then the most frequent pair of
// adjacent tokens becomes a token, again and again. Deterministic; the same merges as those of the
// tokenizers package (ties go to the pair whose tokens came first).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "text/bpe.h"
#include "text/regex.h"

namespace horner::text {

// The words of GPT-2's pattern and how often each occurs.
class WordCounts {
 public:
  WordCounts();
  // The text must be valid UTF-8; its end is the end of a word.
  void add(std::string_view text);
  // A position from 1 to text.size(), about `most` if possible, at which no word goes on.
  size_t cut(std::string_view text, size_t most) const;
  struct Word {
    std::string_view text;
    uint64_t count;
  };
  std::vector<Word> words() const;  // sorted by text

 private:
  Regex pattern_;
  TextTable index_;
  std::vector<std::string> texts_;
  std::vector<uint64_t> counts_;
};

// A Hugging Face tokenizer.json with `vocabulary` tokens, or fewer when no pair is left: first the
// special ones, then the bytes, then one for each merge.
std::string trained_tokenizer(const WordCounts&, size_t vocabulary,
                              const std::vector<std::string>& special);

}  // namespace horner::text
