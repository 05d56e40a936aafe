// Compiled once per instruction set. Each kernel runs over the rows of one task.
#include <cmath>

#include "nn/kernels/numbers.h"
#include "nn/kernels/parts.h"

namespace horner::nn::kernels::HORNER_ISA {

template <class T>
static const T* at(const void* p, int64_t i) {
  return static_cast<const T*>(p) + i;
}
template <class T>
static T* at(void* p, int64_t i) {
  return static_cast<T*>(p) + i;
}

// Calls f with a number of the dtype; the CPU kernels do not support float16.
template <class F>
static void with(Dtype d, const F& f) {
  if (d == Dtype::float32)
    f(float());
  else
    f(Bfloat16());
}

// Calls f(row, whether it is the first) for the rows of a task.
template <class F>
static void rows_of(const Rows& rows, int64_t task, const F& f) {
  const int64_t from = task * rows.each, to = from + rows.each;
  for (int64_t r = from; r < to && r < rows.count; ++r) f(r, r == from);
}

// Sums f(index, lanes) over n numbers; f must return 0 in unused lanes.
template <class F>
static float total(int64_t n, const F& f) {
  Vec sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth)
    for (int j = 0; j < 4; ++j) sums[j] += f(i + j * kWidth, All{});
  over(n - i, [&](int64_t j, auto lanes) { sums[0] += f(i + j, lanes); });
  return vec::sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}
struct Two {
  float a, b;
};
// Two such sums.
template <class F>
static Two totals(int64_t n, const F& f) {
  Vec a[2] = {}, b[2] = {};
  int64_t i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth)
    for (int j = 0; j < 2; ++j) f(i + j * kWidth, All{}, a[j], b[j]);
  over(n - i, [&](int64_t j, auto lanes) { f(i + j, lanes, a[0], b[0]); });
  return {vec::sum(a[0] + a[1]), vec::sum(b[0] + b[1])};
}

static void add_to(float* sums, bool first, Vec x, auto lanes) {
  put(sums, first ? x : get(sums, lanes) + x, lanes);
}

template <class R, class A>
static void norm_rows(const Norm& p, int64_t task) {
  const float per = 1 / float(p.C);
  rows_of(p.rows, task, [&](int64_t r, bool) {
    const R* x = at<R>(p.x, r * p.x_row);
    if (p.added) {
      const A* added = at<A>(p.added, r * p.added_row);
      R* sum = at<R>(p.sum, r * p.C);
      over(p.C, [&](int64_t i, auto n) { put(sum + i, get(x + i, n) + get(added + i, n), n); });
      x = sum;
    }
    float mean = 0;
    if (p.layer) mean = total(p.C, [&](int64_t i, auto n) { return get(x + i, n); }) * per;
    const float squares = total(p.C, [&](int64_t i, auto n) {
      const Vec y = only(get(x + i, n) - mean, n);
      return y * y;
    });
    const float rstd = 1 / std::sqrt(squares * per + p.eps);
    if (p.layer) p.mean[r] = mean;
    p.rstd[r] = rstd;
    A* y = at<A>(p.y, r * p.C);
    over(p.C, [&](int64_t i, auto n) {
      const Vec unit = (get(x + i, n) - mean) * rstd * (get(p.weight + i, n) + p.plus);
      put(y + i, p.bias ? unit + get(p.bias + i, n) : unit, n);
    });
  });
}

// With g = d_y (plus + weight) and u = (x - mean) rstd: d_x = d_sum + rstd (g - <g> - u <g u>),
// with the term <g> only if `layer` is set.
template <class R, class A>
static void norm_rows_backward(const Norm& p, int64_t task) {
  const float per = 1 / float(p.C);
  float* d_weight = p.d_weight + task * p.C;
  float* d_bias = p.bias ? p.d_bias + task * p.C : nullptr;
  rows_of(p.rows, task, [&](int64_t r, bool first) {
    const R* x = at<R>(p.x, r * p.x_row);
    const A* d_y = at<A>(p.d_y, r * p.d_y_row);
    const float rstd = p.rstd[r], mean = p.layer ? p.mean[r] : 0;
    Two means = totals(p.C, [&](int64_t i, auto n, Vec& g_sum, Vec& gu_sum) {
      const Vec d = get(d_y + i, n), u = (get(x + i, n) - mean) * rstd;
      const Vec g = d * (get(p.weight + i, n) + p.plus);
      g_sum += g, gu_sum += g * u;
      add_to(d_weight + i, first, d * u, n);
      if (d_bias) add_to(d_bias + i, first, d, n);
    });
    means.a = p.layer ? means.a * per : 0, means.b *= per;
    const R* d_sum = p.d_sum ? at<R>(p.d_sum, r * p.d_sum_row) : nullptr;
    R* d_x = at<R>(p.d_x, r * p.C);
    A* d_added = p.d_added ? at<A>(p.d_added, r * p.C) : nullptr;
    over(p.C, [&](int64_t i, auto n) {
      const Vec u = (get(x + i, n) - mean) * rstd;
      const Vec g = get(d_y + i, n) * (get(p.weight + i, n) + p.plus);
      Vec d = (g - means.a - u * means.b) * rstd;
      if (d_sum) d += get(d_sum + i, n);
      put(d_x + i, d, n);
      if (d_added) put(d_added + i, d, n);
    });
  });
}

template <class F>
static void with_both(const Norm& p, const F& f) {
  with(p.wide, [&](auto R) { with(p.narrow, [&](auto A) { f(R, A); }); });
}
static void norm(const Norm& p, int64_t task) {
  with_both(p, [&](auto R, auto A) { norm_rows<decltype(R), decltype(A)>(p, task); });
}
static void norm_backward(const Norm& p, int64_t task) {
  with_both(p, [&](auto R, auto A) { norm_rows_backward<decltype(R), decltype(A)>(p, task); });
}

// One head of a row.
struct Head {
  int64_t D;
  const float *cos, *sin;  // of its token, or null

  // direction: 1, or -1 for backward.
  void rotate(float* x, float direction) const {
    if (!cos) return;
    float *a = x, *b = x + D / 2;
    over(D / 2, [&](int64_t i, auto n) {
      const Vec c = get(cos + i, n), s = get(sin + i, n) * direction;
      const Vec low = get(a + i, n), high = get(b + i, n);
      put(a + i, low * c - high * s, n);
      put(b + i, high * c + low * s, n);
    });
  }
};
// Head h of a row: part of q, k or v.
struct HeadOf {
  const Heads4* to;
  const float* weight;  // of its norm, or null
  float* d_weight;
  bool rotated;
  int64_t index;  // among the heads of q, k or v
};
static HeadOf head_of(const Heads& p, int64_t h, int64_t task) {
  const auto sums = [&](float* all) { return all ? all + task * p.D : nullptr; };
  if (h < p.H) return {&p.q, p.q_norm, sums(p.d_q_norm), true, h};
  if (h < p.H + p.G) return {&p.k, p.k_norm, sums(p.d_k_norm), true, h - p.H};
  return {&p.v, nullptr, nullptr, false, h - p.H - p.G};
}
template <class T>
static T* place(const Heads& p, const HeadOf& o, int64_t row) {
  return at<T>(o.to->at, row / p.T * o.to->batch + o.index * o.to->head + row % p.T * o.to->token);
}
static Head at_token(const Heads& p, const HeadOf& o, int64_t row) {
  const int64_t from = row % p.T * (p.D / 2);
  return {p.D, o.rotated && p.cos ? p.cos + from : nullptr, p.cos ? p.sin + from : nullptr};
}

template <class T>
static void heads_rows(const Heads& p, int64_t task) {
  alignas(64) float y[kMostHeadChannels];
  rows_of(p.rows, task, [&](int64_t r, bool) {
    for (int64_t h = 0; h < p.H + 2 * p.G; ++h) {
      const HeadOf o = head_of(p, h, task);
      const T* x = at<T>(p.x, r * p.x_row + h * p.D);
      float rstd = 1;
      if (o.weight) {
        const float squares = total(p.D, [&](int64_t i, auto n) {
          const Vec v = get(x + i, n);
          return v * v;
        });
        rstd = 1 / std::sqrt(squares / float(p.D) + p.eps);
        p.rstd[r * (p.H + p.G) + h] = rstd;
      }
      over(p.D, [&](int64_t i, auto n) {
        const Vec v = get(x + i, n);
        put(y + i, o.weight ? v * rstd * (get(o.weight + i, n) + p.plus) : v, n);
      });
      at_token(p, o, r).rotate(y, 1);
      T* to = place<T>(p, o, r);
      over(p.D, [&](int64_t i, auto n) { put(to + i, get(y + i, n), n); });
    }
  });
}

template <class T>
static void heads_rows_backward(const Heads& p, int64_t task) {
  alignas(64) float d[kMostHeadChannels];
  rows_of(p.rows, task, [&](int64_t r, bool first) {
    for (int64_t h = 0; h < p.H + 2 * p.G; ++h) {
      const HeadOf o = head_of(p, h, task);
      const T* from = place<T>(p, o, r);
      over(p.D, [&](int64_t i, auto n) { put(d + i, get(from + i, n), n); });
      at_token(p, o, r).rotate(d, -1);
      T* d_x = at<T>(p.d_x, r * (p.H + 2 * p.G) * p.D + h * p.D);
      if (!o.weight) {
        over(p.D, [&](int64_t i, auto n) { put(d_x + i, get(d + i, n), n); });
        continue;
      }
      const T* x = at<T>(p.x, r * p.x_row + h * p.D);
      const float rstd = p.rstd[r * (p.H + p.G) + h];
      const bool new_sums = first && o.index == 0;
      const float mean = total(p.D,
                               [&](int64_t i, auto n) {
                                 const Vec u = get(x + i, n) * rstd, dy = get(d + i, n);
                                 add_to(o.d_weight + i, new_sums, dy * u, n);
                                 return dy * (get(o.weight + i, n) + p.plus) * u;
                               }) /
                         float(p.D);
      over(p.D, [&](int64_t i, auto n) {
        const Vec g = get(d + i, n) * (get(o.weight + i, n) + p.plus);
        put(d_x + i, (g - get(x + i, n) * rstd * mean) * rstd, n);
      });
    }
  });
}
static void heads(const Heads& p, int64_t task) {
  with(p.dtype, [&](auto T) { heads_rows<decltype(T)>(p, task); });
}
static void heads_backward(const Heads& p, int64_t task) {
  with(p.dtype, [&](auto T) { heads_rows_backward<decltype(T)>(p, task); });
}

inline constexpr float kGelu = 1.5957691216057308f, kCube = 0.044715f;  // 2 sqrt(2 / pi)

template <bool Gelu>
static Vec sigmoid(Vec x) {  // 1 / (1 + e^-z)
  const Vec z = Gelu ? x * (x * x * kCube + 1.f) * kGelu : x;
  return 1.f / (vec::exp(-z) + 1.f);
}
template <class T, bool Gelu>
static void gated_rows(const Gated& p, int64_t task) {
  rows_of(p.rows, task, [&](int64_t r, bool) {
    const T* x = at<T>(p.x, r * p.x_row);
    T* y = at<T>(p.y, r * p.M);
    over(p.M, [&](int64_t i, auto n) {
      const Vec g = get(x + i, n), f = g * sigmoid<Gelu>(g);
      put(y + i, p.gated ? f * get(x + p.M + i, n) : f, n);
    });
  });
}
template <class T, bool Gelu>
static void gated_rows_backward(const Gated& p, int64_t task) {
  rows_of(p.rows, task, [&](int64_t r, bool) {
    const T* x = at<T>(p.x, r * p.x_row);
    const T* d_y = at<T>(p.d_y, r * p.d_y_row);
    T* d_x = at<T>(p.d_x, r * p.M * (p.gated ? 2 : 1));
    over(p.M, [&](int64_t i, auto n) {
      const Vec g = get(x + i, n), s = sigmoid<Gelu>(g), d = get(d_y + i, n);
      const Vec dz = Gelu ? (g * g * (3 * kCube) + 1.f) * kGelu : splat(1.f);
      const Vec slope = s + g * s * (1.f - s) * dz;
      put(d_x + i, d * slope * (p.gated ? get(x + p.M + i, n) : splat(1.f)), n);
      if (p.gated) put(d_x + p.M + i, d * g * s, n);
    });
  });
}
template <class F>
static void with_kind(const Gated& p, const F& f) {
  with(p.dtype, [&](auto T) { p.gelu ? f(T, std::true_type()) : f(T, std::false_type()); });
}
static void gated(const Gated& p, int64_t task) {
  with_kind(p, [&](auto T, auto gelu) { gated_rows<decltype(T), gelu>(p, task); });
}
static void gated_backward(const Gated& p, int64_t task) {
  with_kind(p, [&](auto T, auto gelu) { gated_rows_backward<decltype(T), gelu>(p, task); });
}

template <class T>
static void loss_rows(const Loss& p, int64_t task) {
  rows_of(p.rows, task, [&](int64_t r, bool) {
    T* x = at<T>(p.logits, r * p.row);
    const int64_t target = p.targets[r];
    if (target < 0) {
      p.loss[r] = 0;
      if (p.gradient) over(p.V, [&](int64_t i, auto n) { put(x + i, Vec{}, n); });
      return;
    }
    Vec most = splat(-INFINITY);
    over(p.V, [&](int64_t i, auto n) {
      const Vec y = get(x + i, n);
      if constexpr (std::is_same_v<decltype(n), All>)
        most = vec::max(y, most);
      else
        most = vec::max(vec::choose(vec::lanes(0) < n, y, most), most);
    });
    const float top = vec::largest(most);
    const float sum =
        total(p.V, [&](int64_t i, auto n) { return only(vec::exp(get(x + i, n) - top), n); });
    const float log_sum = top + std::log(sum), wanted = get(x + target, 1)[0];
    p.loss[r] = log_sum - wanted;
    if (!p.gradient) return;
    const float scale = *p.scale;
    over(p.V, [&](int64_t i, auto n) { put(x + i, vec::exp(get(x + i, n) - log_sum) * scale, n); });
    put(x + target, splat(std::expm1(wanted - log_sum) * scale), 1);
  });
}
static void loss(const Loss& p, int64_t task) {
  with(p.dtype, [&](auto T) { loss_rows<decltype(T)>(p, task); });
}

const PartKernels part_kernels{norm,  norm_backward,  heads, heads_backward,
                               gated, gated_backward, loss};

}  // namespace horner::nn::kernels::HORNER_ISA
