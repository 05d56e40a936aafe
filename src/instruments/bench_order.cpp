#include "instruments/bench_order.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <string>

#include "attn/attend.h"
#include "attn/catalog.h"

namespace horner::instruments {

using namespace attn;

std::vector<OrderError> order_errors(const OrderCase& c) {
  const at::Generator random = at::make_generator<at::CPUGeneratorImpl>(c.seed);
  const auto gaussian = [&] { return at::randn({1, 1, c.T, c.D}, random, at::kDouble); };
  const at::Tensor q = gaussian(), k = gaussian(), v = gaussian();
  const auto rows = [&](const std::string& name, double deviation) {
    // q.k / sqrt(D) has a standard deviation of 1.
    return attend(find(name).spec, {.q = q * deviation, .k = k, .v = v}, "reference");
  };
  std::vector<OrderError> out;
  for (const double deviation : c.deviations) {
    const at::Tensor truth = rows("softmax", deviation), length = truth.norm(2, -1);
    for (const bool centred : {false, true})
      for (int n = 1; n <= c.highest; ++n) {
        const std::string name = (centred ? "centred_taylor" : "taylor") + std::to_string(n);
        const at::Tensor error = (rows(name, deviation) - truth).norm(2, -1) / length;
        out.push_back({deviation, n, centred, error.square().mean().sqrt().item<double>(),
                       error.median().item<double>()});
      }
  }
  return out;
}

}  // namespace horner::instruments
