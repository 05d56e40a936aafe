#include "train/context.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "core/check.h"
#include "train/comm_link.h"
#include "train/trace.h"

namespace horner::train {

Context context_of(const Ranks& r, int64_t parts) {
  check(r.world % parts == 0, "'context-parallel' must divide the number of processes, ", r.world,
        ", not ", parts,
        r.world == 1 ? "; start them with torchrun --nproc-per-node " + std::to_string(parts) : "");
  const int n = int(parts);
  return {n, r.rank % n, r.world / n, r.rank / n};
}

Share share_of(const Settings& s, const Context& c) {
  const double tokens = double(s.batch) * double(s.length), most = 0x1p53;
  check(tokens <= most, "'batch' times 'length' must be at most ", most, " tokens, not ", tokens,
        "; choose a smaller batch or length");
  check(s.batch % c.groups == 0, "'batch' must be a multiple of the number of processes",
        c.parts > 1 ? " that have different sequences, " : ", ", c.groups, ", not ", s.batch);
  check(s.length % c.parts == 0, "'length' must be a multiple of 'context-parallel', ", c.parts,
        ", not ", s.length);
  const int64_t all = s.batch / c.groups, b = s.micro_batch > 0 ? s.micro_batch : all;
  check(all % b == 0, "'micro-batch' must divide the ", all, " sequences per process, not ", b);
  return {all, b};
}

// Gloo sends from the memory of the CPU: tensors on a GPU go through it.
static bool through_cpu(const Backend& backend, const at::Tensor& x) {
  return !x.is_cpu() && backend->getBackendName() != "nccl";
}

static at::Tensor gather(const Link& link, const Backend& backend, int parts, const at::Tensor& x) {
  const c10::NoGradGuard without_gradients;
  if (through_cpu(backend, x)) return gather(link, backend, parts, x.cpu()).to(x.device());
  std::vector<int64_t> shape = x.sizes().vec();
  shape.insert(shape.begin(), parts);
  at::Tensor flat = at::empty({parts * x.numel()}, x.options());
  at::Tensor mine = x.detach().reshape({-1});
  exchange(link, "gathering along the sequence", [&] {
    const Traced trace("sequence: gather");
    if (mine.numel() > 0) backend->_allgather_base(flat, mine)->wait();
  });
  return flat.view(shape);
}

static at::Tensor scatter_sum(const Link& link, const Backend& backend, int parts,
                              const at::Tensor& x) {
  const c10::NoGradGuard without_gradients;
  if (through_cpu(backend, x)) return scatter_sum(link, backend, parts, x.cpu()).to(x.device());
  at::Tensor all = x.detach().reshape({-1});
  const bool nccl = backend->getBackendName() == "nccl";
  at::Tensor to = at::empty({nccl ? all.numel() / parts : all.numel()}, x.options());
  std::vector<int64_t> equal;
  exchange(link, "summing along the sequence", [&] {
    const Traced trace("sequence: sum");
    if (all.numel() > 0)
      (nccl ? backend->_reduce_scatter_base(to, all)
            : backend->alltoall_base(to, all, equal, equal))
          ->wait();
  });
  const std::vector<int64_t> shape(x.sizes().begin() + 1, x.sizes().end());
  if (nccl) return to.view(shape);
  const bool narrow = at::isReducedFloatingType(x.scalar_type());
  const at::Tensor rows = to.view({parts, -1});
  return (narrow ? rows.to(at::kFloat) : rows).sum(0).to(x.scalar_type()).view(shape);
}

// All bytes go to the next rank and come from the one before.
static at::Tensor pass(const Link& link, const Backend& backend, const Context& c,
                       const at::Tensor& x) {
  const c10::NoGradGuard without_gradients;
  if (through_cpu(backend, x)) return pass(link, backend, c, x.cpu()).to(x.device());
  at::Tensor mine = x.detach().contiguous(), to = at::empty_like(mine);
  at::Tensor from = mine.view({-1}).view(at::kByte), all = to.view({-1}).view(at::kByte);
  std::vector<int64_t> sent(size_t(c.parts)), received(size_t(c.parts));
  sent[size_t((c.part + 1) % c.parts)] = from.numel();
  received[size_t((c.part + c.parts - 1) % c.parts)] = from.numel();
  exchange(link, "passing keys and values along the sequence", [&] {
    const Traced trace("sequence: pass");
    if (from.numel() > 0) backend->alltoall_base(all, from, received, sent)->wait();
  });
  return to;
}

attn::Split make_split(const Group& group, const Context& c) {
  if (c.parts == 1) return {};
  Link& link = *group.link();
  const Store store =
      c10::make_intrusive<c10d::PrefixStore>("context/" + std::to_string(c.group), link.store);
  Ranks within = group.ranks();
  within.rank = c.part, within.world = c.parts;
  // The loopback serves a run on a single machine only.
  const bool single = group.ranks().local_world == group.ranks().world;
  within.local_world = single ? c.parts : 0;
  const auto timeout = link.timeout;
  const Backend backend = link.backend == "nccl" ? nccl_backend(store, within, timeout)
                                                 : gloo_backend(store, within, timeout);
  link.others.push_back(backend);
  const int parts = c.parts;
  return {c.part, parts,
          [&link, backend = backend.get(), parts](const at::Tensor& x) {
            return gather(link, Backend::reclaim_copy(backend), parts, x);
          },
          [&link, backend = backend.get(), parts](const at::Tensor& x) {
            return scatter_sum(link, Backend::reclaim_copy(backend), parts, x);
          },
          [&link, backend = backend.get(), c](const at::Tensor& x) {
            return pass(link, Backend::reclaim_copy(backend), c, x);
          }};
}

void check_travels(const Group& group, const Settings& s, const nn::ModelConfig& c,
                   at::Device device) {
  const Context context = context_of(group.ranks(), s.context_parallel);
  if (context.parts == 1) return;
  const at::ScalarType dtype = s.dtype == "float32" ? at::kFloat : at::kBFloat16;
  const at::Tensor number = at::zeros({1, 1, 1, 1}, at::TensorOptions(device).dtype(dtype));
  const int64_t B = share_of(s, context).micro_batch, T = s.length / context.parts;
  std::vector<int64_t> all;
  for (const nn::LayerConfig& layer : c.layers)
    for (const nn::Part& part : layer.parts) {
      const auto rows = [&](const std::vector<int64_t>& heads) {
        return number.expand({B, int64_t(heads.size()), T, c.D});
      };
      const at::Tensor k = rows(part.key_heads);
      all.push_back(int64_t(
          attn::travels(part.attention, {.q = rows(part.heads), .k = k, .v = k}, s.execution)));
    }
  const at::Tensor first = at::tensor(all), own = first.clone();
  group.broadcast({first});
  check(at::equal(first, own), "rank ", group.ranks().rank, ", whose part of a sequence is on ",
        device.str(), ", cannot exchange the same tensors along it as rank 0 (docs/scale.md, ",
        "\"The choice\"): start all ranks on devices of one kind");
}

}  // namespace horner::train
