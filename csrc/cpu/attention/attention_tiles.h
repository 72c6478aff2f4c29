// Building blocks of attention on the CPU: a register-blocked GEMM, the online softmax, row loads.
//
// Everything is fp32. Scores are kept in the log2 domain (queries are loaded times scale * log2(e)), so a probability is
// one exp2. A row's result does not depend on how many rows are processed together, or on where tiles begin and end: every
// output element is summed over its inner dimension one after the other, key after key in the order of the path, and the
// running maximum is a whole number, so that a later one scales what was summed by a power of two, which rounds nothing.
// Training and decoding thus answer the same bits, for trees and for their paths, whatever the tiles, nodes and pages.
//
// Rows are padded to whole vectors (`padded`).
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "../vectors.h"

namespace rolltree {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// ---- vectors ---------------------------------------------------------------------------------------------------------

inline int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

template <int kStride, bool kSecond, int... kLane>
inline Vec swap_lanes(Vec a, Vec b, std::integer_sequence<int, kLane...>) {
  if constexpr (kSecond) return __builtin_shufflevector(a, b, ((kLane & kStride) ? kLanes + kLane : kLane + kStride)...);
  else return __builtin_shufflevector(a, b, ((kLane & kStride) ? kLanes + kLane - kStride : kLane)...);
}
template <int kStride, int... kLane>
inline Vec exchange(Vec a, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(a, a, (kLane ^ kStride)...);
}
using Lanes = std::make_integer_sequence<int, kLanes>;

template <int kStride = kLanes / 2>
inline float horizontal_max(Vec v) {
  if constexpr (kStride == 0) return v[0];
  else return horizontal_max<kStride / 2>(max(v, exchange<kStride>(v, Lanes{})));
}
template <int kStride = kLanes / 2>
inline float horizontal_sum(Vec v) {
  if constexpr (kStride == 0) return v[0];
  else return horizontal_sum<kStride / 2>(v + exchange<kStride>(v, Lanes{}));
}

// kLanes x kLanes transpose in registers: swap the off-diagonal blocks of every size.
template <int kStride = kLanes / 2>
inline void transpose_block(Vec (&r)[kLanes]) {
  if constexpr (kStride > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i & kStride) continue;
      const Vec a = r[i], b = r[i + kStride];
      r[i] = swap_lanes<kStride, false>(a, b, Lanes{});
      r[i + kStride] = swap_lanes<kStride, true>(a, b, Lanes{});
    }
    transpose_block<kStride / 2>(r);
  }
}

// ---- memory ----------------------------------------------------------------------------------------------------------

// Uninitialised fp32 storage aligned to cache lines.
class Buffer {
 public:
  explicit Buffer(int64_t floats) : data_(new (std::align_val_t(64)) float[std::max<int64_t>(floats, 1)]) {}
  float* at(int64_t i) const { return data_.get() + i; }

 private:
  struct Free {
    void operator()(float* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  std::unique_ptr<float[], Free> data_;
};

// A tensor whose last dimension is contiguous, read and written as rows of fp32.
class Rows {
 public:
  // fp32 [rows, heads, width], contiguous.
  Rows(float* rows, int64_t heads, int64_t width) : base_(rows), type_(ScalarType::Float), width_(width), stride_{heads * width, width} {}

  // [pages, page_size, heads, width], contiguous.
  template <class T>
  static Rows paged(T* pages, int64_t page_size, int64_t heads, int64_t width) {
    Rows rows(nullptr, heads, width);
    rows.base_ = pages, rows.type_ = std::is_same_v<T, float> ? ScalarType::Float : ScalarType::BFloat16;
    rows.stride_[0] = page_size * heads * width, rows.stride_[1] = heads * width, rows.stride_[2] = width;
    return rows;
  }

  explicit Rows(const Tensor& t) : base_(t.mutable_data_ptr()), type_(t.scalar_type()), width_(t.size(t.dim() - 1)) {
    for (int64_t d = 0; d + 1 < t.dim(); ++d) stride_[d] = t.stride(d);  // asking the tensor is a call through the ABI
    STD_TORCH_CHECK(type_ == ScalarType::Float || type_ == ScalarType::BFloat16 || type_ == ScalarType::Half,
                    "the CPU attention kernels take float32, bfloat16 or float16 tensors");
  }

  template <class... Index>
  int64_t offset(Index... index) const {
    int64_t at = 0, d = 0;
    ((at += index * stride_[d++]), ...);
    return at;
  }

  // Prefetches `count` elements.
  template <int kLocality = 2>
  void prefetch(int64_t offset, int64_t count) const {
    const int64_t size = type_ == ScalarType::Float ? 4 : 2;
    const char* from = static_cast<const char*>(base_) + offset * size;
    for (int64_t b = 0; b < count * size; b += 64) __builtin_prefetch(from + b, 0, kLocality);
  }

  // dst [count, padded(width)] = rows at base + offsets[i] + shift, times scale; zeros after a row's end.
  void load_rows(const int64_t* offsets, int64_t count, int64_t shift, float scale, float* dst) const {
    if (type_ == ScalarType::Float) load_as_type<float>(offsets, count, shift, scale, dst);
    else if (type_ == ScalarType::BFloat16) load_as_type<uint16_t>(offsets, count, shift, scale, dst);
    else load_as_type<torch::headeronly::Half>(offsets, count, shift, scale, dst);
  }

  void load_row(int64_t offset, float scale, float* dst) const { load_rows(&offset, 1, 0, scale, dst); }

  // Returns whether rows can be used in place: fp32, whole vectors.
  bool in_place() const { return type_ == ScalarType::Float && width_ % kLanes == 0; }
  const float* at(int64_t offset) const { return static_cast<const float*>(base_) + offset; }

  void store_row(int64_t offset, const float* src, float scale) const {
    if (type_ == ScalarType::Float) store_as<float>(offset, src, scale);
    else if (type_ == ScalarType::BFloat16) store_as<torch::headeronly::BFloat16>(offset, src, scale);
    else store_as<torch::headeronly::Half>(offset, src, scale);
  }

 private:
  // uint16_t holds the bits of a bfloat16.
  template <class T>
  void load_as_type(const int64_t* offsets, int64_t count, int64_t shift, float scale, float* dst) const {
    const T* base = static_cast<const T*>(base_) + shift;
    const int64_t width = width_, end = padded(width_);
    for (int64_t i = 0; i < count; ++i, dst += end) {
      const T* src = base + offsets[i];
      int64_t d = 0;
      if constexpr (std::is_same_v<T, float>) {
        for (; d + kLanes <= width; d += kLanes) store(dst + d, load(src + d) * scale);
      } else if constexpr (std::is_same_v<T, uint16_t>) {
        for (; d + kLanes <= width; d += kLanes)
          store(dst + d, (Vec)(__builtin_convertvector(load_as<HalfVec>(src + d), UVec) << 16) * scale);
      }
      for (; d < width; ++d) dst[d] = as_float(src[d]) * scale;
      for (; d < end; ++d) dst[d] = 0.f;
    }
  }

  template <class T>
  static float as_float(T x) {
    if constexpr (!std::is_same_v<T, uint16_t>) return static_cast<float>(x);
    const uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }

  template <class T>
  void store_as(int64_t offset, const float* src, float scale) const {
    T* dst = static_cast<T*>(base_) + offset;
    for (int64_t d = 0; d < width_; ++d) dst[d] = static_cast<T>(src[d] * scale);
  }
  void* base_;
  ScalarType type_;
  int64_t width_, stride_[3] = {};
};

// A matrix of rows [width] that follow each other.
struct Packed {
  const float* first;
  int64_t width;
  const float* operator()(int64_t row) const { return first + row * width; }
  Packed from(int64_t row) const { return {first + row * width, width}; }
};

// A matrix of rows at any addresses.
struct Scattered {
  const float* const* rows;
  const float* operator()(int64_t row) const { return rows[row]; }
  Scattered from(int64_t row) const { return {rows + row}; }
};

// dst [width, ld] = transpose of src [rows, width]; rows and width are whole vectors.
template <class Matrix>
inline void transpose(Matrix src, int64_t rows, int64_t width, float* dst, int64_t ld) {
  for (int64_t r = 0; r < rows; r += kLanes)
    for (int64_t d = 0; d < width; d += kLanes) {
      Vec block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) block[i] = load(src(r + i) + d);
      transpose_block(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(dst + (d + i) * ld + r, block[i]);
    }
}

// ---- GEMM ------------------------------------------------------------------------------------------------------------

constexpr int64_t kTileKeys = 64;  // keys of a score tile; also its leading dimension

// Layouts of the left matrix. Where the distance of its rows is a constant, one register addresses all of them.
struct Across {
  const float* first;
  int64_t ld;
  float operator()(int64_t row, int64_t k) const { return first[row * ld + k]; }
  Across from(int64_t row) const { return {first + row * ld, ld}; }
};
struct AcrossTile {
  const float* first;
  float operator()(int64_t row, int64_t k) const { return first[row * kTileKeys + k]; }
  AcrossTile from(int64_t row) const { return {first + row * kTileKeys}; }
};
struct Down {  // transposed
  const float* first;
  int64_t ld;
  float operator()(int64_t row, int64_t k) const { return first[k * ld + row]; }
  Down from(int64_t row) const { return {first + row, ld}; }
};

// Where the products of a GEMM go: they replace C, continue its sums, or are summed first and then added to it.
enum class Into { set, chain, added };

// The products of fp32 numbers; few_rows_in_lanes.h has others.
struct Plain {
  static Vec add(Vec sum, float x, Vec row) { return fused(sum, x - Vec{}, row); }
};

// C [kRows, kVectors * kLanes] = A B in registers, with B from column `first`.
template <int kRows, int kVectors, class Terms, class Left, class Matrix>
inline void gemm_registers(int64_t depth, Left a, Matrix b, int64_t first, float* c, int64_t ldc, Into into) {
  Vec sum[kRows][kVectors];
#pragma GCC unroll 32
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) sum[r][n] = into == Into::chain ? load(c + r * ldc + n * kLanes) : Vec{};
  for (int64_t k = 0; k < depth; ++k) {
    const float* from = b(k) + first;
    Vec row[kVectors];
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) row[n] = load(from + n * kLanes);
#pragma GCC unroll 32
    for (int r = 0; r < kRows; ++r) {
      const float x = a(r, k);
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n) sum[r][n] = Terms::add(sum[r][n], x, row[n]);
    }
  }
#pragma GCC unroll 32
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) {
      float* to = c + r * ldc + n * kLanes;
      store(to, into == Into::added ? load(to) + sum[r][n] : sum[r][n]);
    }
}

template <int kRows, int kVectors, class Terms, class Left, class Matrix>
inline void gemm_last_rows(int64_t rows, int64_t depth, Left a, Matrix b, int64_t first, float* c, int64_t ldc, Into into) {
  if constexpr (kRows > 0) {
    if (rows == kRows) gemm_registers<kRows, kVectors, Terms>(depth, a, b, first, c, ldc, into);
    else gemm_last_rows<kRows - 1, kVectors, Terms>(rows, depth, a, b, first, c, ldc, into);
  }
}

// Not inlined: its loops need all registers.
template <int kVectors, class Terms = Plain, class Left, class Matrix>
__attribute__((noinline)) void gemm_panel(int64_t rows, int64_t depth, Left a, Matrix b, int64_t first, float* c, int64_t ldc,
                                          Into into) {
  constexpr int kRows = std::min(kAccumulators / kVectors, 12);
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows)
    gemm_registers<kRows, kVectors, Terms>(depth, a.from(r), b, first, c + r * ldc, ldc, into);
  gemm_last_rows<kRows - 1, kVectors, Terms>(rows - r, depth, a.from(r), b, first, c + r * ldc, ldc, into);
}

// C [rows, cols] = A [rows, depth] B [depth, cols], added to C where `add`; cols is whole vectors.
template <class Left, class Matrix>
inline void gemm(int64_t rows, int64_t cols, int64_t depth, Left a, Matrix b, float* c, int64_t ldc, bool add) {
  const Into into = add ? Into::chain : Into::set;
  int64_t n = 0;
  if (2 * kPanelVectors * rows <= kAccumulators)  // with few rows more columns at once, otherwise sums wait for each other
    for (; n + 2 * kPanelVectors * kLanes <= cols; n += 2 * kPanelVectors * kLanes)
      gemm_panel<2 * kPanelVectors>(rows, depth, a, b, n, c + n, ldc, into);
  for (; n + kPanelVectors * kLanes <= cols; n += kPanelVectors * kLanes)
    gemm_panel<kPanelVectors>(rows, depth, a, b, n, c + n, ldc, into);
  for (; n + 2 * kLanes <= cols; n += 2 * kLanes) gemm_panel<2>(rows, depth, a, b, n, c + n, ldc, into);
  for (; n < cols; n += kLanes) gemm_panel<1>(rows, depth, a, b, n, c + n, ldc, into);
}

// ---- softmax ---------------------------------------------------------------------------------------------------------

// scores -> cap * tanh(scores), in the log2 domain: queries are loaded times scale / softcap, `cap` = softcap * log2(e).
inline void soft_cap(float* scores, int64_t rows, int64_t first, int64_t last, float cap) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = first; j < last; j += kLanes) {
      float* p = scores + r * kTileKeys + j;
      store(p, tanh(load(p)) * cap);
    }
}

// Running softmax of some rows: max [rows], sums [rows, kLanes] (the same in every lane), accumulated output [rows, width].
// `max` is the whole number nearest to the largest score.
struct Running {
  float* max;
  float* sum;
  float* out;
  int64_t width;

  void reset(int64_t rows) const {
    std::fill_n(max, rows, -kInfinity);
    std::fill_n(sum, rows * kLanes, 0.f);
    std::fill_n(out, rows * width, 0.f);
  }

  Running from(int64_t row) const { return {max + row, sum + row * kLanes, out + row * width, width}; }

  // Adds keys [first, last) of a tile: scores become probabilities, then out += probabilities * values (keys of [width]).
  // `first` is a whole number of vectors; scores up to the next whole vector after `last` are -inf where masked.
  template <class Matrix>
  void take(float* scores, int64_t rows, int64_t first, int64_t last, Matrix values) const {
    const int64_t end = padded(last);
    if (first == 0 && end == kTileKeys)
      for (int64_t r = 0; r < rows; ++r) fold<true>(scores + r * kTileKeys, r, first, end);
    else
      for (int64_t r = 0; r < rows; ++r) fold<false>(scores + r * kTileKeys, r, first, end);
    gemm(rows, width, last - first, AcrossTile{scores + first}, values.from(first), out, width, true);
    gemm(rows, kLanes, last - first, AcrossTile{scores + first}, Ones{}, sum, kLanes, true);
  }

  // Scores [first, end) of a row become probabilities. The vectors of a whole tile are independent.
  template <bool kWhole>
  void fold(float* s, int64_t r, int64_t first, int64_t end) const {
    if constexpr (kWhole) first = 0, end = kTileKeys;
    Vec top = load(s + first);
#pragma GCC unroll 16
    for (int64_t j = first + kLanes; j < end; j += kLanes) top = rolltree::max(top, load(s + j));
    const float before = max[r], now = std::max(before, std::nearbyint(horizontal_max(top)));
    const float base = now == -kInfinity ? 0.f : now;  // nothing visible yet: -inf - 0 gives probability 0
    if (now > before) {
      const float keep = exp2(splat(before - now))[0];
      store(sum + r * kLanes, load(sum + r * kLanes) * keep);
      for (int64_t d = 0; d < width; d += kLanes) store(out + r * width + d, load(out + r * width + d) * keep);
      max[r] = now;
    }
#pragma GCC unroll 16
    for (int64_t j = first; j < end; j += kLanes) store(s + j, exp2_below(load(s + j), base));
  }

  // Returns the log-sum-exp of a row (natural), and the factor of its accumulated output; -inf and 0 if it sees no key.
  std::pair<float, float> finish(int64_t row) const {
    const float total = sum[row * kLanes];
    if (total == 0.f) return {-kInfinity, 0.f};
    return {(max[row] + std::log2(total)) * kLn2, 1.f / total};
  }

 private:
  // A matrix of ones, whose product with probabilities is their sum.
  struct Ones {
    const float* operator()(int64_t) const {
      alignas(64) static constexpr auto ones = [] {
        std::array<float, kLanes> all{};
        all.fill(1.f);
        return all;
      }();
      return ones.data();
    }
  };
};

// ---- threads ---------------------------------------------------------------------------------------------------------

// Calls make_worker() once a thread and worker(item) for every item, taken in order: put the heavy ones first.
template <class F>
void work_queue(int64_t items, const F& make_worker) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(items, torch::stable::get_num_threads());
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    auto worker = make_worker();
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) worker(item);
  });
}

}  // namespace rolltree
