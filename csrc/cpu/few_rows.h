// Products of few rows with a weight matrix: see few_rows.cpp.
#pragma once

#include <cstdint>

namespace rolltree {

constexpr int64_t kFewRows = 64;  // above, a library's packing has paid for itself

// out[r, n] = x[r] . weight[n] + bias[n]: x [rows, depth], weight [width, depth], bias [width] or null, all fp32 and
// contiguous; out [rows, width], its rows `stride` apart.
void few_rows_product(const float* x, const float* weight, const float* bias, int64_t rows, int64_t width, int64_t depth,
                      float* out, int64_t stride);

}  // namespace rolltree
