// near=window(n) in linear time. A key becomes a far one n tokens after its own: the sums of the
// far keys are those of a stream of keys that is n tokens late. The near ones are scored in blocks
// of queries.
#pragma once

#include "attn/attend.h"
#include "attn/carry.h"
#include "attn/stages.h"

namespace horner::attn::exec {

class Near {
 public:
  // Of S tokens after those that `before`, unless null, has left. v: the values to sum.
  Near(const Spec&, const Inputs&, const at::Tensor& v, const Carry* before);

  // The keys, values and `keep` that are n tokens late: [B, G, S, ..], [B, S].
  at::Tensor k, v, keep;

  // The sums with the near keys. q: of the T last tokens, as given; count: [1 or B, 1, T, 1].
  Sums with(const Sums& far, const at::Tensor& q, const at::Tensor& count) const;

  void leave(Carry& after) const;  // the last n keys

 private:
  int64_t n_;
  double scale_;
  at::Tensor all_k_, all_v_, all_keep_, sequence_;  // of n + S tokens; sequence_ [n + S]
};

}  // namespace horner::attn::exec
