// The types of weights: float and bf16. All arithmetic is in fp32; results are rounded to the type.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace rolltree {

// The upper half of a float's bits.
struct Bf16 {
  uint16_t bits;
  operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
};

// Returns floats rounded to T, to nearest and ties to even; NaN stays NaN.
template <class T>
inline Vec rounded(Vec x);
template <>
inline Vec rounded<float>(Vec x) {
  return x;
}
template <>
inline Vec rounded<Bf16>(Vec x) {
  const UVec bits = (UVec)x, up = bits + 0x7fffu + ((bits >> 16) & 1u);
  return x == x ? (Vec)(up & 0xffff0000u) : (Vec)((bits | 0x400000u) & 0xffff0000u);
}

template <class T>
inline float rounded(float x);
template <>
inline float rounded<float>(float x) {
  return x;
}
template <>
inline float rounded<Bf16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), up = bits + 0x7fffu + ((bits >> 16) & 1u);
  return std::bit_cast<float>((x == x ? up : bits | 0x400000u) & 0xffff0000u);
}

// Returns a float that T holds as T.
template <class T>
inline T narrowed(float x);
template <>
inline float narrowed<float>(float x) {
  return x;
}
template <>
inline Bf16 narrowed<Bf16>(float x) {
  return {static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16)};
}

// Loads kLanes numbers of T, or the last `count` of an array, as floats.
inline Vec load(const Bf16* p) { return (Vec)(__builtin_convertvector(load_as<HalfVec>(p), UVec) << 16); }
inline Vec load_some(const Bf16* p, int64_t count) {
  HalfVec v{};
  std::memcpy(&v, p, count * sizeof(Bf16));
  return (Vec)(__builtin_convertvector(v, UVec) << 16);
}

template <class T>
inline void widen(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  if (i < count) store_some(to + i, load_some(from + i, count - i), count - i);
}
template <class T>
inline void narrow(const float* from, int64_t count, T* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = narrowed<T>(from[i]);
}

}  // namespace rolltree
