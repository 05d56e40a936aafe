// One sequence over three ranks on the emulated GPU (attn/split.h), forward and backward: by the
// rule of every execution, and nothing but states or blocks of keys travels.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>

#include "attn/catalog.h"
#include "attn/inputs.h"
#include "attn/split.h"
#include "core/names.h"
#include "instruments/verify.h"

namespace horner::attn {

using namespace instruments;
namespace {

// Ranks as threads, one at a time: a rank runs until it waits for the others.
class Ranks {
 public:
  static constexpr int kRanks = 3;
  int64_t largest = 0, passes = 0;  // elements of a message that is gathered; passes round

  void run(const std::function<void(const Split&)>& rank) {
    std::vector<std::thread> threads;
    for (int r = 0; r < kRanks; ++r)
      threads.emplace_back([&, r] {
        const std::lock_guard turn(turn_);
        rank({r, kRanks,
              [this, r](const at::Tensor& x) {
                largest = std::max(largest, x.numel());
                return at::stack(all_of(r, x));
              },
              [this, r](const at::Tensor& x) {
                at::Tensor sum;
                for (const at::Tensor& each : all_of(r, x))
                  sum = sum.defined() ? sum + each[r] : each[r];
                return sum;
              },
              [this, r](const at::Tensor& x) {
                ++passes;
                return all_of(r, x)[size_t((r + kRanks - 1) % kRanks)].clone();
              }});
      });
    for (std::thread& t : threads) t.join();
  }

 private:
  std::vector<at::Tensor> all_of(int r, const at::Tensor& x) {
    given_[size_t(r)] = x.detach().clone();
    if (++arrived_ < kRanks) {
      const int64_t meeting = meetings_;
      std::unique_lock turn(turn_, std::adopt_lock);
      met_.wait(turn, [&] { return meetings_ != meeting; });
      turn.release();  // this rank's turn goes on
    } else {
      taken_ = given_, arrived_ = 0, ++meetings_;
      met_.notify_all();
    }
    return taken_;
  }

  std::mutex turn_;
  std::condition_variable met_;
  std::vector<at::Tensor> given_ = std::vector<at::Tensor>(kRanks), taken_;
  int arrived_ = 0;
  int64_t meetings_ = 0;
};

// The ways that a sequence of these sizes can take: with few tokens, and with many.
std::set<Travels> ways(const Spec& spec, const Case& c = {}) {
  std::set<Travels> out;
  for (const int64_t tokens : {int64_t(0), int64_t(1) << 40})
    out.insert(travels(spec, {c.B, c.G, c.D, c.E, tokens, 4, /*on_gpu=*/true}));
  return out;
}

// Every rank has a part of the tokens; parameters have the sum of the gradients of all ranks.
Results over_ranks(const Trial& t, Ranks& ranks, Travels what) {
  const int64_t n = t.on.T / Ranks::kRanks;
  std::vector<Inputs> own(Ranks::kRanks);
  std::vector<at::Tensor> out(Ranks::kRanks);
  ranks.run([&](const Split& split) {
    const int64_t from = split.rank * n;
    Inputs& in = own[size_t(split.rank)] = tokens(t.in, from, from + n);
    in.cu_seqlens = t.in.cu_seqlens;
    for (const Input& i : input_table())
      if ((in.*i.at).defined() && has_gradient(i))
        in.*i.at = (in.*i.at).detach().clone().requires_grad_(true);
    const at::Tensor o = attend_split(t.spec, in, split, what);
    o.backward(t.direction.narrow(2, from, n));
    out[size_t(split.rank)] = o.detach();
  });
  Results r{at::cat(out, 2), {}};
  for (const Input& i : input_table()) {
    if (!(t.in.*i.at).defined() || !has_gradient(i)) continue;
    std::vector<at::Tensor> each;
    for (const Inputs& in : own) {
      const at::Tensor& x = in.*i.at;
      each.push_back(x.grad().defined() ? x.grad() : at::zeros_like(x));
    }
    const int64_t axis = axis_of(i, "TS");
    r.gradients.emplace_back(
        &i, axis < 0 ? at::stack(each).to(at::kDouble).sum(0) : at::cat(each, axis));
  }
  return r;
}

struct Row {
  std::string variant;
  at::ScalarType dtype;
};

// The rows of the catalog whose keys are gathered, or are not.
std::vector<std::string> of_catalog(bool gathered) {
  std::vector<std::string> names;
  for (const Variant& v : variants())
    if (why_no_split(v.spec).empty() && ways(v.spec).contains(Travels::all_keys) == gathered)
      names.push_back(v.name);
  return names;
}

std::vector<Row> rows() {
  std::vector<std::string> names = {"softmax:mask=window(17)",     "gated_decay:mask=window(17)",
                                    "softmax:mask=streaming(3,9)", "gated:mask=streaming(3,9)",
                                    "forgetting:mask=chunks(8)",   "sigmoid:decay=token_gate"};
  for (const std::string& name : of_catalog(/*gathered=*/false)) names.push_back(name);
  std::vector<Row> all;
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat})
    for (const std::string& name : names) all.push_back({name, dtype});
  for (const char* name : {"softmax", "gated_decay", "gated_delta"})
    all.push_back({name, at::kHalf});  // float32 from the first product on
  return all;
}

std::string name(const Row& row) {
  std::string s = row.variant + "_" + c10::toString(row.dtype);
  for (char& c : s) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return s;
}
void PrintTo(const Row& row, std::ostream* out) {
  *out << name(row);
}

class EmulatedSplit : public testing::TestWithParam<Row> {};

TEST_P(EmulatedSplit, MatchesTheReference) {
  const Spec spec = find(GetParam().variant).spec;
  std::vector<Case> cases = {{.T = 39, .S = 39, .D = 8, .E = 8, .seed = 3},
                             {.T = 39, .S = 39, .D = 6, .E = 5, .seed = 4, .packed = true}};
  if (std::getenv("HORNER_LONG"))
    cases.push_back({.H = 2, .G = 1, .T = 3 * 150, .S = 3 * 150, .seed = 5});
  for (Case c : cases) {
    c.dtype = GetParam().dtype;
    const Trial t = trial(spec, c);
    if (!in_range(t.truth.out, c.dtype)) continue;
    const std::set<Travels> all = ways(spec, c);
    EXPECT_TRUE(all.contains(travels(spec, t.in)));
    for (const Travels what : all) {
      Ranks ranks;
      const Verdict v = judge(t, over_ranks(t, ranks, what));
      for (const Difference& d : v.differences)
        EXPECT_LE(d.error, d.allowed) << d.of << " on " << text(c);
      EXPECT_EQ(ranks.passes > 0, what == Travels::blocks_of_keys);
      if (what == Travels::blocks_of_keys) {
        EXPECT_LE(ranks.largest, c.B * c.G);  // the decay of all tokens of a rank
      }
    }
  }
}

// What MatchesTheReference leaves out: attention to all keys, which is that of one GPU.
TEST(EmulatedSplitRows, AreAllButThese) {
  const char* const left_out[] = {"cumulative_gate",
                                  "cumulative_gate_count",
                                  "linear_cosine*",
                                  "sparsemax",
                                  "entmax15",
                                  "asentmax",
                                  "topk*",
                                  "sa_softmax",
                                  "softpick",
                                  "stick_breaking",
                                  "adaptive_temperature",
                                  "gla",
                                  "hgrn2",
                                  "kda",
                                  "delta_exp",
                                  "lolcats",
                                  "near_*",
                                  "centred_taylor9",
                                  "centred_taylor10",
                                  "cosine_taylor*"};
  for (const std::string& name : of_catalog(/*gathered=*/true))
    EXPECT_TRUE(std::ranges::any_of(left_out, [&](auto each) { return matches(each, name); }))
        << name << " is gathered, and not tested here";
  for (const Row& row : rows())
    EXPECT_FALSE(
        std::ranges::any_of(left_out, [&](auto each) { return matches(each, row.variant); }))
        << row.variant << " is tested here";
}

// With a state, what travels does not grow with the length.
TEST(EmulatedSplitStates, AreOfOneSize) {
  for (const char* variant : {"linear_decay", "taylor2", "gated_delta"}) {
    int64_t largest[2];
    for (const int i : {0, 1}) {
      const int64_t T = i == 0 ? 48 : 480;
      Ranks ranks;
      over_ranks(
          trial(find(variant).spec, {.B = 1, .H = 2, .G = 1, .T = T, .S = T, .D = 4, .E = 4}),
          ranks, Travels::states);
      EXPECT_EQ(ranks.passes, 0) << variant;
      largest[i] = ranks.largest;
    }
    EXPECT_EQ(largest[0], largest[1]) << variant;
  }
}

INSTANTIATE_TEST_SUITE_P(Catalog, EmulatedSplit, testing::ValuesIn(rows()),
                         [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace horner::attn
