// Eight channels a lane, as many lanes as a row has of them, several rows a thread: all of its
// loads are on their way before the first is used.
#include "attn/exec/kernels/features_cuda.h"
#include "attn/exec/kernels/fused_cuda_launch.cuh"

namespace horner::attn::kernels::cuda {

inline constexpr int kMapThreads = 256;
inline constexpr float kLeastLength = 1e-12f;

// The problem, and what of it is read and written 16 bytes at once.
struct MapJob {
  FeatureRows p;
  bool whole_x, whole_dx;
  int lanes;  // of a row, a power of two
};

template <class T>
__device__ inline T* row_at(const View& x, int64_t b, int64_t h, int64_t t) {
  return static_cast<T*>(x.at) + b * x.batch + h * x.head + t * x.row;
}

// Eight channels of a row, of which `n` are there.
template <class T>
struct alignas(16) Channels {
  T x[8];

  __device__ void load(const T* from, int n, bool whole) {
    if (whole && n >= 8) {
#pragma unroll
      for (int i = 0; i < int(sizeof(T)) / 2; ++i)
        reinterpret_cast<uint4*>(x)[i] = __ldcs(reinterpret_cast<const uint4*>(from) + i);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = i < n ? from[i] : T(0.f);
    }
  }
  __device__ void store(T* to, int n, bool whole) const {
    if (whole && n >= 8) {
#pragma unroll
      for (int i = 0; i < int(sizeof(T)) / 2; ++i)
        reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(x)[i];
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (i < n) to[i] = x[i];
    }
  }
  // f of each channel that is there; 0 for the others.
  template <class F>
  __device__ void set(int n, const F& f) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = T(i < n ? f(i, float(x[i])) : 0.f);
  }
  template <class F>
  __device__ float sum(const F& f) const {
    float s = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) s += f(i, float(x[i]));
    return s;
  }
};

__device__ inline float total(float x, int lanes) {
  for (int step = 1; step < lanes; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
__device__ inline float square(int, float x) {
  return x * x;
}

// f of a number and its slope, a length apart. NaN stays.
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

// One over a length, and what multiplies x (x.dy) in the gradient: 0 where the length is at its
// bound.
struct Unit {
  float per_length, per_square;

  __device__ Unit(float squares, float repeats) {
    const float length = sqrtf(squares * repeats);
    const bool tiny = length < kLeastLength;
    per_length = 1 / (tiny ? kLeastLength : length);
    per_square = tiny ? 0 : 1 / squares;
  }
};

// Where a thread stands: its head, its first row, the distance to the next one, its channels.
struct MapPlace {
  int64_t b, h;
  int t, step, first, there;

  __device__ MapPlace(const MapJob& job, int rows) {
    const unsigned at_once = kMapThreads / unsigned(job.lanes), rows_of_block = at_once * rows;
    const unsigned blocks = (unsigned(job.p.T) + rows_of_block - 1) / rows_of_block;
    const unsigned head = blockIdx.x / blocks;
    b = head / unsigned(job.p.H), h = head % unsigned(job.p.H), step = int(at_once);
    t = int(blockIdx.x % blocks * rows_of_block + threadIdx.x / unsigned(job.lanes));
    first = int(threadIdx.x) % job.lanes * 8, there = job.p.D - first;
  }
};
__device__ inline float factor_of(const FeatureRows& p, int64_t b, int64_t h, int t) {
  return p.factor.at ? *row_at<float>(p.factor, b, h, t) : 1;
}

template <class T, Map map, int rows>
__global__ __launch_bounds__(kMapThreads) void map_kernel(const __grid_constant__ MapJob job) {
  const FeatureRows& p = job.p;
  const MapPlace at(job, rows);
  Channels<T> x[rows];
  float by[rows];
#pragma unroll
  for (int j = 0; j < rows; ++j) {
    const int t = min(at.t + j * at.step, p.T - 1);
    x[j].load(row_at<T>(p.x, at.b, at.h, t) + at.first, at.there, job.whole_x);
    by[j] = factor_of(p, at.b, at.h, t);
  }
#pragma unroll
  for (int j = 0; j < rows; ++j) {
    const int t = at.t + j * at.step;
    if constexpr (map == Map::cosine)
      by[j] *= Unit(total(x[j].sum(square), job.lanes), 1).per_length;
    x[j].set(at.there, [&](int, float y) { return value<map>(y) * by[j]; });
    if (t < p.T && at.there > 0) x[j].store(row_at<T>(p.y, at.b, at.h, t) + at.first, 8, true);
  }
}

template <class T, Map map, int rows>
__global__ __launch_bounds__(kMapThreads) void map_backward_kernel(
    const __grid_constant__ MapJob job) {
  const FeatureRows& p = job.p;
  const MapPlace at(job, rows);
  Channels<T> x[rows], d[rows];
  float by[rows];
#pragma unroll
  for (int j = 0; j < rows; ++j) {
    const int t = min(at.t + j * at.step, p.T - 1);
    x[j].load(row_at<T>(p.x, at.b, at.h, t) + at.first, at.there, job.whole_x);
    d[j].load(row_at<T>(p.y, at.b, at.h, t) + at.first, at.there > 0 ? 8 : 0, true);
    by[j] = factor_of(p, at.b, at.h, t);
  }
#pragma unroll
  for (int j = 0; j < rows; ++j) {
    const int t = at.t + j * at.step;
    const auto fx = [&](int i) { return i < at.there ? value<map>(float(x[j].x[i])) : 0; };
    float along = 0, per_length = 1;
    if constexpr (map == Map::cosine) {
      const Unit unit(total(x[j].sum(square), job.lanes), 1);
      along = unit.per_square, per_length = unit.per_length;
    }
    if (map == Map::cosine || p.d_factor) {
      const float dot = total(d[j].sum([&](int i, float dy) { return dy * fx(i); }), job.lanes);
      along *= dot;
      if (p.d_factor && at.first == 0 && t < p.T)
        p.d_factor[(at.b * p.H + at.h) * p.T + t] = dot * per_length;
    }
    by[j] *= per_length;
    d[j].set(at.there, [&](int i, float dy) {
      const float own = float(x[j].x[i]);
      return (dy * slope<map>(own) - own * along) * by[j];
    });
    if (t < p.T && p.dx.at)
      d[j].store(row_at<T>(p.dx, at.b, at.h, t) + at.first, at.there, job.whole_dx);
  }
}

// The length is that of a channel over the heads: a thread has eight channels of a token and reads
// its heads twice, the second time from a cache. There is no factor.
template <class T, bool backward>
__global__ __launch_bounds__(kMapThreads) void over_heads_kernel(
    const __grid_constant__ MapJob job) {
  const FeatureRows& p = job.p;
  const int64_t at = int64_t(blockIdx.x) * kMapThreads + threadIdx.x, token = at / job.lanes;
  const int first = int(at % job.lanes) * 8, there = p.D - first;
  if (token >= int64_t(p.B) * p.T || there <= 0) return;
  const int64_t b = token / p.T, t = token % p.T;
  float per_length[8] = {}, along[8] = {};
  Channels<T> x, d;
  const auto load = [&](int h) {
    x.load(row_at<T>(p.x, b, h, t) + first, there, job.whole_x);
    if (backward) d.load(row_at<T>(p.y, b, h, t) + first, 8, true);
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
      d.set(there,
            [&](int i, float dy) { return (dy - float(x.x[i]) * along[i]) * per_length[i]; });
      d.store(row_at<T>(p.dx, b, h, t) + first, there, job.whole_dx);
    } else {
      x.set(there, [&](int i, float y) { return y * per_length[i]; });
      x.store(row_at<T>(p.y, b, h, t) + first, 8, true);
    }
  }
}

// f of the map as a constant; that over heads has a kernel of its own.
template <class F>
static void with_map(Map map, const F& f) {
  if (map == Map::relu) return f(std::integral_constant<Map, Map::relu>());
  if (map == Map::elu1) return f(std::integral_constant<Map, Map::elu1>());
  if (map == Map::cosine) return f(std::integral_constant<Map, Map::cosine>());
  f(std::integral_constant<Map, Map::identity>());
}
template <class F>
static void with_type(Dtype dtype, const F& f) {
  if (dtype == Dtype::bfloat16) return f(bf16());
  if (dtype == Dtype::float16) return f(fp16());
  f(float());
}

static bool whole(const View& x, const FeatureRows& p) {
  const int64_t bytes = p.dtype == Dtype::float32 ? 4 : 2;
  const auto aligned = [&](int64_t n) { return n * bytes % kAlignment == 0; };
  return p.D % 8 == 0 && reinterpret_cast<uintptr_t>(x.at) % kAlignment == 0 && aligned(x.batch) &&
         aligned(x.head) && aligned(x.row);
}

template <bool backward>
static void start(const FeatureRows& p, Stream stream) {
  check(p.D <= kMostChannels, "features on a GPU take head dimensions up to ", kMostChannels,
        ", not ", p.D);
  if (int64_t(p.B) * p.H * p.T * p.D == 0) return;
  MapJob job{p, whole(p.x, p), whole(p.dx, p), 1};
  while (job.lanes * 8 < p.D) job.lanes *= 2;
  const int at_once = kMapThreads / job.lanes;
  with_type(p.dtype, [&]<class T>(T) {
    if (p.map == Map::cosine_over_heads)
      return launch(over_heads_kernel<T, backward>,
                    Grid{blocks(int64_t(p.B) * p.T, at_once), 1, kMapThreads, 0}, stream, job);
    with_map(p.map, [&]<Map map>(std::integral_constant<Map, map>) {
      constexpr int rows = sizeof(T) == 2 ? 4 : 2;
      const int64_t all = int64_t(p.B) * p.H * blocks(p.T, at_once * rows);
      check(all < INT_MAX, "more blocks of tokens than a GPU takes: ", all);
      const Grid grid{all, 1, kMapThreads, 0};
      if constexpr (backward) {
        launch(map_backward_kernel<T, map, rows>, grid, stream, job);
      } else {
        launch(map_kernel<T, map, rows>, grid, stream, job);
      }
    });
  });
}

void map_rows(const FeatureRows& p, Stream stream) {
  start<false>(p, stream);
}
void map_rows_backward(const FeatureRows& p, Stream stream) {
  start<true>(p, stream);
}

}  // namespace horner::attn::kernels::cuda
