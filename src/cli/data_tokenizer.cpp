// horner data tokenizer: train a byte-level BPE tokenizer.
#include <nlohmann/json.hpp>

#include "cli/data.h"
#include "cli/options.h"
#include "cli/run.h"
#include "cli/table.h"
#include "core/check.h"
#include "core/stopwatch.h"
#include "files/files.h"
#include "files/output.h"
#include "text/bpe_train.h"
#include "text/compressed.h"
#include "text/corpus.h"

namespace horner::cli {

namespace {

using Path = std::filesystem::path;

struct Counting {
  text::WordCounts words = {};
  std::string rest = {};  // text whose last word may go on
  size_t bytes = 0;
};

// Counts the words of the text so far, but for its end.
void take(Counting& c, std::string_view part) {
  constexpr size_t kPiece = 1 << 20;
  c.rest += part;
  c.bytes += part.size();
  if (c.rest.size() < 2 * kPiece) return;
  const size_t n = c.words.cut(c.rest, c.rest.size() - kPiece);
  c.words.add(std::string_view(c.rest).substr(0, n));
  c.rest.erase(0, n);
}

void count_file(Counting& c, const Path& path) try {
  if (text::is_compressed(path)) {
    text::decompress(path, [&](std::string_view part) { take(c, part); });
  } else {
    const files::MappedFile file(path);
    constexpr size_t kPart = 1 << 20;
    for (size_t at = 0; at < file.text().size(); at += kPart) {
      take(c, file.text().substr(at, kPart));
      file.forget(at);
    }
  }
  c.words.add(c.rest);
  c.rest.clear();
} catch (const Error& e) {
  fail("'", path.string(), "': ", e.what());
}

}  // namespace

Outcome train_tokenizer(const TokenizerOptions& o) {
  const Stopwatch clock;
  const std::vector<Path> files = text::files_of({o.inputs.begin(), o.inputs.end()});
  std::vector<Path> inputs = files;
  inputs.insert(inputs.end(), o.inputs.begin(), o.inputs.end());
  const auto is_tokenizer = [](std::string_view text) {
    return text.find("\"added_tokens\"") != text.npos && text.find("\"model\"") != text.npos;
  };
  files::check_output({.path = o.out, .ours = is_tokenizer, .inputs = inputs}, o.force);
  Counting c;
  for (const Path& file : files) count_file(c, file);
  const size_t words = c.words.words().size();
  const double counting = clock.ms() / 1e3;
  files::NewFile out(o.out);
  out.write(text::trained_tokenizer(c.words, o.vocabulary, o.special));
  out.commit();
  const size_t size = text::Tokenizer(o.out).size();
  const double seconds = clock.ms() / 1e3;
  if (o.json)
    return print_json({{"out", o.out},
                       {"vocabulary", size},
                       {"bytes", c.bytes},
                       {"words", words},
                       {"seconds", seconds}});
  std::cout << size << " tokens from " << words << " different words of "
            << formatted("%.1f MB", double(c.bytes) / 1e6) << " ("
            << formatted("counted in %.1f s, ", counting)
            << formatted("merged in %.1f s) → ", seconds - counting) << o.out << "\n";
  if (size < o.vocabulary)
    std::cerr << "note: no pair of tokens is left after " << size << " of " << o.vocabulary
              << " tokens\n";
  return Outcome::fine;
}

}  // namespace horner::cli
