// Optimizer and gradients divided among ranks (ZeRO 1 and 2). The parameters lie in buckets, in the
// reverse order of the forward pass; each rank owns one chunk of every bucket. Gradients of a
// bucket are reduced and scattered while backward goes on, the owner updates its chunk, and the
// weights of a bucket are gathered while the next forward pass is on its way to it.
#pragma once

#include <memory>
#include <vector>

#include "train/comm.h"

namespace horner::train {

struct Sharding {
  bool gradients = false;       // keep only the own chunks of gradients; otherwise all of them
  int64_t bucket = 25'000'000;  // bytes; a parameter that is larger has a bucket of its own
};

// Where parameters of given sizes lie, in elements. Offsets and chunks are multiples of kAligned:
// kernels then see every element at the same place of a vector as in the tensor alone.
struct BucketPlan {
  std::vector<size_t> parameters;
  std::vector<int64_t> at;  // of each of them
  int64_t chunk;            // of one rank
};
inline constexpr int64_t kAligned = 16;
std::vector<BucketPlan> plan_buckets(const std::vector<int64_t>& sizes, int64_t bytes, int world);

class Shards {
 public:
  // A run of elements of a parameter that this rank owns, as views.
  struct Part {
    size_t parameter;
    int64_t begin;
    at::Tensor weights, gradient;
  };

  // Every rank passes the same parameters, float32 and in the order of the forward pass. Their
  // memory moves into the buckets.
  Shards(const Group&, const std::vector<at::Tensor>& parameters, const Sharding&);
  ~Shards();
  Shards(const Shards&) = delete;

  const std::vector<Part>& parts() const;

  void clear();  // gradients
  // loss.backward(). Gradients accumulate; after the `last` call those of parts() are means over
  // ranks.
  void backward(const at::Tensor& loss, bool last = true);

  void send_weights();                   // after an update of the parts; returns at once
  void wait_weights(size_t parameters);  // until the first so many have the other ranks' values

 private:
  struct Bucket;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace horner::train
