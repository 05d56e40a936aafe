// What a training step takes of each process: memory by what it is for, and bytes that it sends.
// Calculated from the shapes; scale_test compares both with what is measured.
#pragma once

#include <string>
#include <vector>

#include "attn/split.h"
#include "nn/config.h"

namespace horner::train {

struct Layout {
  int64_t processes = 1, context = 1;  // of which so many share a sequence
  int64_t sequences = 1, parts = 1;    // of a process: in a micro-batch; micro-batches of a step
  int64_t length = 512;
  std::string shard = "none";
  bool recompute = false, bfloat16 = false;
  double bucket = 25e6;  // bytes
  // On CPUs: Gloo gathers and scatters through buffers of its own, in the memory counted.
  bool cpu = false;
};

// What travels along a sequence that several processes share, in a micro-batch.
attn::Travels travels(const nn::Part&, const nn::ModelConfig&, const Layout&);

struct Memory {  // bytes
  double weights = 0, gradients = 0, optimizer = 0;
  // What forward keeps for backward, and the largest work on top; in one process, what of it is
  // more than the gradients that take its place.
  double activations = 0;
  double loss = 0;     // a slice of logits, and the gradients of the head and the last rows
  double buffers = 0;  // gradients and weights on their way
  double all() const { return weights + gradients + optimizer + activations + loss + buffers; }
};
Memory memory_of(const nn::ModelConfig&, const Layout&);

// Bytes that each process sends in a step.
struct Traffic {
  double gradients = 0, weights = 0;
  double sequence = 0;  // states, or keys and values, between the processes of a sequence
  double numbers = 0;   // gradient norms
  double all() const { return gradients + weights + sequence + numbers; }
};
Traffic traffic_of(const nn::ModelConfig&, const Layout&);

// The most sequences in a micro-batch whose memory is at most `bytes`; 0 if one is too many.
int64_t largest_batch(const nn::ModelConfig&, Layout, double bytes);

double parameters_of(const nn::ModelConfig&);

// FLOPs of a step for each token, forward and backward, and once more forward with recomputation.
double flops_per_token(const nn::ModelConfig&, const Layout&);

}  // namespace horner::train
