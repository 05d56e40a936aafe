// Each lane holds eight channels; a power of two of lanes holds a row. Forward in 16 bits, a thread
// holds several rows: all its loads are in flight before the first is used. Backward, one row is
// faster.
#include "attn/kernels/cuda/common/launch.cuh"
#include "attn/kernels/cuda/prepare/features.h"

namespace horner::attn::kernels::cuda {

inline constexpr int kMapThreads = 256;
inline constexpr float kMinLength = 1e-12f;

// The problem, and the number of lanes per row: a power of two.
struct MapJob {
  FeatureRows p;
  int lanes;
};

template <class T>
__device__ inline T* row_at(const View& x, int64_t b, int64_t h, int64_t t) {
  return static_cast<T*>(x.at) + b * x.batch + h * x.head + t * x.row;
}

// Eight channels of a row, in 16-byte accesses if `whole`, else the first `n`, one by one.
template <class T>
struct alignas(16) Channels {
  T x[8];

  // A streaming load: the input is not read again soon.
  template <bool whole>
  __device__ void load(const T* from, int n) {
#pragma unroll
    for (int i = 0; whole && i < int(sizeof(T)) / 2; ++i)
      reinterpret_cast<uint4*>(x)[i] = __ldcs(reinterpret_cast<const uint4*>(from) + i);
#pragma unroll
    for (int i = 0; !whole && i < 8; ++i) x[i] = i < n ? from[i] : T(0.f);
  }
  __device__ void load_gradient(const T* from) {
#pragma unroll
    for (int i = 0; i < int(sizeof(T)) / 2; ++i)
      reinterpret_cast<uint4*>(x)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  template <bool whole>
  __device__ void store(T* to, int n) const {
#pragma unroll
    for (int i = 0; whole && i < int(sizeof(T)) / 2; ++i)
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(x)[i];
#pragma unroll
    for (int i = 0; !whole && i < 8; ++i)
      if (i < n) to[i] = x[i];
  }
  // f of each existing channel; 0 for the others.
  template <bool whole, class F>
  __device__ void set(int n, const F& f) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = T(whole || i < n ? f(i, float(x[i])) : 0.f);
  }
  // Row sums are double for float32: large terms cancel in the gradient of a factor.
  using Sum = std::conditional_t<sizeof(T) == 4, double, float>;
  template <class F>
  __device__ Sum sum(const F& f) const {
    Sum s = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) s += f(i, Sum(float(x[i])));
    return s;
  }
};

// Sums over the lanes of each row.
template <class Sum, int rows>
__device__ inline void total(Sum (&x)[rows], int lanes) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    if (step >= lanes) return;
#pragma unroll
    for (int j = 0; j < rows; ++j) x[j] += __shfl_xor_sync(~0u, x[j], step);
  }
}

// f of an element and its derivative, without the division by a length. Propagates NaN.
template <Map map>
__device__ inline float value(float x) {
  if constexpr (map == Map::relu) return x < 0 ? 0 : x;
  if constexpr (map == Map::elu1) return x > 0 ? x + 1 : expf(x);
  return x;
}
template <Map map>
__device__ inline float slope(float x) {
  if constexpr (map == Map::relu) return x <= 0 ? 0 : 1;
  if constexpr (map == Map::elu1) return x > 0 ? 1 : expf(x);
  return 1;
}

// 1 / length, and the factor of x (x.dy) in the gradient: 0 where the length is clamped.
struct Unit {
  float per_length, per_square;

  __device__ Unit(float squares, float repeats = 1) {
    const bool tiny = squares * repeats < kMinLength * kMinLength;
    per_length = tiny ? 1 / kMinLength : rsqrtf(squares * repeats);
    per_square = tiny ? 0 : per_length * per_length * repeats;
  }
};

// A thread's head, first row, distance to its next row, and channels.
struct MapIndex {
  int64_t b, h;
  int t, step, first, there;

  __device__ MapIndex(const MapJob& job, unsigned block, int rows) {
    const int shift = __ffs(job.lanes) - 1;
    step = kMapThreads >> shift;
    const unsigned rows_of_block = unsigned(step * rows);
    const unsigned blocks = (unsigned(job.p.T) + rows_of_block - 1) / rows_of_block;
    const unsigned head = block / blocks;
    b = head / unsigned(job.p.H), h = head - b * job.p.H;
    t = int((block - head * blocks) * rows_of_block + (threadIdx.x >> shift));
    first = int(threadIdx.x & unsigned(job.lanes - 1)) * 8, there = job.p.D - first;
  }
};
__device__ inline float factor_of(const FeatureRows& p, const MapIndex& at, int t) {
  return p.factor.at ? *row_at<float>(p.factor, at.b, at.h, t) : 1;
}

template <class T, Map map, bool whole, int rows>
__global__ __launch_bounds__(kMapThreads) void feature_map_kernel(
    const __grid_constant__ MapJob job) {
  const FeatureRows& p = job.p;
  const MapIndex at(job, blockIdx.x, rows);
  Channels<T> x[rows] = {};
  float by[rows];
  typename Channels<T>::Sum squares[rows];
#pragma unroll
  for (int j = 0; j < rows; ++j) {
    const int t = min(at.t + j * at.step, p.T - 1);
    if (at.there > 0) x[j].template load<whole>(row_at<T>(p.x, at.b, at.h, t) + at.first, at.there);
    by[j] = factor_of(p, at, t);
  }
  if constexpr (map == Map::cosine) {
#pragma unroll
    for (int j = 0; j < rows; ++j) squares[j] = x[j].sum([](int, auto y) { return y * y; });
    total(squares, job.lanes);
#pragma unroll
    for (int j = 0; j < rows; ++j) by[j] *= Unit(float(squares[j])).per_length;
  }
#pragma unroll
  for (int j = 0; j < rows; ++j) {
    const int t = at.t + j * at.step;
    x[j].template set<whole>(at.there, [&](int, float y) { return value<map>(y) * by[j]; });
    if (t < p.T && at.there > 0)
      x[j].template store<true>(row_at<T>(p.y, at.b, at.h, t) + at.first, 8);
  }
}

template <class T, Map map, bool whole, int rows>
__global__ __launch_bounds__(kMapThreads) void feature_map_backward_kernel(
    const __grid_constant__ MapJob job) {
  const FeatureRows& p = job.p;
  // Last head first: what was written last is still in cache.
  const MapIndex at(job, gridDim.x - 1 - blockIdx.x, rows);
  Channels<T> x[rows] = {}, d[rows] = {};
  float by[rows];
  typename Channels<T>::Sum squares[rows], dot[rows];
#pragma unroll
  for (int j = 0; j < rows; ++j) {
    const int t = min(at.t + j * at.step, p.T - 1);
    if (at.there > 0) {
      x[j].template load<whole>(row_at<T>(p.x, at.b, at.h, t) + at.first, at.there);
      d[j].load_gradient(row_at<T>(p.y, at.b, at.h, t) + at.first);
    }
    by[j] = factor_of(p, at, t);
  }
  if constexpr (map == Map::cosine) {
#pragma unroll
    for (int j = 0; j < rows; ++j) squares[j] = x[j].sum([](int, auto y) { return y * y; });
    total(squares, job.lanes);
  }
  if (map == Map::cosine || p.d_factor) {
#pragma unroll
    for (int j = 0; j < rows; ++j)
      dot[j] = x[j].sum([&](int i, auto y) {
        return whole || i < at.there ? decltype(y)(value<map>(float(y))) * float(d[j].x[i]) : 0;
      });
    total(dot, job.lanes);
  }
#pragma unroll
  for (int j = 0; j < rows; ++j) {
    const int t = at.t + j * at.step;
    float along = 0;
    if constexpr (map == Map::cosine) {
      const Unit unit{float(squares[j])};
      by[j] *= unit.per_length, along = float(dot[j]) * unit.per_square, dot[j] *= unit.per_length;
    }
    if (p.d_factor && at.first == 0 && t < p.T)
      p.d_factor[(at.b * p.H + at.h) * p.T + t] = float(dot[j]);
    d[j].template set<whole>(at.there, [&](int i, float dy) {
      const float own = float(x[j].x[i]);
      if constexpr (map == Map::cosine) dy -= own * along;
      return dy * slope<map>(own) * by[j];
    });
    if (t < p.T && at.there > 0)
      d[j].template store<whole>(row_at<T>(p.dx, at.b, at.h, t) + at.first, at.there);
  }
}

// Normalises a channel over the heads: each thread holds eight channels of a token and reads its
// heads twice, the second time from cache. There is no factor.
template <class T, bool whole, bool backward>
__global__ __launch_bounds__(kMapThreads) void feature_map_over_heads_kernel(
    const __grid_constant__ MapJob job) {
  const FeatureRows& p = job.p;
  const int64_t at = int64_t(blockIdx.x) * kMapThreads + threadIdx.x, token = at / job.lanes;
  const int first = int(at % job.lanes) * 8, there = p.D - first;
  if (token >= int64_t(p.B) * p.T || there <= 0) return;
  const int64_t b = token / p.T, t = token % p.T;
  float per_length[8] = {}, along[8] = {};
  Channels<T> x, d;
  const auto load = [&](int h) {
    x.template load<whole>(row_at<T>(p.x, b, h, t) + first, there);
    if (backward) d.load_gradient(row_at<T>(p.y, b, h, t) + first);
  };
  for (int h = 0; h < p.H; ++h) {
    load(h);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      per_length[i] += float(x.x[i]) * float(x.x[i]);
      if (backward) along[i] += float(x.x[i]) * float(d.x[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const Unit unit(per_length[i], p.repeats);
    per_length[i] = unit.per_length, along[i] *= unit.per_square;
  }
  for (int h = 0; h < p.H; ++h) {
    load(h);
    if constexpr (backward) {
      d.template set<whole>(
          there, [&](int i, float dy) { return (dy - float(x.x[i]) * along[i]) * per_length[i]; });
      d.template store<whole>(row_at<T>(p.dx, b, h, t) + first, there);
    } else {
      x.template set<whole>(there, [&](int i, float y) { return y * per_length[i]; });
      x.template store<true>(row_at<T>(p.y, b, h, t) + first, 8);
    }
  }
}

// Calls f with the map as a constant; cosine_over_heads has its own kernel.
template <class F>
static void with_map(Map map, const F& f) {
  if (map == Map::relu) return f(std::integral_constant<Map, Map::relu>());
  if (map == Map::elu1) return f(std::integral_constant<Map, Map::elu1>());
  if (map == Map::cosine) return f(std::integral_constant<Map, Map::cosine>());
  f(std::integral_constant<Map, Map::identity>());
}
static bool is_whole(const View& x, const FeatureRows& p) {
  const int64_t bytes = p.dtype == Dtype::float32 ? 4 : 2;
  const auto aligned = [&](int64_t n) { return n * bytes % kAlignment == 0; };
  return p.D % 8 == 0 && reinterpret_cast<uintptr_t>(x.at) % kAlignment == 0 && aligned(x.batch) &&
         aligned(x.head) && aligned(x.row);
}

template <class T, bool whole, bool backward>
static void start(const FeatureRows& p, Stream stream) {
  MapJob job{p, 1};
  while (job.lanes * 8 < p.D) job.lanes *= 2;
  const int at_once = kMapThreads / job.lanes;
  if (p.map == Map::cosine_over_heads)
    return launch(feature_map_over_heads_kernel<T, whole, backward>,
                  Grid{ceil_div(int64_t(p.B) * p.T, at_once), 1, kMapThreads, 0}, stream, job);
  with_map(p.map, [&]<Map map>(std::integral_constant<Map, map>) {
    constexpr int rows = whole && !backward && sizeof(T) == 2 ? 4 : 1;
    const int64_t all = int64_t(p.B) * p.H * ceil_div(p.T, at_once * rows);
    check(all < INT_MAX, "grid.x is below 2147483647; use a smaller batch; got ", all);
    const Grid grid{all, 1, kMapThreads, 0};
    if constexpr (backward) {
      launch(feature_map_backward_kernel<T, map, whole, rows>, grid, stream, job);
    } else {
      launch(feature_map_kernel<T, map, whole, rows>, grid, stream, job);
    }
  });
}
template <bool backward>
static void start(const FeatureRows& p, Stream stream) {
  check(p.D <= kMaxChannels, "feature maps on a GPU support head dimensions up to ", kMaxChannels,
        "; got ", p.D);
  if (int64_t(p.B) * p.H * p.T * p.D == 0) return;
  const bool whole = is_whole(p.x, p) && is_whole(p.dx, p);
  with_dtype(p.dtype, [&]<class T>(T) {
    (whole ? start<T, true, backward> : start<T, false, backward>)(p, stream);
  });
}

void map_rows(const FeatureRows& p, Stream stream) {
  start<false>(p, stream);
}
void map_rows_backward(const FeatureRows& p, Stream stream) {
  start<true>(p, stream);
}

}  // namespace horner::attn::kernels::cuda
