// Quantities per row, from passes over its keys: the row threshold of weights that need the whole
// row, the sums that the score gradients of such a row share, and the statistics.
#pragma once

#include <cfloat>

#include "attn/kernels/cuda/fused/queries.cuh"

namespace horner::attn::kernels::cuda {

__device__ inline float quad_min(float x) {
  return -quad_max(-x);
}

// One pass over the scores of the block: calls each(i, x) for every row and tile.
template <class T, int C, class F>
__device__ inline void over_scores(const QueryBlock<T, C>& block, const F& each) {
  block.template over_keys<false>([&](int s0, auto& x, auto&, Tile<T, C>) {
#pragma unroll
    for (int i = 0; i < 2; ++i) each(i, block.scores(x, i, s0));
  });
}

// The largest score of each row, NaN if one is NaN or +inf, and the smallest visible one.
template <class T, int C>
__device__ void find_range(const QueryBlock<T, C>& block, float (&top)[2], float (&least)[2]) {
  top[0] = top[1] = -INFINITY, least[0] = least[1] = INFINITY;
  float bad[2] = {};
  over_scores(block, [&](int i, const auto& x) {
#pragma unroll
    for (int j = 0; j < block.n; ++j) {
      top[i] = fmaxf(top[i], x[j]);
      if (x[j] > -INFINITY) least[i] = fminf(least[i], x[j]);
      if (!(x[j] < INFINITY)) bad[i] = NAN;
    }
  });
#pragma unroll
  for (int i = 0; i < 2; ++i)
    top[i] = quad_max(top[i]) + quad_sum(bad[i]), least[i] = quad_min(least[i]);
}

// The sum of e^(x - top) over the scores x >= from.
template <class T, int C>
__device__ void find_sum(const QueryBlock<T, C>& block, const float (&top)[2],
                         const float (&from)[2], float (&sum)[2]) {
  sum[0] = sum[1] = 0;
  over_scores(block, [&](int i, const auto& x) {
#pragma unroll
    for (int j = 0; j < block.n; ++j)
      if (x[j] >= from[i] && x[j] > -INFINITY) sum[i] += exp_fast(x[j] - top[i]);
  });
#pragma unroll
  for (int i = 0; i < 2; ++i) sum[i] = quad_sum(sum[i]);
}

// tau by Newton's method, up from -1 until the weights p sum to 1. The sum P is convex in tau, and
// so is P^a, which is closer to linear far from 1: from the left, no step overshoots.
template <class T, int C>
__device__ void find_tau(const QueryBlock<T, C>& block, const RuntimeWeight& w,
                         RowThreshold (&r)[2]) {
  const float a = w.alpha - 1;
  bool more[2] = {true, true};
  r[0].threshold = r[1].threshold = -1;
  for (int step = 0; step < 100; ++step) {
    float total[2] = {}, slope[2] = {};
    over_scores(block, [&](int i, const auto& x) {
#pragma unroll
      for (int j = 0; j < block.n; ++j) {
        const float z = fmaxf((x[j] - r[i].top) * a - r[i].threshold, 0), p = root(z, a);
        total[i] += p;
        slope[i] += z > 0 ? p / z : 0;
      }
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float P = quad_sum(total[i]), sum = quad_sum(slope[i]);
      if (!more[i]) continue;
      const float up = P > 1.1f ? P - exp2f(log2f(P) * (1 - a)) : a * (P - 1);
      more[i] = up > -6e-8f * r[i].threshold * sum;
      if (more[i]) r[i].threshold += up / sum;
    }
    if (!__syncthreads_or(more[0] || more[1])) break;
  }
}

// Halfway between the k-th largest score and the next, -inf if there are at most k. Bisection: the
// k-th lies between two scores, low and high; each step moves one of them past the middle.
template <class T, int C>
__device__ void find_kth_largest(const QueryBlock<T, C>& block, int k, RowThreshold (&r)[2]) {
  float low[2] = {-INFINITY, -INFINITY}, high[2] = {r[0].top, r[1].top};
  float middle[2] = {-FLT_MAX, -FLT_MAX}, above[2], below[2];
  int count[2];
  const auto pass = [&] {
    above[0] = above[1] = INFINITY, below[0] = below[1] = -INFINITY, count[0] = count[1] = 0;
    over_scores(block, [&](int i, const auto& x) {
#pragma unroll
      for (int j = 0; j < block.n; ++j) {
        const bool over = x[j] >= middle[i];
        count[i] += over;
        above[i] = fminf(above[i], over ? x[j] : INFINITY);
        below[i] = fmaxf(below[i], over ? -INFINITY : x[j]);
      }
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      above[i] = quad_min(above[i]), below[i] = quad_max(below[i]);
      count[i] = int(quad_sum(float(count[i])));
    }
  };
  do {
    pass();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!(low[i] < high[i])) continue;
      if (count[i] >= k) low[i] = above[i];
      if (count[i] <= k) high[i] = count[i] == k ? low[i] : below[i];
      middle[i] = low[i] / 2 + high[i] / 2;
      if (!(middle[i] > low[i])) middle[i] = high[i];
    }
  } while (__syncthreads_or(low[0] < high[0] || low[1] < high[1]));
  middle[0] = low[0], middle[1] = low[1];
  pass();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float half = low[i] / 2 + below[i] / 2;
    r[i].threshold = half > below[i] ? half : low[i];  // adjacent floats have no midpoint
    if (low[i] == -INFINITY || below[i] == -INFINITY) r[i].threshold = -INFINITY;
  }
}

// beta, the factor on the scores of a row, from the entropy of its softmax, as in the reference.
template <class T, int C>
__device__ void find_sharpness(const QueryBlock<T, C>& block, RowThreshold (&r)[2]) {
  const float all[2] = {-INFINITY, -INFINITY}, top[2] = {r[0].top, r[1].top};
  float total[2];
  double entropy[2] = {};
  find_sum(block, top, all, total);
  const float unit[2] = {total[0] > 0 ? 1 / total[0] : 0, total[1] > 0 ? 1 / total[1] : 0};
  over_scores(block, [&](int i, const auto& x) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < block.n; ++j) {
      const float p = exp_fast(x[j] - top[i]) * unit[i];
      sum -= p * logf(p + 1e-9f);
    }
    entropy[i] += sum;
  });
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    double H = entropy[i];
    H += __shfl_xor_sync(~0u, H, 1);
    H += __shfl_xor_sync(~0u, H, 2);
    const double beta = (((-0.037 * H + 0.481) * H - 2.3) * H + 4.917) * H - 1.791;
    r[i].beta = H > 0.5 && beta > 1 ? float(beta) : 1;
  }
}

template <class T, int C>
__global__ __launch_bounds__(QueriesShape<T, C>::kThreads) void row_thresholds_kernel(
    const __grid_constant__ Fused f, const __grid_constant__ RuntimeWeight w, bool adaptive) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const QueryBlock<T, C> block(f, memory, false);
  RowThreshold r[2] = {};
  float top[2], least[2], sum[2] = {1, 1};
  find_range(block, top, least);
  for (int i = 0; i < 2; ++i) r[i].top = top[i] == -INFINITY ? 0 : top[i];
  for (int i = 0; i < 2; ++i) top[i] = r[i].top;
  const float all[2] = {-INFINITY, -INFINITY};
  if (adaptive) {
    find_sharpness(block, r);
  } else if (w.kind == RuntimeWeight::entmax) {
    find_tau(block, w, r);
  } else if (w.kind == RuntimeWeight::softpick) {
    for (int i = 0; i < 2; ++i) r[i].top = r[i].top < 0 ? 0 : r[i].top;
  } else if (w.kind == RuntimeWeight::top_k) {
    find_kth_largest(block, w.k, r);
    const float from[2] = {r[0].threshold, r[1].threshold};
    find_sum(block, top, w.renormalise ? from : all, sum);
  } else {
    for (int i = 0; i < 2; ++i) r[i].threshold = fminf(least[i], 0);
    find_sum(block, top, all, sum);
  }
  for (int i = 0; i < 2; ++i) {
    if (!(adaptive || w.kind == RuntimeWeight::entmax)) r[i].inv_sum = sum[i] > 0 ? 1 / sum[i] : 1;
    if (block.query(i) < f.T && lane() % 4 == 0) f.thresholds[block.row(i)] = r[i];
  }
}

template <class T, int C>
__global__ __launch_bounds__(QueriesShape<T, C>::kThreads) void row_gradient_sums_kernel(
    const __grid_constant__ Fused f, const __grid_constant__ RuntimeWeight w) {
  using Block = QueryBlock<T, C>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Block block(f, memory, true);
  DecaySum<T> row_dot[2] = {}, row_sum[2] = {};
  float column_dot[2] = {}, lowest[2] = {}, highest[2] = {};
  const RowThreshold threshold[2] = {f.thresholds[block.row(0)], f.thresholds[block.row(1)]};
  const Query query[2] = {f.queries[block.row(0)], f.queries[block.row(1)]};
  block.template over_keys<true>([&](int s0, auto& x, auto& dp, Tile<T, C>) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto y = block.scores(x, i, s0);
      auto d = Block::of_row(dp, i);
      block.drop(d, i, s0);
#pragma unroll
      for (int j = 0; j < Block::n; ++j) {
        if (!(y[j] > -INFINITY)) continue;
        const WeightJacobian p = weight_jacobian(w, y[j], threshold[i]);
        float dw = query[i].a * d[j] + query[i].dW;
        if (f.decay) dw *= block.decay_factors(i, s0, ~0u)[j];
        row_dot[i] += DecaySum<T>(p.row) * dw, row_sum[i] += p.row;
        column_dot[i] += p.column * dw;
        lowest[i] += is_near(y[j], threshold[i].threshold, threshold[i]);
        highest[i] += is_near(y[j], fmaxf(threshold[i].top, 0), threshold[i]);
      }
    }
  });
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      row_dot[i] += __shfl_xor_sync(~0u, row_dot[i], step);
      row_sum[i] += __shfl_xor_sync(~0u, row_sum[i], step);
    }
    if (w.kind == RuntimeWeight::entmax) row_dot[i] = row_sum[i] > 0 ? row_dot[i] / row_sum[i] : 0;
    const float all = float(row_dot[i]), column_total = quad_sum(column_dot[i]);
    const float low = quad_sum(lowest[i]), high = quad_sum(highest[i]);
    if (block.query(i) < f.T && lane() % 4 == 0)
      f.gradient_sums[block.row(i)] = {all, (all - column_total) / fmaxf(1, low),
                                       -all / fmaxf(1, high), float(row_dot[i] - all)};
  }
}

// From a = |w decay| over the visible keys of a row, A = sum a: entropy log A - sum a log a / A,
// the largest a / A, a / A of the first key, and the fraction of A with negative weights.
template <class T, int C, class W>
__global__ __launch_bounds__(QueriesShape<T, C>::kThreads) void fused_statistics_kernel(
    const __grid_constant__ Fused f, const __grid_constant__ W w) {
  using Block = QueryBlock<T, C>;
  constexpr int n = Block::n;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Block block(f, memory, false);
  float total[2] = {}, moment[2] = {}, most[2] = {}, first[2] = {}, negative[2] = {};
  block.template over_keys<false>([&](int s0, auto& x, auto&, Tile<T, C>) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto score = block.scores(x, i, s0);
      const int64_t row = block.row(i);
      const int start = first_key(f, min(block.query(i), f.T - 1));
      Vec<n> y;
      if constexpr (std::is_same_v<W, RuntimeWeight>) {
        const RowThreshold threshold = f.thresholds ? f.thresholds[row] : RowThreshold{};
        y = vec<n>(
            [&](int j) { return in_numerator(w, weight_jacobian(w, score[j], threshold).w); });
      } else {
        const float by = f.shift[row];
        with_degree(w, degree_of(w), [&](const auto& weight) {
          y = weights_of(weight, (score + (std::is_same_v<W, Exp> ? -by : 0.0f)) * kUnit<W>);
        });
        if (!std::is_same_v<W, Exp>) y = y * exp_fast(-by);
      }
      Vec<n> decay = vec<n>([](int) { return 1.0f; });
      if (f.decay && !f.decay_in_scores) decay = block.decay_factors(i, s0, ~0u);
#pragma unroll
      for (int j = 0; j < n; ++j) {
        const float v = score[j] > -INFINITY ? y[j] * decay[j] : 0, a = fabsf(v);
        total[i] += a;
        moment[i] += a > 0 ? a * logf(a) : 0;
        most[i] = fmaxf(most[i], a);
        negative[i] += fmaxf(-v, 0);
        if (Block::key(s0, j) == start) first[i] = a;
      }
    }
  });
  const int64_t rows = int64_t(f.B) * f.H * f.T;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float A = quad_sum(total[i]), per = A > 0 ? 1 / A : 0, m = quad_sum(moment[i]);
    const float values[4] = {A > 0 ? logf(A) - m * per : 0, quad_max(most[i]) * per,
                             quad_sum(first[i]) * per, quad_sum(negative[i]) * per};
    if (f.abs_sum && block.query(i) < f.T && lane() % 4 == 0) f.abs_sum[block.row(i)] = A;
    if (block.query(i) < f.T)  // each lane of a quad writes one
      f.statistics[lane() % 4 * rows + block.row(i)] = lane() % 4 == 0   ? values[0]
                                                       : lane() % 4 == 1 ? values[1]
                                                       : lane() % 4 == 2 ? values[2]
                                                                         : values[3];
  }
}

}  // namespace horner::attn::kernels::cuda
