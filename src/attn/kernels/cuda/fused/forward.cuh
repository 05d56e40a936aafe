// Forward: each thread block owns a block of queries of one head, each warp some of its rows, and
// loops over the tiles of keys they see. The weights w of a tile stay in registers as the A operand
// of N += w v, while cp.async loads the next tile.
#pragma once

#include <utility>

#include "attn/kernels/cuda/common/row_sums.cuh"

namespace horner::attn::kernels::cuda {

template <class T, int C>
struct ForwardShape {
  static constexpr bool kWide = sizeof(T) == 4;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kAtoms = !kWide && C <= 128 ? 2 : 1;  // 16-row atoms per warp
  static constexpr bool kDecay = true;
  static constexpr bool kRaw = true;  // fixed degrees act on q.k before the scale
  static constexpr int kQueries = 16 * kAtoms * kWarps;
  static constexpr int kBlocks = kWide || C == 256 ? 1 : 2;  // minimum blocks per SM
  static constexpr int kTile = kWide ? (C == 256 ? 16 : 32) : C == 256 ? 32 : 64;  // keys
  static constexpr int kKeys = !kWide && C == 128 ? 32 : kTile;                    // per step
  static constexpr int kBytes = (kQueries + 4 * kTile) * C * int(sizeof(T)) + 2 * kTile * (8 + 4);
};

template <class T, int C, class W, bool factored, bool gated, class Shape = ForwardShape<T, C>>
__global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void fused_forward_kernel(
    const __grid_constant__ Fused f, const __grid_constant__ W w) {
  constexpr int kTile = Shape::kTile, kQueries = Shape::kQueries, kThreads = Shape::kThreads;
  constexpr int kBytes = kTile * C * int(sizeof(T));
  extern __shared__ __align__(1024) unsigned char memory[];
  const Tile<T, C> q{shared_address(memory)};
  const Tile<T, C> first_tile{q.at + kQueries * C * int(sizeof(T))};
  double* const gates = reinterpret_cast<double*>(memory + (kQueries + 4 * kTile) * C * sizeof(T));
  float* const input_gates = reinterpret_cast<float*>(gates + 2 * kTile);

  const int blocks = (f.T + kQueries - 1) / kQueries;
  const BlockSchedule work(int(blockIdx.x), f.B * f.H, blocks);
  const Head head(f, work.head);
  const int t0 = (blocks - 1 - work.block) * kQueries;  // longest rows first
  const auto tiles = key_tiles<kTile>(sight<Shape>(f), head.b, t0, min(t0 + kQueries, f.T) - 1);
  const int begin = tiles.begin, end = tiles.end;
  const auto copy_keys = [&](int s0, int stage) {
    const Tile<T, C> k{first_tile.at + 2 * stage * kBytes}, v{k.at + kBytes};
    copy_rows<kTile, kThreads>(k, row_of<T>(f.k, head.b, head.g, s0), f.k.row, f.S - s0, f.D);
    copy_rows<kTile, kThreads>(v, row_of<T>(f.v, head.b, head.g, s0), f.v.row, f.S - s0, f.E);
    if (const int n = int(threadIdx.x); factored && f.decay && n < kTile)
      cp_async_8(shared_address(gates + stage * kTile + n),
                 f.decay + head.key(f, min(s0 + n, f.S - 1)));
    if (gated && f.gate) copy_gates<kTile>(f, head, s0, input_gates + stage * kTile);
  };
  copy_rows<kQueries, kThreads>(q, row_of<T>(f.q, head.b, head.h, t0), f.q.row, f.T - t0, f.D);
  if (begin < end) copy_keys(begin, 0);

  const int own = warp() * 16 * Shape::kAtoms;
  const Path plain = last_clamp(f) < INFINITY ? Path::clamp : Path::plain;
  const auto visible =
      keys_seen_by(sight<Shape>(f), head.b, t0 + own, t0 + own + 16 * Shape::kAtoms);
  RunningSums<T, C, W, Shape, factored> sums(f, w, head, t0 + own + lane() / 4);
  const double reference = factored && f.decay ? gates_at_query(f, head, t0) : 0;
  if constexpr (factored) sums.set_decay(reference);
  uint64_t dropout = 0;
  if constexpr (kIsSpecial<Shape>)
    if (f.dropout.seed) dropout = dropout_head(f, head);
  const auto over_keys = [&](const auto& weight) __attribute__((always_inline)) {
    int stage = 0;
    for (int s0 = begin; s0 < end; s0 = tiles.after(s0), stage ^= 1) {
      const Tile<T, C> k{first_tile.at + 2 * stage * kBytes}, v{k.at + kBytes};
      if (!kHasDecayFactors<T, W> && f.decay && threadIdx.x < kTile)
        gates[stage * kTile + threadIdx.x] = gates_at_key(f, head, s0 + int(threadIdx.x));
      cp_async_wait_all();
      if (factored && f.decay && threadIdx.x < kTile) {  // the key this thread copied
        KeyDecaySlot& key = reinterpret_cast<KeyDecaySlot*>(gates)[stage * kTile + threadIdx.x];
        const float log_decay = log2_decay(key.gates, reference);
        key.decay = make_float2(log_decay, exp2_fast(-log_decay));
      }
      __syncthreads();  // this tile has arrived; all warps are done with the last one
      if (tiles.after(s0) < end) copy_keys(tiles.after(s0), stage ^ 1);
#pragma unroll 1
      for (int at = 0; at < kTile; at += Shape::kKeys) {
        const int s = s0 + at, s1 = s + Shape::kKeys;
        if (visible.has_none(s, s1)) continue;
        float x[Shape::kAtoms][Shape::kKeys / 8][4];
        // With decay factors, also if some of these keys come after the reference.
        const bool general = factored ? !sums.kIsExp && (last_clamp(f) < INFINITY ||
                                                         (f.decay && s1 > t0 + f.S - f.T + 1))
                                      : !kHasDecayFactors<T, W> && f.decay;
        const bool any = general || !visible.has_all(s, s1);
        bool find_max = !sums.kSkipsMax || sums.fresh;
        do {
          mma_abt<T>(x, q, own, k, at);
        } while (!sums.to_weights(weight, any ? Path::general : plain, x, s,
                                  gates + stage * kTile + at, std::exchange(find_max, true)));
        if (!sums.kIsExp) sums.rescale();
        if (gated && f.gate) gate_columns(input_gates + stage * kTile + at, x);
        if constexpr (kIsSpecial<Shape>)
          if (f.dropout.seed) drop_pairs(f, dropout, sums.t0, s + lane() % 4 * 2, x);
        mma_ab_rs<T>(sums.N, x, v, at);
      }
    }
  };
  if constexpr (Shape::kWide || kIsSpecial<Shape>) {
    with_any_degree(w, over_keys);
  } else {
    with_degree(w, degree_of(w), over_keys);
  }
  if (begin >= end) cp_async_wait_all();
  if constexpr (kIsSpecial<Shape>) sums.scale_sums(f.dropout.kept);
  sums.finish();
}

}  // namespace horner::attn::kernels::cuda
