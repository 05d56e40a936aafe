// near=window(n) in linear time. A key becomes a far one n tokens after its own: the sums of the
// far keys are those of a stream of keys that is n tokens late, with gates that are late too. What
// is missing of the decay is that of the last n gates, a factor of each query. The near keys are
// scored in blocks of queries.
#pragma once

#include <string>

#include "attn/attend.h"
#include "attn/carry.h"
#include "attn/stages.h"

namespace horner::attn::exec {

class Near {
 public:
  // Of S tokens after those that `before`, unless null, has left. v: the values to sum.
  Near(const Spec&, const Inputs&, const at::Tensor& v, const Carry* before);

  // The keys, values, `keep` and log gates that are n tokens late: [B, G, S, ..], [B, S]. logs: in
  // double, undefined without a decay.
  at::Tensor k, v, keep, logs;

  // The sums with the near keys. q: of the T last tokens, as given; count: [1 or B, 1, T, 1];
  // centre: what is subtracted from their scores, [B, H, T, 1], or undefined.
  Sums with(const Sums& far, const at::Tensor& q, const at::Tensor& count,
            const at::Tensor& centre = {}) const;

  void leave(Carry& after) const;      // the last n keys
  at::Tensor decay_of_tokens() const;  // the sum of the log gates of the S tokens, [B, G]

 private:
  int64_t n_;
  double scale_;
  at::Tensor share_;                                // [H, 1, 1], or undefined
  at::Tensor all_k_, all_v_, all_keep_, sequence_;  // of n + S tokens; sequence_ [n + S]
  at::Tensor all_logs_, sums_;                      // with a decay, and its running sums
};

// The near keys of two streams one after the other, the later one of `tokens`, in `first`: those
// that are no longer among the last ones become far.
void follow_near(const Spec&, Carry& first, const Carry& later, int64_t tokens);
std::string why_not_followed(const Spec&);  // "" where that needs no inputs

}  // namespace horner::attn::exec
