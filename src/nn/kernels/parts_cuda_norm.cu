// Norms and heads on CUDA: a block or a warp for each row, sums in a fixed order.
#include "nn/kernels/parts_cuda.cuh"

namespace horner::nn::kernels::cuda {

template <class R, class A, int N>
__global__ void norm_rows(const Norm p) {
  const int64_t r = blockIdx.x, first = threadIdx.x * N, step = blockDim.x * N;
  const R* x = at<R>(p.x, r * p.x_row);
  float total = 0;
  if (p.added) {
    const A* added = at<A>(p.added, r * p.added_row);
    R* sum = at<R>(p.sum, r * p.C);
    for (int64_t c = first; c < p.C; c += step) {
      Pack<N> a = get<N>(x + c);
      const Pack<N> b = get<N>(added + c);
      for (int i = 0; i < N; ++i) a.x[i] += b.x[i];
      put<N>(sum + c, a);
    }
    x = sum;  // each thread reads again what it wrote
  }
  float mean = 0;
  if (p.layer) {
    for (int64_t c = first; c < p.C; c += step) {
      const Pack<N> a = get<N>(x + c);
      for (int i = 0; i < N; ++i) total += a.x[i];
    }
    mean = block_sum(total) / float(p.C);
  }
  float squares = 0;
  for (int64_t c = first; c < p.C; c += step) {
    const Pack<N> a = get<N>(x + c);
    for (int i = 0; i < N; ++i) squares += (a.x[i] - mean) * (a.x[i] - mean);
  }
  const float rstd = 1 / sqrtf(block_sum(squares) / float(p.C) + p.eps);
  if (threadIdx.x == 0) {
    if (p.layer) p.mean[r] = mean;
    p.rstd[r] = rstd;
  }
  for (int64_t c = first; c < p.C; c += step) {
    Pack<N> a = get<N>(x + c);
    const Pack<N> w = get<N>(p.weight + c);
    for (int i = 0; i < N; ++i) a.x[i] = (a.x[i] - mean) * rstd * (w.x[i] + p.plus);
    if (p.bias)
      for (int i = 0; i < N; ++i) a.x[i] += p.bias[c + i];
    put<N>(at<A>(p.y, r * p.C + c), a);
  }
}

// A block takes the rows of a task; every thread adds up its own channels of the weight's gradient.
template <class R, class A, int N>
__global__ void norm_rows_backward(const Norm p) {
  extern __shared__ float sums[];  // [C], and [C] of the bias
  float* bias_sums = sums + p.C;
  const int64_t first = threadIdx.x * N, step = blockDim.x * N;
  for (int64_t c = first; c < p.C; c += step)
    for (int i = 0; i < N; ++i) {
      sums[c + i] = 0;
      if (p.bias) bias_sums[c + i] = 0;
    }
  const int64_t from = blockIdx.x * p.rows.each, to = min(from + p.rows.each, p.rows.count);
  for (int64_t r = from; r < to; ++r) {
    const R* x = at<R>(p.x, r * p.x_row);
    const A* d_y = at<A>(p.d_y, r * p.d_y_row);
    const float rstd = p.rstd[r], mean = p.layer ? p.mean[r] : 0;
    float g_sum = 0, gu_sum = 0;
    for (int64_t c = first; c < p.C; c += step) {
      const Pack<N> a = get<N>(x + c), d = get<N>(d_y + c), w = get<N>(p.weight + c);
      for (int i = 0; i < N; ++i) {
        const float u = (a.x[i] - mean) * rstd, g = d.x[i] * (w.x[i] + p.plus);
        g_sum += g, gu_sum += g * u;
        sums[c + i] += d.x[i] * u;
        if (p.bias) bias_sums[c + i] += d.x[i];
      }
    }
    const float g_mean = p.layer ? block_sum(g_sum) / float(p.C) : 0;
    const float gu_mean = block_sum(gu_sum) / float(p.C);
    for (int64_t c = first; c < p.C; c += step) {
      const Pack<N> a = get<N>(x + c), d = get<N>(d_y + c), w = get<N>(p.weight + c);
      Pack<N> out;
      for (int i = 0; i < N; ++i) {
        const float u = (a.x[i] - mean) * rstd, g = d.x[i] * (w.x[i] + p.plus);
        out.x[i] = (g - g_mean - u * gu_mean) * rstd;
      }
      if (p.d_sum) {
        const Pack<N> more = get<N>(at<R>(p.d_sum, r * p.d_sum_row + c));
        for (int i = 0; i < N; ++i) out.x[i] += more.x[i];
      }
      put<N>(at<R>(p.d_x, r * p.C + c), out);
      if (p.d_added) put<N>(at<A>(p.d_added, r * p.C + c), out);
    }
  }
  for (int64_t c = first; c < p.C; c += step)
    for (int i = 0; i < N; ++i) {
      p.d_weight[blockIdx.x * p.C + c + i] = sums[c + i];
      if (p.bias) p.d_bias[blockIdx.x * p.C + c + i] = bias_sums[c + i];
    }
}

// A head of a row by a group of lanes, a power of two of them: each takes N channels of the first
// half and the N that turn with them, kRounds times at most.
template <int N>
inline constexpr int kRounds = int(kMostHeadChannels / 64) / N;

struct Group {
  int lanes, lane, index, count;  // in a block

  __device__ explicit Group(int lanes)
      : lanes(lanes),
        lane(int(threadIdx.x) % lanes),
        index(int(threadIdx.x) / lanes),
        count(int(blockDim.x) / lanes) {}
  __device__ float sum(float x) const {
    for (int i = lanes / 2; i > 0; i /= 2) x += __shfl_xor_sync(~0u, x, i);
    return x;
  }
};
// Head h of a row among q, k and v.
template <class T>
__device__ inline T* place(const Heads& p, int h, int64_t row) {
  const Heads4 to = h < p.H ? p.q : h < p.H + p.G ? p.k : p.v;
  const int64_t index = h < p.H ? h : h < p.H + p.G ? h - p.H : h - p.H - p.G;
  return at<T>(to.at, row / p.T * to.batch + index * to.head + row % p.T * to.token);
}
template <int N>
struct Pair {
  Pack<N> a, b;
};
template <int N, class T>
__device__ inline Pair<N> get_pair(const T* x, int i, int half) {
  return {get<N>(x + i), get<N>(x + half + i)};
}
template <int N, class T>
__device__ inline void put_pair(T* x, int i, int half, const Pair<N>& y) {
  put<N>(x + i, y.a), put<N>(x + half + i, y.b);
}
template <int N>
__device__ inline void turn(Pair<N>& x, const float* cos, const float* sin, float way) {
  const Pack<N> c = get<N>(cos), s = get<N>(sin);
  for (int j = 0; j < N; ++j) {
    const float a = x.a.x[j], b = x.b.x[j], to = s.x[j] * way;
    x.a.x[j] = a * c.x[j] - b * to, x.b.x[j] = b * c.x[j] + a * to;
  }
}

template <class T, int N, bool Normed>
__global__ void heads_rows(const Heads p, int lanes) {
  const Group g(lanes);
  const int all = int(p.H + 2 * p.G), half = int(p.D / 2);
  const int64_t row = blockIdx.x, angle = row % p.T * half;
  for (int first = 0; first < all; first += g.count) {  // as often for all lanes of a warp
    const int h = first + g.index;
    const bool here = h < all, is_v = h >= p.H + p.G;
    const T* x = at<T>(p.x, row * p.x_row + h * p.D);
    Pair<N> y[kRounds<N>];
    float squares = 0;
#pragma unroll
    for (int j = 0; j < kRounds<N>; ++j) {
      const int i = (g.lane + j * lanes) * N;
      if (!here || i >= half) continue;
      y[j] = get_pair<N>(x, i, half);
      for (int k = 0; Normed && k < N; ++k)
        squares += y[j].a.x[k] * y[j].a.x[k] + y[j].b.x[k] * y[j].b.x[k];
    }
    float rstd = 1;
    if (Normed) rstd = 1 / sqrtf(g.sum(squares) / float(p.D) + p.eps);
    if (!here) continue;
    if (Normed && !is_v && g.lane == 0) p.rstd[row * (p.H + p.G) + h] = rstd;
    T* to = place<T>(p, h, row);
#pragma unroll
    for (int j = 0; j < kRounds<N>; ++j) {
      const int i = (g.lane + j * lanes) * N;
      if (i >= half) continue;
      if (Normed && !is_v) {
        const Pair<N> w = get_pair<N>(h < p.H ? p.q_norm : p.k_norm, i, half);
        for (int k = 0; k < N; ++k) {
          y[j].a.x[k] *= rstd * (w.a.x[k] + p.plus);
          y[j].b.x[k] *= rstd * (w.b.x[k] + p.plus);
        }
      }
      if (p.cos && !is_v) turn(y[j], p.cos + angle + i, p.sin + angle + i, 1);
      put_pair<N>(to, i, half, y[j]);
    }
  }
}

// A block takes the rows of a task; the sums of its groups are added in their order.
template <class T, int N, bool Normed>
__global__ void heads_rows_backward(const Heads p, int lanes) {
  extern __shared__ float shared[];  // [groups, D], of norms
  const Group g(lanes);
  const int all = int(p.H + 2 * p.G), half = int(p.D / 2);
  Pair<N> sums[2][kRounds<N>] = {};
  const int64_t from = blockIdx.x * p.rows.each, end = min(from + p.rows.each, p.rows.count);
  for (int64_t row = from; row < end; ++row)
    for (int first = 0; first < all; first += g.count) {
      const int h = first + g.index;
      const bool here = h < all, is_v = h >= p.H + p.G, normed = Normed && here && !is_v;
      const T *d_y = here ? place<T>(p, h, row) : nullptr, *x = nullptr;
      if (normed) x = at<T>(p.x, row * p.x_row + h * p.D);
      const float rstd = normed ? p.rstd[row * (p.H + p.G) + h] : 1;
      const int64_t angle = row % p.T * half;
      Pair<N> d[kRounds<N>], u[kRounds<N>];
      float mean = 0;
#pragma unroll
      for (int j = 0; j < kRounds<N>; ++j) {
        const int i = (g.lane + j * lanes) * N;
        if (!here || i >= half) continue;
        d[j] = get_pair<N>(d_y, i, half);
        if (p.cos && !is_v) turn(d[j], p.cos + angle + i, p.sin + angle + i, -1);
        if (!normed) continue;
        const Pair<N> w = get_pair<N>(h < p.H ? p.q_norm : p.k_norm, i, half);
        u[j] = get_pair<N>(x, i, half);
        const auto add = [&](Pack<N>& u, Pack<N>& d, const Pack<N>& w, Pack<N>& q, Pack<N>& k) {
          for (int e = 0; e < N; ++e) {
            u.x[e] *= rstd;
            (h < p.H ? q : k).x[e] += d.x[e] * u.x[e];
            d.x[e] *= w.x[e] + p.plus;
            mean += d.x[e] * u.x[e];
          }
        };
        add(u[j].a, d[j].a, w.a, sums[0][j].a, sums[1][j].a);
        add(u[j].b, d[j].b, w.b, sums[0][j].b, sums[1][j].b);
      }
      if (Normed) mean = g.sum(mean) / float(p.D);
#pragma unroll
      for (int j = 0; j < kRounds<N>; ++j) {
        const int i = (g.lane + j * lanes) * N;
        if (!here || i >= half) continue;
        for (int e = 0; normed && e < N; ++e) {
          d[j].a.x[e] = (d[j].a.x[e] - u[j].a.x[e] * mean) * rstd;
          d[j].b.x[e] = (d[j].b.x[e] - u[j].b.x[e] * mean) * rstd;
        }
        put_pair<N>(at<T>(p.d_x, (row * all + h) * p.D), i, half, d[j]);
      }
    }
  for (int which = 0; Normed && which < 2; ++which) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kRounds<N>; ++j) {
      const int i = (g.lane + j * lanes) * N;
      if (i < half) put_pair<N>(shared + g.index * p.D, i, half, sums[which][j]);
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < p.D; i += blockDim.x) {
      float sum = 0;
      for (int k = 0; k < g.count; ++k) sum += shared[k * p.D + i];
      (which ? p.d_k_norm : p.d_q_norm)[blockIdx.x * p.D + i] = sum;
    }
  }
}

template <class F>
static void with_norm(const Norm& p, const F& f) {
  const bool four =
      side_by_side(4, {p.C, p.x_row, p.added_row, p.d_y_row, p.d_sum_row},
                   {p.x, p.added, p.weight, p.sum, p.y, p.d_y, p.d_sum, p.d_x, p.d_added});
  with(p.wide, [&](auto R) {
    with(p.narrow, [&](auto A) { with_width(four, [&](auto N) { f(R, A, N); }); });
  });
}
void norm(const Norm& p, Stream stream) {
  with_norm(p, [&](auto R, auto A, auto N) {
    norm_rows<decltype(R), decltype(A), N.value>
        <<<unsigned(p.rows.count), threads_for(p.C, N.value, 512), 0, stream>>>(p);
  });
}
void norm_backward(const Norm& p, Stream stream) {
  with_norm(p, [&](auto R, auto A, auto N) {
    const auto kernel = norm_rows_backward<decltype(R), decltype(A), N.value>;
    const int bytes = int(p.C * 4 * (p.bias ? 2 : 1));
    if (bytes > 40 << 10)
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<unsigned(p.rows.tasks()), threads_for(p.C, N.value, 512), size_t(bytes), stream>>>(p);
  });
}
// f(number, channels of a lane, whether there are norms, lanes, threads)
template <class F>
static void with_heads(const Heads& p, const F& f) {
  const int64_t half = p.D / 2, all = p.H + 2 * p.G;
  bool eight = side_by_side(8, {half, p.x_row}, {p.x, p.d_x, p.cos, p.sin, p.q_norm, p.k_norm});
  for (const Heads4& y : {p.q, p.k, p.v})
    eight &= side_by_side(8, {y.batch, y.head, y.token}, {y.at});
  int lanes = 1;
  while (lanes < 32 && lanes * (eight ? 8 : 1) < half) lanes *= 2;
  const int64_t wanted = (all * lanes + 31) / 32 * 32;
  const auto threads = unsigned(wanted < 256 ? wanted : 256);
  with(p.dtype, [&](auto T) {
    const auto normed = [&](auto N) {
      p.q_norm ? f(T, N, std::true_type(), lanes, threads)
               : f(T, N, std::false_type(), lanes, threads);
    };
    eight ? normed(std::integral_constant<int, 8>()) : normed(std::integral_constant<int, 1>());
  });
}
void heads(const Heads& p, Stream stream) {
  with_heads(p, [&](auto T, auto N, auto normed, int lanes, unsigned threads) {
    heads_rows<decltype(T), N.value, normed.value>
        <<<unsigned(p.rows.count), threads, 0, stream>>>(p, lanes);
  });
}
void heads_backward(const Heads& given, Stream stream) {
  Heads p = given;
  if (!p.q_norm) p.rows.each = 1;  // no sums of a task: a block for each row
  with_heads(p, [&](auto T, auto N, auto normed, int lanes, unsigned threads) {
    const size_t bytes = normed.value ? threads / unsigned(lanes) * size_t(p.D) * 4 : 0;
    heads_rows_backward<decltype(T), N.value, normed.value>
        <<<unsigned(p.rows.tasks()), threads, bytes, stream>>>(p, lanes);
  });
}

}  // namespace horner::nn::kernels::cuda
