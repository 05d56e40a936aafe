// The parts of a model around its matrix products, row by row: norms, heads, activations, the loss.
// Everything inside is float32. Raw pointers: no torch header in this folder.
//
// Rows are split into tasks by the shape alone, and a gradient of a weight is one sum for each
// task: the same bits come out whatever the number of threads.
#pragma once

#include <cstdint>

namespace horner::nn::kernels {

enum class Dtype { float32, bfloat16, float16 };

struct Rows {
  int64_t count, each;  // rows, and rows of a task

  int64_t tasks() const { return (count + each - 1) / each; }
};

// sum = x + added, y = (sum - mean) rstd (plus + weight) + bias, where mean is 0 unless `layer`.
struct Norm {
  Rows rows;
  int64_t C;
  Dtype wide, narrow;  // of x and sum; of added and y. Gradients have the dtype of what they are of
  bool layer;
  float plus, eps;
  const float *weight, *bias;  // [C]; bias may be null
  const void* x;               // [rows, C]; backward: what was normed
  const void* added;           // [rows, C], or null: then there is no sum
  int64_t x_row, added_row;    // numbers from one row to the next
  void *sum, *y;               // [rows, C]
  float *mean, *rstd;          // [rows]; mean of `layer` alone
  // Backward. d_sum (of the sum, from beyond) may be null, and d_added where it would be d_x.
  const void *d_y, *d_sum;
  int64_t d_y_row, d_sum_row;
  void *d_x, *d_added;
  float *d_weight, *d_bias;  // [tasks, C]
};

// A tensor [B, heads, T, D] whose channels lie side by side.
struct Heads4 {
  void* at;
  int64_t batch, head, token;
};

inline constexpr int64_t kMostHeadChannels = 512;

// Rows (q | k | v) of H, G and G heads of D channels become tensors [B, heads, T, D]; q and k are
// normed (rms, as above) if there are weights, and turned if there are angles:
//   (a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of a head.
struct Heads {
  Rows rows;  // B T
  int64_t T, H, G, D;
  Dtype dtype;
  float plus, eps;
  const float *q_norm, *k_norm;  // [D], or null
  const float *cos, *sin;        // [T, D / 2], or null
  const void* x;                 // [B T, (H + 2 G) D]; backward reads it for the norms alone
  int64_t x_row;
  float* rstd;                 // [B T, H + G], of the norms
  Heads4 q, k, v;              // backward: their gradients
  void* d_x;                   // [B T, (H + 2 G) D]
  float *d_q_norm, *d_k_norm;  // [tasks, D]
};

// y = f(gate) up of rows (gate | up), or f(x); f(x) = x / (1 + e^-z), z = x for silu, and for gelu
// by tanh z = 2 sqrt(2 / pi) (x + 0.044715 x^3).
struct Gated {
  Rows rows;
  int64_t M;
  Dtype dtype;
  bool gelu, gated;
  const void* x;  // [rows, 2 M], or [rows, M]
  int64_t x_row;
  void* y;          // [rows, M]
  const void* d_y;  // backward
  int64_t d_y_row;
  void* d_x;  // as x
};

// loss = log sum exp - logit of the target; the logits become its gradient times *scale.
struct Loss {
  Rows rows;
  int64_t V;
  Dtype dtype;
  void* logits;  // [rows, V]
  int64_t row;
  const int64_t* targets;  // [rows]; below 0: does not count
  const float* scale;
  float* loss;  // [rows]
  bool gradient;
};

// One for each instruction set.
struct PartKernels {
  void (*norm)(const Norm&, int64_t task);
  void (*norm_backward)(const Norm&, int64_t task);
  void (*heads)(const Heads&, int64_t task);
  void (*heads_backward)(const Heads&, int64_t task);
  void (*gated)(const Gated&, int64_t task);
  void (*gated_backward)(const Gated&, int64_t task);
  void (*loss)(const Loss&, int64_t task);
};
namespace portable {
extern const PartKernels part_kernels;
}
namespace avx2 {
extern const PartKernels part_kernels;
}
namespace avx512 {
extern const PartKernels part_kernels;
}

namespace cuda {
using Stream = struct CUstream_st*;
inline constexpr int64_t kMostChannels = 8192;  // of a norm
void norm(const Norm&, Stream);
void norm_backward(const Norm&, Stream);
void heads(const Heads&, Stream);
void heads_backward(const Heads&, Stream);
void gated(const Gated&, Stream);
void gated_backward(const Gated&, Stream);
void loss(const Loss&, Stream);
const char* last_error();  // of a launch; null for none
}  // namespace cuda

}  // namespace horner::nn::kernels
