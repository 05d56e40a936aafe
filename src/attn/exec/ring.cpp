#include "attn/exec/ring.h"

#include <ATen/ATen.h>

#include <cmath>

namespace horner::attn::exec {

at::Tensor Ring::count() const {
  at::Tensor n = seen.hi - seen.lo;
  if (seen.from.defined()) n = n + seen.to - seen.from;
  return n.view({1, 1, -1, 1});
}

// The rank whose keys are here after so many steps.
static int owner(const Ring& ring, int step) {
  return (ring.rank - step + ring.ranks) % ring.ranks;
}

static bool sees_any(const Intervals& i) {
  const auto some = [](const at::Tensor& lo, const at::Tensor& hi) {
    return hi.defined() && (hi > lo).any().item<bool>();
  };
  return some(i.lo, i.hi) || some(i.from, i.to);
}

// The tensors that ranks pass on: those of keys, or their gradients.
static constexpr at::Tensor FusedTensors::* kOfKeys[] = {&FusedTensors::k, &FusedTensors::v,
                                                         &FusedTensors::gate, &FusedTensors::decay};

static void pass_on(const Ring& ring, FusedTensors& block) {
  for (at::Tensor FusedTensors::* x : kOfKeys)
    if ((block.*x).defined()) block.*x = ring.pass(block.*x);
}

// Adds the sums of other keys. A row that sees none of them has W = 0 and a shift without meaning.
static void merge(BlockSums& all, const BlockSums& more, bool shifted) {
  if (!shifted) {
    all.N += more.N, all.W += more.W;
    return;
  }
  const auto of = [](const BlockSums& r) { return r.shift.masked_fill(r.W == 0, -INFINITY); };
  const at::Tensor one = of(all), two = of(more), most = at::maximum(one, two);
  all.shift = most.masked_fill(most == -INFINITY, 0);
  const at::Tensor left = (one - all.shift).exp(), right = (two - all.shift).exp();
  all.N.mul_(left.unsqueeze(-1)).addcmul_(more.N, right.unsqueeze(-1));
  all.W.mul_(left).addcmul_(more.W, right);
}

BlockSums sums_round(
    const Ring& ring, const FusedTensors& own, bool shifted,
    const std::function<BlockSums(int owner, const FusedTensors& block)>& of_block) {
  BlockSums all = of_block(ring.rank, own);
  FusedTensors block = own;
  for (int step = 1; step < ring.ranks; ++step) {
    pass_on(ring, block);
    const int from = owner(ring, step);
    if (sees_any(ring.of_block(from))) merge(all, of_block(from, block), shifted);
  }
  return all;
}

FusedTensors gradients_round(
    const Ring& ring, const FusedTensors& own,
    const std::function<FusedTensors(int owner, const FusedTensors& block)>& of_block) {
  // Starts with the gradients of the rows and of this rank's own keys. What the queries of other
  // ranks add to its keys arrives last.
  FusedTensors d = of_block(ring.rank, own), block = own, theirs;
  for (at::Tensor FusedTensors::* y : kOfKeys)
    if ((d.*y).defined()) theirs.*y = at::zeros_like(d.*y);
  for (int step = 1; step < ring.ranks; ++step) {
    pass_on(ring, block);
    if (step > 1) pass_on(ring, theirs);
    const int from = owner(ring, step);
    if (!sees_any(ring.of_block(from))) continue;
    const FusedTensors each = of_block(from, block);
    d.q += each.q;
    if (d.centre.defined()) d.centre += each.centre;
    for (at::Tensor FusedTensors::* y : kOfKeys)
      if ((theirs.*y).defined()) theirs.*y += each.*y;
  }
  pass_on(ring, theirs);
  for (at::Tensor FusedTensors::* y : kOfKeys)
    if ((theirs.*y).defined()) d.*y += theirs.*y;
  return d;
}

}  // namespace horner::attn::exec
