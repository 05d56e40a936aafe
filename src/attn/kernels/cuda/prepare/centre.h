// The mean score of every query, scale q_t . mean of the keys that it sees, and its gradients on an
// NVIDIA GPU: interval sums of rows, of which only sums of whole chunks are stored (double).
#pragma once

#include "attn/kernels/cuda/common/problem.h"

namespace horner::attn::kernels::cuda {

struct Centre {
  int B, H, G, T, S, D;
  Dtype dtype;
  float scale;
  Seen seen;           // with `keep`
  const float* count;  // [B, T] if `keep` hides keys, else null: number of keys seen, at least 1
  View q, k;
  double* sums;           // scratch, centre_scratch() elements
  float* centre;          // [B, H, T]
  const float* d_centre;  // its gradient
  // [B, H, T, D], [B, G, S, D], problem's dtype: the gradients through the centre are added to dq
  // and dk. If dq_sum is not null, dq is set to dq_sum plus its part.
  void *dq, *dk;
  const float* dq_sum;
};

int64_t centre_scratch(const Centre&);
void centre_forward(const Centre&, Stream);
void centre_backward(const Centre&, Stream);

}  // namespace horner::attn::kernels::cuda
