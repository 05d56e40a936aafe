// The mean score of every query, scale q_t . mean of the keys that it sees, and its gradients, on
// an NVIDIA GPU: sums over intervals of rows, of which only those of whole chunks are held
// (double).
#pragma once

#include "attn/kernels/cuda/common/problem.h"

namespace horner::attn::kernels::cuda {

struct Centre {
  int B, H, G, T, S, D;
  Dtype dtype;
  float scale;
  Seen seen;           // with `keep`
  const float* count;  // [B, T], where `keep` hides keys: of those that a query sees, at least 1
  View q, k;
  double* sums;           // scratch of centre_scratch() numbers
  float* centre;          // [B, H, T]
  const float* d_centre;  // its gradient
  // [B, H, T, D], [B, G, S, D] of the problem's dtype: gradients of q and k, to which those by way
  // of the centre are added. To dq_sum, where that is not null, and dq is set.
  void *dq, *dk;
  const float* dq_sum;
};

int64_t centre_scratch(const Centre&);
void centre_forward(const Centre&, Stream);
void centre_backward(const Centre&, Stream);

}  // namespace horner::attn::kernels::cuda
