// The tasks: a program without learning solves each, guessing has the stated accuracy, and no
// sequence is in both splits.
#include "study/tasks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "core/check.h"
#include "diag/series.h"
#include "nn/slots.h"
#include "study/study.h"
#include "study/taylor.h"
#include "task_solvers.h"

namespace horner::study {
namespace {

struct Setting {
  const char* task;
  size_t T;
  int64_t (*solve)(const std::vector<int64_t>&, size_t);
  size_t asked;      // at least, in a sequence
  bool told = true;  // the answer is the next token
};
const Setting kSettings[] = {
    {"recall", 64, looked_up, 16},
    {"recall:pairs=4,vocabulary=32", 61, looked_up, 27},
    {"recall:pairs=8", 64, looked_up, 24},
    {"copy", 64, copied, 32},
    {"copy:vocabulary=8", 33, copied, 16},
    {"induction", 64, looked_up, 1},
    {"induction:pairs=8,vocabulary=128", 256, looked_up, 20},
    {"mqar", 256, looked_up, 4, false},
    {"mqar:pairs=5,vocabulary=11", 13, looked_up, 2, false},
    {"mqar:pairs=5,vocabulary=11", 100, looked_up, 5, false},
    {"mqar:pairs=16,vocabulary=21,values=4", 64, looked_up, 4, false},
    {"parity", 64, parity_of, 63, false},
    {"parity", 13, parity_of, 12, false},
    {"s3", 64, product_of, 63, false},
    {"s3", 31, product_of, 30, false},
    {"mqar:pairs=16,vocabulary=64,curriculum=200", 64, looked_up, 4, false},
    {"phone_book:pairs=4", 80, digit_of, 21},
    {"phone_book:pairs=16,vocabulary=18", 256, digit_of, 49},
    {"needle", 512, found_in_text, 28},
    {"needle:pairs=1", 128, found_in_text, 7},
    {"mad_recall", 128, looked_up, 40},
    {"mad_noisy", 128, looked_up, 25},
    {"mad_fuzzy", 128, fuzzy, 20},
    {"mad_memorize", 32, memorized, 16, false},
    {"mad_compress", 32, from_the_start, 15, false},
    {"mad_select", 256, selected, 16, false},
    {"automata", 256, same_beginning, 0},
    {"modular", 64, value_so_far, 31, false},
    {"s5", 64, s5_product, 63, false},
};

TEST(Tasks, AProgramSolvesThem) {
  for (const Setting& s : kSettings) {
    SCOPED_TRACE(s.task);
    const train::Source source = make_source(s.task, "", 3);
    for (const Split split : {Split::train, Split::validation})
      for (uint64_t i = 0; i < 300; ++i) {
        const Sequence q = sequence(source, split, i, s.T);
        size_t asked = 0;
        for (size_t t = 0; t < s.T; ++t) {
          ASSERT_GE(q.tokens[t], 0);
          ASSERT_LT(q.tokens[t], source.vocabulary);
          if (q.targets[t] < 0) continue;
          ++asked;
          ASSERT_EQ(s.solve(q.tokens, t), q.targets[t]) << "at " << t << " of sequence " << i;
          if (s.told && t + 1 < s.T) {
            ASSERT_EQ(q.tokens[t + 1], q.targets[t]);
          }
        }
        ASSERT_GE(asked, s.asked);
      }
  }
}

TEST(Tasks, AGuessIsRightAsOftenAsSaid) {
  for (const Setting& s : kSettings) {
    SCOPED_TRACE(s.task);
    const Chosen chosen = find_task(s.task);
    const train::Source source = make_source(s.task, "", 5);
    std::map<int64_t, int64_t> counts;
    int64_t all = 0;
    for (uint64_t i = 0; i < 3000; ++i)
      for (int64_t target : sequence(source, Split::validation, i, s.T).targets)
        if (target >= 0) ++counts[target], ++all;
    // Targets are uniform: the stated number of them, none much more frequent than the others.
    const double chance = chosen.task->chance(chosen.shape);
    EXPECT_EQ(counts.size(), size_t(std::lround(1 / chance)));
    for (const auto& [token, n] : counts) EXPECT_NEAR(double(n) / double(all) / chance, 1, 0.25);
  }
}

TEST(Tasks, NoSequenceIsInBothSplits) {
  // So few distinct sequences that chance would put many into both splits.
  const train::Source source = make_source("recall:pairs=2,vocabulary=8", "", 1);
  std::set<std::vector<int64_t>> seen[2];
  for (const uint64_t seed : {1, 2})
    for (const Split split : {Split::train, Split::validation})
      for (uint64_t i = 0; i < 2000; ++i)
        seen[size_t(split)].insert(
            sequence(make_source("recall:pairs=2,vocabulary=8", "", seed), split, i, 8).tokens);
  EXPECT_GT(seen[0].size(), 300u);
  EXPECT_GT(seen[1].size(), 40u);
  for (const auto& s : seen[1]) EXPECT_FALSE(seen[0].contains(s));
}

TEST(Tasks, ANumberGivesOneSequence) {
  for (const Setting& s : kSettings) {
    const train::Source a = make_source(s.task, "", 3), b = make_source(s.task, "", 3),
                        c = make_source(s.task, "", 4);
    const Sequence later = sequence(a, Split::train, 9, s.T);
    sequence(b, Split::train, 8, s.T);
    EXPECT_EQ(later.tokens, sequence(b, Split::train, 9, s.T).tokens);
    EXPECT_EQ(later.targets, sequence(b, Split::train, 9, s.T).targets);
    EXPECT_NE(later.tokens, sequence(b, Split::train, 10, s.T).tokens);
    EXPECT_NE(later.tokens, sequence(b, Split::validation, 9, s.T).tokens);
    EXPECT_NE(later.tokens, sequence(c, Split::train, 9, s.T).tokens);
  }
}

// Validation has all pairs: each key is asked once, most of them early. Training has fewer pairs
// too.
TEST(Tasks, KeysOfMqarAreAskedAtGrowingGaps) {
  constexpr size_t T = 320, kPairs = 32;
  const train::Source source = make_source("mqar:pairs=32,vocabulary=128", "", 1);
  std::vector<size_t> at;
  for (uint64_t i = 0; i < 400; ++i) {
    const Sequence q = sequence(source, Split::validation, i, T);
    std::set<int64_t> asked;
    for (size_t t = 2 * kPairs; t < T; ++t) {
      ASSERT_EQ(q.targets[t] >= 0, q.tokens[t] != 127);
      if (q.targets[t] < 0) continue;
      ASSERT_TRUE(asked.insert(q.tokens[t]).second);
      at.push_back(t - 2 * kPairs);
    }
    ASSERT_EQ(asked.size(), kPairs);
  }
  // The 256 places in quarters: the first has most, and each has some.
  size_t quarters[4] = {};
  for (const size_t t : at) ++quarters[t / 64];
  for (int i = 0; i < 3; ++i) EXPECT_GT(quarters[i], quarters[i + 1]);
  EXPECT_GT(quarters[0], 2 * quarters[3]);
  EXPECT_GT(quarters[3], at.size() / 20);

  std::map<size_t, size_t> pairs;  // keys of a sequence: how many sequences
  for (uint64_t i = 0; i < 400; ++i) {
    const Sequence q = sequence(source, Split::train, i, T);
    std::set<int64_t> keys;
    for (size_t t = 0; t < T; ++t)
      if (q.tokens[t] < 64) keys.insert(q.tokens[t]);
    ++pairs[keys.size()];
  }
  EXPECT_EQ(pairs.size(), 4u);
  for (const size_t n : {4, 8, 16, 32}) EXPECT_GT(pairs[n], 60u) << n;
}

// A curriculum begins with 4 pairs in 16 tokens and has all sizes at its end.
TEST(Tasks, ACurriculumAddsPairs) {
  const train::Source source = make_source("mqar:pairs=32,vocabulary=128,curriculum=400", "", 1);
  for (const uint64_t from : {0, 100, 200, 300, 400}) {
    std::map<size_t, size_t> seen;
    for (uint64_t i = from; i < from + 100; ++i) {
      const Sequence q = sequence(source, Split::train, i, 320);
      size_t pairs = 0, last = 0;
      for (size_t t = 0; t < 320; ++t) {
        pairs += t % 2 == 1 && q.tokens[t] >= 64 && q.tokens[t] < 127 && q.targets[t] < 0;
        if (q.tokens[t] != 127) last = t;
      }
      EXPECT_LT(last, 4 * pairs);
      ++seen[pairs];
    }
    EXPECT_EQ(seen.size(), std::min<size_t>(4, 1 + from / 100));
    EXPECT_EQ(seen.rbegin()->first, std::min<size_t>(32, size_t(4) << (from / 100)));
  }
}

// A file for validation: the same sequences for every seed, spread over the file; training has all
// of its own file.
TEST(Tasks, ValidationOnAFile) {
  const auto folder = std::filesystem::temp_directory_path() / "horner_validation_test";
  std::filesystem::create_directories(folder);
  const auto write = [&](const char* name, uint16_t n, uint16_t first) {
    std::vector<uint16_t> tokens(n);
    for (uint16_t i = 0; i < n; ++i) tokens[i] = uint16_t(first + i);
    std::ofstream(folder / name, std::ios::binary)
        .write(reinterpret_cast<const char*>(tokens.data()), 2 * n);
    return (folder / name).string();
  };
  const std::string data = write("data.bin", 1000, 0), other = write("valid.bin", 500, 5000);
  const train::Source a = make_source("text", data, 1, other),
                      b = make_source("text", data, 2, other);
  int64_t least = 1 << 20, most = 0, furthest = 0;
  for (uint64_t i = 0; i < 64; ++i) {
    const Sequence q = sequence(a, Split::validation, i, 16);
    EXPECT_EQ(q.tokens, sequence(b, Split::validation, i, 16).tokens);
    EXPECT_EQ(q.targets[0], q.tokens[1]);
    least = std::min(least, q.tokens[0]), most = std::max(most, q.tokens[0]);
    for (uint64_t k = 0; k < 8; ++k)
      furthest = std::max(furthest, sequence(a, Split::train, 8 * i + k, 16).targets[15]);
  }
  EXPECT_LT(least, 5020);
  EXPECT_GT(most, 5460);
  EXPECT_LE(most, 5484);
  EXPECT_GT(furthest, 960);
  EXPECT_THROW(make_source("copy", "", 1, other), Error);
  std::filesystem::remove_all(folder);
}

// Needles stand at all depths of the text, which is otherwise as it was; a file for validation
// gives every seed the same sequences, and tokens that are not bytes are refused.
TEST(Tasks, NeedlesLieInAText) {
  const auto folder = std::filesystem::temp_directory_path() / "horner_needle_test";
  std::filesystem::create_directories(folder);
  const auto write = [&](const char* name, uint16_t token) {
    const std::vector<uint16_t> tokens(4000, token);
    std::ofstream(folder / name, std::ios::binary)
        .write(reinterpret_cast<const char*>(tokens.data()), 8000);
    return (folder / name).string();
  };
  const std::string data = write("data.bin", 'x'), other = write("valid.bin", 'y'),
                    wide = write("wide.bin", 300);
  size_t thirds[3] = {};
  const train::Source a = make_source("needle:pairs=1", data, 1, other),
                      b = make_source("needle:pairs=1", data, 2, other);
  for (uint64_t i = 0; i < 600; ++i) {
    const Sequence q = sequence(a, Split::validation, i, 377);
    EXPECT_EQ(q.tokens, sequence(b, Split::validation, i, 377).tokens);
    // 40 bytes of a needle and 37 of its question; keys may have an 'y' too.
    EXPECT_GE(std::count(q.tokens.begin(), q.tokens.end(), 'y'), 377 - 40 - 37);
    const size_t at = size_t(std::find(q.tokens.begin(), q.tokens.end(), '\n') - q.tokens.begin());
    ++thirds[std::min<size_t>(at / 101, 2)];
  }
  for (const size_t n : thirds) EXPECT_NEAR(double(n), 200, 50);
  EXPECT_NE(sequence(a, Split::train, 0, 377).tokens, sequence(b, Split::train, 0, 377).tokens);
  EXPECT_THROW(sequence(make_source("needle", wide, 1), Split::train, 0, 512), Error);
  std::filesystem::remove_all(folder);
}

// The rules, by hand: exchanges of the places (0 1), (1 2) and (2 0).
TEST(Tasks, S3ByHand) {
  const std::vector<int64_t> tokens = {6, 0, 1, 2, 2, 1, 0};
  // 012 -> 102 -> 120 -> 021 -> 120 -> 102 -> 012, of 012 021 102 120 201 210.
  const int64_t wanted[] = {2, 3, 1, 3, 2, 0};
  for (size_t t = 1; t < tokens.size(); ++t) EXPECT_EQ(product_of(tokens, t), wanted[t - 1]);
}

void expect_error(const std::string& task, size_t T, const std::string& words) {
  try {
    sequence(make_source(task, "", 0), Split::train, 0, T);
    ADD_FAILURE() << task << ": no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
  }
}

TEST(Tasks, ErrorsSayWhatIsPossible) {
  expect_error("recal", 64,
               "possible: 'text', 'recall', 'copy', 'induction', 'mqar', 'phone_book', 'needle', ");
  expect_error("recall:pairs=40", 100, "requires a vocabulary of at least 80, not 64");
  expect_error("recall", 32, "requires sequences longer than 32 tokens, not 32");
  expect_error("recall:pairs=x", 64, "'x' is not a positive integer");
  expect_error("recall:pair=3", 64, "possible: 'pairs=N' or 'vocabulary=N'");
  expect_error("mqar:value=3", 64, "'pairs=N', 'vocabulary=N', 'values=N' or 'curriculum=N'");
  expect_error("needle", 311, "requires sequences of at least 312 tokens, not 311");
  expect_error("phone_book", 100, "requires sequences of at least 187 tokens, not 100");
  expect_error("mad_select", 30, "requires sequences of at least 34 tokens, not 30");
  expect_error("mqar:pairs=64,vocabulary=96,values=32", 256, "at least 97, not 96");
  expect_error("text:pairs=3", 64, "possible: none for 'text'");
  expect_error("induction", 20, "requires sequences of at least 32 tokens");
  expect_error("mqar", 128, "requires sequences longer than 128 tokens, not 128");
  expect_error("mqar:pairs=600", 4096, "requires a vocabulary of at least 1200, not 1024");
  expect_error("parity:vocabulary=4", 64, "possible: none for 'parity'");
  expect_error("s3", 7, "a sequence must have at least 8 tokens, not 7");
}

// The mean of |x|^n / n!, term by term.
double magnitude(const std::vector<double>& scores, int n) {
  double sum = 0;
  for (const double x : scores) sum += std::pow(std::abs(x), n) / std::tgamma(n + 1.0);
  return sum / double(scores.size());
}

TEST(Taylor, MagnitudesAreMeansOfAbsoluteTerms) {
  const std::vector<double> scores = {0.5, -2, 3, -4.5, 0};
  const auto logs = diag::log_term_means(at::tensor(scores, at::kDouble), kHighestOrder);
  ASSERT_EQ(logs.size(), size_t(kHighestOrder + 1));
  for (int n = 0; n <= 60; ++n)
    EXPECT_NEAR(std::exp(logs[n]) / magnitude(scores, n), 1, 1e-10) << n;
  // A term |x|^n / n! is largest at n = floor |x|, whatever the sign of x.
  for (const double x : {0.4, 1.5, 7.3, 40.2})
    EXPECT_EQ(diag::dominant_order(diag::log_term_means(at::tensor({x, -x}, at::kDouble))), int(x));
  // Terms beyond the range of a double stay finite as logarithms.
  EXPECT_EQ(diag::dominant_order(diag::log_term_means(at::tensor({6e30}, at::kDouble))),
            diag::kMostOrder);
}

nn::ModelConfig tiny(const std::string& attention, bool key_shift) {
  nn::Json j = nn::preset("tiny", attention).json;
  j["initializer_range"] = 0.5;  // scores that are not all near 0
  j["horner"]["key_shift"] = key_shift;
  return nn::model_config(j);
}

TEST(Taylor, OfAModelHiddenKeysAreLeftOut) {
  const nn::Model m = nn::random_model(tiny("softmax", false), 3);
  const at::Tensor tokens = at::arange(2 * 9, at::kLong).view({2, 9});
  std::vector<std::vector<double>> scores(m.layers.size());
  const nn::Probe probe{[&](const nn::Operated& o) {
    const int64_t layer = o.layer;
    const attn::Inputs& in = o.in;
    const at::Tensor q = in.q.to(at::kDouble), k = in.k.to(at::kDouble);
    for (int64_t b = 0; b < 2; ++b)
      for (int64_t h = 0; h < q.size(1); ++h)
        for (int64_t t = 0; t < 9; ++t)
          for (int64_t s = 0; s <= t; ++s)
            scores[layer].push_back(at::dot(q[b][h][t], k[b][h][s]).item<double>() /
                                    std::sqrt(double(q.size(3))));
  }};
  nn::hidden(m, tokens, {.probe = &probe});
  const auto logs = log_term_means(m, tokens);
  ASSERT_EQ(logs.size(), scores.size());
  for (size_t layer = 0; layer < logs.size(); ++layer)
    for (int n = 0; n <= 20; ++n)
      EXPECT_NEAR(std::exp(logs[layer][n]) / magnitude(scores[layer], n), 1, 1e-3) << layer << n;
}

// The keys of a layer come from the input of the previous token; queries and values do not.
TEST(KeyShift, KeysAreOfTheTokenBefore) {
  const nn::Model with = nn::random_model(tiny("softmax", true), 3),
                  without = nn::random_model(tiny("softmax", false), 3);
  const at::Tensor tokens = at::arange(9, at::kLong).view({1, 9}) * 7;
  attn::Inputs first[2];
  for (const bool shifted : {false, true}) {
    const nn::Probe probe{[&](const nn::Operated& o) {
      if (o.layer == 0) first[shifted] = o.in;
    }};
    nn::hidden(shifted ? with : without, tokens, {.probe = &probe});
  }
  EXPECT_TRUE(at::equal(first[0].q, first[1].q));
  EXPECT_TRUE(at::equal(first[0].v, first[1].v));
  // Rotary positions rotate a key, which does not change its norm.
  const at::Tensor a = first[0].k.norm(2, -1), b = first[1].k.norm(2, -1);
  EXPECT_TRUE(at::allclose(b.narrow(2, 1, 8), a.narrow(2, 0, 8), 1e-5, 1e-6));
  EXPECT_EQ(b.select(2, 0).abs().max().item<float>(), 0);
}

// Every preset names existing variants, tasks and settings.
TEST(Study, PresetsCanBeRead) {
  for (const Preset& p : presets()) {
    SCOPED_TRACE(p.name);
    const Study s = read_study(Json::parse(p.json), p.name, "out");
    EXPECT_GE(s.runs.size(), 8u);
    EXPECT_EQ(s.runs[0].settings.attention, "softmax");
  }
}

bool has_gate(const attn::Spec& s) {
  return s.input_gate || s.output_gate || s.post_gate || !attn::is<attn::NoDecay>(s.decay) ||
         attn::is<attn::CumulativeGate>(s.denominator);
}

// Gradient clipping for gated models only; torch's initial weights and its AdamW.
TEST(Study, PaperTrainsAsTheAuthors) {
  const Json j = find_study("paper");
  int gated = 0;
  for (const study::Run& r : read_study(j, "paper", "out").runs) {
    const bool gate = has_gate(attn::find(r.settings.attention).spec);
    gated += gate;
    EXPECT_EQ(r.settings.clip, gate ? 1 : 0) << r.name;
    EXPECT_TRUE(r.settings.decay_all);
    EXPECT_EQ(r.settings.model_config["horner"]["init"], "torch");
  }
  EXPECT_GT(gated, 1);
}

TEST(Study, SettingsOfAVariantOverrideThoseOfItsTask) {
  Json j = {{"attention", {"softmax", "gated", "gate"}},
            {"settings", {{"clip", 1}, {"steps", 5}}},
            {"attention-settings", {{"gate*", {{"clip", 3}}}, {"gated", {{"steps", 7}}}}},
            {"tasks", Json::array({{{"task", "text"}, {"settings", {{"clip", 2}}}}})}};
  std::map<std::string, std::pair<double, int64_t>> found;
  for (const study::Run& r : read_study(j, "test", "out").runs)
    found[r.settings.attention] = {r.settings.clip, r.settings.steps};
  const std::map<std::string, std::pair<double, int64_t>> wanted = {
      {"softmax", {2, 5}}, {"gate", {3, 5}}, {"gated", {3, 7}}};
  EXPECT_EQ(found, wanted);
  j["attention-settings"]["l2*"] = {{"clip", 1}};
  EXPECT_THROW(read_study(j, "test", "out"), Error);  // nothing matches
  j["attention-settings"] = {{"gate", {{"clipp", 1}}}};
  EXPECT_THROW(read_study(j, "test", "out"), Error);
}

}  // namespace
}  // namespace horner::study
