// Products of few rows with weight matrices: see few_rows.cpp.
#pragma once

#include <cstdint>
#include <span>

#include "attention_tiles.h"

namespace rolltree {

// Rows above which a library is used. 384 was measured beside MKL on EPYCs with AVX2 and with AVX-512; 64 on a Xeon with
// AVX-512, where MKL is faster, by an earlier kernel.
int64_t few_rows();
constexpr int64_t kColumns = kLanes;  // of a weight: a block, the least that a thread is given

// out[r, n] (+)= x[r] . weight[n] + bias[n]: weight [width, depth], bias [width] or null, both contiguous; out [rows, width],
// its rows `stride` apart.
struct Product {
  const float *weight, *bias;
  int64_t width;
  float* out;
  int64_t stride;
  bool add = false;  // to what is in `out`

  int64_t blocks() const { return (width + kColumns - 1) / kColumns; }
};

// Rows x [rows, depth], contiguous, made ready for products with several weights.
class FewRows {
 public:
  FewRows(const float* x, int64_t rows, int64_t depth);

  // Blocks of columns that are worth a thread.
  int64_t worth_a_thread() const { return (1 << 16) / (rows_ * depth_ * kColumns + 1) + 1; }
  // Some blocks of a product.
  void multiply(const Product& product, int64_t begin, int64_t end) const;
  // All blocks of several products, in parallel.
  void multiply(std::span<const Product> products) const;

 private:
  void multiply_lanes(const Product& product, int64_t n, int64_t count, float* room) const;
  void multiply_alone(const Product& product, int64_t n, int64_t count) const;
  const char* asked(const Product& product, int64_t n, int64_t pass) const;

  const float* x_;
  int64_t rows_, depth_;
  int64_t alone_, lanes_;  // rows at the end whose columns lie in lanes; lanes of the others
  int64_t passes_;         // over a weight
  Buffer panels_;          // the others, transposed: panel after panel, each [depth, its lanes]
};

}  // namespace rolltree
