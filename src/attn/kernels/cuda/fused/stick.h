// Stick breaking, with kernels of its own: w_s = sigmoid(x_s) times 1 - sigmoid(x_r) of every later
// key r that the query sees. bfloat16 and float32.
#pragma once

#include "attn/kernels/cuda/common/problem.h"

namespace horner::attn::kernels::cuda {

inline constexpr int kStickTiles = 32;  // tiles of keys between two sweeps of backward

struct Sticks {
  Fused f;       // sizes, q, k, v, scale, clamp, soft cap, keys seen; statistics
  float *N, *W;  // [B, H, T, E], [B, H, T]
  double* left;  // [B, H, T]: the log of what all keys of a row leave of its stick

  // Backward: `f.d_o` is the gradient of N; f.dk and f.dv are written.
  const float* dW;  // [B, H, T]
  float* dq;        // [B, H, T, D], zero-initialised
  double* swept;    // [B, H, T, 2], zero-initialised: what the sweeps so far have added up
  float* states;    // [B, H, T, kStickTiles, 2], zero-initialised: at the tiles of this sweep
  int first;        // tile of this sweep, set by the launches
};

void stick_forward(const Sticks&, Stream);
void stick_backward(const Sticks&, Stream);

// The same for one dtype.
template <class T>
struct StickLaunch {
  static void forward(const Sticks&, Stream);
  static void backward(const Sticks&, Stream);
};

}  // namespace horner::attn::kernels::cuda
