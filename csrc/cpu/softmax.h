// The softmax of a row of logits, in the one order of sums that sampling and training share: the log-prob of a token has the
// same bits wherever it is computed from the same logits.
//
// A token of logit x has the weight w = exp((x - top) / T), where `top` is the greatest logit of the row. Weights are summed
// in the lanes of 64 bytes, in as many vectors of this machine as that takes, so the order is the same on all machines; the
// lanes of a block are then added to the sums of the row in double. (Vectors wider than the machine's would do that too, but
// GCC compares and selects those one number at a time.)
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "vectors.h"

namespace rolltree::softmax {

template <class T>
struct Vector;
template <>
struct Vector<float> {
  typedef float type __attribute__((vector_size(kVectorBytes)));
  static constexpr float lowest = -87.0f;  // exp of less counts as zero
};
template <>
struct Vector<double> {
  typedef double type __attribute__((vector_size(kVectorBytes)));
  static constexpr double lowest = -708.0;
};

template <class T>
using Vec = typename Vector<T>::type;
template <class T>
constexpr int64_t kLanes = sizeof(Vec<T>) / sizeof(T);
constexpr int kParts = 64 / kVectorBytes;  // vectors of a sum
template <class T>
constexpr int64_t kBlock = 64 * kParts * kLanes<T>;  // numbers whose sum is added separately, so long rows round little
template <class T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

inline Vec<float> exponential(Vec<float> x) { return rolltree::exp(x); }

inline Vec<double> exponential(Vec<double> x) {
  for (int64_t i = 0; i < kLanes<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}

template <class T>
inline Vec<T> load(const T* p) {
  return load_as<Vec<T>>(p);
}

// Loads the first n numbers of a vector, padded with `fill`, or all of it.
template <class T>
inline Vec<T> load_some(const T* p, int64_t n, T fill) {
  if (n >= kLanes<T>) return load(p);
  Vec<T> v = fill - Vec<T>{};
  std::memcpy(&v, p, n * sizeof(T));
  return v;
}

template <class T>
inline void store_some(T* p, Vec<T> v, int64_t n) {
  if (n >= kLanes<T>)
    std::memcpy(p, &v, sizeof v);  // of constant size: one store
  else
    std::memcpy(p, &v, n * sizeof(T));
}

template <class T>
inline double total(const Vec<T> (&v)[kParts]) {
  double sum = 0;
  for (const Vec<T>& part : v)
    for (int64_t i = 0; i < kLanes<T>; ++i) sum += part[i];
  return sum;
}

struct Sums {
  double weights = 0, moments = 0, squares = 0;  // of w, w log w and w^2
  double log() const { return std::log(weights); }
  double entropy() const { return log() - moments / weights; }
};

// Returns the sums of x [width]; NaN where a logit is NaN or +inf. Writes the weights to `w` [width] where Kept.
template <class T, bool Moments, bool Squares, bool Kept>
Sums sum_weights(const T* x, int64_t width, T top, T inverse_temperature, T* w) {
  Sums sums;
  constexpr int64_t lanes = kParts * kLanes<T>;
  for (int64_t begin = 0; begin < width; begin += kBlock<T>) {
    const int64_t end = std::min(begin + kBlock<T>, width);
    Vec<T> weights[kParts]{}, moments[kParts]{}, squares[kParts]{};
    const auto add = [&](int part, Vec<T> v) {
      Vec<T> d = (v - top) * inverse_temperature;
      const auto none = d < Vector<T>::lowest;
      d = none ? Vec<T>{} : d;
      const Vec<T> e = none ? Vec<T>{} : exponential(d);
      weights[part] += e;
      if constexpr (Moments) moments[part] += e * d;
      if constexpr (Squares) squares[part] += e * e;
      return e;
    };
    int64_t j = begin;
    for (; j + lanes <= end; j += lanes)
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        const Vec<T> e = add(part, load(x + j + part * kLanes<T>));
        if constexpr (Kept) std::memcpy(w + j + part * kLanes<T>, &e, sizeof e);
      }
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part, j += kLanes<T>)
      if (j < end) {
        const Vec<T> e = add(part, load_some(x + j, end - j, -kInfinity<T>));
        if constexpr (Kept) store_some<T>(w + j, e, end - j);
      }
    sums.weights += total<T>(weights);
    if constexpr (Moments) sums.moments += total<T>(moments);
    if constexpr (Squares) sums.squares += total<T>(squares);
  }
  return sums;
}

// Returns the log-prob of a token of logit x, given the log of the sum of weights.
template <class T>
inline T log_prob(T x, T top, T temperature, double log_sum) {
  return static_cast<T>((static_cast<double>(x) - static_cast<double>(top)) / static_cast<double>(temperature) - log_sum);
}

}  // namespace rolltree::softmax
