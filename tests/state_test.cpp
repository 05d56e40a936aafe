// States: every cut of a stream gives what the reference gives of the whole.
#include "attn/state.h"

#include <filesystem>
#include <fstream>

#include "attn/rollback.h"
#include "core/check.h"
#include "nan_gates.h"
#include "streams.h"

namespace horner::attn {
namespace {

namespace fs = std::filesystem;

Inputs in_double(Inputs in) {
  for (const Input& i : input_table())
    if ((in.*i.at).defined() && i.role != Role::mask) in.*i.at = (in.*i.at).to(at::kDouble);
  return in;
}

TEST(States, APromptThenDecodingIsTheWholeSequence) {
  uint64_t seed = 700;
  for (const Variant& v : streams()) {
    for (int64_t buffer : {0, 1, 3, 64}) {
      const bool finite = buffer > 0 && why_no_state(v.spec).empty();
      const Case c{.T = 41, .S = 41, .D = 5, .E = 6, .seed = ++seed, .padded = seed % 2 == 0};
      const Inputs in = random_inputs(v.spec, c);
      const at::Tensor truth = execution("reference").run(v.spec, in_double(in), nullptr);
      const at::Tensor plain = execution("reference").run(v.spec, in, nullptr);
      State state = make_state(v.spec, shape_of(in), at::kFloat, buffer);
      EXPECT_EQ(state.finite, finite);
      const at::Tensor o = stream(state, in, {23, 24, 25, 30, 31, 32, 33, 41});
      EXPECT_EQ(state.tokens, 41);
      const double own = largest(plain - truth);
      EXPECT_LE(largest(o - truth), 2 * own + 2e-6 * (1 + largest(truth)))
          << v.name << " with a buffer of " << buffer << ", " << text(c);
    }
  }
}

// A prompt, single tokens, a few at once, a second prompt: keys pass from the chunks to the kernel
// and back, and on to the sums.
TEST(States, OfNearKeysGiveEveryToken) {
  uint64_t seed = 1100;
  std::vector<Variant> rows = near_rows();
  for (const char* name :
       {"near_taylor2:near=window(5)", "near_centred_taylor2:near=window(5)",
        "near_taylor1:near=window(5)", "lolcats:near=window(5),features=hedgehog(3)",
        "lolcats:near=window(70),temperature=2", "lolcats:near=window(5),decay=slope",
        "near_taylor2:near=window(80)", "linear_cosine:near=window(5)",
        "cumulative_gate:clamp=inf,weight=taylor(2),near=window(5)",
        "linear_cosine@code:near=window(5)"})
    rows.push_back(find(name));
  constexpr at::ScalarType kTypes[] = {at::kDouble, at::kFloat, at::kBFloat16};
  for (const Variant& v : rows)
    for (const int64_t buffer : {0, 1, 3, 64}) {
      const auto dtype = kTypes[++seed % 3];
      Case c{.T = 121, .S = 121, .D = 7, .E = 9, .dtype = dtype, .seed = seed};
      c.padded = seed % 2 == 0, c.hot = seed % 4 < 2;
      const Inputs in = random_inputs(v.spec, c);
      std::vector<int64_t> ends;
      for (int64_t t = 1; t <= 121; ++t)
        if ((t < 4 || t >= 23) && (t < 81 || t > 104) && t % 10) ends.push_back(t);
      State state = make_state(v.spec, shape_of(in), dtype, buffer);
      const at::Tensor o = stream(state, in, ends);
      const at::Tensor truth = execution("reference").run(v.spec, in_double(in), nullptr);
      const at::Tensor plain = execution("reference").run(v.spec, in, nullptr);
      const double own = largest(plain.to(at::kDouble) - truth);
      const double floor = dtype == at::kDouble ? 1e-9 : 2e-6;
      EXPECT_LE(largest(o.to(at::kDouble) - truth), 2 * own + floor * (1 + largest(truth)))
          << v.name << " with a buffer of " << buffer << ", " << text(c);
    }
}

// Relative to the largest of them, the weights of far keys would overflow.
TEST(States, OfNearKeysWithLowScores) {
  const Spec spec = find("near_taylor2:near=window(5)").spec;
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    Inputs in = random_inputs(spec, {.H = 2, .G = 2, .T = 20, .S = 20, .D = 8, .dtype = dtype});
    in.q.fill_(20), in.k.narrow(2, 15, 5).fill_(-20);
    State state = make_state(spec, shape_of(in), dtype);
    const at::Tensor o = stream(state, in, {16, 17, 18, 19, 20});
    expect_near(o, execution("reference").run(spec, in, nullptr), 1e-5, "near_taylor2");
  }
}

// q^40 is beyond the range of a float: a prompt in chunks and tokens after it share one state.
TEST(States, OfHighOrderGoOnFromAPrompt) {
  const Spec spec = find("taylor40").spec;
  Inputs in = random_inputs(spec, {.T = 41, .S = 41, .D = 2, .E = 3, .dtype = at::kDouble});
  in.q *= 12;
  State state = make_state(spec, shape_of(in), at::kDouble, 3);
  const at::Tensor truth = execution("reference").run(spec, in, nullptr);
  expect_near(stream(state, in, {23, 24, 25, 30, 41}), truth, 1e-6, "taylor40");
}

TEST(States, MergeAsIfOneHadFollowedTheOther) {
  uint64_t seed = 900;
  for (const char* name : {"taylor2",
                           "retention",
                           "centred_taylor3",
                           "cumulative_gate",
                           "softmax",
                           "gated_decay",
                           "linear_decay",
                           "gla",
                           "alibi",
                           "softmax:mask=window(7)",
                           "softcap",
                           "near_taylor2",
                           "near_taylor2:near=window(9)",
                           "near_taylor2:near=window(9),decay=token_gate",
                           "linear_elu:near=window(40),decay=slope",
                           "linear_elu:near=window(31)",
                           "near_centred_taylor3:near=window(9)",
                           "elu_taylor2:near=window(40),centred=yes",
                           "near_centred_taylor2:near=window(9),decay=token_gate",
                           "softmax:mask=streaming(first=3,size=7)",
                           "sigmoid:mask=streaming(first=30,size=2)"}) {
    const Spec spec = find(name).spec;
    const Inputs in = random_inputs(spec, small(++seed));
    State whole = make_state(spec, shape_of(in), at::kDouble, 5);
    State first = make_state(spec, shape_of(in), at::kDouble, 5);
    State second = make_state(spec, shape_of(in), at::kDouble, 7);
    stream(whole, in, {20, 21, 22, 52});
    stream(first, in, {20, 21}), stream(second, tokens(in, 21, 53), {1, 2, 31});
    merge(first, second);
    const Inputs next = tokens(in, 52, 53);
    expect_near(step(first, next), step(whole, next), 1e-9, name);
    EXPECT_EQ(first.tokens, whole.tokens);
  }
  State a = make_state(find("taylor2").spec, {1, 1, 4, 4});
  EXPECT_THROW(merge(a, make_state(find("taylor3").spec, {1, 1, 4, 4})), Error);
  EXPECT_THROW(merge(a, make_state(find("taylor2").spec, {1, 2, 4, 4})), Error);
  State b = make_state(find("linear_cosine").spec, {1, 1, 4, 4});
  EXPECT_THROW(merge(b, b), Error);
  for (const char* name : {"delta", "lolcats"}) {
    State c = make_state(find(name).spec, {1, 1, 4, 4});
    EXPECT_THROW(merge(c, c), Error);
  }
}

TEST(States, RepeatAStream) {
  for (const char* name : {"softmax", "alibi", "sink"}) {
    const Spec spec = find(name).spec;
    const Inputs in = random_inputs(spec, small(7));
    State state = make_state(spec, shape_of(in), at::kDouble, 0);
    State other = make_state(spec, shape_of(in), at::kDouble, 0);
    stream(state, in, {20}), stream(other, in, {20});
    repeat(state, 39);
    stream(other, in, {19});
    const Inputs next = tokens(in, 20, 21);
    expect_near(step(state, next), step(other, next), 1e-12, name);
    EXPECT_EQ(state.tokens, 40);
  }
}

// Only near keys, of low scores: what is far has a factor e^200, and no keys.
TEST(States, OfOnlyNearKeysOfLowScores) {
  for (const char* name : {"near_taylor2", "near_centred_taylor3", "linear_elu:near=window(5)"}) {
    const Spec spec = find(name).spec;
    Inputs in = random_inputs(spec, {.T = 3, .S = 3, .D = 4, .E = 4});
    in.q = at::full_like(in.q, 10), in.k = at::full_like(in.k, -10);
    const at::Tensor truth = execution("reference").run(spec, in_double(in), nullptr);
    EXPECT_TRUE(truth.isfinite().all().item<bool>()) << name;
    for (const char* other : {"reference", "chunked", "recurrent"})
      expect_near(execution(other).run(spec, in, nullptr).to(at::kDouble), truth, 1e-5, other);
    State state = make_state(spec, shape_of(in), at::kFloat);
    expect_near(stream(state, in, {1, 2, 3}).to(at::kDouble), truth, 1e-5, name);
  }
}

TEST(States, OfAStreamingMaskKeepItsKeysOnly) {
  for (const char* name :
       {"softmax:mask=streaming(first=3,size=7)", "softcap:mask=streaming(first=3,size=7)",
        "entmax15:mask=streaming(first=3,size=7)", "sink:mask=streaming(first=70,size=1)"})
    for (const bool padded : {false, true}) {
      const Spec spec = find(name).spec;
      const Inputs in = random_inputs(
          spec, {.T = 400, .S = 400, .D = 5, .E = 6, .dtype = at::kDouble, .padded = padded});
      State state = make_state(spec, shape_of(in), at::kDouble);
      std::vector<int64_t> ends = {5, 60};
      for (int64_t t = 61; t <= 400; t += t % 7 ? 1 : 5) ends.push_back(t);
      if (ends.back() < 400) ends.push_back(400);
      expect_near(stream(state, in, ends), execution("reference").run(spec, in, nullptr), 1e-9,
                  name);
      EXPECT_LE(state.room, 160) << name;
    }
  EXPECT_THROW(make_state(find("alibi:mask=streaming(first=3,size=7)").spec, {1, 1, 4, 4}), Error);
}

TEST(States, OfTheDeltaRuleCorrectEveryValueOnce) {
  for (const char* name :
       {"delta_exp", "delta_exp:decay=token_gate,input_gate=yes", "delta_exp:decay=slope",
        "delta_taylor2", "delta:decay=token_gate", "delta_exp:features=identity"})
    for (const bool padded : {false, true}) {
      const Spec spec = find(name).spec;
      const Inputs in = random_inputs(
          spec, {.T = 150, .S = 150, .D = 5, .E = 6, .dtype = at::kDouble, .padded = padded});
      State state = make_state(spec, shape_of(in), at::kDouble, 0);
      std::vector<int64_t> ends{20, 29};
      while (ends.back() < 140) ends.push_back(ends.back() + 1);
      ends.push_back(150);
      expect_near(stream(state, in, ends), execution("reference").run(spec, in, nullptr), 1e-9,
                  name);
      EXPECT_FALSE(state.recent.beta.defined()) << name;
    }
}

struct Folder {
  fs::path path = fs::temp_directory_path() / ("horner_state_" + std::to_string(getpid()));
  Folder() { fs::create_directories(path); }
  ~Folder() { fs::remove_all(path); }
};

TEST(States, HaveNanWhereTheDefinitionHasIt) {
  expect_nan_in_streams(at::kFloat, at::kCPU);
}

TEST(States, AreSavedAndLoaded) {
  const Folder folder;
  const fs::path file = folder.path / "state.safetensors";
  uint64_t seed = 1000;
  for (const Variant& v : streams()) {
    const Case c{.T = 41, .S = 41, .D = 5, .E = 6, .seed = ++seed, .padded = seed % 2 == 0};
    const Inputs in = random_inputs(v.spec, c);
    for (int64_t buffer : {8, 0}) {
      State state = make_state(v.spec, shape_of(in), at::kFloat, buffer);
      stream(state, tokens(in, 0, 40), {23, 40});
      save(state, file);
      State loaded = load_state(file);
      EXPECT_EQ(bytes(loaded), bytes(state)) << v.name;
      const Inputs next = tokens(in, 40, 41);
      EXPECT_TRUE(at::equal(step(loaded, next), step(state, next))) << v.name;
    }
  }
}

TEST(States, OfBfloat16KeepTheirKeysAsGiven) {
  for (const Variant& v : streams())
    if (!caches_corrected(v.spec)) expect_kept_as_given(v.spec, at::kCPU, v.name);
  for (const auto dtype : {at::kHalf, at::kFloat})
    EXPECT_EQ(make_state(find("softmax").spec, {1, 1, 4, 4}, dtype, 0).kept, at::kFloat);
}

TEST(States, OfBfloat16AreLoadedAsTheyWereKept) {
  const Folder folder;
  const fs::path file = folder.path / "state.safetensors";
  const Spec spec = find("softmax").spec;
  const Inputs in = random_inputs(spec, {.T = 41, .S = 41, .D = 5, .E = 6, .dtype = at::kBFloat16});
  for (const at::ScalarType kept : {at::kBFloat16, at::kFloat}) {
    State state = make_state(spec, shape_of(in), at::kBFloat16);
    state.kept = kept;
    stream(state, in, {23, 40});
    save(state, file);
    State loaded = load_state(file);
    EXPECT_EQ(loaded.recent.k.scalar_type(), kept);
    const Inputs next = tokens(in, 40, 41);
    EXPECT_TRUE(at::equal(step(loaded, next), step(state, next)));
    state.recent.v = state.recent.v.to(kept == at::kFloat ? at::kBFloat16 : at::kFloat);
    save(state, file);
    EXPECT_THROW(load_state(file), Error);
  }
}

// What a state holds, without the room behind its newest token.
std::vector<at::Tensor> contents(State s) {
  std::vector<at::Tensor> all{at::scalar_tensor(s.tokens), at::scalar_tensor(s.held)};
  for (const auto& [name, x] : tensors_of(s)) {
    if (!x->defined()) continue;
    const int64_t axis = x == &s.recent.keep ? 1 : 2;
    all.push_back((name.starts_with("recent.") ? x->narrow(axis, 0, s.held) : *x).clone());
  }
  return all;
}

TEST(States, AreUndoneBitForBit) {
  uint64_t seed = 1200;
  for (const Variant& v : streams())
    for (const int64_t buffer : {0, 3, 64}) {
      Case c{.T = 100, .S = 100, .D = 5, .E = 6, .seed = ++seed, .padded = seed % 2 == 0};
      if (seed % 3 == 0) c.dtype = at::kBFloat16;
      Inputs in = random_inputs(v.spec, c);
      if (in.decay.defined()) in.decay.select(2, 60).fill_(NAN);
      const Inputs later = tokens(in, 30, 100);
      State state = make_state(v.spec, shape_of(in), c.dtype, buffer);
      stream(state, in, {23, 24, 29, 30});
      for (const std::vector<int64_t>& ends : std::vector<std::vector<int64_t>>{
               {1}, {1, 2, 3, 4, 5, 6, 7}, {20}, {1, 31, 33, 69, 70}}) {
        const Mark before = mark(state, ends.back());
        const std::vector<at::Tensor> held = contents(state);
        const at::Tensor o = stream(state, later, ends);
        undo(state, before);
        const std::vector<at::Tensor> again = contents(state);
        ASSERT_EQ(again.size(), held.size()) << v.name;
        for (size_t i = 0; i < held.size(); ++i)
          EXPECT_TRUE(at::equal(again[i], held[i])) << v.name << " " << i << ", " << text(c);
        EXPECT_TRUE(at::allclose(stream(state, later, ends), o, 0, 0, /*equal_nan=*/true))
            << v.name << " with a buffer of " << buffer << ", " << text(c);
        undo(state, before);
      }
    }
}

TEST(States, OfDamagedFilesAreRefused) {
  const Folder folder;
  const fs::path file = folder.path / "state.safetensors";
  const Spec spec = find("taylor2").spec;
  const Inputs in = random_inputs(spec, {.T = 41, .S = 41, .D = 5, .E = 6});
  State state = make_state(spec, shape_of(in));
  step(state, in);
  save(state, file);
  const auto size = fs::file_size(file);
  fs::resize_file(file, size - 4);
  EXPECT_THROW(load_state(file), Error);
  std::ofstream(file) << "not a state";
  EXPECT_THROW(load_state(file), Error);
  EXPECT_THROW(load_state(folder.path / "none"), Error);
}

TEST(States, HaveASizeThatIsKnownBefore) {
  const Spec spec = find("taylor2").spec;
  const State state = make_state(spec, {1, 2, 64, 64}, at::kFloat, 1);
  const double sums = double(state.carry.S.nbytes() + state.carry.z.nbytes());
  EXPECT_EQ(sums, 2 * state_bytes(spec, 64, 64));
  EXPECT_EQ(state.carry.z.size(2), 2145);
  try {
    make_state(find("taylor10").spec, {1, 1, 64, 64});
    FAIL() << "a state of petabytes";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("GB"), std::string::npos) << e.what();
  }
  EXPECT_THROW(make_state(find("softmax:mask=full").spec, {1, 1, 4, 4}), Error);
  EXPECT_FALSE(make_state(find("power2:centred=yes").spec, {1, 1, 4, 4}).finite);
}

TEST(States, SayWhatIsWrongWithAStep) {
  const Spec spec = find("taylor2").spec;
  State state = make_state(spec, {1, 2, 4, 4});
  const auto inputs = [](int64_t B, int64_t G, int64_t T, int64_t S) {
    return Inputs{
        .q = at::randn({B, G, T, 4}), .k = at::randn({B, G, S, 4}), .v = at::randn({B, G, S, 4})};
  };
  EXPECT_NO_THROW(step(state, inputs(1, 2, 1, 1)));
  EXPECT_THROW(step(state, inputs(2, 2, 1, 1)), Error);
  EXPECT_THROW(step(state, inputs(1, 1, 1, 1)), Error);
  EXPECT_THROW(step(state, inputs(1, 2, 1, 2)), Error);
}

// A stream in float32 or of bfloat16, many tokens at once or one by one, beside one in double: the
// largest error of every part, relative to its largest element.
void expect_little_drift(const char* name, int64_t all, bool one_by_one,
                         at::ScalarType dtype = at::kFloat, double allowed = 1e-4) {
  const Spec spec = find(name).spec;
  constexpr int64_t kPart = 20'000;
  State single = make_state(spec, {1, 1, 8, 8}, dtype),
        exact = make_state(spec, {1, 1, 8, 8}, at::kDouble);
  double drift = 0;
  for (int64_t t = 0; t < all; t += kPart) {
    const Inputs in = random_inputs(spec, {.B = 1,
                                           .H = 1,
                                           .G = 1,
                                           .T = kPart,
                                           .S = kPart,
                                           .D = 8,
                                           .E = 8,
                                           .dtype = dtype,
                                           .seed = uint64_t(t)});
    std::vector<int64_t> ends;
    for (int64_t i = one_by_one ? 1 : kPart; i <= kPart; ++i) ends.push_back(i);
    const at::Tensor a = stream(single, in, ends), b = step(exact, in_double(in));
    drift = std::max(drift, largest(a - b) / largest(b));
  }
  testing::Test::RecordProperty(std::string("drift_of_") + name, std::to_string(drift));
  EXPECT_LT(drift, allowed) << name << " " << dtype_name(dtype);
  EXPECT_EQ(single.tokens, all);
}

TEST(States, OfLongStreamsStayRight) {
  for (const char* name : {"taylor2", "kda"}) expect_little_drift(name, 1'000'000, false);
  for (const char* name : {"gated_delta", "near_taylor2"})
    expect_little_drift(name, 100'000, false);
  for (const char* name : {"near_taylor2", "near_taylor2:decay=token_gate"})
    expect_little_drift(name, 20'000, true);
  // The result is rounded to 8 bits; the state is not.
  expect_little_drift("gated_delta", 100'000, false, at::kBFloat16, 0x1p-7);
}

TEST(States, OfAMillionSingleTokensStayRight) {
  if (!std::getenv("HORNER_LONG")) GTEST_SKIP() << "takes minutes: set HORNER_LONG=1";
  for (const char* name :
       {"gla", "hgrn2", "delta", "delta_negative", "gated_delta", "kda", "delta_taylor2",
        "hedgehog", "lolcats", "near_taylor2", "near_taylor2:decay=token_gate", "retention"})
    expect_little_drift(name, 1'000'000, true);
}

}  // namespace
}  // namespace horner::attn
