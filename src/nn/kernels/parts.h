// The parts of a model around its matrix products, row by row: norms, heads, activations, the loss.
// All arithmetic is float32.
//
// The shape alone determines how rows are split into tasks, and each task writes its own sum for
// the gradient of a weight, so results do not depend on the number of threads.
#pragma once

#include <cstdint>

#include "core/simd/isa.h"

namespace horner::nn::kernels {

enum class Dtype { float32, bfloat16, float16 };

struct Rows {
  int64_t count, each;  // rows, and rows per task

  int64_t tasks() const { return (count + each - 1) / each; }
};

// sum = x + added, y = (sum - mean) rstd (plus + weight) + bias; mean is 0 unless `layer` is set.
struct Norm {
  Rows rows;
  int64_t C;
  Dtype wide,
      narrow;  // dtypes of x and sum; of added and y. A gradient has the dtype of its tensor
  bool layer;
  float plus, eps;
  const float *weight, *bias;  // [C]; bias may be null
  const void* x;               // [rows, C]; backward: the input of the norm
  const void* added;           // [rows, C], or null: no sum
  int64_t x_row, added_row;    // strides of rows
  void *sum, *y;               // [rows, C]
  float *mean, *rstd;          // [rows]; mean only if `layer`
  // Backward. d_sum, the incoming gradient of the sum, may be null; d_added is null if equal to
  // d_x.
  const void *d_y, *d_sum;
  int64_t d_y_row, d_sum_row;
  void *d_x, *d_added;
  float *d_weight, *d_bias;  // [tasks, C]
};

// A tensor [B, heads, T, D] with contiguous channels, and its strides.
struct Heads4 {
  void* at;
  int64_t batch, head, token;
};

inline constexpr int64_t kMostHeadChannels = 512;

// Splits rows (q | k | v) of H, G and G heads of D channels into tensors [B, heads, T, D]. q and k
// are normalized (RMS, as above) if there are weights, and rotated (RoPE) if there are angles:
//   (a, b) -> (a cos - b sin, b cos + a sin), where a and b are the halves of a head.
struct Heads {
  Rows rows;  // B T
  int64_t T, H, G, D;
  Dtype dtype;
  float plus, eps;
  const float *q_norm, *k_norm;  // [D], or null
  const float *cos, *sin;        // [T, D / 2], or null
  const void* x;                 // [B T, (H + 2 G) D]; backward reads it only for the norms
  int64_t x_row;
  float* rstd;                 // [B T, H + G], of the norms
  Heads4 q, k, v;              // backward: their gradients
  void* d_x;                   // [B T, (H + 2 G) D]
  float *d_q_norm, *d_k_norm;  // [tasks, D]
};

// y = f(gate) up for rows (gate | up), or f(x), where f(x) = x / (1 + e^-z): z = x for SiLU, and
// z = 2 sqrt(2 / pi) (x + 0.044715 x^3) for GELU (tanh approximation).
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

// loss = log sum exp - logit of the target; its gradient times *scale replaces the logits.
struct Loss {
  Rows rows;
  int64_t V;
  Dtype dtype;
  void* logits;  // [rows, V]
  int64_t row;
  const int64_t* targets;  // [rows]; negative: ignored
  const float* scale;
  float* loss;  // [rows]
  bool gradient;
};

struct PartKernels {
  void (*norm)(const Norm&, int64_t task);
  void (*norm_backward)(const Norm&, int64_t task);
  void (*heads)(const Heads&, int64_t task);
  void (*heads_backward)(const Heads&, int64_t task);
  void (*gated)(const Gated&, int64_t task);
  void (*gated_backward)(const Gated&, int64_t task);
  void (*loss)(const Loss&, int64_t task);
};
HORNER_PER_ISA(extern const PartKernels part_kernels;)

namespace cuda {
using Stream = struct CUstream_st*;
inline constexpr int64_t kMostChannels = 8192;  // of a norm on CUDA
void norm(const Norm&, Stream);
void norm_backward(const Norm&, Stream);
void heads(const Heads&, Stream);
void heads_backward(const Heads&, Stream);
void gated(const Gated&, Stream);
void gated_backward(const Gated&, Stream);
void loss(const Loss&, Stream);
const char* last_error();  // of a launch; null if there was none
}  // namespace cuda

}  // namespace horner::nn::kernels
