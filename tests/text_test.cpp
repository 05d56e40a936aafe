// Tokenizers and token files without an oracle: cuts, streams, broken files. Equality with the
// tokenizers package is tested by tokenizer_test.py.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "core/check.h"
#include "text/token_file.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace horner::text {
namespace {

using Json = nlohmann::json;
using Path = std::filesystem::path;

struct Text : testing::Test {
  Path folder = std::filesystem::temp_directory_path() /
                ("horner_text_" + std::to_string(::getpid()) + "_" +
                 testing::UnitTest::GetInstance()->current_test_info()->name());
  Text() { std::filesystem::create_directories(folder); }
  ~Text() override { std::filesystem::remove_all(folder); }
};

void put(const Path& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::streamsize(bytes.size()));
}
std::string contents(const Path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Adds merges of which the parts are there, until the vocabulary is as large as that.
void grow(Json& model, const std::vector<std::string>& merges) {
  for (const std::string& merge : merges) {
    const size_t space = merge.find(' ');
    model["merges"].push_back(merge);
    const std::string whole = merge.substr(0, space) + merge.substr(space + 1);
    if (!model["vocab"].contains(whole)) model["vocab"][whole] = model["vocab"].size();
  }
}

// Byte-level: GPT-2's pattern, all bytes and a few merges.
Json byte_level() {
  Json model{{"type", "BPE"}, {"vocab", Json::object()}, {"merges", Json::array()}};
  unsigned others = 256;
  for (unsigned b = 0; b < 256; ++b) {
    const bool printable = (b > ' ' && b <= '~') || (b >= 0xA1 && b != 0xAD);
    std::string name;
    text::append(name, printable ? b : others++);
    model["vocab"][name] = b;
  }
  grow(model, {"t h", "th e", "Ġ the", "a n", "Ġ an", "Ġan d", "Ċ Ċ", "Ġ Ġ", "ĠĠ ĠĠ", "e r"});
  const Json level{{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}};
  const Json end{{"id", model["vocab"].size()},
                 {"content", "<|end|>"},
                 {"special", true},
                 {"normalized", false}};
  return {{"version", "1.0"}, {"added_tokens", {end}},  {"normalizer", {{"type", "NFC"}}},
          {"decoder", level}, {"pre_tokenizer", level}, {"model", model}};
}

// As Llama 2: characters, bytes for those that are not there, and a space before all.
Json fallback(bool prepend) {
  Json model{{"type", "BPE"},           {"unk_token", "<unk>"},    {"byte_fallback", true},
             {"vocab", {{"<unk>", 0}}}, {"merges", Json::array()}, {"fuse_unk", true}};
  for (unsigned b = 0; b < 256; ++b) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", b);
    model["vocab"][name] = model["vocab"].size();
  }
  for (const char* c : {"a", "b", "d", "e", "h", "n", "r", "t", "▁", "\n", ",", "."})
    model["vocab"][c] = model["vocab"].size();
  grow(model, {"t h", "th e", "▁ the", "a n", "▁ an", "▁an d", "\n \n", "▁ ▁", "e r"});
  Json steps =
      Json::array({{{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "▁"}}});
  const Json first{{"type", "Prepend"}, {"prepend", "▁"}};
  if (prepend) steps.insert(steps.begin(), first);
  const Json back{{"type", "Replace"}, {"pattern", {{"String", "▁"}}}, {"content", " "}};
  const Json decoders = Json::array({back, {{"type", "ByteFallback"}}, {{"type", "Fuse"}}});
  return {{"normalizer", {{"type", "Sequence"}, {"normalizers", steps}}},
          {"decoder", {{"type", "Sequence"}, {"decoders", decoders}}},
          {"model", model}};
}

std::string some_text(size_t size) {
  const char* words[] = {"the ", "and ", " other",     "\n\n", "    ", "é",  "e\u0301", "<|end|>",
                         "an,",  "x1 ",  "\U0001F642", "漢字", " ",    "\n", ".",       "banner"};
  std::mt19937 random(1);
  std::string out;
  while (out.size() < size) out += words[random() % std::size(words)];
  return out;
}

std::vector<Json> tokenizers() {
  return {byte_level(), fallback(false), fallback(true)};
}

TEST_F(Text, EncodeAndDecode) {
  put(folder / "tokenizer.json", byte_level().dump());
  const Tokenizer t(folder);
  EXPECT_EQ(t.encode("the and<|end|>the\n\n"), (std::vector<Token>{257, 261, 266, 257, 262}));
  EXPECT_EQ(t.decode(t.encode("the and\xC3\xA9"), true), "the and\xC3\xA9");
  EXPECT_EQ(t.decode(std::vector<Token>{257, 266}, true), "the");
  EXPECT_EQ(t.decode(std::vector<Token>{257, 266}, false), "the<|end|>");
  EXPECT_EQ(t.encode("e\u0301"), t.encode("\u00e9"));
  EXPECT_EQ(t.size(), 267u);
  EXPECT_EQ(t.find("<|end|>"), Token(266));
  EXPECT_TRUE(t.is_special(266));
  EXPECT_THROW(t.encode("\xff"), Error);
  const Tokenizer copy = t;
  EXPECT_EQ(copy.encode("the"), t.encode("the"));
  EXPECT_EQ(Tokenizer().encode("\xff"), std::vector<Token>{255});
}

TEST_F(Text, LongWordsTakeTheHeap) {
  put(folder / "tokenizer.json", byte_level().dump());
  const Tokenizer t(folder);
  std::string word;
  std::vector<Token> wanted;
  for (int i = 0; i < 500; ++i) {
    word += "ther";
    wanted.insert(wanted.end(), {257, Token('r')});
  }
  EXPECT_EQ(t.encode(word), wanted);
}

TEST_F(Text, CutsChangeNoToken) {
  for (const Json& json : tokenizers()) {
    put(folder / "tokenizer.json", json.dump());
    const Tokenizer t(folder);
    const std::string text = some_text(200'000);
    std::vector<Token> parts;
    size_t done = 0, cuts = 0;
    while (done < text.size()) {
      const size_t n = safe_cut(t, std::string_view(text).substr(done), 5'000);
      t.encode(std::string_view(text).substr(done, n), parts, {.continues = done > 0});
      done += n;
      ++cuts;
    }
    EXPECT_GT(cuts, 20u);
    EXPECT_EQ(parts, t.encode(text));
  }
}

TEST_F(Text, StreamsOfTokensGiveTheSameText) {
  for (const Json& json : tokenizers()) {
    put(folder / "tokenizer.json", json.dump());
    const Tokenizer t(folder);
    const std::string text = some_text(5'000);
    const std::vector<Token> tokens = t.encode(text);
    DecodeStream stream(t);
    std::string out;
    for (const Token token : tokens) out += stream.add(token);
    EXPECT_EQ(out + stream.rest(), t.decode(tokens));
  }
}

TEST_F(Text, BrokenTokenizersGiveErrors) {
  std::mt19937 random(1);
  for (const Json& json : tokenizers()) {
    const std::string good = json.dump();
    int errors = 0;
    for (int i = 0; i < 400; ++i) {
      std::string bad = good;
      if (i % 4 == 0)
        bad.resize(random() % bad.size());
      else
        for (unsigned n = 1 + random() % 3; n-- > 0;)
          bad[random() % bad.size()] ^= char(1 << random() % 8);
      put(folder / "tokenizer.json", bad);
      try {
        const Tokenizer t(folder);
        t.decode(t.encode(some_text(500)), false);
      } catch (const Error&) {
        ++errors;
      }
    }
    EXPECT_GT(errors, 150);
  }
}

TEST_F(Text, TokenFiles) {
  const std::vector<Token> tokens{1, 2, 3, 65535, 5, 6, 7};
  for (const size_t vocabulary : {65536, 65537}) {
    TokenWriter w(folder / "x.bin", vocabulary, 3);
    w.write(std::span(tokens).first(2));
    w.write(std::span(tokens).subspan(2));
    EXPECT_EQ(w.files().size(), 3u);
    w.finish();
    std::vector<int64_t> read;
    for (const Path& path : w.files()) {
      const TokenFile f = open_tokens(path);
      EXPECT_EQ(f.layout, "llm.c");
      EXPECT_EQ(f.width, vocabulary > 65536 ? 4u : 2u);
      std::vector<int64_t> part(f.size);
      copy_tokens(f, 0, part);
      read.insert(read.end(), part.begin(), part.end());
      EXPECT_EQ(token_at(f, 0), Token(part[0]));
      EXPECT_THROW(token_at(f, f.size), Error);
      EXPECT_THROW(copy_tokens(f, 1, part), Error);
    }
    EXPECT_EQ(read, std::vector<int64_t>(tokens.begin(), tokens.end()));
  }
  put(folder / "nano.bin", std::string("\x01\x00\xff\xff", 4));
  const TokenFile nano = open_tokens(folder / "nano.bin");
  EXPECT_EQ(nano.layout, "nanoGPT");
  EXPECT_EQ(token_at(nano, 1), 65535u);
  put(folder / "odd.bin", "abc");
  EXPECT_THROW(open_tokens(folder / "odd.bin"), Error);
}

TEST_F(Text, BrokenTokenFilesGiveErrors) {
  const Path path = folder / "x.bin";
  {
    TokenWriter w(path, 100'000);
    w.write(std::vector<Token>(300, 7));
    w.finish();
  }
  const std::string good = contents(path);
  std::mt19937 random(1);
  int errors = 0;
  int64_t sum = 0;
  for (int i = 0; i < 1000; ++i) {
    std::string bad = good;
    if (i % 2 == 0)
      bad.resize(random() % bad.size());
    else
      bad[random() % (i % 4 == 1 ? 12 : bad.size())] ^= char(1 << random() % 8);
    put(path, bad);
    try {
      const TokenFile f = open_tokens(path);
      std::vector<int64_t> all(f.size);
      copy_tokens(f, 0, all);
      for (const int64_t token : all) sum += token;
    } catch (const Error&) {
      ++errors;
    }
  }
  EXPECT_GT(errors, 500);
  EXPECT_GT(sum, 0);
}

TEST_F(Text, AnUnfinishedFileLeavesTheOldOne) {
  put(folder / "x.bin", "old!");
  {
    TokenWriter w(folder / "x.bin", 256);
    w.write(std::vector<Token>(10, 1));
  }
  EXPECT_EQ(contents(folder / "x.bin"), "old!");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1);
}

TEST_F(Text, Lossy) {
  EXPECT_EQ(text::lossy("a\xF0\x9F\x99z"), "a\uFFFDz");
  EXPECT_EQ(text::lossy("\xED\xA0\x80"), "\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(text::lossy("\xC0\xAF\xE2\x82"), "\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(text::valid_size("Gr\xC3\xBC\xC3"), 4u);
}

}  // namespace
}  // namespace horner::text
