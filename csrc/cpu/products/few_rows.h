// Products of few rows with weight matrices: see few_rows.cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "../numbers.h"
#include "../vectors.h"

namespace rolltree {

// Rows of fp32 above which a library is used. 384 was measured against MKL on EPYCs with AVX2 and with AVX-512; 64 on a
// Xeon with AVX-512, where MKL is faster, by an earlier kernel. Rows of bf16 have no limit.
int64_t few_rows();
constexpr int64_t kColumns = kLanes;  // of a weight: a block, the least work of a thread

// out[r, n] (+)= x[r] . weight[n] + bias[n]: weight [width, depth], its rows `weight_stride` apart, bias [width] or null;
// out [rows, width], its rows `stride` apart. T is float or Bf16.
template <class T>
struct Product {
  const T *weight, *bias;
  int64_t width, weight_stride;
  float* out;
  int64_t stride;
  bool add = false;      // to the values in `out`
  bool rounded = true;  // to T, after the bias, and again after the sum with the values in `out`

  int64_t blocks() const { return (width + kColumns - 1) / kColumns; }
};

// Rows prepared for products with several weights.
template <class T>
class FewRows {
 public:
  // Prepares x [rows, depth], contiguous, of values that T holds; x must outlive the result.
  static std::unique_ptr<const FewRows> of(const float* x, int64_t rows, int64_t depth);
  virtual ~FewRows() = default;

  // Returns how many blocks of columns justify a thread.
  int64_t worth_a_thread() const { return (1 << 16) / (rows_ * depth_ * kColumns + 1) + 1; }
  // Computes a range of blocks of a product.
  virtual void multiply(const Product<T>& product, int64_t begin, int64_t end) const = 0;
  // Computes all blocks of several products, in parallel.
  void multiply(std::span<const Product<T>> products) const;

 protected:
  FewRows(int64_t rows, int64_t depth) : rows_(rows), depth_(depth) {}
  const int64_t rows_, depth_;
};

// The two ways to multiply bf16 that few_rows.cpp does not contain: by AVX-512's dot products of pairs, and by tiles.
std::unique_ptr<const FewRows<Bf16>> rows_for_dots(const float* x, int64_t rows, int64_t depth);
std::unique_ptr<const FewRows<Bf16>> rows_for_tiles(const float* x, int64_t rows, int64_t depth);

}  // namespace rolltree
