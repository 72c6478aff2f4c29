// Vectors of floats and the functions that all CPU kernels share: 2^x, e^x, log, tanh.
//
// GCC's vector extensions, as wide as the target's registers. A kernel whose sums must have the same order on every machine
// uses vectors of its own width; the exponential takes any.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed by value between inlined functions only

namespace rolltree {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kPanelVectors = 4, kAccumulators = 24;  // 32 registers
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kPanelVectors = 2, kAccumulators = 12;  // 16 registers
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16, kPanelVectors = 4, kAccumulators = 24;
#else
constexpr int kVectorBytes = 16, kPanelVectors = 2, kAccumulators = 12;
#endif
constexpr int kLanes = kVectorBytes / 4;

typedef float Vec __attribute__((vector_size(kVectorBytes)));
typedef int32_t IVec __attribute__((vector_size(kVectorBytes)));
typedef uint32_t UVec __attribute__((vector_size(kVectorBytes)));
typedef uint16_t HalfVec __attribute__((vector_size(kVectorBytes / 2)));

// Returns sum + x * y, rounded once where the processor can. Compilers may contract such an expression in one loop and leave it
// alone in the next, as GCC does where it is tuned to avoid chains of sums, and a row's bits would depend on its loop.
inline Vec fused(Vec sum, Vec x, Vec y) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)y);
#else
  return sum + x * y;
#endif
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <class V>
inline V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
inline Vec load(const float* p) { return load_as<Vec>(p); }
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(Vec)); }

// Loads and stores the last `count` floats of an array, fewer than a vector.
inline Vec load_some(const float* p, int64_t count) {
  Vec v{};
  std::memcpy(&v, p, count * sizeof(float));
  return v;
}
inline void store_some(float* p, Vec v, int64_t count) { std::memcpy(p, &v, count * sizeof(float)); }

inline Vec splat(float x) { return x - Vec{}; }
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

// 2^f for f in [-0.5, 0.5], exactly 1 at 0. Relative error 2e-9 before rounding.
inline Vec exp2_of_fraction(Vec f) {
  Vec p = splat(0.00015353361959569156f);
  p = p * f + 0.0013398875016719103f;
  p = p * f + 0.00961843691766262f;
  p = p * f + 0.055503323674201965f;
  p = p * f + 0.24022647738456726f;
  p = p * f + 0.6931471824645996f;
  return p * f + 1.f;
}

// 2^x for x <= 127, flushed to 0 below 2^-126; NaN stays NaN. Relative error 2e-9 before rounding.
inline Vec exp2(Vec x) {
  const Vec low = splat(-126.f), round = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec clamped = x < low ? low : x;
  const Vec shifted = clamped + round;
  const Vec p = exp2_of_fraction(clamped - (shifted - round));
  const Vec power = (Vec)((UVec)p + ((UVec)shifted << 23));
  return x < low ? Vec{} : power;
}

// 2^(x - whole) for a whole number not below x rounded to one, flushed to 0 below 2^-126; NaN stays NaN. The fraction of x
// alone decides the bits: another whole number scales the result by a power of two.
inline Vec exp2_below(Vec x, float whole) {
  const UVec sign = (UVec)x & 0x80000000u;
  const Vec size = (Vec)((UVec)x ^ sign), one_apart = splat(8388608.f);  // 2^23, from which on floats are whole numbers
  const Vec rounded = (size + one_apart) - one_apart;
  const Vec n = (Vec)((UVec)(size < one_apart ? rounded : size) | sign);
  const Vec power = n - whole, low = splat(-126.f);
  const IVec steps = __builtin_convertvector(power < low ? low : power, IVec);
  const Vec p = (Vec)((UVec)exp2_of_fraction(x - n) + ((UVec)steps << 23));
  return power < low ? Vec{} : p;
}

// tanh with a small relative error near 0 too: an odd polynomial below 0.625, 1 - 2 / (e^2|x| + 1) above.
inline Vec tanh(Vec x) {
  const Vec magnitude = x < 0.f ? -x : x;
  const Vec capped = magnitude > 10.f ? splat(10.f) : magnitude;
  const Vec z = x * x;
  Vec p = splat(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const Vec small = p * z * x + x;
  const Vec large = 1.f - 2.f / (exp2(capped * (2.f * kLog2e)) + 1.f);
  return magnitude < 0.625f ? small : (x < 0.f ? -large : large);
}

// e^x for x in [-87, 88], in vectors of any width; NaN stays NaN. Error below 1.5 ulp.
template <class V>
inline V exp(V x) {
  using Bits = decltype(x < x);
  const V magic = 12582912.f - V{};  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
  const V shifted = x * 1.44269504088896341f + magic;
  const V n = shifted - magic;
  const V f = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  V p = f * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * (f * f) + f + 1.f;
  return p * (V)(((Bits)shifted - (Bits)magic + 127) << 23);
}

// log x for a positive normal x, to about 1 ulp.
inline Vec log_positive(Vec x) {
  const IVec bits = (IVec)x;
  const IVec e = (bits - 0x3f3504f3) >> 23;  // x = 2^e m with m in [sqrt(1/2), sqrt(2))
  const Vec n = __builtin_convertvector(e, Vec);
  const Vec f = (Vec)(bits - (e << 23)) - 1.f;
  Vec p = f * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const Vec square = f * f;
  return (p * f * square - n * 2.12194440e-4f - 0.5f * square) + f + n * 0.693359375f;
}

}  // namespace rolltree
