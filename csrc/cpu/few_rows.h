// Products of few rows with weight matrices: see few_rows.cpp.
#pragma once

#include <cstdint>
#include <span>

#include "attention_tiles.h"

namespace rolltree {

// Rows above which a library is used. 384 was measured against MKL on EPYCs with AVX2 and with AVX-512; 64 on a Xeon with
// AVX-512, where MKL is faster, by an earlier kernel.
int64_t few_rows();
constexpr int64_t kColumns = kLanes;  // of a weight: a block, the least work of a thread

// out[r, n] (+)= x[r] . weight[n] + bias[n]: weight [width, depth], bias [width] or null, both contiguous; out [rows, width],
// its rows `stride` apart.
struct Product {
  const float *weight, *bias;
  int64_t width;
  float* out;
  int64_t stride;
  bool add = false;  // to the values in `out`

  int64_t blocks() const { return (width + kColumns - 1) / kColumns; }
};

// Rows x [rows, depth], contiguous, prepared for products with several weights.
class FewRows {
 public:
  FewRows(const float* x, int64_t rows, int64_t depth);

  // Returns how many blocks of columns justify a thread.
  int64_t worth_a_thread() const { return (1 << 16) / (rows_ * depth_ * kColumns + 1) + 1; }
  // Computes a range of blocks of a product.
  void multiply(const Product& product, int64_t begin, int64_t end) const;
  // Computes all blocks of several products, in parallel.
  void multiply(std::span<const Product> products) const;

 private:
  void multiply_lanes(const Product& product, int64_t n, int64_t count, float* room) const;
  void multiply_alone(const Product& product, int64_t n, int64_t count) const;
  const char* asked(const Product& product, int64_t n, int64_t pass) const;

  const float* x_;
  int64_t rows_, depth_;
  int64_t alone_, lanes_;  // rows at the end that are multiplied with columns in lanes; lanes of the other rows
  int64_t passes_;         // over a weight
  Buffer panels_;          // the other rows, transposed: panel after panel, each [depth, its lanes]
};

}  // namespace rolltree
