#include "instruments/verify.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <cmath>

#include "attn/inputs.h"
#include "attn/plan.h"
#include "core/check.h"

namespace horner::instruments {

std::string text(const Case& c) {
  std::ostringstream s;
  s << "B" << c.B << " H" << c.H << " G" << c.G << " T" << c.T << " S" << c.S << " D" << c.D << " E"
    << c.E << (c.hot ? " hot" : "") << (c.padded ? " padded" : "") << (c.packed ? " packed" : "")
    << " seed " << c.seed;
  return s.str();
}

std::vector<Case> standard_cases(at::ScalarType dtype, at::Device device, uint64_t seed) {
  std::vector<Case> all = {
      {.T = 1, .S = 1, .D = 5, .E = 5},
      {.T = 7, .S = 7, .D = 3, .E = 6},
      {.H = 6, .T = 16, .S = 16, .D = 8, .E = 8},
      {.D = 5, .E = 5, .hot = true},
      {.D = 6, .E = 7, .padded = true},
      {.D = 7, .E = 4, .packed = true},
      {.T = 9, .S = 37, .D = 5, .E = 8, .padded = true},
      {.T = 200, .S = 200, .D = 16, .E = 16},
      {.B = 1, .H = 2, .G = 2, .T = 1024, .S = 1024, .D = 6, .E = 6},
  };
  for (Case& c : all) c.dtype = dtype, c.device = device, c.seed = ++seed;
  return all;
}

static constexpr double kHeat = 8;  // what multiplies q in a hot case

static int64_t size(const Case& c, const Spec& spec, char letter) {
  const int64_t sizes[] = {c.B, c.H, c.G, c.T, c.S, c.D, c.E};
  const size_t i = std::string_view("BHGTSDE").find(letter);
  if (i < std::size(sizes)) return sizes[i];
  return letter == 'F' ? std::get<Project>(spec.features).dim : letter - '0';
}

// A seed gives the same numbers on every device, except in large cases: the CPU takes a second for
// millions of normal numbers.
static at::Generator seeded(const Case& c) {
  constexpr int64_t kMany = 1 << 21;
  const bool few = c.B * std::max(c.H * c.T * c.D, c.G * c.S * std::max(c.D, c.E)) < kMany;
  if (c.device.is_cpu() || few) return at::make_generator<at::CPUGeneratorImpl>(c.seed);
  at::Generator random = at::globalContext().defaultGenerator(c.device).clone();
  random.set_current_seed(c.seed);
  return random;
}

static at::Tensor random_mask(const Input& i, const Case& c, const at::Generator& random) {
  if (i.at == &Inputs::keep) {
    at::Tensor keep = at::rand({c.B, c.S}, random, at::TensorOptions(random.device())) < 0.7;
    keep.select(0, c.B - 1).narrow(0, 0, c.S / 3).fill_(false);  // rows that see nothing
    return keep;
  }
  const int64_t a = c.T / 3, b = c.T / 2;
  return at::tensor({int64_t(0), a, a, b, c.T}, at::kInt);  // the second sequence is empty
}

Inputs random_inputs(const Spec& spec, const Case& c) {
  const at::Generator random = seeded(c);
  const auto exact = at::TensorOptions(at::kDouble).device(random.device());
  // Dividing magnifies rounding where the divisor is near 0: the sum of weights that change sign or
  // vanish, or the length of a row that few keys contribute to. Positive inputs avoid that.
  const bool few_keys = is<Relu>(spec.features) && !is<NoNorm>(spec.norm);
  const bool may_vanish =
      may_be_negative(spec) || (is<Power>(spec.weight) && is<Identity>(spec.features));
  const auto* sum = std::get_if<Sum>(&spec.denominator);
  const bool fragile = few_keys || (may_vanish && sum);
  const bool has_floor = fragile && sum && sum->floor > 0 && !spec.centred;
  // At -30 the terms of a long series cancel: e^-30 is lost in the rounding of 30^30 / 30!.
  const auto* series = std::get_if<Taylor>(&spec.weight);
  const bool hot = c.hot && !fragile && !(series && series->order > 10);
  Inputs in;
  for (const Input& i : input_table()) {
    if (i.role == Role::mask) {
      if (i.at == &Inputs::keep ? c.padded : c.packed)
        in.*i.at = random_mask(i, c, random).to(c.device);
      continue;
    }
    if (!i.wanted(spec)) continue;
    std::vector<int64_t> shape;
    for (const char* letter = i.shape; *letter; ++letter) shape.push_back(size(c, spec, *letter));
    at::Tensor x = at::randn(shape, random, exact);
    if (i.role == Role::tensor && fragile) x = at::rand(shape, random, exact);
    // The last sequence is far below the floor of its sum, the others above it: at the floor the
    // gradient jumps.
    if (has_floor && i.at == &Inputs::k) x = 0.75 + 0.5 * x;
    if (has_floor && i.at == &Inputs::q) x.select(0, c.B - 1).mul_(-2).sub_(2);
    if (i.at == &Inputs::q && hot) x = x * kHeat;
    // Values whose mean differs between channels, so that the divisor of a norm is not near 0.
    if (i.at == &Inputs::v && !is<NoNorm>(spec.norm))
      x = x + at::arange(c.E, exact).remainder(2) * 3 - 1.5;
    if (i.role == Role::gate) x = 0.1 + 0.8 * x.sigmoid();
    if (i.role == Role::log_gate) x = (x + 2).sigmoid().log();
    if (i.role == Role::constant) x = 0.3 * x.sigmoid();
    if (i.role == Role::parameter)
      x = x.dim() == 3 ? x / std::sqrt(double(c.D)) : x.sigmoid() + 0.5;
    in.*i.at = x.to(c.dtype).to(c.device);
  }
  return in;
}

struct Outcome {
  at::Tensor out;
  std::vector<std::pair<const Input*, at::Tensor>> gradients;
};

// Every input as a new leaf in `dtype`.
static Inputs leaves(Inputs in, at::ScalarType dtype, bool gradients) {
  for (const Input& i : input_table()) {
    at::Tensor& x = in.*i.at;
    if (x.defined() && i.role != Role::mask)
      x = x.detach().to(dtype, false, true).requires_grad_(gradients && i.role != Role::constant);
  }
  return in;
}

static Outcome outcome(const Spec& spec, const Execution& e, const Inputs& given,
                       at::ScalarType dtype, const at::Tensor& direction) {
  const Inputs in = leaves(given, dtype, direction.defined());
  check_inputs(spec, in);
  Outcome r{e.run(spec, in, nullptr), {}};
  if (!direction.defined()) return r;
  r.out.backward(direction.to(r.out.options()));
  r.out = r.out.detach();
  for (const Input& i : input_table()) {
    const at::Tensor& x = in.*i.at;
    if (x.defined() && x.requires_grad())
      r.gradients.emplace_back(&i, x.grad().defined() ? x.grad() : at::zeros_like(x));
  }
  return r;
}

static double distance(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0) return 0;
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

static double ulp(at::ScalarType dtype) {
  const int bits = dtype == at::kDouble  ? 52
                   : dtype == at::kFloat ? 23
                   : dtype == at::kHalf  ? 10
                                         : 7;
  return std::ldexp(1.0, -bits);
}

// The gradients of the reference in double against central differences along random directions.
static void add_numeric(const Spec& spec, const Execution& e, const Inputs& in,
                        const at::Tensor& direction, const Outcome& own, Verdict& verdict) {
  constexpr double h = 1e-5;
  for (const auto& [input, gradient] : own.gradients) {
    const at::Tensor u = at::randn_like(gradient);
    auto loss = [&, x = input->at](double step) {
      Inputs moved = in;
      moved.*x = in.*x + step * u / u.norm();
      return (e.run(spec, moved, nullptr) * direction).sum().item<double>();
    };
    const double numeric = (loss(h) - loss(-h)) / (2 * h);
    const double analytic = ((gradient * u).sum() / u.norm()).item<double>();
    const double allowed = 1e-6 * (1 + gradient.norm().item<double>());
    const double error = std::abs(numeric - analytic);
    const std::string of = std::string("d ") + input->name + " (numeric)";
    verdict.differences.push_back({of, error, allowed, error / allowed});
  }
}

const Difference* Verdict::worst() const {
  const Difference* worst = nullptr;
  auto excess = [](const Difference& d) { return d.ok() ? d.error / d.allowed : INFINITY; };
  for (const Difference& d : differences)
    if (!worst || excess(d) > excess(*worst)) worst = &d;
  return worst;
}

Verdict verify(const Spec& spec, const Execution& e, const Case& c) {
  const Execution& reference = execution("reference");
  const Inputs in = random_inputs(spec, c);
  Verdict verdict{e.why_not(spec, in), {}};
  constexpr double kMostWork = 2e9;  // a second or two
  if (verdict.why_not.empty() && e.work && e.work(spec, in) > kMostWork)
    verdict.why_not = "checking this case would take too long";
  if (!verdict.why_not.empty()) return verdict;

  at::Tensor direction;
  if (c.gradients)
    direction =
        at::randn({c.B, c.H, c.T, c.E}, at::make_generator<at::CPUGeneratorImpl>(c.seed + 1),
                  at::TensorOptions(at::kDouble))
            .to(c.dtype)
            .to(c.device);
  const Outcome found = outcome(spec, e, in, c.dtype, direction);
  const Outcome truth = outcome(spec, reference, in, at::kDouble, direction);
  const bool of_itself = &e == &reference;
  const auto* sum = std::get_if<Sum>(&spec.denominator);
  const bool has_constants = (sum && sum->detach) || is<Adaptive>(spec.sharpness);
  const bool small = c.T <= 200;  // numeric derivatives take two runs for each input
  if (of_itself && c.dtype == at::kDouble && c.gradients && small && !c.hot && !has_constants)
    add_numeric(spec, reference, in, direction, found, verdict);

  // The rounding error of the reference in this dtype; for double, scaled from float.
  const bool exact = c.dtype == at::kDouble;
  const Outcome naive = of_itself && !exact
                            ? found
                            : outcome(spec, reference, in, exact ? at::kFloat : c.dtype, direction);
  const double to_dtype = exact ? ulp(at::kDouble) / ulp(at::kFloat) : 1;
  auto compare = [&](const std::string& of, const at::Tensor& x, const at::Tensor& plain,
                     const at::Tensor& right) {
    const double error = distance(x, right), own = distance(plain, right) * to_dtype;
    const double size = right.numel() ? right.abs().max().item<double>() : 0;
    const double unit = ulp(c.dtype) * (1 + size) * (c.hot ? kHeat : 1);
    constexpr double kFewUlps = 16, kReferenceUlps = 256;
    const double allowed = of_itself ? kReferenceUlps * unit : 2 * own + kFewUlps * unit;
    verdict.differences.push_back({of, error, allowed, error / std::max(own, unit / 2)});
  };
  compare("output", found.out, naive.out, truth.out);
  for (size_t i = 0; i < found.gradients.size(); ++i)
    compare(std::string("d ") + found.gradients[i].first->name, found.gradients[i].second,
            naive.gradients[i].second, truth.gradients[i].second);
  return verdict;
}

}  // namespace horner::instruments
