// Products of few rows with weight matrices: see few_rows.cpp.
#pragma once

#include <cstdint>
#include <span>

#include "vectors.h"

namespace rolltree {

// Above, a library's packing has paid for itself: measured beside MKL on a Xeon with AVX-512 and an EPYC with AVX2.
constexpr int64_t kFewRows = kVectorBytes == 32 ? 96 : 64;
constexpr int64_t kColumns = 4;  // of a weight that are multiplied together: a block

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

// Blocks of columns that are worth a thread.
inline int64_t worth_a_thread(int64_t rows, int64_t depth) { return (1 << 16) / (rows * depth * kColumns + 1) + 1; }

// Some blocks of a product with x [rows, depth], contiguous.
void few_rows_blocks(const float* x, int64_t rows, int64_t depth, const Product& product, int64_t begin, int64_t end);

// All blocks of several products with the same x, in parallel.
void few_rows_products(const float* x, int64_t rows, int64_t depth, std::span<const Product> products);

}  // namespace rolltree
