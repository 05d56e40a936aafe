#include "instruments/verify.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attn/plan.h"
#include "attn/stages.h"
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
  if (letter == 'b' || letter == 'h')  // with and without an axis of its own
    return c.seed % 2 ? 1 : size(c, spec, char(std::toupper(letter)));
  if (letter != 'F') return letter - '0';
  const auto* projected = std::get_if<Project>(&spec.features);
  return projected ? projected->dim : std::get<Hedgehog>(spec.features).dim;
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
  if (i.at == &Inputs::prefix) return at::arange(c.B).mul_(c.S).div_(3 * c.B, "floor");
  if (i.at == &Inputs::seed) return at::full({1}, int64_t(c.seed) - 3, at::kLong);
  if (!c.cuts.empty()) return at::tensor(c.cuts, at::kInt);
  const int64_t n = i.at == &Inputs::cu_seqlens ? c.T : c.S, a = n / 3, b = n / 2;
  if (c.T != c.S && n == c.S)  // the first has fewer keys than queries, the third one none
    return at::tensor({int64_t(0), a / 2, b, b, n}, at::kInt);
  return at::tensor({int64_t(0), a, a, b, n}, at::kInt);  // the second sequence is empty
}

Inputs random_inputs(const Spec& spec, const Case& c) {
  const at::Generator random = seeded(c);
  const auto exact = at::TensorOptions(at::kDouble).device(random.device());
  // Dividing magnifies rounding where the divisor is near 0: the sum of weights that change sign or
  // vanish, or the length of a row that few keys contribute to, or corrected values. Positive
  // inputs avoid that.
  const bool few_keys = is<Relu>(spec.features) && !is<NoNorm>(spec.norm);
  const bool may_vanish =
      may_be_negative(spec) || (is<Power>(spec.weight) && is<Identity>(spec.features));
  const auto* sum = std::get_if<Sum>(&spec.denominator);
  const bool corrected = is<Delta>(spec.values) && !is<NoNorm>(spec.norm);  // values around 0
  const bool fragile = few_keys || corrected || (may_vanish && sum);
  const bool has_floor = fragile && sum && sum->floor > 0 && !spec.centred;
  // At -30 the terms of a long series cancel: e^-30 is lost in the rounding of 30^30 / 30!.
  const auto* series = std::get_if<Taylor>(&spec.weight);
  const bool hot = c.hot && !fragile && !(series && series->order > 10);
  Inputs in;
  for (const Input& i : input_table()) {
    if (i.role == Role::mask) {
      bool wanted = i.wanted ? i.wanted(spec) : i.at == &Inputs::keep ? c.padded : c.packed;
      if (i.at == &Inputs::cu_seqlens) wanted = wanted && !is<Prefix>(spec.mask);
      if (i.at == &Inputs::cu_seqlens_k) wanted = in.cu_seqlens.defined() && c.T != c.S;
      if (wanted) in.*i.at = random_mask(i, c, random).to(c.device);
      continue;
    }
    if (!i.wanted(spec)) continue;
    std::vector<int64_t> shape;
    for (const char* letter = attn::shape(i, spec); *letter; ++letter)
      shape.push_back(size(c, spec, *letter));
    at::Tensor x = at::randn(shape, random, exact);
    if (i.role == Role::tensor && fragile) x = at::rand(shape, random, exact);
    // The last sequence is far below the floor of its sum, the others above it: at the floor the
    // gradient jumps.
    if (has_floor && i.at == &Inputs::k) x = 0.75 + 0.5 * x;
    if (has_floor && i.at == &Inputs::q) x.select(0, c.B - 1).add_(3).mul_(-1.5 / std::sqrt(c.D));
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

// Every input as a new leaf in `dtype`.
static Inputs leaves(Inputs in, at::ScalarType dtype, bool gradients) {
  for (const Input& i : input_table()) {
    at::Tensor& x = in.*i.at;
    if (x.defined() && i.role != Role::mask)
      x = x.detach().to(dtype, false, true).requires_grad_(gradients && has_gradient(i));
  }
  return in;
}

static Results run(const Trial& trial, const Execution& e, at::ScalarType dtype,
                   const Hook& hook = {}) {
  const bool gradients = trial.direction.defined();
  const Inputs in = leaves(trial.in, dtype, gradients);
  check_inputs(trial.spec, in);
  Results r{hook.forward ? hook.forward(e, trial.spec, in) : e.run(trial.spec, in, nullptr), {}};
  if (!gradients) return r;
  r.out.backward(trial.direction.to(r.out.options()));
  r.out = r.out.detach();
  for (const Input& i : input_table()) {
    const at::Tensor& x = in.*i.at;
    if (x.defined() && has_gradient(i))
      r.gradients.emplace_back(&i, x.grad().defined() ? x.grad() : at::zeros_like(x));
  }
  if (hook.gradients) hook.gradients(in, r);
  return r;
}

// A gradient jumps where a score reaches the clamp. Queries with a score so near to it that
// rounding decides on which side it falls are shortened.
static Inputs away_from_clamp(const Spec& spec, Inputs in) {
  constexpr double kNear = 1. / 32, kShorter = 7. / 8;
  if (spec.clamp == kNoClamp) return in;
  for (int tries = 0; tries < 64; ++tries) {
    Inputs x = leaves(in, at::kDouble, false);
    const at::Tensor factor = scale(spec, x, seen(spec.mask, x).count);
    x.q = mapped(spec.features, x.q, x.query_projection) * factor;
    x.k = mapped(spec.features, x.k, x.key_projection, x.q.size(1) / x.k.size(1));
    const at::Tensor scores = at::matmul(x.q, one_key_head_each(x).k.transpose(-1, -2));
    const at::Tensor near = ((scores / spec.clamp - 1).abs() < kNear).any(-1, true);
    if (!near.any().item<bool>()) break;
    in.q = at::where(near, in.q * kShorter, in.q);
  }
  return in;
}

static double ulp(at::ScalarType dtype) {
  const int bits = dtype == at::kDouble  ? 52
                   : dtype == at::kFloat ? 23
                   : dtype == at::kHalf  ? 10
                                         : 7;
  return std::ldexp(1.0, -bits);
}

// What is allowed beyond the error of the reference, in units of the truth's RMS: 2 ulps of the
// dtype of the sums, and half an ulp for rounding a 16-bit result.
static double floor_of_sums(at::ScalarType dtype) {
  return 2 * ulp(wide(dtype));
}
static double floor_of(at::ScalarType dtype) {
  return floor_of_sums(dtype) + (wide(dtype) == dtype ? 0 : ulp(dtype) / 2);
}

static double rms(const at::Tensor& x) {
  return x.numel() ? x.to(at::kDouble).square().mean().sqrt().item<double>() : 0;
}

// The size of a gradient of x if each element of x moved its share of the output as far as it moves
// itself: sqrt(sum (d o)^2 / n) / rms(x), for the output o, its gradient d and the n elements of x.
static double natural_scale(const Trial& t, const Input& i) {
  const at::Tensor& x = t.in.*i.at;
  const double loss = (t.direction.to(at::kDouble) * t.truth.out).norm().item<double>();
  return x.numel() && rms(x) > 0 ? loss / (std::sqrt(double(x.numel())) * rms(x)) : 0;
}

// A gradient below a thousandth of its natural scale is what is left of terms that cancel (of a
// gate before a norm, of the score of an only key). Its errors are those of the terms.
static constexpr double kCancelled = 1e-3;
static double unit(const at::Tensor& truth, double scale) {
  const double size = rms(truth);
  return size < kCancelled * scale ? scale : size;
}

static Errors errors(const at::Tensor& x, const at::Tensor& truth, double unit) {
  if (truth.numel() == 0 || unit == 0) return {rms(x), rms(x), 0};
  const at::Tensor e = (x.to(at::kDouble) - truth) / unit, R = truth / unit;
  const at::Tensor along = (e * R).sum().abs() / R.square().sum().clamp_min(1e-30);
  return {rms(e), (e.abs() / (1 + R.abs())).max().item<double>(), along.item<double>()};
}

// Independent errors average out along R: by sqrt(n) over n elements of one size.
static double averaging(const at::Tensor& truth) {
  const double square = truth.square().sum().item<double>();
  return square > 0 ? truth.pow(4).sum().sqrt().item<double>() / square : 1;
}

static double largest(const at::Tensor& x) {
  return x.numel() ? x.abs().max().item<double>() : 0;
}

static double most(at::ScalarType dtype) {
  return dtype == at::kHalf       ? double(std::numeric_limits<c10::Half>::max())
         : dtype == at::kBFloat16 ? double(std::numeric_limits<c10::BFloat16>::max())
         : dtype == at::kFloat    ? double(std::numeric_limits<float>::max())
                                  : std::numeric_limits<double>::max();
}
// An infinite or undefined truth is an error: such a case runs, and fails.
bool in_range(const at::Tensor& x, at::ScalarType dtype) {
  const double size = largest(x);
  return !(size > most(dtype) && std::isfinite(size));
}

// The rule before this one: 16 ulps of 1 + the largest element, and 128 for hot scores. Only for
// comparison.
static double most_by_old_rule(const Case& c, double own, double size) {
  return 2 * own + 16 * ulp(c.dtype) * (1 + size) * (c.hot ? kHeat : 1);
}

// From the results of `reference` in the dtype of the case, or in float32 for float64.
static Limits limits(const Trial& t, std::string of, const at::Tensor& own, const at::Tensor& truth,
                     double scale, double of_output) {
  constexpr double kTimes = 2, kLargest = 8, kFactor = 4;
  const bool exact = t.on.dtype == at::kDouble;
  const double to_dtype = exact ? ulp(at::kDouble) / ulp(at::kFloat) : 1;
  Limits l{std::move(of), truth, unit(truth, scale), scale, {}, {}, 0};
  l.own = errors(own, truth, l.unit);
  for (double* error : {&l.own.rms, &l.own.largest, &l.own.factor}) *error *= to_dtype;
  // The own error of n elements is known to 1 / sqrt(n): that of a few may be small by luck. The
  // error of the output, which has many, moves a gradient by as much of its natural scale.
  const double n = double(std::max<int64_t>(1, truth.numel()));
  const double luck = l.unit > 0 ? of_output * scale / l.unit / std::sqrt(n) : 0;
  l.most.rms = kTimes * (l.own.rms + luck) + floor_of(t.on.dtype);
  l.most.largest = kTimes * l.own.largest + kLargest * l.most.rms;
  l.most.factor =
      kTimes * l.own.factor + kFactor * l.most.rms * averaging(truth) + floor_of_sums(t.on.dtype);
  if (l.unit == scale) l.most.factor = INFINITY;  // what is left of terms that cancel has none
  const double error = largest(own.to(at::kDouble) - truth) * to_dtype;
  l.most_by_old_rule = most_by_old_rule(t.on, error, largest(truth));
  return l;
}

Trial trial(const Spec& spec, const Case& c) {
  const Execution& reference = execution("reference");
  Trial t{spec, c, away_from_clamp(spec, random_inputs(spec, c)), {}, {}, {}};
  if (c.gradients)
    t.direction =
        at::randn({c.B, c.H, c.T, c.E}, at::make_generator<at::CPUGeneratorImpl>(c.seed + 1),
                  at::TensorOptions(at::kDouble))
            .to(c.dtype)
            .to(c.device);
  t.truth = run(t, reference, at::kDouble);
  const Results own = run(t, reference, c.dtype == at::kDouble ? at::kFloat : c.dtype);
  t.limits.push_back(limits(t, "output", own.out, t.truth.out, 0, 0));
  for (size_t i = 0; i < own.gradients.size(); ++i) {
    const auto& [input, gradient] = own.gradients[i];
    t.limits.push_back(limits(t, std::string("d ") + input->name, gradient,
                              t.truth.gradients[i].second, natural_scale(t, *input),
                              t.limits[0].own.rms));
  }
  return t;
}

static void compare(const Limits& l, const at::Tensor& x, double floor, Verdict& verdict) {
  const Errors found = errors(x, l.truth, l.unit);
  auto add = [&](const char* what, double error, double own, double most) {
    verdict.differences.push_back({l.of + what, error, most, error / std::max(own, floor)});
  };
  add("", found.rms, l.own.rms, l.most.rms);
  add(" (largest)", found.largest, l.own.largest, l.most.largest);
  add(" (factor)", found.factor, l.own.factor, l.most.factor);
  verdict.old_rule_ok =
      verdict.old_rule_ok && largest(x.to(at::kDouble) - l.truth) <= l.most_by_old_rule;
}

Verdict judge(const Trial& t, const Results& found) {
  Verdict verdict;
  const double floor = floor_of(t.on.dtype);
  compare(t.limits[0], found.out, floor, verdict);
  for (size_t i = 0; i < found.gradients.size(); ++i)
    compare(t.limits[i + 1], found.gradients[i].second, floor, verdict);
  return verdict;
}

// The error of the reference itself. It is a quarter at most, so that with twice as much zeros
// would still be noticed.
static void add_own(const Trial& t, Verdict& verdict) {
  const double most = std::min(128 * ulp(t.on.dtype), 0.25);
  for (const Limits& l : t.limits) {
    const double unit = std::max(l.unit, l.scale);
    const double error = unit > 0 ? l.own.rms * l.unit / unit : 0;
    verdict.differences.push_back({l.of + " (own)", error, most, 1});
  }
}

// The gradients of the reference in double against central differences along random directions.
static void add_numeric(const Trial& t, Verdict& verdict) {
  constexpr double h = 1e-5, kAllowed = 1e-7;
  const Execution& reference = execution("reference");
  const Inputs in = leaves(t.in, at::kDouble, false);
  for (const auto& [input, gradient] : t.truth.gradients) {
    const at::Tensor u = at::randn_like(gradient);
    auto loss = [&, x = input->at](double step) {
      Inputs moved = in;
      moved.*x = in.*x + step * u / u.norm();
      return (reference.run(t.spec, moved, nullptr) * t.direction).sum().item<double>();
    };
    const double numeric = (loss(h) - loss(-h)) / (2 * h);
    const double analytic = ((gradient * u).sum() / u.norm()).item<double>();
    const double size = unit(gradient, natural_scale(t, *input)) * std::sqrt(double(u.numel()));
    const double error = std::abs(numeric - analytic) / size;
    const std::string of = std::string("d ") + input->name + " (numeric)";
    verdict.differences.push_back({of, error, kAllowed, error / kAllowed});
  }
}

const Difference* Verdict::worst() const {
  const Difference* worst = nullptr;
  auto excess = [](const Difference& d) { return d.ok() ? d.error / d.allowed : INFINITY; };
  for (const Difference& d : differences)
    if (!worst || excess(d) > excess(*worst)) worst = &d;
  return worst;
}

static bool in_range(const Results& truth, at::ScalarType dtype) {
  return in_range(truth.out, dtype) && std::ranges::all_of(truth.gradients, [&](const auto& g) {
           return in_range(g.second, dtype);
         });
}

static std::string why_not(const Execution& e, const Spec& spec, const Inputs& in) {
  constexpr double kMostWork = 2e9;  // a second or two
  const std::string reason = e.why_not(spec, in);
  if (reason.empty() && e.work && e.work(spec, in) > kMostWork)
    return "checking this case would take too long";
  return reason;
}

Verdict verify(const Trial& t, const Execution& e, const Hook& hook) {
  if (const std::string reason = why_not(e, t.spec, t.in); !reason.empty()) return {reason, {}};
  if (!in_range(t.truth, t.on.dtype)) return {"the result exceeds the range of the dtype", {}};
  Verdict verdict = judge(t, run(t, e, t.on.dtype, hook));
  if (&e != &execution("reference") || hook.forward || hook.gradients) return verdict;
  add_own(t, verdict);
  const auto* sum = std::get_if<Sum>(&t.spec.denominator);
  const bool has_constants = (sum && sum->detach) || is<Adaptive>(t.spec.sharpness);
  const bool small = t.on.T <= 200;  // numeric derivatives take two runs for each input
  if (t.on.dtype == at::kDouble && small && !t.on.hot && !has_constants) add_numeric(t, verdict);
  return verdict;
}

Verdict verify(const Spec& spec, const Execution& e, const Case& c) {
  const std::string reason = why_not(e, spec, random_inputs(spec, c));
  return reason.empty() ? verify(trial(spec, c), e) : Verdict{reason, {}};
}

}  // namespace horner::instruments
