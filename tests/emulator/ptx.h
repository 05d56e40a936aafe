// The instructions of PTX that the kernels use, by name, in namespace ptx: outputs first, then
// inputs. A new one does not compile until it is here.
#pragma once

namespace emulator {

inline float widened(bool bf16, uint32_t bits16) {
  if (bf16) return __uint_as_float(bits16 << 16);
  const auto bits = uint16_t(bits16);
  __half h;
  std::memcpy(&h, &bits, 2);
  return __half2float(h);
}
inline float as_tf32(uint32_t bits) {
  return __uint_as_float(bits & 0xffffe000u);
}

struct Lanes4 {
  uint32_t x[4], at;
};
template <bool transposed>
inline void load_matrices(const char* name, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d,
                          uint32_t at) {
  Lanes4 own{{}, at};
  meet_in_warp(name, &own, [](void* const* lanes) {
    for (int m = 0; m < 4; ++m)
      for (int l = 0; l < 32; ++l) {
        uint16_t two[2];
        for (int i = 0; i < 2; ++i) {
          const int row = transposed ? l % 4 * 2 + i : l / 4,
                    column = transposed ? l / 4 : l % 4 * 2 + i;
          const auto* from = static_cast<Lanes4*>(lanes[8 * m + row]);
          std::memcpy(&two[i], static_cast<char*>(shared_pointer(from->at)) + 2 * column, 2);
        }
        static_cast<Lanes4*>(lanes[l])->x[m] = two[0] | uint32_t(two[1]) << 16;
      }
  });
  a = own.x[0], b = own.x[1], c = own.x[2], d = own.x[3];
}

// d [16, 8] = a [16, depth] b [depth, 8] + c. The layouts are those of the PTX manual.
struct Product {
  float d[4];
  uint32_t a[4], b[2];
};
template <int depth, class Element>
inline void multiply(const char* name, Product& own, const Element& element) {
  meet_in_warp(name, &own, [&](void* const* lanes) {
    float a[16][depth], b[depth][8];
    for (int l = 0; l < 32; ++l) {
      const auto& p = *static_cast<Product*>(lanes[l]);
      element(p, l, a, b);
    }
    for (int l = 0; l < 32; ++l) {
      auto& p = *static_cast<Product*>(lanes[l]);
      for (int i = 0; i < 4; ++i) {
        const int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
        double sum = p.d[i];
        for (int k = 0; k < depth; ++k) sum += double(a[row][k]) * b[k][column];
        p.d[i] = float(sum);
      }
    }
  });
}
template <bool bf16, int depth>
struct Halves {
  void operator()(const Product& p, int l, float (&a)[16][depth], float (&b)[depth][8]) const {
    for (int r = 0; r < depth / 4; ++r)
      for (int h = 0; h < 2; ++h)
        a[l / 4 + r % 2 * 8][l % 4 * 2 + r / 2 * 8 + h] = widened(bf16, p.a[r] >> 16 * h & 0xffff);
    for (int r = 0; r < depth / 8; ++r)
      for (int h = 0; h < 2; ++h)
        b[l % 4 * 2 + r * 8 + h][l / 4] = widened(bf16, p.b[r] >> 16 * h & 0xffff);
  }
};
struct Tf32 {
  void operator()(const Product& p, int l, float (&a)[16][8], float (&b)[8][8]) const {
    for (int r = 0; r < 4; ++r) a[l / 4 + r % 2 * 8][l % 4 + r / 2 * 4] = as_tf32(p.a[r]);
    for (int r = 0; r < 2; ++r) b[l % 4 + r * 4][l / 4] = as_tf32(p.b[r]);
  }
};
template <bool bf16>
inline void multiply_16(const char* name, float& d0, float& d1, float& d2, float& d3, uint32_t a0,
                        uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, float c0,
                        float c1, float c2, float c3) {
  Product own{{c0, c1, c2, c3}, {a0, a1, a2, a3}, {b0, b1}};
  multiply<16>(name, own, Halves<bf16, 16>());
  d0 = own.d[0], d1 = own.d[1], d2 = own.d[2], d3 = own.d[3];
}

template <class T>
inline T load_shared(uint32_t at) {
  T x;
  std::memcpy(&x, shared_pointer(at), sizeof x);
  return x;
}
template <class T>
inline void store_shared(uint32_t at, T x) {
  std::memcpy(shared_pointer(at), &x, sizeof x);
}

}  // namespace emulator

namespace ptx {

inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t& a, uint32_t& b, uint32_t& c,
                                                     uint32_t& d, uint32_t at) {
  emulator::load_matrices<false>("ldmatrix", a, b, c, d, at);
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t& a, uint32_t& b, uint32_t& c,
                                                           uint32_t& d, uint32_t at) {
  emulator::load_matrices<true>("ldmatrix.trans", a, b, c, d, at);
}
template <class... Operands>
void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(Operands&&... x) {
  emulator::multiply_16<true>("mma bf16", x...);
}
template <class... Operands>
void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(Operands&&... x) {
  emulator::multiply_16<false>("mma f16", x...);
}
inline void mma_sync_aligned_m16n8k8_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2,
                                                               float& d3, uint32_t a0, uint32_t a1,
                                                               uint32_t b, float c) {
  emulator::Product own{{c, c, c, c}, {a0, a1}, {b}};
  emulator::multiply<8>("mma bf16 k8", own, emulator::Halves<true, 8>());
  d0 = own.d[0], d1 = own.d[1], d2 = own.d[2], d3 = own.d[3];
}
inline void mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(float& d0, float& d1, float& d2,
                                                               float& d3, uint32_t a0, uint32_t a1,
                                                               uint32_t a2, uint32_t a3,
                                                               uint32_t b0, uint32_t b1) {
  emulator::Product own{{d0, d1, d2, d3}, {a0, a1, a2, a3}, {b0, b1}};
  emulator::multiply<8>("mma tf32", own, emulator::Tf32());
  d0 = own.d[0], d1 = own.d[1], d2 = own.d[2], d3 = own.d[3];
}
inline void ld_shared_b32(uint32_t& x, uint32_t at) {
  x = emulator::load_shared<uint32_t>(at);
}
inline void ld_shared_u16(uint16_t& x, uint32_t at) {
  x = emulator::load_shared<uint16_t>(at);
}
inline void ld_shared_v4_b32(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t at) {
  const auto x = emulator::load_shared<uint4>(at);
  a = x.x, b = x.y, c = x.z, d = x.w;
}
inline void ld_shared_v4_f32(float& a, float& b, float& c, float& d, uint32_t at) {
  const auto x = emulator::load_shared<float4>(at);
  a = x.x, b = x.y, c = x.z, d = x.w;
}
inline void st_shared_b32(uint32_t at, uint32_t x) {
  emulator::store_shared(at, x);
}
inline void st_shared_b16(uint32_t at, uint16_t x) {
  emulator::store_shared(at, x);
}
inline void st_shared_v4_b32(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  emulator::store_shared(at, uint4{a, b, c, d});
}
inline void ld_global_v2_f32(float& a, float& b, const void* at) {
  std::memcpy(&a, at, 4), std::memcpy(&b, static_cast<const char*>(at) + 4, 4);
}
inline void ld_global_b32(uint32_t& x, const void* at) {
  std::memcpy(&x, at, 4);
}
inline void prefetch_global_L1(const void*) {}
inline void cp_async_cg_shared_global(uint32_t to, const void* from, int bytes) {
  emulator::copy_later(to, from, bytes, 16 - bytes);
}
inline void cp_async_ca_shared_global_8(uint32_t to, const void* from) {
  emulator::copy_later(to, from, 8, 0);
}
inline void cp_async_ca_shared_global_4(uint32_t to, const void* from) {
  emulator::copy_later(to, from, 4, 0);
}
inline void cp_async_wait_all() {
  emulator::finish_copies(-1);
}
inline void cp_async_commit_group() {
  emulator::commit_copies();
}
inline void cp_async_wait_group(int n) {
  emulator::finish_copies(n);
}
inline void min_NaN_f32(float& y, float a, float b) {
  y = std::isnan(a) || std::isnan(b) ? NAN : std::fmin(a, b);
}
inline void ex2_approx_ftz_f32(float& y, float x) {
  y = std::exp2(x);
}
inline void tanh_approx_f32(float& y, float x) {
  y = std::tanh(x);
}

}  // namespace ptx
