// The sums of sums.h with the features before them and the division after them as one node of the
// graph: each tensor of the size of the inputs that is not made is one that the system need not
// page in. malloc returns blocks above 32 MB when they are freed.
#pragma once

#include "attn/exec/sums.h"

namespace horner::attn::exec {

struct RowsJob {
  ChunkJob chunks;
  Features features;  // Identity, Elu1 or Relu
  bool divided;       // N is divided by W, bounded as Sum has it
};

struct RowsResult {
  ChunkResult sums;  // N divided
  at::Tensor q, k;   // mapped, if the features are not Identity

  static auto outputs(auto& r) { return ChunkResult::outputs(r.sums); }
  static auto saved(auto& r) {
    return std::array{&r.sums.N, &r.sums.W, &r.sums.all_S, &r.sums.all_z, &r.q, &r.k};
  }
};

template <class R>
RowsResult chunk_rows(const RowsJob&, const ChunkTensors&, bool for_backward);
template <class R>
ChunkTensors chunk_rows_backward(const RowsJob&, const ChunkTensors&, const RowsResult&,
                                 const RowsResult& grads);

bool is_elementwise(const Features&);  // one of RowsJob

}  // namespace horner::attn::exec
