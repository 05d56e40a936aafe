// Tiled forward and backward. Compiled once per instruction set, in a namespace named after it
// (HORNER_ISA). Uses no standard library functions: the sets would share their inline code.
#include <cmath>

#include "attn/kernels/cpu/fused/tile.h"
#include "core/simd/amx.h"

namespace horner::attn::kernels::HORNER_ISA {

using simd::HORNER_ISA::transpose;

// [rows, C] -> [C, kTile] of 32-bit words, padded with zeros.
static void transpose(const float* x, int64_t C, int rows, float* to) {
  const int64_t whole = C / kWidth * kWidth;
  const FloatLoose* from = x;
  FloatLoose* tile = to;
  for (int j = 0; j < kTile; j += kWidth) {
    for (int64_t c = 0; c < whole; c += kWidth) {
      Vec r[kWidth];
      for (int i = 0; i < kWidth; ++i) r[i] = j + i < rows ? load(x + (j + i) * C + c) : Vec{};
      transpose(r);
      for (int i = 0; i < kWidth; ++i) store(to + (c + i) * kTile + j, r[i]);
    }
    for (int64_t c = whole; c < C; ++c)
      for (int i = j; i < j + kWidth; ++i) tile[c * kTile + i] = i < rows ? from[i * C + c] : 0;
  }
}

// The seven products of a tile, in float32. x, w, dp and dx are [rows, kTile].
struct Single {
  const Tile& t;
  const Fused& f = t.f;
  const int D = int(f.D), E = int(f.E);
  struct Registers {};
  struct Keys {  // one block, transposed
    alignas(64) float k[kMostChannels * kTile], v[kMostChannels * kTile];
  };

  const float* q() const { return f.q + t.row(0) * D; }
  const float* dN() const { return f.dN + t.row(0) * E; }

  void scores(const float* k_tile, float* x) const {
    multiply<false>(Product{q(), D, 1, k_tile, kTile, x, kTile, t.rows, kTile, D});
  }
  void scores(float* x) const { scores(f.k_tiles + t.key_block() * D * kTile, x); }
  void add_values(const float* w, float* N) const {
    multiply<true>(Product{w, kTile, 1, f.v + t.key(0) * E, E, N, E, t.rows, E, t.columns});
  }

  void pack(Keys& keys) const {
    transpose(f.k + t.key(0) * D, D, t.columns, keys.k);
    transpose(f.v + t.key(0) * E, E, t.columns, keys.v);
  }
  void scores(const Keys& keys, float* x) const { scores(keys.k, x); }
  void d_weights(const Keys& keys, float* dp) const {
    multiply<false>(Product{dN(), E, 1, keys.v, kTile, dp, kTile, t.rows, kTile, E});
  }
  void add_d_values(const float* w, float* dv) const {
    multiply<true>(Product{w, 1, kTile, dN(), E, dv, E, t.columns, E, t.rows});
  }
  void add_d_keys(const float* dx, float* dk) const {
    multiply<true>(Product{dx, 1, kTile, q(), D, dk, D, t.columns, D, t.rows});
  }
  void add_d_queries(const Keys&, const float* dx, float* dq) const {
    multiply<true>(Product{dx, kTile, 1, f.k + t.key(0) * D, D, dq, D, t.rows, D, t.columns});
  }
  Vec value(int j, int64_t e) const { return load(f.v + t.key(j) * E + e); }

  // Where rows() writes dN for a block.
  struct Kept {
    float* dN;
    Kept(const Fused& f, int64_t row) : dN(f.dN + row * f.E) {}
    void done(const Fused&, int64_t, int64_t, int) {}
  };
};

#ifdef __AVX512BF16__
// The same products of bfloat16 pairs, summed in float32.
struct Paired {
  const Tile& t;
  const Fused& f = t.f;
  const int D = int(f.D), E = int(f.E);
  static constexpr int kHalf = kTile / 2;
  using Registers = TileShapes;
  struct Keys {
    alignas(64) uint32_t k[kMostChannels / 2 * kTile], v[kMostChannels / 2 * kTile];
    alignas(64) uint32_t k_columns[kHalf * kMostChannels];
  };

  void scores(const uint32_t* k_tile, float* x) const {
    multiply_tiles<false>(PairProduct{f.pairs.q + t.row(0) * (D / 2), D / 2, 1, k_tile, kTile, x,
                                      kTile, t.rows, kTile, D / 2});
  }
  void scores(float* x) const { scores(f.pairs.k_tiles + t.key_block() * (D / 2) * kTile, x); }
  void add_values(const float* w, float* N) const {
    add_by_rows(w, f.pairs.v_columns + t.key_block() * kHalf * E, N, E);
  }
  // C[queries, channels] += x B, where B are the pairs of a block of keys.
  void add_by_rows(const float* x, const uint32_t* b, float* c, int channels) const {
    alignas(64) uint32_t a[kTile * kHalf];
    pair_columns(x, kTile, a, kHalf, t.rows, kTile);
    multiply_tiles<true>(
        PairProduct{a, kHalf, 1, b, channels, c, channels, t.rows, channels, kHalf});
  }

  void pack(Keys& keys) const {
    const uint32_t *k = f.pairs.k + t.key(0) * (D / 2), *v = f.pairs.v + t.key(0) * (E / 2);
    transpose((const float*)k, D / 2, t.columns, (float*)keys.k);
    transpose((const float*)v, E / 2, t.columns, (float*)keys.v);
    for (int i = (t.columns + 1) / 2 * D; i < kHalf * D; ++i) keys.k_columns[i] = 0;
    pair_rows((const uint16_t*)k, D, keys.k_columns, D, t.columns, D);
  }
  void scores(const Keys& keys, float* x) const { scores(keys.k, x); }
  void d_weights(const Keys& keys, float* dp) const {
    multiply_tiles<false>(PairProduct{f.pairs.dN + t.row(0) * (E / 2), E / 2, 1, keys.v, kTile, dp,
                                      kTile, t.rows, kTile, E / 2});
  }
  // C[keys, channels] += x^T B, where B are the pairs of a block of queries.
  void add_transposed(const float* x, const uint32_t* b, float* c, int channels) const {
    alignas(64) uint32_t a[kTile * kHalf];
    pair_rows(x, kTile, a, kTile, t.rows, kTile);
    b += t.query_block() * kHalf * channels;
    const int pairs = (t.rows + 1) / 2;
    if constexpr (kTileRegisters) {  // AMX needs the pairs of a row to be contiguous
      alignas(64) uint32_t transposed[kTile * kHalf];
      for (int i = 0; i < pairs; ++i)
        for (int j = 0; j < kTile; ++j) transposed[j * kHalf + i] = a[i * kTile + j];
      multiply_tiles<true>(
          {transposed, kHalf, 1, b, channels, c, channels, t.columns, channels, pairs});
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
  void add_d_queries(const Keys& keys, const float* dx, float* dq) const {
    add_by_rows(dx, keys.k_columns, dq, D);
  }
  Vec value(int j, int64_t e) const { return widened(f.pairs.v + (t.key(j) * E + e) / 2); }

  struct Kept {
    alignas(64) float dN[kTile * kMostChannels];
    Kept(const Fused&, int64_t) {}
    void done(const Fused& f, int64_t task, int64_t row, int rows) {
      simd::HORNER_ISA::pair_columns(dN, f.E, f.pairs.dN + row * (f.E / 2), f.E / 2, rows,
                                     int(f.E));
      pair_rows(dN, f.E, f.pairs.dN_columns + task * kHalf * f.E, f.E, rows, int(f.E));
    }
  };
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
  for (int i = 0; i < kTile; ++i) sums.W[i] = Vec{}, sums.shift[i] = -INFINITY;
  if (f.statistics)
    for (int i = 0; i < kTile; ++i)
      sums.total[i] = sums.most[i] = sums.moment[i] = Vec{}, sums.first[i] = 0;
  for (int64_t i = 0; i < kTile * f.E; ++i) sums.N[i] = 0;
  const int64_t first = tile.first_key(0) / kTile * kTile, last = tile.hi(tile.rows - 1);
  const int64_t lo = tile.lo(0) / kTile * kTile;
  const auto next = [&](int64_t s) {  // the next tile of which some query sees a key
    return f.seen.to && s >= f.seen.to[t0 + tile.rows - 1] && s < lo ? lo : s;
  };
  for (tile.s0 = first; tile.s0 < last; tile.s0 = next(tile.s0 + kTile)) {
    tile.columns = least(kTile, f.S - tile.s0);
    tile.scale = f.softcap != 0 ? 1 : f.scale;
    products.scores(x);
    if (f.softcap != 0) cap(tile, x);
    if (f.bias) add_bias(tile, x), tile.scale = 1;
    std::visit([&](const auto& w) { weigh_tile(w, tile, x, sums); }, f.weight);
    if (f.in_gate) gate_values(tile, x);
    if (f.dropout.below) drop(tile, x);
    products.add_values(x, sums.N);
  }
  const bool is_shifted = f.near || std::holds_alternative<Exp>(f.weight);
  alignas(64) float W[kTile];
  for (int i = 0; i < kTile; i += kWidth) {
    Vec r[kWidth];
    for (int j = 0; j < kWidth; ++j) r[j] = sums.W[i + j];
    store(W + i, sum_each(r));
  }
  if (f.statistics) write_statistics(tile, W, sums);
  for (int i = 0; i < tile.rows; ++i) {
    const int64_t row = tile.row(i);
    const float shift = is_shifted && sums.shift[i] > -INFINITY ? sums.shift[i] : 0;
    const float* N = sums.N + i * f.E;
    Row(f.epilogue, row, f.E, N, W[i], shift).forward(f.o + row * f.E);
    if (!f.N) continue;
    f.W[row] = W[i];
    f.shift[row] = shift;
    for (int64_t e = 0; e < f.E; e += kWidth) store(f.N + row * f.E + e, load(N + e));
  }
}

// Backward.

// From the gradient of the result to dN and dW, for one block of rows.
template <class Products>
static void rows(const Fused& f, int64_t task) {
  const int64_t n = blocks(f.T), t0 = task % n * kTile, row0 = task / n * f.T + t0;
  const int rows = least(kTile, f.T - t0);
  Epilogue p = f.epilogue;
  if (p.d_norm_weight) p.d_norm_weight += task * f.E;
  if (p.d_norm_bias) p.d_norm_bias += task * f.E;
  typename Products::Kept kept(f, row0);
  for (int i = 0; i < rows; ++i) {
    const int64_t row = row0 + i;
    const Row r(p, row, f.E, f.N + row * f.E, f.W[row], f.shift[row]);
    f.dW[row] = r.backward(f.d_o + row * f.E, kept.dN + i * f.E);
  }
  kept.done(f, task, row0, rows);
}

static void zero(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += kWidth) store(x + i, Vec{});
}

// One part of the queries against one block of keys.
template <class Products>
static void backward_keys(const Fused& f, Tile& tile, const typename Products::Keys& keys,
                          int64_t queries_part) {
  alignas(64) float x[kTile * kTile], dp[kTile * kTile];
  const Products products{tile};
  float *dk = f.dk + tile.key(0) * f.D, *dv = f.dv + tile.key(0) * f.E;
  tile.bias = tile.of_head(f.bias);
  const auto [first, last] = queries(tile);
  const int64_t past = (first / kTile - queries_part) % f.parts;  // to the part's next block
  const int64_t begin = first / kTile + (past > 0 ? f.parts - past : -past);
  for (tile.t0 = begin * kTile; tile.t0 < last; tile.t0 += f.parts * kTile) {
    tile.rows = least(kTile, f.T - tile.t0);
    products.scores(keys, x);
    if (f.softcap != 0) cap(tile, x);
    products.d_weights(keys, dp);
    if (f.in_gate) gate_values(tile, dp);
    if (f.dropout.below) drop(tile, dp);
    std::visit(
        [&](const auto& w) {
          tile.partial() ? slopes<true>(w, tile, x, dp) : slopes<false>(w, tile, x, dp);
        },
        f.weight);
    if (f.dropout.below) drop(tile, x);
    products.add_d_values(x, dv);
    products.add_d_keys(dp, dk);
    products.add_d_queries(keys, dp, f.dq + tile.row(0) * f.D);
  }
}

// A part is every parts-th block: under a causal mask the cost of a block depends on its position,
// so every part gets a mix.
template <class Products>
static void backward(const Fused& f, int64_t round, int64_t task) {
  const int64_t part = task % f.parts, head = task / f.parts, shared = f.H / f.G;
  const int64_t queries_part = (part + round) % f.parts;
  [[maybe_unused]] const typename Products::Registers registers;
  typename Products::Keys keys;
  Tile tile{f, head / f.G, 0, head % f.G, 0, 0, 0, 0};
  if (round == 0)
    for (int64_t h = head * shared; h < (head + 1) * shared; ++h)
      for (int64_t t = queries_part * kTile; t < f.T; t += f.parts * kTile)
        zero(f.dq + (h * f.T + t) * f.D, least(kTile, f.T - t) * f.D);
  for (tile.s0 = part * kTile; tile.s0 < f.S; tile.s0 += f.parts * kTile) {
    tile.columns = least(kTile, f.S - tile.s0);
    const Products products{tile};
    products.pack(keys);
    if (round == 0) {
      zero(f.dk + tile.key(0) * f.D, tile.columns * f.D);
      zero(f.dv + tile.key(0) * f.E, tile.columns * f.E);
    }
    for (int64_t r = 0; r < shared; ++r) {
      tile.h = tile.g * shared + r;
      backward_keys<Products>(f, tile, keys, queries_part);
    }
    if (f.in_gate && round == f.parts - 1)
      gate_d_values(
          tile, [&](int j, int64_t e) { return products.value(j, e); }, f.dv + tile.key(0) * f.E);
  }
}

static void transpose(const Transpose& t, int64_t block) {
  const int64_t s0 = block * kTile;
  transpose(t.x + s0 * t.C, t.C, least(kTile, t.rows - s0), t.tiles + block * t.C * kTile);
}

const FusedKernels fused_kernels{transpose, nullptr, forward<Single>, rows<Single>,
                                 backward<Single>};
#ifdef __AVX512BF16__
const FusedKernels fused_bf16_kernels{transpose, pair_columns, forward<Paired>, rows<Paired>,
                                      backward<Paired>};
#endif

}  // namespace horner::attn::kernels::HORNER_ISA
