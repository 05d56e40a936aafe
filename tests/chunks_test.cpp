// Linear time: every cut of a sequence gives what the reference gives of the whole, with its
// gradients.
#include <ATen/Parallel.h>

#include "attn/exec/by_series.h"
#include "attn/exec/chunked.h"
#include "attn/exec/series.h"
#include "attn/stages.h"
#include "attn/state.h"
#include "streams.h"
#include "strong_gates.h"

namespace horner::attn {
namespace {

Inputs leaves(Inputs in) {
  for (const Input& i : input_table()) {
    at::Tensor& x = in.*i.at;
    if (x.defined()) x = x.detach().clone().requires_grad_(has_gradient(i));
  }
  return in;
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

TEST(Chunks, OfStrongGatesAreRight) {
  for (at::ScalarType dtype : {at::kBFloat16, at::kFloat})
    expect_strong_gates_are_right("chunked", dtype, at::kCPU, 20);
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
    if (is<Flat>(v.spec.sharpness) && !is<ChannelGate>(v.spec.decay) &&
        !is<CumulativeGate>(v.spec.denominator) &&
        feature_count(v.spec, 3) < 40 + 100 * !is<NoKeys>(v.spec.near))
      rows.push_back(v);
  rows.push_back({"delta_taylor2 with decay", find("delta_taylor2").spec});
  rows.back().spec.decay = TokenGate{};
  rows.push_back({"less log n", {.less_log_count = true, .weight = Taylor{2}}});
  rows.push_back({"centred, less log n", rows.back().spec});
  rows.back().spec.centred = true;
  for (const Variant& v : rows) {
    Case c{.T = 130, .S = 150, .D = 3, .E = 4, .dtype = at::kDouble, .seed = ++seed};
    c.padded = seed % 2 == 0;
    const std::string name = std::string(v.name) + " on " + text(c);
    const Inputs given = random_inputs(v.spec, c), whole = leaves(given), parts = leaves(given);
    const at::Tensor truth = execution("reference").run(v.spec, whole, nullptr);
    const at::Tensor direction = at::randn_like(truth);
    truth.backward(direction);
    const auto attended = [&](const Inputs& in, Carry* after) {
      Sums sums = exec::sums_by_series(v.spec, in, nullptr, after);
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
    State theirs = make_state(v.spec, shape, at::kDouble);
    Carry first, mine;
    attended(tokens(all, 0, 100), &first);
    first.count = all.keep.defined() ? all.keep.narrow(1, 0, 100).sum(1).to(at::kDouble)
                                     : at::full({c.B}, 100, at::kDouble);
    const Sums later = exec::sums_by_series(v.spec, tokens(all, 100, 150), &first, &mine);
    step(theirs, all), flush(theirs);
    expect_near(mine.S, theirs.carry.S.narrow(3, 0, c.E), 1e-9, name + ": S");
    const Sums whole_sums = exec::sums_by_series(v.spec, all, nullptr, nullptr);
    const auto end = [](const at::Tensor& x, const at::Tensor& shift) {
      return (x * shift.exp()).narrow(2, x.size(2) - 50, 50);
    };
    expect_near(end(later.N, later.shift), end(whole_sums.N, whole_sums.shift), 1e-9, name + ": N");
    if (mine.near_k.defined())
      expect_near(mine.near_k, theirs.carry.near_k, 0, name + ": near keys");
    expect_near(mine.z, theirs.carry.z, 1e-9, name + ": z");
    if (mine.keys.defined()) expect_near(mine.keys, theirs.carry.keys, 1e-9, name + ": keys");
    if (mine.decay.defined()) expect_near(mine.decay, theirs.carry.decay, 1e-9, name + ": decay");
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
                               Sums sums = exec::sums_by_series(spec, in, nullptr, nullptr);
                               sums.count = seen(spec.mask, in).count;
                               return finish(spec, in, sums);
                             }};
  for (const char* name :
       {"delta_taylor1", "delta_taylor2", "delta_taylor3", "near_taylor2", "lolcats",
        "near_taylor2:near=window(9),decay=token_gate", "taylor3", "taylor4", "power4",
        "elu_taylor3", "centred_taylor3", "near_centred_taylor2:near=window(9)", "taylor2"})
    for (at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
      std::vector<Case> cases = standard_cases(dtype);
      if (std::string(name) == "taylor2")
        cases = {{.B = 1, .H = 2, .G = 1, .T = 300, .S = 300, .D = 128, .E = 72, .dtype = dtype}};
      for (const Case& c : cases) {
        if (c.T > 300) continue;
        const Verdict v = verify(find(name).spec, series, c);
        EXPECT_TRUE(v.ok()) << name << " " << c10::toString(dtype) << " " << v.worst()->of << ": "
                            << v.worst()->error << ", allowed " << v.worst()->allowed << ", on "
                            << text(c);
      }
    }
}

// Backward computes the states again that it does not keep.
TEST(Series, GiveTheSameGradientsFromFewStates) {
  const auto random = [](int64_t n) { return at::randn({2, 2, 900, n}, at::kDouble) / 2; };
  const exec::SeriesTensors given{random(6), random(6), random(5), {}, -random(1).abs().squeeze(3)};
  exec::SeriesJob job{{0, 2}, 0.4, at::ones({2, 1, 900, 1}, at::kDouble)};
  std::vector<at::Tensor> all;
  for (const double most_bytes : {kMostStateBytes, 0.0}) {
    exec::SeriesTensors x = given;
    for (at::Tensor* y : {&x.q, &x.k, &x.v, &x.logs}) *y = y->clone().requires_grad_();
    job.most_bytes = most_bytes;
    const exec::SeriesResult r = exec::series_sums(job, x);
    (r.N.sin().sum() + r.S.cos().sum()).backward();
    for (const at::Tensor* y : {&x.q, &x.k, &x.v, &x.logs}) all.push_back(y->grad());
  }
  for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(at::equal(all[i], all[i + 4])) << i;
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

}  // namespace
}  // namespace horner::attn
