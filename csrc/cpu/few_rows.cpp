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

constexpr int64_t kLine = 16;  // numbers of a cache line
constexpr int64_t kBit = 4 * kLine;  // asked for in one go: a core has some twenty reads under way, more would stall it
constexpr int kTileRows = kAccumulators / kColumns;
constexpr int kRowsOfVector = kLanes / kColumns;

// Lanes of a where kStride's bit of their number is 0, of b where it is 1, each the sum of two.
template <int kStride, int... kLane>
inline Vec fold(Vec a, Vec b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(a, b, ((kLane & kStride) ? kLanes + kLane : kLane)...) +
         __builtin_shufflevector(a, b, ((kLane & kStride) ? kLanes + kLane - kStride : kLane + kStride)...);
}

// The sums of kLanes vectors: lane l is that of s[l].
template <int kStride = kLanes / 2>
inline Vec totals(Vec* s) {
  if constexpr (kStride == 0) return s[0];
  else {
#pragma GCC unroll 8
    for (int i = 0; i < kStride; ++i) s[i] = fold<kStride>(s[i], s[i + kStride], Lanes{});
    return totals<kStride / 2>(s);
  }
}

// Some columns of the weight, one after the other; where fewer than kColumns are left the last one stands in.
struct Columns {
  const float* row[kColumns];
  int64_t count;
  const float* next;  // asked for meanwhile, bit by bit: weights are too many to stay in a cache
  int64_t asked;      // columns of it
};

template <int kRows>
inline void few_rows_tile(const float* x, const Columns& weight, const float* bias, int64_t depth, float* out, int64_t stride,
                          bool added) {
  constexpr int kVectors = (kRows + kRowsOfVector - 1) / kRowsOfVector;
  Vec sum[kVectors * kRowsOfVector][kColumns] = {};
  const auto add = [&](auto load_from, int64_t d) __attribute__((always_inline)) {
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
  const float* next = weight.next;
  for (int64_t d = 0; d < whole;) {
    const int64_t until = std::min(d + kBit, whole);
    for (const float* stop = next + weight.asked * (until - d); next < stop; next += kLine) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 1
    for (; d < until; d += kLanes) add([](const float* p) { return load(p); }, d);
  }
  if (whole < depth)
    add(
        [&](const float* p) {
          Vec v{};
          std::memcpy(&v, p, (depth - whole) * sizeof(float));
          return v;
        },
        whole);
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    float of[kRowsOfVector][kColumns];
    store(of[0], totals(sum[v * kRowsOfVector]));
#pragma GCC unroll 4
    for (int r = v * kRowsOfVector; r < std::min(kRows, (v + 1) * kRowsOfVector); ++r) {
      float* from = of[r - v * kRowsOfVector];
      if (bias)
        for (int64_t c = 0; c < weight.count; ++c) from[c] += bias[c];
      if (added)
        for (int64_t c = 0; c < weight.count; ++c) from[c] += out[r * stride + c];
      if (weight.count == kColumns) std::memcpy(out + r * stride, from, kColumns * sizeof(float));
      else std::memcpy(out + r * stride, from, weight.count * sizeof(float));
    }
  }
}

template <int kRows>
inline void few_rows_tile(int64_t rows, const float* x, const Columns& weight, const float* bias, int64_t depth, float* out,
                          int64_t stride, bool added) {
  if constexpr (kRows > 0) {
    if (rows == kRows) few_rows_tile<kRows>(x, weight, bias, depth, out, stride, added);
    else few_rows_tile<kRows - 1>(rows, x, weight, bias, depth, out, stride, added);
  }
}

}  // namespace

void few_rows_blocks(const float* x, int64_t rows, int64_t depth, const Product& product, int64_t begin, int64_t end) {
  constexpr int64_t kNearest = 5 << 10;  // numbers of a weight that stay in the nearest cache beside a tile of x
  const auto [weight, bias, width, out, stride, added] = product;
  const int64_t together = std::max<int64_t>(kNearest / (kColumns * depth + 1), 1);
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t first = begin; first < end; first += together)
    for (int64_t tile = 0, r = 0, own; tile < tiles; ++tile, r += own) {
      own = rows / tiles + (tile < rows % tiles);
      const int64_t asked = tile * kColumns / tiles;
      for (int64_t n = first * kColumns; n < std::min(std::min(first + together, end) * kColumns, width); n += kColumns) {
        Columns columns{{}, std::min<int64_t>(kColumns, width - n), weight + (n + together * kColumns + asked) * depth,
                        (tile + 1) * kColumns / tiles - asked};
        for (int64_t c = 0; c < kColumns; ++c) columns.row[c] = weight + std::min(n + c, width - 1) * depth;
        few_rows_tile<kTileRows>(own, x + r * depth, columns, bias ? bias + n : nullptr, depth, out + r * stride + n, stride, added);
      }
    }
}

void few_rows_products(const float* x, int64_t rows, int64_t depth, std::span<const Product> products) {
  int64_t blocks = 0;
  for (const Product& product : products) blocks += product.blocks();
  torch::stable::parallel_for(0, blocks, worth_a_thread(rows, depth), [&](int64_t begin, int64_t end) {
    int64_t first = 0;
    for (const Product& product : products) {
      const int64_t own = product.blocks();
      few_rows_blocks(x, rows, depth, product, std::max<int64_t>(begin - first, 0), std::min(end - first, own));
      first += own;
    }
  });
}

namespace {

int64_t few_rows() { return kFewRows; }

void linear(const Tensor& x, const Tensor& weight, Tensor out) {
  const int64_t rows = x.size(0), width = weight.size(0);
  STD_TORCH_CHECK(rows <= kFewRows, "linear: more than ", kFewRows, " rows");
  const Product product{weight.const_data_ptr<float>(), nullptr, width, out.mutable_data_ptr<float>(), rows > 1 ? out.stride(0) : width};
  few_rows_products(x.const_data_ptr<float>(), rows, x.size(1), {&product, 1});
}

}  // namespace
}  // namespace rolltree

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cpu, m) {
  m.def("few_rows() -> int");
  m.def("linear(Tensor x, Tensor weight, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CompositeExplicitAutograd, m) { m.impl("few_rows", TORCH_BOX(&rolltree::few_rows)); }

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CPU, m) { m.impl("linear", TORCH_BOX(&rolltree::linear)); }
