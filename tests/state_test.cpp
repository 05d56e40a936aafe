// States: every cut of a stream gives what the reference gives of the whole, with its gradients.
#include "attn/state.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "attn/catalog.h"
#include "attn/exec/by_series.h"
#include "attn/exec/chunked.h"
#include "attn/inputs.h"
#include "attn/stages.h"
#include "core/check.h"
#include "instruments/verify.h"
#include "nan_gates.h"

namespace horner::attn {

using namespace instruments;
namespace {

namespace fs = std::filesystem;

std::vector<Variant> with_state() {
  std::vector<Variant> out;
  for (const Variant& v : variants())
    if (feature_count(v.spec, 5) < 5000) out.push_back(v);
  for (const char* name :
       {"near_taylor2:near=window(9),decay=token_gate", "near_taylor2:near=window(20),decay=slope",
        "linear_elu:near=window(3),decay=token_gate,input_gate=yes", "near_taylor3:near=window(9)",
        "near_centred_taylor1:near=window(1)", "near_centred_taylor3:near=window(9)",
        "near_centred_taylor2:near=window(9),decay=token_gate",
        "near_centred_taylor4:near=window(20),decay=slope",
        "elu_taylor2:near=window(7),centred=yes"})
    out.push_back(find(name));
  return out;
}

bool is_stream(const Spec& s) {
  return !sees_future(s.mask) && !s.bias;
}

Inputs leaves(Inputs in) {
  for (const Input& i : input_table()) {
    at::Tensor& x = in.*i.at;
    if (x.defined()) x = x.detach().clone().requires_grad_(has_gradient(i));
  }
  return in;
}

double largest(const at::Tensor& x) {
  return x.numel() ? x.detach().abs().max().item<double>() : 0;
}

void expect_near(const at::Tensor& found, const at::Tensor& wanted, double tolerance,
                 const std::string& what) {
  ASSERT_EQ(found.sizes(), wanted.sizes()) << what;
  const double error = largest(found.to(at::kDouble) - wanted.to(at::kDouble));
  EXPECT_LE(error, tolerance * (1 + largest(wanted))) << what;
}

void expect_same_gradients(const Inputs& found, const Inputs& wanted, const std::string& what,
                           double tolerance = 1e-9) {
  for (const Input& i : input_table()) {
    const at::Tensor &a = found.*i.at, &b = wanted.*i.at;
    if (!b.defined() || !b.requires_grad() || !b.grad().defined()) continue;
    ASSERT_TRUE(a.grad().defined()) << what << ": d " << i.name;
    expect_near(a.grad(), b.grad(), tolerance, what + ": d " + i.name);
  }
}

Case small(uint64_t seed) {
  return {.T = 53, .S = 53, .D = 5, .E = 6, .dtype = at::kDouble, .seed = seed};
}

TEST(Chunks, OfEverySizeGiveTheReference) {
  const exec::Cut cuts[] = {{16, 1, 64}, {16, 4, 16}, {32, 2, 32}, {16, 2, 32}};
  uint64_t seed = 100;
  for (const Variant& v : with_state())
    for (int kind = 0; kind < 3; ++kind) {
      Case c = small(++seed);
      c.padded = kind == 1, c.packed = kind == 2;
      const Inputs given = random_inputs(v.spec, c);
      const Inputs whole = leaves(given);
      const at::Tensor truth = execution("reference").run(v.spec, whole, nullptr);
      const at::Tensor direction = at::randn_like(truth);
      truth.backward(direction);
      const exec::Cut& cut = cuts[seed % 4];
      const Inputs in = leaves(given);
      const at::Tensor o = exec::attend_in_chunks(v.spec, in, cut);
      o.backward(direction);
      const std::string what = v.name + " in chunks of " + std::to_string(cut.C) + ", " + text(c);
      expect_near(o, truth, 1e-9, what);
      expect_same_gradients(in, whole, what);
    }
}

TEST(Chunks, CarryGradientsThroughTheState) {
  uint64_t seed = 300;
  for (const Variant& v : with_state()) {
    Case c = small(++seed);
    c.padded = seed % 2;
    const Inputs given = random_inputs(v.spec, c), whole = leaves(given), in = leaves(given);
    const at::Tensor truth = execution("reference").run(v.spec, whole, nullptr);
    const at::Tensor direction = at::randn_like(truth);
    truth.backward(direction);
    Carry middle, last;
    const at::Tensor first = attend_from(v.spec, tokens(in, 0, 20), {}, &middle);
    const at::Tensor second = attend_from(v.spec, tokens(in, 20, 53), middle, &last);
    const at::Tensor o = at::cat({first, second}, 2);
    o.backward(direction);
    expect_near(o, truth, 1e-9, v.name);
    expect_same_gradients(in, whole, v.name);
  }
}

// Long inputs, here beyond 2048 tokens, run in pieces where a row takes much memory.
TEST(Chunks, RunInPieces) {
  for (const char* name : {"gated_delta", "kda", "near_centred_taylor1"}) {
    const Spec spec = find(name).spec;
    Case c{.B = 2, .H = 16, .G = 16, .T = 2100, .S = 2100, .D = 64, .E = 6, .seed = 7};
    c.padded = true;
    const Inputs given = random_inputs(spec, c), whole = leaves(given), in = leaves(given);
    const at::Tensor o = execution("chunked").run(spec, in, nullptr);
    const at::Tensor truth = exec::attend_in_chunks(spec, whole, exec::cut(spec, whole));
    const at::Tensor direction = at::randn_like(truth);
    o.backward(direction), truth.backward(direction);
    expect_near(o, truth, 1e-5, name);
    expect_same_gradients(in, whole, name, 1e-5);
  }
}

// Of the state that is left: against differences.
TEST(Chunks, GiveTheGradientsOfTheLastState) {
  uint64_t seed = 500;
  for (const char* name : {"taylor2", "taylor4", "linear_mamba", "centred_taylor3", "based", "gla",
                           "gated_delta", "kda", "delta_taylor2"}) {
    const Spec spec = find(name).spec;
    const Inputs given = random_inputs(spec, small(++seed));
    const auto loss = [&](const Inputs& in) {
      Carry last;
      attend_from(spec, in, {}, &last);
      const at::Tensor ramp = at::arange(last.S.numel(), last.S.options()).view(last.S.sizes());
      return (last.S * (ramp * 0.37).sin()).sum() +
             (last.z * (ramp.select(-1, 0) * 0.7).cos()).sum();
    };
    Inputs in = leaves(given);
    loss(in).backward();
    for (const Input& i : input_table()) {
      const at::Tensor& x = in.*i.at;
      if (!x.defined() || i.role == Role::mask || !x.grad().defined()) continue;
      const at::Tensor u = at::randn_like(x);
      const auto at_step = [&](double h) {
        Inputs moved = given;
        moved.*i.at = given.*i.at + h * u;
        return loss(moved).item<double>();
      };
      const double numeric = (at_step(1e-5) - at_step(-1e-5)) / 2e-5;
      const double analytic = (x.grad() * u).sum().item<double>();
      EXPECT_NEAR(numeric, analytic, 1e-5 * (1 + std::abs(analytic))) << name << ": d " << i.name;
    }
  }
}

// The form in torch's operators that a GPU runs, on the CPU: in double, over several chunks.
TEST(Series, GiveTheReferenceAndTheState) {
  uint64_t seed = 900;
  std::vector<Variant> rows;
  for (const Variant& v : with_state())
    if (!v.spec.centred && !v.spec.less_log_count && is<Flat>(v.spec.sharpness) &&
        !is<ChannelGate>(v.spec.decay) && !is<CumulativeGate>(v.spec.denominator) &&
        feature_count(v.spec, 3) < 40 + 100 * !is<NoKeys>(v.spec.near))
      rows.push_back(v);
  rows.push_back({"delta_taylor2 with decay", find("delta_taylor2").spec});
  rows.back().spec.decay = TokenGate{};
  for (const Variant& v : rows) {
    Case c{.T = 130, .S = 150, .D = 3, .E = 4, .dtype = at::kDouble, .seed = ++seed};
    c.padded = seed % 2 == 0;
    const std::string name = std::string(v.name) + " on " + text(c);
    const Inputs given = random_inputs(v.spec, c), whole = leaves(given), parts = leaves(given);
    const at::Tensor truth = execution("reference").run(v.spec, whole, nullptr);
    const at::Tensor direction = at::randn_like(truth);
    truth.backward(direction);
    const auto attended = [&](const Inputs& in, Carry* carry) {
      Sums sums = exec::sums_by_series(v.spec, in, carry);
      sums.count = seen(v.spec.mask, in).count;
      return finish(v.spec, in, sums);
    };
    const at::Tensor o = attended(parts, nullptr);
    o.backward(direction);
    expect_near(o, truth, 1e-9, name);
    expect_same_gradients(parts, whole, name);
    if (!is<AsGiven>(v.spec.values) && !is<Delta>(v.spec.values)) continue;
    // The state is the one that the kernels on the CPU leave.
    Case same = c;
    same.T = same.S;
    const Inputs all = random_inputs(v.spec, same);
    const StateShape shape{c.B, c.G, c.D, c.E};
    State mine = make_state(v.spec, shape, at::kDouble),
          theirs = make_state(v.spec, shape, at::kDouble);
    attended(tokens(all, 0, 100), &mine.carry);
    mine.carry.count += 100;
    const Sums later = exec::sums_by_series(v.spec, tokens(all, 100, 150), &mine.carry);
    step(theirs, all), flush(theirs);
    expect_near(mine.carry.S, theirs.carry.S, 1e-9, name + ": S");
    const Sums whole_sums = exec::sums_by_series(v.spec, all);
    const auto end = [](const at::Tensor& x, const at::Tensor& shift) {
      return (x * shift.exp()).narrow(2, x.size(2) - 50, 50);
    };
    expect_near(end(later.N, later.shift), end(whole_sums.N, whole_sums.shift), 1e-9, name + ": N");
    if (mine.carry.near_k.defined())
      expect_near(mine.carry.near_k, theirs.carry.near_k, 0, name + ": near keys");
    expect_near(mine.carry.z, theirs.carry.z, 1e-9, name + ": z");
    if (mine.carry.decay.defined())
      expect_near(mine.carry.decay, theirs.carry.decay, 1e-9, name + ": decay");
  }
}

// As an execution, by the rule of `horner check`.
TEST(Series, AreAsExactAsTheReference) {
  const Execution series{.name = "series",
                         .about = "",
                         .why_not = [](const Spec&, const Inputs& in) -> std::string {
                           return in.cu_seqlens.defined() ? "packed" : "";
                         },
                         .run =
                             [](const Spec& spec, const Inputs& in, Statistics*) {
                               Sums sums = exec::sums_by_series(spec, in);
                               sums.count = seen(spec.mask, in).count;
                               return finish(spec, in, sums);
                             }};
  for (const char* name : {"delta_taylor1", "delta_taylor2", "delta_taylor3", "near_taylor2",
                           "lolcats", "near_taylor2:near=window(9),decay=token_gate"})
    for (at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kFloat})
      for (const Case& c : standard_cases(dtype)) {
        if (c.T > 200) continue;
        const Verdict v = verify(find(name).spec, series, c);
        EXPECT_TRUE(v.ok()) << name << " " << c10::toString(dtype) << " " << v.worst()->of << ": "
                            << v.worst()->error << ", allowed " << v.worst()->allowed << ", on "
                            << text(c);
      }
}

TEST(Chunks, GiveTheSameBitsWhateverTheThreads) {
  for (const char* name : {"taylor3", "gated_delta", "kda"}) {
    const Spec spec = find(name).spec;
    const Inputs given =
        random_inputs(spec, {.B = 1, .H = 4, .G = 2, .T = 3000, .S = 3000, .D = 6, .E = 6});
    std::vector<at::Tensor> first;
    for (int threads : {1, 2, 3}) {
      at::set_num_threads(threads);
      const Inputs in = leaves(given);
      const at::Tensor o = execution("chunked").run(spec, in, nullptr);
      o.sum().backward();
      const std::vector<at::Tensor> now = {o, in.q.grad(), in.k.grad(), in.v.grad()};
      if (first.empty()) first = now;
      for (size_t i = 0; i < now.size(); ++i) EXPECT_TRUE(at::equal(now[i], first[i])) << name << i;
    }
  }
}

// As a decoder goes: a prompt, tokens one by one, a few at once.
at::Tensor stream(State& state, const Inputs& in, const std::vector<int64_t>& ends) {
  std::vector<at::Tensor> results;
  int64_t from = 0;
  for (int64_t to : ends) results.push_back(step(state, tokens(in, from, to))), from = to;
  return at::cat(results, 2);
}

StateShape shape_of(const Inputs& in) {
  return {in.k.size(0), in.k.size(1), in.k.size(3), in.v.size(3)};
}

TEST(States, APromptThenDecodingIsTheWholeSequence) {
  uint64_t seed = 700;
  for (const Variant& v : variants()) {
    if (!is_stream(v.spec)) continue;
    const bool finite = why_no_state(v.spec).empty();
    if (finite && feature_count(v.spec, 5) > 5000) continue;
    for (int64_t buffer : {1, 3, 64}) {
      const Case c{.T = 41, .S = 41, .D = 5, .E = 6, .seed = ++seed, .padded = seed % 2 == 0};
      const Inputs in = random_inputs(v.spec, c);
      Inputs exact = in;
      for (const Input& i : input_table())
        if ((in.*i.at).defined() && i.role != Role::mask) exact.*i.at = (in.*i.at).to(at::kDouble);
      const at::Tensor truth = execution("reference").run(v.spec, exact, nullptr);
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
  for (const Variant& v : variants()) {
    if (!is_stream(v.spec) || (why_no_state(v.spec).empty() && feature_count(v.spec, 5) > 5000))
      continue;
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

// A million tokens in float32 beside a million in double.
void expect_little_drift(const char* name) {
  const Spec spec = find(name).spec;
  constexpr int64_t kTokens = 1'000'000, kPart = 20'000;
  State single = make_state(spec, {1, 1, 8, 8}),
        exact = make_state(spec, {1, 1, 8, 8}, at::kDouble);
  double drift = 0;
  for (int64_t t = 0; t < kTokens; t += kPart) {
    const Inputs in = random_inputs(
        spec,
        {.B = 1, .H = 1, .G = 1, .T = kPart, .S = kPart, .D = 8, .E = 8, .seed = uint64_t(t)});
    Inputs wide = in;
    for (const Input& i : input_table())
      if ((in.*i.at).defined()) wide.*i.at = (in.*i.at).to(at::kDouble);
    const at::Tensor a = step(single, in), b = step(exact, wide);
    drift = largest(a.narrow(2, kPart - 1000, 1000) - b.narrow(2, kPart - 1000, 1000)) /
            largest(b.narrow(2, kPart - 1000, 1000));
  }
  testing::Test::RecordProperty(std::string("drift_of_") + name, std::to_string(drift));
  EXPECT_LT(drift, 1e-4) << name;
  EXPECT_EQ(single.tokens, kTokens);
}

TEST(States, OfLongStreamsStayRight) {
  for (const char* name : {"taylor2", "kda"}) expect_little_drift(name);
}

}  // namespace
}  // namespace horner::attn
