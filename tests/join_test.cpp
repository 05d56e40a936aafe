// States of several streams as one batch: every row goes on as its own state would.
#include "attn/join.h"

#include <cmath>

#include "core/check.h"
#include "streams.h"

namespace horner::attn {
namespace {

bool has_batch(const Input& i, const at::Tensor& x) {
  return x.defined() && (i.shape[0] == 'B' || (i.shape[0] == 'b' && x.size(0) > 1));
}

// Rows from <= b < to of a batch.
Inputs rows(Inputs in, int64_t from, int64_t to) {
  for (const Input& i : input_table())
    if (at::Tensor& x = in.*i.at; has_batch(i, x)) x = x.narrow(0, from, to - from);
  return in;
}

Inputs as_batch(const std::vector<Inputs>& each) {
  Inputs out = each[0];
  for (const Input& i : input_table()) {
    if (!(out.*i.at).defined() || std::string_view("Bb").find(i.shape[0]) == std::string::npos)
      continue;
    std::vector<at::Tensor> all;
    for (const Inputs& in : each) all.push_back(in.*i.at);
    out.*i.at = at::cat(all);
  }
  return out;
}

// Streams of different lengths, each with its state, and what follows.
struct Streams {
  Spec spec;
  Inputs in;
  std::vector<int64_t> at;  // tokens so far, of each
  std::vector<State> states = {};

  Streams(const Variant& v, const std::vector<int64_t>& lengths, int64_t buffer, uint64_t seed)
      : spec(v.spec),
        in(random_inputs(spec, {.B = int64_t(lengths.size()),
                                .T = 160,
                                .S = 160,
                                .D = 5,
                                .E = 6,
                                .dtype = at::kDouble,
                                .seed = seed,
                                .padded = seed % 2 == 0})),
        at(lengths) {
    for (size_t r = 0; r < lengths.size(); ++r) {
      StateShape shape = shape_of(in);
      shape.B = 1;
      states.push_back(make_state(spec, shape, at::kDouble, buffer));
      std::vector<int64_t> ends;  // at once, and with single tokens at the end
      for (int64_t t = std::max<int64_t>(1, lengths[r] - 7 * int64_t(r)); t <= lengths[r]; ++t)
        ends.push_back(t);
      if (!ends.empty()) stream(states[r], of(r, 0, lengths[r]), ends);
    }
  }
  Inputs of(size_t row, int64_t from, int64_t to) const {
    return tokens(rows(in, int64_t(row), int64_t(row) + 1), from, to);
  }
  // The next n tokens of some rows, for a state of them.
  Inputs next(const std::vector<int64_t>& which, int64_t n) const {
    std::vector<Inputs> each;
    for (const int64_t r : which) each.push_back(of(size_t(r), at[size_t(r)], at[size_t(r)] + n));
    return as_batch(each);
  }
  // A step of `batch`, a state of those rows, beside steps of their own states.
  void expect_same(State& batch, const std::vector<int64_t>& which, int64_t n,
                   const std::string& what) {
    const at::Tensor o = step(batch, next(which, n));
    for (size_t i = 0; i < which.size(); ++i) {
      const auto r = size_t(which[i]);
      const at::Tensor alone = step(states[r], of(r, at[r], at[r] + n));
      expect_near(o.narrow(0, int64_t(i), 1), alone, 1e-9,
                  what + ", row " + std::to_string(r) + " at " + std::to_string(at[r]));
      at[r] += n;
    }
  }
};

std::vector<Variant> rows_to_join() {
  std::vector<Variant> out = streams();
  for (const char* name :
       {"softmax:mask=window(7)", "softcap:mask=window(20)", "gated_decay:mask=window(30)",
        "ssmax:mask=window(20)", "entmax15:mask=window(20)", "near_taylor2:near=window(5)",
        "linear_cosine@code:near=window(5)", "cumulative_gate:weight=exp,mask=window(9)"})
    out.push_back(find(name));
  return out;
}

TEST(JoinedStates, StepAsEachAlone) {
  uint64_t seed = 2000;
  for (const Variant& v : rows_to_join()) {
    if (!why_not_joined(v.spec).empty()) continue;
    for (const int64_t buffer : {0, 5, 64}) {
      Streams s(v, {3, 17, 70}, buffer, ++seed);
      State batch = joined(s.states);
      EXPECT_EQ(batch.tokens, 70);
      const std::string what = v.name + " with a buffer of " + std::to_string(buffer);
      for (int t = 0; t < 60; ++t) s.expect_same(batch, {0, 1, 2}, 1, what);
      s.expect_same(batch, {0, 1, 2}, 3, what), s.expect_same(batch, {0, 1, 2}, 17, what);
      if (testing::Test::HasFailure()) break;
    }
  }
}

TEST(JoinedStates, JoinAndLeave) {
  uint64_t seed = 3000;
  for (const Variant& v : rows_to_join()) {
    if (!why_not_joined(v.spec).empty()) continue;
    for (const int64_t buffer : {0, 5, 64}) {
      Streams s(v, {9, 40, 21, 1}, buffer, ++seed);
      const std::string what = v.name + " with a buffer of " + std::to_string(buffer);
      State batch = joined({s.states[0], s.states[1]});
      for (int t = 0; t < 5; ++t) s.expect_same(batch, {0, 1}, 1, what);
      batch = joined({batch, s.states[2], s.states[3]});
      for (int t = 0; t < 5; ++t) s.expect_same(batch, {0, 1, 2, 3}, 1, what);
      batch = select(batch, at::tensor({3, 0}, at::kLong));  // not the longest
      EXPECT_EQ(batch.shape.B, 2);
      for (int t = 0; t < 5; ++t) s.expect_same(batch, {3, 0}, 1, what);
    }
  }
}

// Also those whose masks count from the first token: their caches hold other numbers of keys.
TEST(JoinedStates, OfEqualLengths) {
  std::vector<Variant> all = rows_to_join();
  for (const char* name :
       {"softmax:mask=streaming(first=3,size=7)", "ssmax:mask=streaming(first=3,size=9)",
        "entmax15:mask=streaming(first=3,size=7)", "softmax:mask=chunks(16)",
        "ssmax:mask=chunks(16)", "sparsemax:mask=chunks(32)"})
    all.push_back(find(name));
  uint64_t seed = 4000;
  for (const Variant& v : all) {
    Streams s(v, {75, 75, 75}, 64, ++seed);
    State batch = joined(s.states);
    for (int t = 0; t < 12; ++t) s.expect_same(batch, {0, 1, 2}, 1, v.name);
  }
}

// A row without tokens yet, whose first gate is NaN: it decays nothing.
TEST(JoinedStates, OfStreamsWithoutKeys) {
  uint64_t seed = 5000;
  for (const char* name : {"softmax", "taylor2", "gated_delta", "kda", "retention", "near_taylor2",
                           "gated_decay", "linear_cosine", "cumulative_gate"}) {
    for (const int64_t buffer : {0, 64, 64, 0}) {  // with hidden keys, and without
      Streams s(find(name), {0, 20, 30}, buffer, ++seed);
      for (at::Tensor* x : {&s.in.decay, &s.in.channel_decay})
        if (x->defined()) x->select(0, 0).select(1, 0).fill_(NAN);
      State batch = joined(s.states);
      for (int t = 0; t < 20; ++t) s.expect_same(batch, {0, 1, 2}, 1, name);
    }
  }
}

// A shorter stream has no decay where a longer one has its first.
TEST(JoinedStates, MergeWithTheDecayOfTheLongest) {
  const Spec spec = find("retention").spec;
  const Case c{.B = 2, .T = 41, .S = 41, .D = 5, .E = 6, .dtype = at::kDouble};
  const Inputs in = random_inputs(spec, c);
  const auto read = [&](const Inputs& from, int64_t B, int64_t begin, int64_t end) {
    State s = make_state(spec, {B, c.G, c.D, c.E}, at::kDouble, 0);
    step(s, tokens(from, begin, end));
    return s;
  };
  State whole = read(in, 2, 0, 40), merged = read(in, 2, 0, 10);
  merge(merged, joined({read(rows(in, 0, 1), 1, 37, 40), read(rows(in, 1, 2), 1, 10, 40)}));
  const Inputs next = tokens(in, 40, 41);
  const at::Tensor found = step(merged, next), wanted = step(whole, next);
  expect_near(found.select(0, 1), wanted.select(0, 1), 1e-12, "the longer one");
}

TEST(JoinedStates, SayWhatCannotBeJoined) {
  const auto state = [](const char* name, at::ScalarType type = at::kFloat, int64_t buffer = 64,
                        int64_t D = 4) {
    return make_state(find(name).spec, {1, 1, D, 4}, type, buffer);
  };
  const auto refused = [](const std::vector<State>& states, const std::string& words) {
    try {
      joined(states);
      FAIL() << words;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
    }
  };
  refused({}, "expected states");
  refused({state("taylor2"), state("taylor3")}, "cannot join states of two variants");
  refused({state("taylor2"), state("taylor2", at::kDouble)}, "two dtypes: float32 and float64");
  refused({state("taylor2"), state("taylor2", at::kFloat, 0)}, "a state and a KV cache");
  refused({state("taylor2"), state("taylor2", at::kFloat, 64, 5)}, "two shapes");
  for (const char* name : {"softmax:mask=chunks(16)", "softmax:mask=streaming(first=3,size=7)"}) {
    EXPECT_NE(why_not_joined(find(name).spec), "");
    Streams s(find(name), {3, 17}, 64, 1);
    refused(s.states, "streams of 3 and 17 tokens: ");
  }
}

TEST(Snapshots, LeaveTheOriginalAsItIs) {
  uint64_t seed = 6000;
  for (const Variant& v : streams()) {
    for (const int64_t buffer : {0, 64}) {
      Streams s(v, {37}, buffer, ++seed);
      const State before = snapshot(s.states[0]);
      State other = snapshot(s.states[0]);
      const auto ahead = [&](State& state) {  // folds a full buffer, too
        std::vector<at::Tensor> results;
        for (int64_t t = 37; t < 110; ++t) results.push_back(step(state, s.of(0, t, t + 1)));
        return at::cat(results, 2);
      };
      const at::Tensor o = ahead(other);
      State now = s.states[0], then = before;
      const auto a = tensors_of(now), b = tensors_of(then);
      for (size_t i = 0; i < a.size(); ++i) {
        ASSERT_EQ(a[i].second->defined(), b[i].second->defined()) << v.name << a[i].first;
        if (!a[i].second->defined()) continue;
        EXPECT_TRUE(at::equal(*a[i].second, *b[i].second)) << v.name << " " << a[i].first;
      }
      EXPECT_TRUE(at::equal(ahead(s.states[0]), o)) << v.name;
      then = snapshot(before);
      EXPECT_TRUE(at::equal(ahead(then), o)) << v.name;
    }
  }
}

}  // namespace
}  // namespace horner::attn
