#include "train/shards.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "core/check.h"
#include "train/comm_link.h"
#include "train/trace.h"

namespace horner::train {

static int64_t aligned(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}

std::vector<BucketPlan> plan_buckets(const std::vector<int64_t>& sizes, int64_t bytes, int world) {
  std::vector<BucketPlan> out;
  int64_t used = 0;
  const auto close = [&] { out.back().chunk = aligned(used, kAligned * world) / world; };
  for (size_t i = sizes.size(); i-- > 0;) {  // backward reaches the last parameters first
    const int64_t n = aligned(sizes[i], kAligned);
    if (out.empty() || (used + n) * int64_t(sizeof(float)) > bytes) {
      if (!out.empty()) close();
      out.emplace_back();
      used = 0;
    }
    out.back().parameters.push_back(i), out.back().at.push_back(used);
    used += n;
  }
  if (!out.empty()) close();
  return out;
}

using Work = c10::intrusive_ptr<c10d::Work>;

struct Shards::Bucket {
  BucketPlan plan;
  at::Tensor weights;    // [world * chunk]
  at::Tensor gradients;  // the same; if only shards are kept, while backward fills and sends it
  at::Tensor received;   // [world * chunk], from each rank the gradients of the own chunk
  at::Tensor shard;      // [chunk], if only shards are kept
  size_t missing = 0;    // parameters whose gradients backward has not reached
  Work reducing, gathering;
};

struct Shards::State {
  const Link* link;
  Backend backend;
  int rank, world;
  bool only_shards;
  std::vector<at::Tensor> parameters;
  std::vector<Bucket> buckets;
  std::vector<size_t> bucket_of;  // of each parameter
  std::vector<Part> parts;
  // They own the hooks.
  std::vector<decltype(torch::autograd::impl::grad_accumulator(at::Tensor()))> accumulators;
  bool sending = false;
  size_t next = 0;     // bucket to reduce
  size_t waiting = 0;  // buckets whose weights are not there: the first `waiting`

  at::Tensor own(const Bucket& b, const at::Tensor& x) const {
    return x.narrow(0, rank * b.plan.chunk, b.plan.chunk);
  }
  at::Tensor view(const at::Tensor& flat, const Bucket& b, size_t i) const {
    const at::Tensor& p = parameters[b.plan.parameters[i]];
    return flat.narrow(0, b.plan.at[i], p.numel()).view(p.sizes());
  }
  void move_parameters(const Sharding&);
  void list_parts();
  void filled(size_t parameter);
  void reduce_filled();
  void reduce(size_t bucket);
  void finish_reduce(size_t bucket);
};

// Notes when a message is done; its backend calls from another thread.
static void traced(const char* name, const Work& work) {
  if (!tracing()) return;
  const auto begin = TraceClock::now();
  work->getFuture()->addCallback(
      [name, begin](auto&) { trace(name, Lane::message, begin, TraceClock::now()); });
}

void Shards::State::move_parameters(const Sharding& s) {
  const c10::NoGradGuard without_gradients;
  std::vector<int64_t> sizes;
  for (const at::Tensor& p : parameters) sizes.push_back(p.numel());
  bucket_of.resize(parameters.size());
  for (BucketPlan& plan : plan_buckets(sizes, s.bucket, world)) {
    Bucket b{std::move(plan)};
    const at::TensorOptions options = parameters[0].options().requires_grad(false);
    b.weights = at::zeros({world * b.plan.chunk}, options);
    if (only_shards)
      b.shard = at::zeros({b.plan.chunk}, options);
    else
      b.gradients = at::zeros_like(b.weights);
    for (size_t i = 0; i < b.plan.parameters.size(); ++i) {
      at::Tensor p = parameters[b.plan.parameters[i]], place = view(b.weights, b, i);
      place.copy_(p);
      p.set_data(place);
      bucket_of[b.plan.parameters[i]] = buckets.size();
    }
    buckets.push_back(std::move(b));
  }
}

void Shards::State::list_parts() {
  for (const Bucket& b : buckets) {
    const int64_t from = rank * b.plan.chunk, to = from + b.plan.chunk;
    for (size_t i = 0; i < b.plan.parameters.size(); ++i) {
      const int64_t at = b.plan.at[i], end = at + parameters[b.plan.parameters[i]].numel();
      const int64_t lo = std::max(from, at), n = std::min(to, end) - lo;
      if (n > 0)
        parts.push_back(
            {b.plan.parameters[i], lo - at, b.weights.narrow(0, lo, n),
             only_shards ? b.shard.narrow(0, lo - from, n) : b.gradients.narrow(0, lo, n)});
    }
  }
}

Shards::Shards(const Group& group, const std::vector<at::Tensor>& parameters, const Sharding& s)
    : state_(std::make_unique<State>()) {
  State& t = *state_;
  check(group.link(), "shards require several processes");
  for (const at::Tensor& p : parameters)
    check(p.is_leaf() && p.requires_grad() && p.scalar_type() == at::kFloat,
          "every parameter must be a float32 leaf tensor that requires a gradient");
  t.backend = group.link()->group->getBackend(parameters.at(0).device().type());
  t.link = group.link(), t.rank = group.ranks().rank, t.world = group.ranks().world;
  t.only_shards = s.gradients, t.parameters = parameters;
  t.move_parameters(s);
  t.list_parts();
  using Lists = torch::autograd::variable_list;
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto node = torch::autograd::impl::grad_accumulator(parameters[i]);
    node->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [&t, i](const Lists& outputs, const Lists&) {
          t.filled(i);
          return outputs;
        }));
    t.accumulators.push_back(std::move(node));
  }
  clear();
}

Shards::~Shards() = default;

const std::vector<Shards::Part>& Shards::parts() const {
  return state_->parts;
}

void Shards::clear() {
  for (Bucket& b : state_->buckets) {
    if (state_->only_shards) b.shard.zero_();
    if (!state_->only_shards) b.gradients.zero_();
    for (size_t i = 0; i < b.plan.parameters.size(); ++i)
      state_->parameters[b.plan.parameters[i]].mutable_grad() =
          state_->only_shards ? at::Tensor() : state_->view(b.gradients, b, i);
  }
}

void Shards::State::filled(size_t i) {
  if (!sending) return;
  Bucket& b = buckets[bucket_of[i]];
  if (only_shards) {
    const c10::NoGradGuard without_gradients;
    if (!b.gradients.defined()) b.gradients = at::zeros_like(b.weights);
    at::Tensor& gradient = parameters[i].mutable_grad();
    const size_t place =
        size_t(std::ranges::find(b.plan.parameters, i) - b.plan.parameters.begin());
    view(b.gradients, b, place).copy_(gradient);
    gradient = at::Tensor();
  }
  --b.missing;
  reduce_filled();
}

// In the same order on all ranks.
void Shards::State::reduce_filled() {
  for (; next < buckets.size() && buckets[next].missing == 0; ++next) reduce(next);
}

// At most one bucket is on its way while backward fills the next one.
void Shards::State::reduce(size_t i) {
  Bucket& b = buckets[i];
  const c10::NoGradGuard without_gradients;
  if (i > 0) finish_reduce(i - 1);
  if (!b.gradients.defined()) b.gradients = at::zeros_like(b.weights);
  std::vector<int64_t> equal;
  if (link->backend == "nccl") {
    b.received = at::empty({b.plan.chunk}, b.weights.options());
    b.reducing = backend->_reduce_scatter_base(b.received, b.gradients);
  } else {  // Gloo's own reduce-scatter is an all-reduce, which sends twice as much
    b.received = at::empty_like(b.gradients);
    b.reducing = backend->alltoall_base(b.received, b.gradients, equal, equal);
  }
  traced("reduce-scatter", b.reducing);
}

void Shards::State::finish_reduce(size_t i) {
  Bucket& b = buckets[i];
  if (!b.reducing) return;
  b.reducing->wait();
  b.reducing.reset();
  const at::Tensor mean = b.received.view({-1, b.plan.chunk}).sum(0).div_(world);
  if (only_shards)
    b.shard.add_(mean), b.gradients = at::Tensor();
  else
    own(b, b.gradients).copy_(mean);
  b.received = at::Tensor();
}

void Shards::backward(const at::Tensor& loss, bool last) {
  State& t = *state_;
  t.sending = last || t.only_shards;
  t.next = 0;
  for (Bucket& b : t.buckets) b.missing = b.plan.parameters.size();
  exchange(*t.link, "backward", [&] {
    {
      const Traced trace("backward");
      loss.backward();
    }
    if (!t.sending) return;
    const Traced trace("wait for gradients");
    const c10::NoGradGuard without_gradients;
    for (Bucket& b : t.buckets) b.missing = 0;  // the others have no gradient
    t.reduce_filled();
    t.finish_reduce(t.buckets.size() - 1);
  });
  t.sending = false;
}

// In the order of the forward pass, which is from the last bucket to the first.
void Shards::send_weights() {
  State& t = *state_;
  wait_weights(t.parameters.size());
  t.waiting = t.buckets.size();
  exchange(*t.link, "sending weights", [&] {
    for (size_t i = t.waiting; i-- > 0;) {
      Bucket& b = t.buckets[i];
      at::Tensor mine = t.own(b, b.weights);
      b.gathering = t.backend->_allgather_base(b.weights, mine);
      traced("all-gather", b.gathering);
    }
  });
}

void Shards::wait_weights(size_t n) {
  State& t = *state_;
  if (n == 0 || t.waiting == 0) return;
  const size_t last = t.bucket_of[std::min(n, t.parameters.size()) - 1];
  const Traced trace("wait for weights");
  exchange(*t.link, "receiving weights", [&] {
    for (; t.waiting > last; --t.waiting) {
      Bucket& b = t.buckets[t.waiting - 1];
      b.gathering->wait();
      b.gathering.reset();
    }
  });
}

}  // namespace horner::train
