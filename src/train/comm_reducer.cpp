// Gradients averaged over ranks by c10d's Reducer: in buckets, each sent as soon as backward has
// filled it.
#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "core/check.h"
#include "train/comm_link.h"

namespace horner::train {

static std::unique_ptr<c10d::Reducer> reducer(const Link& link,
                                              std::vector<at::Tensor> parameters) {
  constexpr int64_t kFirst = c10d::kDefaultFirstBucketBytes, kBytes = c10d::kDefaultBucketBytesCap;
  // Backward reaches the last parameters first.
  std::reverse(parameters.begin(), parameters.end());
  const std::vector<bool> sparse(parameters.size(), false);
  auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(
      parameters, {size_t(kFirst), size_t(kBytes)}, sparse));
  constexpr bool kFindUnused = true;  // some variants have parameters without a gradient
  constexpr bool kAsBucketView = true, kSkipUnused = false, kPython = false;
  // The constructor gains parameters with torch releases; these twelve work from 2.11 to 2.15.
  return std::make_unique<c10d::Reducer>(std::move(parameters), std::move(buckets), link.group,
                                         sparse, kBytes, kFindUnused, kAsBucketView,
                                         std::unordered_map<size_t, std::string>(), kFirst,
                                         kSkipUnused, kPython, std::vector<int64_t>());
}

// Reducer warns if all parameters are used, because the search for unused ones was unnecessary.
struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

static void prepare(c10d::Reducer& reducer, const at::Tensor& loss) {
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  reducer.prepare_for_backward({loss});
}

struct GradientAverage::State {
  const Link* link = nullptr;
  std::unique_ptr<c10d::Reducer> reducer;
};

GradientAverage::GradientAverage(const Group& group, const std::vector<at::Tensor>& parameters)
    : state_(std::make_unique<State>()) {
  if (!group.link()) return;
  check(!parameters.empty(), "there are no parameters whose gradients could be averaged");
  for (const at::Tensor& p : parameters)
    check(p.defined() && p.requires_grad() && p.is_leaf(),
          "every parameter must be a leaf tensor that requires a gradient");
  state_->link = group.link();
  exchange(*state_->link, "comparing parameters across ranks", [&] {
    c10d::verify_params_across_processes(state_->link->group, parameters, std::nullopt);
  });
  state_->reducer = reducer(*state_->link, parameters);
}

GradientAverage::~GradientAverage() = default;
GradientAverage::GradientAverage(GradientAverage&&) noexcept = default;
GradientAverage& GradientAverage::operator=(GradientAverage&&) noexcept = default;

void GradientAverage::backward(const at::Tensor& loss, bool last) {
  if (!state_->reducer) return loss.backward();
  exchange(*state_->link, "backward", [&] {
    if (last) prepare(*state_->reducer, loss);
    loss.backward();
  });
}

}  // namespace horner::train
