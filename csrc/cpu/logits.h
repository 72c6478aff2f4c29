// Logits of a tile as the kernels of distributions read them: biased, capped and divided by a temperature.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "softmax.h"

namespace rolltree::softmax {

inline Vec<float> hyperbolic_tangent(Vec<float> x) { return rolltree::tanh(x); }

inline Vec<double> hyperbolic_tangent(Vec<double> x) {
  for (int64_t i = 0; i < kLanes<double>; ++i) x[i] = std::tanh(x[i]);
  return x;
}

// x = softcap(x), in place.
template <class T>
void cap(T* x, int64_t width, T softcap) {
  for (int64_t j = 0; j < width; j += kLanes<T>) {
    const Vec<T> z = load_some(x + j, width - j, T(0));
    store_some<T>(x + j, softcap * hyperbolic_tangent(z / softcap), width - j);
  }
}

// Logits of type In; arithmetic is in T.
template <class T, class In>
struct Rows {
  const In* logits;
  int64_t rows, width;
  const T* bias;  // or null
  const T* temperature;
  int64_t temperature_stride;
  T softcap;  // 0: none

  T inverse_temperature(int64_t i) const {
    return T(1) / temperature[i * temperature_stride];
  }
  // Returns x = softcap(u + bias) of row i: the row itself where they are the same, otherwise in `scratch`.
  const T* capped(int64_t i, T* scratch) const {
    const In* row = logits + i * width;
    if constexpr (std::is_same_v<In, T>)
      if (!bias && softcap == 0) return row;
    for (int64_t j = 0; j < width; ++j) scratch[j] = static_cast<T>(row[j]);
    if (bias)
      for (int64_t j = 0; j < width; ++j) scratch[j] += bias[j];
    if (softcap != 0) cap(scratch, width, softcap);
    return scratch;
  }
  // Returns z = x / T of row i, likewise.
  const T* scaled(int64_t i, T* scratch) const {
    const T inverse = inverse_temperature(i);
    const T* x = capped(i, scratch);
    if (inverse == 1) return x;
    for (int64_t j = 0; j < width; ++j) scratch[j] = x[j] * inverse;
    return scratch;
  }
  // Returns dz/du at z, without the factor 1/T.
  T slope(T z, T inverse) const {
    const T t = z / (inverse * softcap);
    return 1 - t * t;
  }
  int64_t grain() const {
    return std::max<int64_t>(1, 32768 / width);
  }
};

template <class T>
T maximum(const T* z, int64_t width) {
  Vec<T> most = -kInfinity<T> - Vec<T>{};
  for (int64_t j = 0; j < width; j += kLanes<T>) {
    const Vec<T> v = load_some(z + j, width - j, -kInfinity<T>);
    most = v > most ? v : most;
  }
  return *std::max_element(reinterpret_cast<T*>(&most), reinterpret_cast<T*>(&most) + kLanes<T>);
}

}  // namespace rolltree::softmax
