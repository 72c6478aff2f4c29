// Products of few rows with a weight matrix.
//
// A decode step multiplies a handful of rows with every weight. Libraries pack the weight first, or leave most of their
// tile empty; here the weight is read once, where it lies, and every register holds sums that are needed. A sum goes
// over the depth in kLanes partial sums, which are then added pairwise, so a row's result does not depend on how many
// rows there are.
#include "few_rows.h"

#include <torch/csrc/stable/library.h>

#include "attention_tiles.h"

namespace rolltree {
namespace {

constexpr int kColumns = 4, kTileRows = kAccumulators / kColumns;

// Lanes of a where kStride's bit of their number is 0, of b where it is 1, each the sum of two.
template <int kStride>
inline Vec fold(Vec a, Vec b) {
  return swap_lanes<kStride, false>(a, b, Lanes{}) + swap_lanes<kStride, true>(a, b, Lanes{});
}

template <int kStride>
inline Vec fold_all(Vec v) {
  if constexpr (kStride == 0) return v;
  else return fold_all<kStride / 2>(v + exchange<kStride>(v, Lanes{}));
}

// Some columns of the weight, one after the other; where fewer than kColumns are left the last one stands in.
struct Columns {
  const float* row[kColumns];
  int64_t count;
};

template <int kRows>
inline void few_rows_tile(const float* x, const Columns& weight, const float* bias, int64_t depth, float* out, int64_t stride,
                          bool ask_ahead) {
  Vec sum[kRows][kColumns] = {};
  const auto add = [&](auto load_from, int64_t d) {
    Vec columns[kColumns];
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) columns[c] = load_from(weight.row[c] + d);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec row = load_from(x + r * depth + d);
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) sum[r][c] += row * columns[c];
    }
  };
  const int64_t whole = depth / kLanes * kLanes;
  for (int64_t d = 0; d < whole; d += kLanes) {
    if (ask_ahead)
      for (int c = 0; c < kColumns; ++c) __builtin_prefetch(weight.row[c] + kColumns * depth + d, 0, 2);
    add([](const float* p) { return load(p); }, d);
  }
  if (whole < depth)
    add(
        [&](const float* p) {
          Vec v{};
          std::memcpy(&v, p, (depth - whole) * sizeof(float));
          return v;
        },
        whole);
  constexpr int kHalf = kLanes / 2, kQuarter = kLanes / 4;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const Vec totals = fold_all<kQuarter / 2>(
        fold<kQuarter>(fold<kHalf>(sum[r][0], sum[r][1]), fold<kHalf>(sum[r][2], sum[r][3])));
    const float of_column[kColumns] = {totals[0], totals[kHalf], totals[kQuarter], totals[kHalf + kQuarter]};
    for (int64_t c = 0; c < weight.count; ++c) out[r * stride + c] = bias ? of_column[c] + bias[c] : of_column[c];
  }
}

template <int kRows>
inline void few_rows_tile(int64_t rows, const float* x, const Columns& weight, const float* bias, int64_t depth, float* out,
                          int64_t stride, bool ask_ahead) {
  if constexpr (kRows > 0) {
    if (rows == kRows) few_rows_tile<kRows>(x, weight, bias, depth, out, stride, ask_ahead);
    else few_rows_tile<kRows - 1>(rows, x, weight, bias, depth, out, stride, ask_ahead);
  }
}

}  // namespace

void few_rows_product(const float* x, const float* weight, const float* bias, int64_t rows, int64_t width, int64_t depth,
                      float* out, int64_t stride) {
  constexpr int64_t kWorth = 1 << 16;      // products that are worth a thread
  constexpr int64_t kOfCache = 1 << 18;    // numbers of a weight that come from memory anew each time
  const int64_t blocks = (width + kColumns - 1) / kColumns, grain = kWorth / (rows * depth * kColumns + 1) + 1;
  torch::stable::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin * kColumns; n < std::min(end * kColumns, width); n += kColumns) {
      Columns columns{{}, std::min<int64_t>(kColumns, width - n)};
      for (int64_t c = 0; c < kColumns; ++c) columns.row[c] = weight + std::min(n + c, width - 1) * depth;
      for (int64_t r = 0; r < rows; r += kTileRows)
        few_rows_tile<kTileRows>(std::min<int64_t>(kTileRows, rows - r), x + r * depth, columns, bias ? bias + n : nullptr, depth,
                                 out + r * stride + n, stride, r == 0 && width * depth >= kOfCache);
    }
  });
}

namespace {

void linear(const Tensor& x, const Tensor& weight, Tensor out) {
  const int64_t rows = x.size(0), width = weight.size(0);
  STD_TORCH_CHECK(rows <= kFewRows, "linear: more than ", kFewRows, " rows");
  few_rows_product(x.const_data_ptr<float>(), weight.const_data_ptr<float>(), nullptr, rows, width, x.size(1),
                   out.mutable_data_ptr<float>(), rows > 1 ? out.stride(0) : width);
}

}  // namespace
}  // namespace rolltree

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cpu, m) { m.def("linear(Tensor x, Tensor weight, Tensor(a!) out) -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CPU, m) { m.impl("linear", TORCH_BOX(&rolltree::linear)); }
