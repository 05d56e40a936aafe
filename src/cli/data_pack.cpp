// horner data pack: documents to tokens, one megabyte at a time.
#include <unistd.h>

#include "cli/data.h"
#include "cli/options.h"
#include "cli/run.h"
#include "cli/table.h"
#include "core/check.h"
#include "core/stopwatch.h"
#include "files/files.h"
#include "files/output.h"
#include "text/compressed.h"
#include "text/corpus.h"
#include "text/token_file.h"

namespace horner::cli {

namespace {

using Path = std::filesystem::path;
using text::Token;

constexpr size_t kPiece = 1 << 20;  // bytes that are encoded at once

struct Packing {
  const PackOptions& options;
  text::Tokenizer tokenizer;
  text::TokenWriter out;
  std::vector<Token> begin, end;  // around every document
  size_t bytes_all = 0, bytes = 0, documents = 0;
  Stopwatch watch = {};
  std::vector<Token> buffer = {};
};

double megabytes_per_second(const Packing& p) {
  return double(p.bytes) / 1e3 / std::max(p.watch.ms(), 1e-3);
}

void show(const Packing& p) {
  if (!live()) return;
  constexpr size_t kWidth = 30;
  const double part = p.bytes_all > 0 ? double(p.bytes) / double(p.bytes_all) : 1;
  std::string bar;
  for (size_t i = 0; i < kWidth; ++i) bar += double(i) < part * kWidth ? "█" : "░";
  const std::string line = bar + formatted(" %3.0f %%", 100 * part) +
                           formatted("  %.1f MB/s", megabytes_per_second(p)) + "  " +
                           std::to_string(p.out.written()) + " tokens";
  std::cerr << "\r\033[K" << fitted(line, terminal_width(STDERR_FILENO)) << std::flush;
}

// The next piece of `text` into the buffer; how many bytes that is.
size_t encode_piece(Packing& p, std::string_view text, size_t done, const std::string& where) try {
  const std::string_view rest = text.substr(done);
  const size_t n = text::safe_cut(p.tokenizer, rest, kPiece);
  p.buffer.clear();
  p.tokenizer.encode(rest.substr(0, n), p.buffer, {.special = false, .continues = done > 0});
  return n;
} catch (const Error& e) {
  fail(where, done > 0 ? " from byte " + std::to_string(done) : "", ": ", e.what());
}

// Packs one document, which takes `size` bytes of the input. Returns false after Ctrl-C.
bool pack_text(Packing& p, std::string_view text, size_t size, const std::string& where,
               const files::MappedFile* file) {
  const size_t before = p.bytes;
  p.out.write(p.begin);
  for (size_t done = 0; done < text.size();) {
    if (stopped()) return false;
    done += encode_piece(p, text, done, where);
    p.out.write(p.buffer);
    p.bytes = before + std::min(done, size);
    if (file) file->forget(done);
    if (file || text.size() > kPiece) show(p);
  }
  p.out.write(p.end);
  ++p.documents;
  p.bytes = before + size;
  return true;
}

// `all` is the content of the file at `path`; `file` is null where it was decompressed.
bool pack_lines(Packing& p, std::string_view all, const Path& path, const files::MappedFile* file) {
  size_t number = 0, shown = 0;
  for (size_t at = 0; at < all.size();) {
    const size_t end = std::min(all.find('\n', at), all.size());
    const std::string_view line = all.substr(at, end - at);
    ++number;
    const size_t size = std::min(end + 1, all.size()) - at;
    at += size;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) {
      p.bytes += size;
      continue;
    }
    const std::string where = "'" + path.string() + "' line " + std::to_string(number);
    const std::string text = text::text_of_line(line, p.options.key, where);
    if (!pack_text(p, text, size, where, nullptr)) return false;
    if (at - shown < kPiece) continue;
    shown = at;
    if (file) file->forget(at);
    show(p);
  }
  return true;
}

bool is_lines(const Path& path) {
  return path.extension() == ".jsonl" || path.extension() == ".ndjson";
}

// Compressed files are read into memory whole; their bytes count as those of their content.
bool pack_compressed(Packing& p, const Path& path) {
  std::string all;
  text::decompress(path, [&](std::string_view part) { all += part; });
  p.bytes_all += all.size() - std::filesystem::file_size(path);
  if (is_lines(path.stem())) return pack_lines(p, all, path, nullptr);
  return pack_text(p, all, all.size(), "'" + path.string() + "'", nullptr);
}

bool pack_file(Packing& p, const Path& path) {
  if (text::is_compressed(path)) return pack_compressed(p, path);
  const files::MappedFile file(path);
  if (is_lines(path)) return pack_lines(p, file.text(), path, &file);
  return pack_text(p, file.text(), file.text().size(), "'" + path.string() + "'", &file);
}

std::vector<Token> named(const text::Tokenizer& t, const std::string& name) {
  if (name.empty()) return {};
  const auto token = t.find(name);
  horner::check(token.has_value(), "the tokenizer has no token '", name,
                "'; it must be one whole token of its vocabulary, such as '<|endoftext|>'");
  return {*token};
}

Outcome report(const Packing& p, size_t files) {
  std::vector<std::string> out;
  for (const Path& path : p.out.files()) out.push_back(path.string());
  if (p.options.json)
    return print_json({{"out", out},
                       {"layout", "llm.c"},
                       {"tokens", p.out.written()},
                       {"vocabulary", p.tokenizer.size()},
                       {"files", files},
                       {"documents", p.documents},
                       {"bytes", p.bytes},
                       {"seconds", p.watch.ms() / 1e3}});
  std::cout << p.out.written() << " tokens of " << p.documents << " documents in " << files
            << " files (" << formatted("%.1f MB", double(p.bytes) / 1e6)
            << formatted(", %.1f MB/s)", megabytes_per_second(p)) << " → " << out[0];
  if (out.size() > 1) std::cout << " … " << out.back();
  std::cout << "\n";
  return Outcome::fine;
}

}  // namespace

Outcome pack(const PackOptions& o) {
  const std::vector<Path> files = o.inputs.empty()
                                      ? text::default_corpus()
                                      : text::files_of({o.inputs.begin(), o.inputs.end()});
  std::vector<Path> inputs = files;
  inputs.insert(inputs.end(), o.inputs.begin(), o.inputs.end());
  if (Path(o.tokenizer).extension() == ".json") inputs.push_back(o.tokenizer);
  for (const Path& path : text::TokenWriter::existing(o.out))
    files::check_output({.path = path, .ours = text::is_token_file, .inputs = inputs}, o.force);
  text::Tokenizer tokenizer = tokenizer_at(o.tokenizer);
  const auto begin = named(tokenizer, o.begin), end = named(tokenizer, o.end);
  const size_t vocabulary = tokenizer.size();
  const size_t most = o.shard > 0 ? o.shard : text::TokenWriter::kMostTokens;
  Packing p{o, std::move(tokenizer), text::TokenWriter(o.out, vocabulary, most), begin, end};
  for (const Path& file : files) p.bytes_all += std::filesystem::file_size(file);
  catch_interrupt();
  catch_termination();
  bool all = true;
  for (const Path& file : files) all = all && pack_file(p, file);
  if (live()) std::cerr << "\r\033[K" << std::flush;
  if (!all) return Outcome::interrupted;
  p.out.finish();
  return report(p, files.size());
}

}  // namespace horner::cli
