// Compares every part with its definition in double, outputs and gradients: awkward sizes and
// strides, uninitialized memory full of NaN, every instruction set, and CUDA if available. The bits
// must not depend on the number of threads.
#include "nn/parts.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <cstdlib>

#include "core/check.h"
#include "core/simd/isa.h"

namespace horner::nn::parts {
namespace {

using Tensors = std::vector<at::Tensor>;

struct Case {
  int64_t B, T, C;  // C: channels of a row, or of a head (then even)
  at::ScalarType wide, dtype;
  at::Device device = at::kCPU;
  enum { dense, rows_apart, channels_apart } strides = dense;
};

// A part: its inputs, and the function to test; `out` is the dtype of the results.
struct Part {
  const char* name;
  Tensors (*inputs)(const Case&);
  Tensors (*run)(const Case&, const Tensors&, at::ScalarType out);
  Tensors (*reference)(const Case&, const Tensors&, at::ScalarType out);
};

at::Tensor random(std::vector<int64_t> shape, double scale = 1, double shift = 0) {
  return at::randn(shape, at::kDouble) * scale + shift;
}
int64_t rows(const Case& c) {
  return c.B * c.T;
}

Norm kind(int i) {
  return std::array<Norm, 3>{Norm{false, 0, 1e-6}, Norm{false, 1, 1e-6}, Norm{true, 0, 1e-5}}[i];
}
template <int Kind>
Tensors norm_inputs(const Case& c) {
  Tensors in{random({rows(c), c.C}, 2, 0.5), random({c.C}, 0.3, 1)};
  if (Kind == 2) in.push_back(random({c.C}));
  return in;
}
at::Tensor third(const Tensors& in, size_t i) {
  return i < in.size() ? in[i] : at::Tensor();
}
template <int Kind>
Part norm_part(const char* name) {
  return {name, norm_inputs<Kind>,
          [](const Case&, const Tensors& in, at::ScalarType out) -> Tensors {
            return {norm(kind(Kind), in[0], in[1], third(in, 2), out)};
          },
          [](const Case&, const Tensors& in, at::ScalarType out) -> Tensors {
            return {reference::norm(kind(Kind), in[0], in[1], third(in, 2), out)};
          }};
}
// If the number of rows is odd, the sum gets no gradient.
template <int Kind>
Part add_norm_part(const char* name) {
  return {name,
          [](const Case& c) {
            Tensors in = norm_inputs<Kind>(c);
            in.insert(in.begin() + 1, random({rows(c), c.C}));
            return in;
          },
          [](const Case& c, const Tensors& in, at::ScalarType) -> Tensors {
            const auto [sum, y] = add_norm(kind(Kind), in[0], in[1], in[2], third(in, 3));
            return rows(c) % 2 ? Tensors{y} : Tensors{y, sum};
          },
          [](const Case& c, const Tensors& in, at::ScalarType out) -> Tensors {
            const at::Tensor sum = (in[0] + in[1]).to(in[0].scalar_type());
            const at::Tensor y = reference::norm(kind(Kind), sum, in[2], third(in, 3), out);
            return rows(c) % 2 ? Tensors{y} : Tensors{y, sum};
          }};
}

constexpr int64_t kH = 3, kG = 2;  // H need not be a multiple of G: heads are only moved
Rotation angles(const Case& c, const at::Tensor& like) {
  const at::Tensor a = at::arange(c.T, at::kFloat).unsqueeze(1) *
                       at::pow(10., -at::arange(c.C / 2, at::kDouble) / double(c.C)).to(at::kFloat);
  const auto dtype = like.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {a.cos().to(like.device(), dtype), a.sin().to(like.device(), dtype)};
}
template <bool Normed, bool Turned>
Part heads_part(const char* name) {
  return {name,
          [](const Case& c) {
            Tensors in{random({rows(c), (kH + 2 * kG) * c.C}, 2)};
            if (Normed) in.push_back(random({c.C}, 0.3)), in.push_back(random({c.C}, 0.3));
            return in;
          },
          [](const Case& c, const Tensors& in, at::ScalarType) {
            const auto out = heads({c.B, c.T, kH, kG, c.C, kind(1)}, in[0], third(in, 1),
                                   third(in, 2), Turned ? angles(c, in[0]) : Rotation{});
            return Tensors(out.begin(), out.end());
          },
          [](const Case& c, const Tensors& in, at::ScalarType) {
            const auto out = reference::heads({c.B, c.T, kH, kG, c.C, kind(1)}, in[0], third(in, 1),
                                              third(in, 2), Turned ? angles(c, in[0]) : Rotation{});
            return Tensors(out.begin(), out.end());
          }};
}

template <Activation F, bool Gated>
Part activation_part(const char* name) {
  return {name,
          [](const Case& c) -> Tensors {
            at::Tensor x = random({rows(c), c.C * (Gated ? 2 : 1)}, 3);
            x.view(-1)[0] = -200;  // where e^-x is infinite
            return {x};
          },
          [](const Case&, const Tensors& in, at::ScalarType) -> Tensors {
            return {Gated ? gated(F, in[0]) : activated(F, in[0])};
          },
          [](const Case&, const Tensors& in, at::ScalarType) -> Tensors {
            return {Gated ? reference::gated(F, in[0]) : reference::activated(F, in[0])};
          }};
}

at::Tensor targets_of(const Case& c) {  // some are ignored
  return ((at::arange(rows(c)) * 7) % (c.C + 1) - 1).to(c.device);
}
constexpr double kScale = 0.37;
struct SumOfLosses : torch::autograd::Function<SumOfLosses> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& targets) {
    const at::Tensor logits =
        x.stride(1) == 1 ? x.detach().clone() : x.detach().clone().contiguous();
    const at::Tensor again = logits.clone();
    const at::Tensor scale = at::full({}, kScale, x.options().dtype(at::kFloat));
    const at::Tensor losses = losses_(logits, targets, scale, true);
    EXPECT_TRUE(at::allclose(losses, losses_(again, targets, scale, false), 0, 0, true));
    ctx->save_for_backward({logits});
    return losses;
  }
  static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors&) {
    return {ctx->get_saved_variables()[0], at::Tensor()};
  }
};
Part loss_part() {
  return {"losses", [](const Case& c) -> Tensors { return {random({rows(c), c.C}, 4)}; },
          [](const Case& c, const Tensors& in, at::ScalarType) -> Tensors {
            return {SumOfLosses::apply(in[0], targets_of(c))};
          },
          [](const Case& c, const Tensors& in, at::ScalarType) -> Tensors {
            return {reference::losses(in[0], targets_of(c))};
          }};
}

const Part kParts[] = {
    norm_part<0>("rms norm"),
    norm_part<1>("rms norm, 1 + weight"),
    norm_part<2>("layer norm"),
    add_norm_part<0>("sum and rms norm"),
    add_norm_part<1>("sum and rms norm, 1 + weight"),
    add_norm_part<2>("sum and layer norm"),
    heads_part<false, false>("heads"),
    heads_part<false, true>("heads, turned"),
    heads_part<true, false>("heads, normed"),
    heads_part<true, true>("heads, normed and turned"),
    activation_part<Activation::silu, false>("silu"),
    activation_part<Activation::gelu, false>("gelu"),
    activation_part<Activation::silu, true>("silu gated"),
    activation_part<Activation::gelu, true>("gelu gated"),
    loss_part(),
};

// The same numbers with other strides, and NaN in the gaps.
at::Tensor laid_out(const at::Tensor& x, const Case& c) {
  if (c.strides == Case::dense || x.dim() < 2) return x.clone();
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() += 5;
  if (c.strides == Case::rows_apart) {
    const at::Tensor y = at::full(shape, NAN, x.options()).narrow(-1, 3, x.size(-1));
    return y.copy_(x);
  }
  return x.transpose(-1, -2).contiguous().transpose(-1, -2);
}

struct Outcome {
  Tensors out, gradients;
};
Outcome outcome(const Part& p, const Case& c, const Tensors& given, at::ScalarType dtype,
                bool exact, bool reference) {
  Tensors in;
  for (size_t i = 0; i < given.size(); ++i) {  // the first is in the wide dtype
    const at::ScalarType t = exact ? at::kDouble : i == 0 ? c.wide : dtype;
    at::Tensor x = given[i].to(c.device, i == 0 ? c.wide : dtype).to(t);
    in.push_back((reference ? x : laid_out(x, c)).requires_grad_(true));
  }
  Outcome f;
  f.out = (reference ? p.reference : p.run)(c, in, exact ? at::kDouble : dtype);
  Tensors directions;
  for (size_t i = 0; i < f.out.size(); ++i) {
    const bool losses = std::string_view(p.name) == "losses";
    at::Tensor d = at::full(f.out[i].sizes(), kScale, at::kDouble);
    if (!losses) d = (at::arange(d.numel(), at::kDouble) * 2.39996).sin().view(d.sizes());
    d = d.to(c.device, losses ? at::kDouble : i == 0 ? dtype : f.out[i].scalar_type());
    d = d.to(f.out[i].scalar_type());
    directions.push_back(reference ? d : laid_out(d, c));
  }
  f.gradients = torch::autograd::grad(f.out, in, directions);
  return f;
}

double distance(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() ? (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>() : 0;
}
double ulp(at::ScalarType t) {
  return t == at::kFloat ? std::ldexp(1., -23) : std::ldexp(1., t == at::kHalf ? -10 : -7);
}

// At most twice the error of the reference in the same dtypes, plus 16 ulps of float32 and one of a
// 16-bit result.
void expect_right(const Part& p, const Case& c) {
  at::manual_seed(uint64_t(rows(c) * 1000 + c.C));
  const Tensors in = p.inputs(c);
  const Outcome truth = outcome(p, c, in, c.dtype, true, true),
                plain = outcome(p, c, in, c.dtype, false, true),
                ours = outcome(p, c, in, c.dtype, false, false);
  const auto compare = [&](const std::string& of, const at::Tensor& x, const at::Tensor& own,
                           const at::Tensor& right) {
    ASSERT_EQ(x.scalar_type(), own.scalar_type()) << p.name << " " << of;
    ASSERT_EQ(x.sizes(), own.sizes()) << p.name << " " << of;
    const double size = right.numel() ? right.abs().max().item<double>() : 0;
    const double rounding = c.dtype == at::kFloat ? 0 : ulp(c.dtype) * size;
    const double allowed = 2 * distance(own, right) + 16 * ulp(at::kFloat) * (1 + size) + rounding;
    EXPECT_LE(distance(x, right), allowed)
        << p.name << ", " << of << ": B " << c.B << " T " << c.T << " C " << c.C << " wide "
        << c.wide << " dtype " << c.dtype << " strides " << c.strides << " on " << c.device;
  };
  for (size_t i = 0; i < ours.out.size(); ++i)
    compare("output " + std::to_string(i), ours.out[i], plain.out[i], truth.out[i]);
  for (size_t i = 0; i < ours.gradients.size(); ++i)
    compare("gradient " + std::to_string(i), ours.gradients[i], plain.gradients[i],
            truth.gradients[i]);
}

std::vector<Case> cases(at::Device device) {
  std::vector<Case> out;
  using D = std::pair<at::ScalarType, at::ScalarType>;
  std::vector<D> dtypes{
      {at::kFloat, at::kFloat}, {at::kFloat, at::kBFloat16}, {at::kBFloat16, at::kBFloat16}};
  if (device.is_cuda())
    dtypes.insert(dtypes.end(), {{at::kFloat, at::kHalf}, {at::kHalf, at::kHalf}});
  for (const auto& [wide, dtype] : dtypes) {
    out.push_back({1, 1, 2, wide, dtype, device});
    out.push_back({2, 37, 18, wide, dtype, device, Case::rows_apart});
    out.push_back({3, 7, 64, wide, dtype, device, Case::channels_apart});
    out.push_back({2, 300, 130, wide, dtype, device});
    out.push_back({1, 33, 384, wide, dtype, device, Case::rows_apart});
  }
  return out;
}

// Makes at::empty return NaN, so that numbers that are never written show up.
struct Poisoned {
  Poisoned() {
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
    at::globalContext().setDeterministicFillUninitializedMemory(true);
  }
  ~Poisoned() { at::globalContext().setDeterministicAlgorithms(false, false); }
};

TEST(Parts, AreTheirDefinitions) {
  const Poisoned memory;
  ASSERT_TRUE(std::isnan(at::empty({3}, at::kFloat)[1].item<float>()));
  std::vector<at::Device> devices{at::kCPU};
  if (at::hasCUDA()) devices.emplace_back(at::kCUDA, 0);
  for (const at::Device& device : devices)
    for (const Part& p : kParts)
      for (const Case& c : cases(device)) expect_right(p, c);
}

TEST(Parts, AreRightOnEveryInstructionSet) {
  const Poisoned memory;
  for (const simd::Isa set : simd::supported()) {
    setenv("HORNER_CPU", std::string(simd::name(set)).c_str(), 1);
    for (const Part& p : kParts)
      for (const Case& c : cases(at::kCPU))
        if (c.T < 100) expect_right(p, c);
  }
  unsetenv("HORNER_CPU");
}

TEST(Parts, GiveTheSameBitsOnAnyNumberOfThreads) {
  const int before = at::get_num_threads();
  for (const Part& p : kParts) {
    const Case c{3, 211, 66, at::kFloat, at::kBFloat16};
    at::manual_seed(1);
    const Tensors in = p.inputs(c);
    Outcome by_threads[2];
    for (int i = 0; i < 2; ++i) {
      at::set_num_threads(i ? 3 : 1);
      by_threads[i] = outcome(p, c, in, c.dtype, false, false);
    }
    for (size_t i = 0; i < by_threads[0].out.size(); ++i)
      EXPECT_TRUE(at::equal(by_threads[0].out[i], by_threads[1].out[i])) << p.name;
    for (size_t i = 0; i < by_threads[0].gradients.size(); ++i)
      EXPECT_TRUE(at::equal(by_threads[0].gradients[i], by_threads[1].gradients[i])) << p.name;
  }
  at::set_num_threads(before);
}

TEST(Parts, TakeADefinitionInDoubleAndSayWhatIsWrong) {
  for (const Part& p : kParts) {
    if (std::string_view(p.name) == "losses") continue;
    const Case c{2, 5, 6, at::kDouble, at::kDouble};
    const Outcome a = outcome(p, c, p.inputs(c), at::kDouble, true, false);
    EXPECT_EQ(a.out[0].scalar_type(), at::kDouble);
  }
  EXPECT_THROW(norm({}, at::ones({2, 3}), at::ones({4}), {}, at::kFloat), Error);
  EXPECT_THROW(heads({1, 2, 1, 1, 4}, at::ones({2, 11}), {}, {}, {}), Error);
  EXPECT_THROW(gated(Activation::silu, at::ones({2, 3})), Error);
  EXPECT_THROW(losses_(at::ones({2, 3}), at::full({2}, 3), at::ones({}), true), Error);
}

TEST(Parts, NanStaysVisible) {
  for (const Part& p : kParts)
    for (const at::ScalarType t : {at::kFloat, at::kBFloat16}) {
      const Case c{1, 3, 34, t, t};
      Tensors in = p.inputs(c);
      in[0][1][33] = NAN;
      const Outcome f = outcome(p, c, in, t, false, false);
      bool seen = false;
      for (const at::Tensor& y : f.out) seen |= y.isnan().any().item<bool>();
      EXPECT_TRUE(seen) << p.name;
    }
}

}  // namespace
}  // namespace horner::nn::parts
