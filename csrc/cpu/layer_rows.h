// The passes over a row between a decoder layer's products: RMSNorm, rotary embedding and the gated unit.
//
// Norms and rotary embedding have every rounding of PyTorch's own operators on T (float or Bf16), and squares are summed in
// its order, in eight lanes of four partial sums each, 16 at a time. Rows are floats that T holds. Files that include this
// must turn contraction off before.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "numbers.h"
#include "vectors.h"

namespace rolltree {

typedef float Eight __attribute__((vector_size(32)));
constexpr int64_t kEight = 8, kPartials = 4, kBlock = 16;
constexpr int64_t kGrain = 1 << 14;  // elements that justify a thread

inline Eight square(const float* x) {
  const Eight v = load_as<Eight>(x);
  return v * v;
}

inline float sum_of_squares(const float* x, int64_t n) {
  const int64_t vectors = n / kEight, steps = vectors / kPartials;
  Eight sum[kPartials], block[kPartials];  // unrolled, so that they are registers
#pragma GCC unroll 4
  for (int64_t p = 0; p < kPartials; ++p) sum[p] = block[p] = Eight{};
  for (int64_t i = 0; i < steps;) {
    const int64_t end = std::min(i + kBlock, steps), whole = end - i == kBlock;
    for (; i < end; ++i)
#pragma GCC unroll 4
      for (int64_t p = 0; p < kPartials; ++p) block[p] += square(x + (i * kPartials + p) * kEight);
    if (whole)
#pragma GCC unroll 4
      for (int64_t p = 0; p < kPartials; ++p) sum[p] += block[p], block[p] = Eight{};
  }
#pragma GCC unroll 4
  for (int64_t p = 0; p < kPartials; ++p) block[p] += sum[p];
  for (int64_t i = steps * kPartials; i < vectors; ++i) block[0] += square(x + i * kEight);
#pragma GCC unroll 4
  for (int64_t p = 1; p < kPartials; ++p) block[0] += block[p];
  float total = 0.f;
  for (int64_t d = vectors * kEight; d < n; ++d) total += x[d] * x[d];
  for (int64_t l = 0; l < kEight; ++l) total += block[0][l];
  return total;
}

// Returns the factor of the row, 1 / sqrt(mean square + eps).
template <class T>
inline float rms_norm(const float* x, const T* weight, float eps, int64_t n, float* out) {
  const float factor = 1.f / std::sqrt(sum_of_squares(x, n) / static_cast<float>(n) + eps);
  for (int64_t d = 0; d < n; ++d) out[d] = rounded<T>(weight[d] * rounded<T>(x[d] * factor));
  return factor;
}

// out = x * cos + (-high, low) * sin, with x = (low, high); they do not overlap.
template <class T>
inline void turn(const float* __restrict x, const T* cos, const T* sin, int64_t dim, float* __restrict out) {
  const int64_t half = dim / 2;
  for (int64_t d = 0; d < half; ++d) {
    const float kept = rounded<T>(x[d] * cos[d]), turned = rounded<T>(-x[d + half] * sin[d]);
    out[d] = rounded<T>(kept + turned);
  }
  for (int64_t d = half; d < dim; ++d) {
    const float kept = rounded<T>(x[d] * cos[d]), turned = rounded<T>(x[d - half] * sin[d]);
    out[d] = rounded<T>(kept + turned);
  }
}

// Returns 1 + e^-x, infinite below -88, where e^-x overflows.
inline Vec one_plus_exp_of_minus(Vec x) {
  const Vec low = x < -88.f ? splat(-88.f) : x, within = low > 87.f ? splat(87.f) : low;
  const Vec sum = 1.f + exp(-within);
  return x < -88.f ? splat(kInfinity) : sum;
}

// Returns x / (1 + e^-x) * up.
template <class T = float>
inline Vec silu_mul(Vec x, Vec up) {
  return rounded<T>(rounded<T>(x / one_plus_exp_of_minus(x)) * up);
}

// Computes silu_mul of `count` numbers, which may be in place; in silu_mul.cpp, whose contractions give it bits of its own.
void silu_mul(const float* x, const float* up, int64_t count, float* out);

}  // namespace rolltree
