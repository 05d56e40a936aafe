// Hopper instructions, one wrapper each: WGMMA with operands in shared memory as TMA swizzles them,
// TMA copies, and the mbarriers that count their bytes.
//
// In warp w of its warpgroup, lane l holds rows 16 w + l / 4 and 8 further of C [64, n], and of
// each eight columns 2 (l % 4) and the next: c[column / 8][4], as in common/mma.cuh.
#pragma once

#include <cuda.h>

#include "attn/kernels/cuda/common/mma.cuh"

namespace horner::attn::kernels::cuda {

// R rows of C 16-bit elements: in columns of 64 (128 bytes), 16-byte chunks swizzled by the row.
// Aligned to 1024 bytes.
template <int R, int C>
struct SwizzledTile {
  static constexpr int kColumnBytes = R * 128, kBytes = R * C * 2;
  static constexpr uint64_t kHigh = uint64_t(1024 >> 4 | 1u << 30) << 32;
  uint32_t at;

  // The matrix descriptor of an operand: start address, distances between columns of 64 and between
  // groups of eight rows, all in units of 16 bytes, and the swizzle mode. Stepping to the next
  // operand is one addition.
  __device__ uint64_t descriptor(int bytes) const {
    const uint32_t low = (at >> 4) + (uint32_t(kColumnBytes >> 4) << 16) + uint32_t(bytes >> 4);
    return kHigh | low;
  }
  // Rows from `row` on; the product sums over channels 16 k, ..., 16 k + 15.
  __device__ uint64_t k_major(int row, int k) const {
    return descriptor(row * 128 + k / 4 * kColumnBytes + k % 4 * 32);
  }
  // Channels from `channel` on; the product sums over rows 16 k, ..., 16 k + 15.
  __device__ uint64_t mn_major(int channel, int k) const {
    return descriptor(k * 2048 + channel / 64 * kColumnBytes + channel % 64 * 2);
  }
  // The tile's 64 channels, and a second column elsewhere: 16 rows, the same for every k.
  __device__ uint64_t mn_major_and(uint32_t column, int k) const {
    const uint32_t from = at + uint32_t(k * 2048), low = (from >> 4) + ((column - from) >> 4 << 16);
    return kHigh | low;
  }
};

// Descriptor of a B operand [16, 8] of ones: both halves of its rows are the same 128 bytes.
__device__ inline uint64_t ones_desc(uint32_t at) {
  return at >> 4;
}

// Whether the product sums over an operand's channels (k) or over its rows (mn).
enum class Major { k, mn };

// The accumulators as asm operands: added to ("+f") or set ("=f").
#define HORNER_SUMS_4(m, c, j) m(c[j][0]), m(c[j][1]), m(c[j][2]), m(c[j][3])
#define HORNER_SUMS_16(m, c, j)                                                   \
  HORNER_SUMS_4(m, c, j), HORNER_SUMS_4(m, c, j + 1), HORNER_SUMS_4(m, c, j + 2), \
      HORNER_SUMS_4(m, c, j + 3)
#define HORNER_SUMS_32(m, c) HORNER_SUMS_16(m, c, 0), HORNER_SUMS_16(m, c, 4)
#define HORNER_SUMS_64(m, c) HORNER_SUMS_32(m, c), HORNER_SUMS_16(m, c, 8), HORNER_SUMS_16(m, c, 12)
#define HORNER_NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define HORNER_NAMES_32 \
  HORNER_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define HORNER_NAMES_64                                                                  \
  HORNER_NAMES_32                                                                        \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52" \
  ",%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
// A operand in shared memory (SS) or in registers (RS). Last operands: A, B, whether to add.
#define HORNER_WGMMA_SS(n, type, names, a, b, add, a_major, b_major, ...)                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add                                          \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" names \
               "}, " a ", " b ", p, 1, 1, " a_major ", " b_major ";\n}\n"                       \
               : __VA_ARGS__                                                                    \
               : "l"(x), "l"(y), "r"(int(Add)), "n"(int(X)), "n"(int(Y)))
#define HORNER_WGMMA_RS(n, type, names, a, b, b_major, ...)                                        \
  asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #n      \
               "k16.f32." type "." type " {" names "}, {" a "}, " b ", p, 1, 1, " b_major ";\n}\n" \
               : __VA_ARGS__                                                                       \
               : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y), "n"(int(Y)))
#define HORNER_WGMMA_RS_SET(type)                                                                \
  asm volatile(                                                                                  \
      "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." type \
      "." type " {" HORNER_NAMES_32 "}, {%32,%33,%34,%35}, %36, p, 1, 1, %37;\n}\n"              \
      : HORNER_SUMS_32("=f", c)                                                                  \
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y), "n"(int(Y)))
#define HORNER_WGMMA_SS_N(type, m)                                                                 \
  if constexpr (n == 8)                                                                            \
    HORNER_WGMMA_SS(8, type, "%0,%1,%2,%3", "%4", "%5", "%6", "%7", "%8", HORNER_SUMS_4(m, c, 0)); \
  else if constexpr (n == 32)                                                                      \
    HORNER_WGMMA_SS(32, type, HORNER_NAMES_16, "%16", "%17", "%18", "%19", "%20",                  \
                    HORNER_SUMS_16(m, c, 0));                                                      \
  else if constexpr (n == 64)                                                                      \
    HORNER_WGMMA_SS(64, type, HORNER_NAMES_32, "%32", "%33", "%34", "%35", "%36",                  \
                    HORNER_SUMS_32(m, c));                                                         \
  else if constexpr (n == 72)                                                                      \
    HORNER_WGMMA_SS(72, type, HORNER_NAMES_32 ",%32,%33,%34,%35", "%36", "%37", "%38", "%39",      \
                    "%40", HORNER_SUMS_32(m, c), HORNER_SUMS_4(m, c, 8));                          \
  else                                                                                             \
    HORNER_WGMMA_SS(128, type, HORNER_NAMES_64, "%64", "%65", "%66", "%67", "%68",                 \
                    HORNER_SUMS_64(m, c))
#define HORNER_WGMMA_RS_N(type)                                                                    \
  if constexpr (n == 8)                                                                            \
    HORNER_WGMMA_RS(8, type, "%0,%1,%2,%3", "%4,%5,%6,%7", "%8", "%9", HORNER_SUMS_4("+f", c, 0)); \
  else if constexpr (n == 64)                                                                      \
    HORNER_WGMMA_RS(64, type, HORNER_NAMES_32, "%32,%33,%34,%35", "%36", "%37",                    \
                    HORNER_SUMS_32("+f", c));                                                      \
  else                                                                                             \
    HORNER_WGMMA_RS(128, type, HORNER_NAMES_64, "%64,%65,%66,%67", "%68", "%69",                   \
                    HORNER_SUMS_64("+f", c))

// Issues C [64, n] (+)= X [64, 16] Y [16, n], asynchronous until `wgmma_wait`.
template <class T, bool Add, Major X, Major Y, int columns>
__device__ __forceinline__ void wgmma_ss(float (&c)[columns][4], uint64_t x, uint64_t y) {
  constexpr int n = 8 * columns;
  static_assert(n == 8 || n == 32 || n == 64 || n == 72 || n == 128);
  if constexpr (std::is_same_v<T, bf16> && Add) {
    HORNER_WGMMA_SS_N("bf16", "+f");
  } else if constexpr (std::is_same_v<T, bf16>) {
    HORNER_WGMMA_SS_N("bf16", "=f");
  } else if constexpr (Add) {
    HORNER_WGMMA_SS_N("f16", "+f");
  } else {
    HORNER_WGMMA_SS_N("f16", "=f");
  }
}
// The same with X in registers; always adds.
template <class T, Major Y, int columns>
__device__ __forceinline__ void wgmma_rs(float (&c)[columns][4], const uint32_t (&x)[4],
                                         uint64_t y) {
  constexpr int n = 8 * columns;
  static_assert(n == 8 || n == 64 || n == 128);
  if constexpr (std::is_same_v<T, bf16>) {
    HORNER_WGMMA_RS_N("bf16");
  } else {
    HORNER_WGMMA_RS_N("f16");
  }
}
// Issues C [64, 64] = X [64, 16] Y [16, 64] with X in registers.
template <class T, Major Y>
__device__ __forceinline__ void wgmma_rs_set(float (&c)[8][4], const uint32_t (&x)[4], uint64_t y) {
  if constexpr (std::is_same_v<T, bf16>) {
    HORNER_WGMMA_RS_SET("bf16");
  } else {
    HORNER_WGMMA_RS_SET("f16");
  }
}
#undef HORNER_WGMMA_RS_SET
#undef HORNER_WGMMA_RS_N
#undef HORNER_WGMMA_SS_N
#undef HORNER_WGMMA_RS
#undef HORNER_WGMMA_SS
#undef HORNER_NAMES_64
#undef HORNER_NAMES_32
#undef HORNER_NAMES_16
#undef HORNER_SUMS_64
#undef HORNER_SUMS_32
#undef HORNER_SUMS_16
#undef HORNER_SUMS_4

// Orders register accesses before the WGMMAs that read or add to these registers.
__device__ inline void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
// Waits until all but the last `pending` groups have completed.
template <int pending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(pending) : "memory");
}
// Register fence: the compiler cannot use values before a WGMMA has written them.
template <int n>
__device__ inline void register_fence(float (&c)[n][4]) {
#pragma unroll
  for (int i = 0; i < 4 * n; ++i) asm volatile("" : "+f"(c[i / 4][i % 4])::"memory");
}
template <int n>
__device__ inline void register_fence(uint32_t (&c)[n][4]) {
#pragma unroll
  for (int i = 0; i < 4 * n; ++i) asm volatile("" : "+r"(c[i / 4][i % 4])::"memory");
}

// mbarriers in shared memory, 8 bytes each, count arrivals and copied bytes. A phase ends when all
// have arrived; `mbarrier_wait` takes phase 0, 1, 0, ...
__device__ inline void mbarrier_init(uint32_t at, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(at), "r"(arrivals) : "memory");
}
__device__ inline void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
__device__ inline void mbarrier_arrive(uint32_t at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(at) : "memory");
}
__device__ inline void mbarrier_arrive_expect(uint32_t at, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(at), "r"(bytes)
               : "memory");
}
__device__ inline void mbarrier_wait(uint32_t at, int phase) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\nbra again;\ndone:\n}\n" ::"r"(at),
      "r"(phase)
      : "memory");
}
// A named barrier of some warps; 0 is that of __syncthreads.
template <int threads>
__device__ inline void named_barrier_sync(int id) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "n"(threads) : "memory");
}

// Issues the load of a box of [batch, head, row, channel] to a tile's column.
__device__ inline void tma_load_box(uint32_t to, const CUtensorMap& from, int channel, int row,
                                    int head, int batch, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4, %5}], [%6];\n" ::"r"(to),
      "l"(&from), "r"(channel), "r"(row), "r"(head), "r"(batch), "r"(barrier)
      : "memory");
}
// Issues a copy of bytes; size and addresses are multiples of 16.
__device__ inline void tma_load_bytes(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
template <int R, int C>
__device__ inline void tma_load_tile(SwizzledTile<R, C> to, const CUtensorMap& from, int row,
                                     int head, int batch, uint32_t barrier) {
#pragma unroll
  for (int c = 0; c < C; c += 64)
    tma_load_box(to.at + uint32_t(c / 64 * to.kColumnBytes), from, c, row, head, batch, barrier);
}

// Makes stores to shared memory visible to WGMMA and TMA after the next barrier.
__device__ inline void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}
__device__ inline void store_float4(uint32_t at, const float (&x)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(at), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}
// Issues the addition of floats in shared memory to global memory. `tma_reduce_wait` waits until
// all but the last `pending` of these have read their source.
__device__ inline void tma_reduce_add(float* to, uint32_t from, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;\n" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}
template <int pending>
__device__ inline void tma_reduce_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(pending) : "memory");
}
// Stores a warp's four 8 x 8 matrices of an A operand to the rows that the lanes address.
__device__ inline void stmatrix(uint32_t at, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(at),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// Stores a warp's sixteen rows from registers to global memory, through its own rows of a tile from
// `row` on, so that each row is written contiguously.
template <class T, int R, int C>
__device__ inline void store_rows(SwizzledTile<R, C> tile, int row, const float (&x)[C / 8][4],
                                  void* to, int64_t first, int channels, int real) {
  const auto chunk = [&](int r, int c) {
    return tile.at + uint32_t(c / 8 * tile.kColumnBytes + r * 128 + ((c % 8 ^ (r & 7)) << 4));
  };
#pragma unroll
  for (int j = 0; j < C / 16; ++j) {
    const uint32_t y[4] = {
        pack2(T(), x[2 * j][0], x[2 * j][1]), pack2(T(), x[2 * j][2], x[2 * j][3]),
        pack2(T(), x[2 * j + 1][0], x[2 * j + 1][1]), pack2(T(), x[2 * j + 1][2], x[2 * j + 1][3])};
    stmatrix(chunk(row + lane() % 16, 2 * j + lane() / 16), y);
  }
  __syncwarp();
#pragma unroll
  for (int i = lane(); i < 2 * C; i += 32) {
    const int r = i / (C / 8), c = i % (C / 8);
    if (r >= real || c * 8 >= channels) continue;
    uint4 y;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w)
                 : "r"(chunk(row + r, c))
                 : "memory");
    *reinterpret_cast<uint4*>(static_cast<T*>(to) + (first + r) * channels + c * 8) = y;
  }
  __syncwarp();
}

// The thread's warpgroup, in a form that the compiler knows to be warp-uniform.
__device__ inline int warpgroup_index() {
  return __shfl_sync(~0u, int(threadIdx.x) / 128, 0);
}

// Sets the registers per thread of this warpgroup.
template <int n>
__device__ inline void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(n));
}
template <int n>
__device__ inline void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(n));
}

}  // namespace horner::attn::kernels::cuda
