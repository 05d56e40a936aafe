// The tiled forward and backward. Compiled once per instruction set, each in a namespace of its own
// (HORNER_ISA). Nothing of the standard library here: its inline functions would be shared by the
// sets.
#include <cmath>

#include "attn/exec/kernels/amx.h"
#include "attn/exec/kernels/gemm.h"
#include "attn/exec/kernels/tile.h"

namespace horner::attn::kernels {
namespace HORNER_ISA {

// The seven products of a tile, in float32. x, w, dp and dx are [rows, kTile].
struct Single {
  const Tile& t;
  const Fused& f = t.f;
  const int D = int(f.D), E = int(f.E);
  struct Registers {};

  const float* q() const { return f.q + t.row(0) * D; }
  const float* dN() const { return f.dN + t.row(0) * E; }

  void scores(float* x) const {
    multiply<false>(Product{q(), D, 1, f.k_tiles + t.key_block() * D * kTile, kTile, x, kTile,
                            t.rows, kTile, D});
  }
  void add_values(const float* w, float* N) const {
    multiply<true>(Product{w, kTile, 1, f.v + t.key(0) * E, E, N, E, t.rows, E, t.columns});
  }
  void d_weights(float* dp) const {
    multiply<false>(Product{dN(), E, 1, f.v_tiles + t.key_block() * E * kTile, kTile, dp, kTile,
                            t.rows, kTile, E});
  }
  void add_d_values(const float* w, float* dv) const {
    multiply<true>(Product{w, 1, kTile, dN(), E, dv, E, t.columns, E, t.rows});
  }
  void add_d_keys(const float* dx, float* dk) const {
    multiply<true>(Product{dx, 1, kTile, q(), D, dk, D, t.columns, D, t.rows});
  }
  void add_d_queries(const float* dx, float* dq) const {
    multiply<true>(Product{dx, kTile, 1, f.k + t.key(0) * D, D, dq, D, t.rows, D, t.columns});
  }
  static void keep_dN(const Fused&, int64_t, int64_t, int) {}
};

#ifdef __AVX512BF16__
// The same in bfloat16, summed in float32.
struct Paired {
  const Tile& t;
  const Fused& f = t.f;
  const int D = int(f.D), E = int(f.E);
  static constexpr int kHalf = kTile / 2;
  using Registers = TileShapes;

  void scores(float* x) const {
    const uint32_t* k = f.pairs.k_tiles + t.key_block() * (D / 2) * kTile;
    multiply_tiles<false>(PairProduct{f.pairs.q + t.row(0) * (D / 2), D / 2, 1, k, kTile, x, kTile,
                                      t.rows, kTile, D / 2});
  }
  void add_values(const float* w, float* N) const {
    alignas(64) uint32_t a[kTile * kHalf];
    pair_columns(w, kTile, a, kHalf, t.rows, kTile);
    multiply_tiles<true>(PairProduct{a, kHalf, 1, f.pairs.v_columns + t.key_block() * kHalf * E, E,
                                     N, E, t.rows, E, kHalf});
  }
  void d_weights(float* dp) const {
    const uint32_t* v = f.pairs.v_tiles + t.key_block() * (E / 2) * kTile;
    multiply_tiles<false>(PairProduct{f.pairs.dN + t.row(0) * (E / 2), E / 2, 1, v, kTile, dp,
                                      kTile, t.rows, kTile, E / 2});
  }
  // C[keys, channels] += x^T B, B the pairs of a block of queries.
  void add_transposed(const float* x, const uint32_t* b, float* c, int channels) const {
    alignas(64) uint32_t a[kTile * kHalf];
    pair_rows(x, kTile, a, kTile, t.rows, kTile);
    b += t.query_block() * kHalf * channels;
    const int pairs = (t.rows + 1) / 2;
    if constexpr (kTileRegisters) {  // they want the pairs of a row side by side
      alignas(64) uint32_t turned[kTile * kHalf];
      for (int i = 0; i < pairs; ++i)
        for (int j = 0; j < kTile; ++j) turned[j * kHalf + i] = a[i * kTile + j];
      multiply_tiles<true>(
          {turned, kHalf, 1, b, channels, c, channels, t.columns, channels, pairs});
    } else {
      multiply<true>(
          PairProduct{a, 1, kTile, b, channels, c, channels, t.columns, channels, pairs});
    }
  }
  void add_d_values(const float* w, float* dv) const {
    add_transposed(w, f.pairs.dN_columns, dv, E);
  }
  void add_d_keys(const float* dx, float* dk) const {
    add_transposed(dx, f.pairs.q_columns, dk, D);
  }
  void add_d_queries(const float* dx, float* dq) const {
    alignas(64) uint32_t a[kTile * kHalf];
    pair_columns(dx, kTile, a, kHalf, t.rows, kTile);
    multiply_tiles<true>(PairProduct{a, kHalf, 1, f.pairs.k_columns + t.key_block() * kHalf * D, D,
                                     dq, D, t.rows, D, kHalf});
  }
  static void keep_dN(const Fused& f, int64_t task, int64_t row, int rows) {
    const float* dN = f.dN + row * f.E;
    kernels::HORNER_ISA::pair_columns(dN, f.E, f.pairs.dN + row * (f.E / 2), f.E / 2, rows,
                                      int(f.E));
    pair_rows(dN, f.E, f.pairs.dN_columns + task * kHalf * f.E, f.E, rows, int(f.E));
  }
};

static void pair_columns(const PairColumns& p, int64_t block) {
  const int64_t s0 = block * kTile;
  pair_rows(p.x + s0 * p.C, p.C, p.pairs + block * (kTile / 2) * p.C, p.C,
            least(kTile, p.rows - s0), int(p.C));
}
#endif

template <class Products>
static void forward(const Fused& f, int64_t task) {
  const int64_t n = blocks(f.T), head = task / n,
                t0 = (n - 1 - task % n) * kTile;  // longest rows first
  Tile tile{f,    head / f.H, head % f.H, head % f.H / (f.H / f.G), t0, 0, least(kTile, f.T - t0),
            kTile};
  const Products products{tile};
  [[maybe_unused]] const typename Products::Registers registers;
  alignas(64) float x[kTile * kTile];
  alignas(64) Sums sums;
  for (int i = 0; i < kTile; ++i) sums.W[i] = 0, sums.shift[i] = -INFINITY;
  for (int64_t i = 0; i < kTile * f.E; ++i) sums.N[i] = 0;
  const int64_t first = f.lo[t0] / kTile * kTile, last = f.hi[t0 + tile.rows - 1];
  for (tile.s0 = first; tile.s0 < last; tile.s0 += kTile) {
    tile.columns = least(kTile, f.S - tile.s0);
    products.scores(x);
    std::visit([&](const auto& w) { weigh_tile(w, tile, x, sums); }, f.weight);
    products.add_values(x, sums.N);
  }
  const bool is_exp = std::holds_alternative<Exp>(f.weight);
  for (int i = 0; i < tile.rows; ++i) {
    const int64_t row = tile.row(i);
    const float shift = is_exp && sums.shift[i] > -INFINITY ? sums.shift[i] : 0;
    const float* N = sums.N + i * f.E;
    Row(f.epilogue, row, f.E, N, sums.W[i], shift).forward(f.o + row * f.E);
    if (f.statistics) sums.tally[i].write(f.statistics + row, f.B * f.H * f.T);
    if (!f.N) continue;
    f.W[row] = sums.W[i];
    f.shift[row] = shift;
    for (int64_t e = 0; e < f.E; e += kWidth) store(f.N + row * f.E + e, load(N + e));
  }
}

// Backward.

// From the gradient of the result to those of the sums, for the rows of one block.
template <class Products>
static void rows(const Fused& f, int64_t task) {
  const int64_t n = blocks(f.T), head = task / n, t0 = task % n * kTile;
  Epilogue p = f.epilogue;
  if (p.d_norm_weight) p.d_norm_weight += task * f.E;
  if (p.d_norm_bias) p.d_norm_bias += task * f.E;
  for (int64_t t = t0; t < f.T && t < t0 + kTile; ++t) {
    const int64_t row = head * f.T + t;
    const Row r(p, row, f.E, f.N + row * f.E, f.W[row], f.shift[row]);
    f.dW[row] = r.backward(f.dN + row * f.E);
  }
  Products::keep_dN(f, task, head * f.T + t0, least(kTile, f.T - t0));
}

template <class Products>
static void backward(const Fused& f, int64_t task) {
  const int64_t part = task % f.parts, head = task / f.parts, n = blocks(f.S);
  const int64_t shared = f.H / f.G;
  alignas(64) float x[kTile * kTile], dp[kTile * kTile];
  [[maybe_unused]] const typename Products::Registers registers;
  // Every parts-th block of keys: the blocks of a causal mask differ in length, so each part gets
  // some of each.
  for (int64_t block = part; block < n; block += f.parts) {
    const int64_t s0 = block * kTile;
    const int columns = least(kTile, f.S - s0);
    const auto [first, last] = queries(f, s0, s0 + columns);
    for (int64_t r = 0; r < shared; ++r) {
      Tile tile{f, head / f.G, head % f.G * shared + r, head % f.G, 0, s0, 0, columns};
      float* dk = f.dk + tile.key(0) * f.D;
      float* dv = f.dv + tile.key(0) * f.E;
      const Products products{tile};
      for (tile.t0 = first; tile.t0 < last; tile.t0 += kTile) {
        tile.rows = least(kTile, f.T - tile.t0);
        products.scores(x);
        products.d_weights(dp);
        std::visit(
            [&](const auto& w) {
              tile.partial() ? slopes<true>(w, tile, x, dp, part)
                             : slopes<false>(w, tile, x, dp, part);
            },
            f.weight);
        products.add_d_values(x, dv);
        products.add_d_keys(dp, dk);
        products.add_d_queries(dp, f.dq + (part * f.B * f.H * f.T + tile.row(0)) * f.D);
      }
    }
  }
}

static void transpose(const Transpose& t, int64_t block) {
  const int64_t s0 = block * kTile;
  float* tile = t.tiles + block * t.C * kTile;
  for (int64_t c = 0; c < t.C; ++c)
    for (int j = 0; j < kTile; ++j)
      tile[c * kTile + j] = s0 + j < t.rows ? t.x[(s0 + j) * t.C + c] : 0;
}

const FusedKernels fused_kernels{transpose, nullptr, forward<Single>, rows<Single>,
                                 backward<Single>};
#ifdef __AVX512BF16__
const FusedKernels fused_bf16_kernels{transpose, pair_columns, forward<Paired>, rows<Paired>,
                                      backward<Paired>};
#endif

}  // namespace HORNER_ISA
}  // namespace horner::attn::kernels
