// Products of few rows with a weight matrix.
//
// A decode step multiplies a handful of rows with every weight. Libraries pack the weight first; here it is read once,
// in place. Rows are transposed, which is little work, and are in the lanes; weights are broadcast. Where this would leave
// most lanes empty, columns of the weight are in the lanes instead and are transposed while they are read. Both ways sum
// over the depth one element after the other, so a row's result does not depend on the number of rows.
#include "few_rows.h"

#include "machine.h"

#include <torch/csrc/stable/library.h>

#include <optional>

namespace rolltree {
namespace {

constexpr int64_t kTogether = 2 * kAccumulators;  // columns that all rows are multiplied with before the next columns are read
constexpr int64_t kAlone = kLanes * 3 / 4;        // most rows for which columns are in the lanes
constexpr int64_t kBusy = kVectorBytes == 64 ? kLanes : 2 * kLanes;  // rows in lanes that keep the multipliers busy

// Columns of a weight as the left matrix of a GEMM. The columns after them are prefetched meanwhile, little by little:
// weights do not fit in a cache, and a core has some twenty reads in flight; more would stall it.
struct Weights {
  const float* first;
  int64_t depth;
  const char* next;
  int64_t share;  // bytes prefetched with each column
  int64_t ahead;  // bytes prefetched with each step
  float operator()(int64_t column, int64_t k) const {
    if (column == 0) __builtin_prefetch(next + k * ahead, 0, 2);
    return first[column * depth + k];
  }
  Weights from(int64_t column) const { return {first + column * depth, depth, next + column * share, share, ahead}; }
};

typedef float Quad __attribute__((vector_size(16)));

template <class V, int... kLane>
inline auto beside(V a, V b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(a, b, kLane...);
}

// Loads four numbers of each of kCount columns, every fourth column.
template <int kCount>
inline auto quads(const float* column, int64_t depth) {
  if constexpr (kCount == 1) return load_as<Quad>(column);
  else
    return beside(quads<kCount / 2>(column, depth), quads<kCount / 2>(column + 2 * kCount * depth, depth),
                  std::make_integer_sequence<int, 4 * kCount>{});
}

// Shuffles in each quad of lanes: a and b alternating, of the first or the second half; or a's half and then b's.
template <bool kSecond, int... kLane>
inline Vec in_turn(Vec a, Vec b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(a, b, ((kLane & 1) * kLanes + (kLane & ~3) + 2 * kSecond + (kLane & 3) / 2)...);
}
template <bool kSecond, int... kLane>
inline Vec halves(Vec a, Vec b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(a, b, ((kLane & 2) / 2 * kLanes + (kLane & ~3) + 2 * kSecond + (kLane & 1))...);
}

// Makes lane l of at[k] column[l * depth + k].
inline void transpose_four(const float* column, int64_t depth, Vec (&at)[4]) {
  constexpr int kQuads = kLanes / 4;
  const Vec a = quads<kQuads>(column, depth), b = quads<kQuads>(column + depth, depth);
  const Vec c = quads<kQuads>(column + 2 * depth, depth), d = quads<kQuads>(column + 3 * depth, depth);
  const Vec first = in_turn<false>(a, b, Lanes{}), second = in_turn<false>(c, d, Lanes{});
  const Vec third = in_turn<true>(a, b, Lanes{}), fourth = in_turn<true>(c, d, Lanes{});
  at[0] = halves<false>(first, second, Lanes{}), at[1] = halves<true>(first, second, Lanes{});
  at[2] = halves<false>(third, fourth, Lanes{}), at[3] = halves<true>(third, fourth, Lanes{});
}

// out[r] = x[r] . each of kLanes columns.
template <int kRows>
inline void dot_columns(const float* x, const float* column, int64_t depth, const char* next, int64_t ahead, Vec* out) {
  Vec sum[kRows] = {};
  const auto add = [&](Vec at, int64_t k) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) sum[r] += x[r * depth + k] * at;
  };
  int64_t k = 0;
  for (; k + 4 <= depth; k += 4) {
    for (const char* stop = next + ahead; next < stop; next += 64) __builtin_prefetch(next, 0, 2);
    Vec at[4];
    transpose_four(column + k, depth, at);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) add(at[i], k + i);
  }
  for (; k < depth; ++k) {
    Vec at{};
    for (int l = 0; l < kLanes; ++l) at[l] = column[l * depth + k];
    add(at, k);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) out[r] = sum[r];
}

template <int kRows>
inline void dot_columns(int64_t rows, const float* x, const float* column, int64_t depth, const char* next, int64_t ahead,
                        Vec* out) {
  if constexpr (kRows > 0) {
    if (rows == kRows) dot_columns<kRows>(x, column, depth, next, ahead, out);
    else dot_columns<kRows - 1>(rows, x, column, depth, next, ahead, out);
  }
}

// Writes the sums of `count` columns from the n-th on to the output.
inline void put(Vec sum, const Product& product, int64_t row, int64_t n, int64_t count) {
  float* to = product.out + row * product.stride + n;
  const bool whole = count >= kLanes;
  if (product.bias) sum += whole ? load(product.bias + n) : load_some(product.bias + n, count);
  if (product.add) sum += whole ? load(to) : load_some(to, count);
  if (whole) store(to, sum);
  else store_some(to, sum, count);
}

int64_t alone_of(int64_t rows) {
  const int64_t rest = rows % kBusy;
  return rest <= kAlone ? rest : 0;
}

// Returns the vectors of the next panel, given how many are left.
int64_t panel_of(int64_t vectors) { return vectors >= kPanelVectors ? kPanelVectors : vectors >= 2 ? 2 : 1; }

}  // namespace

int64_t few_rows() { return library_is_fast() ? 64 : 384; }

FewRows::FewRows(const float* x, int64_t rows, int64_t depth)
    : x_(x), rows_(rows), depth_(depth), alone_(alone_of(rows)), lanes_(padded(rows - alone_)), panels_(lanes_ * depth) {
  passes_ = alone_ > 0;
  const int64_t others = rows - alone_;
  for (int64_t first = 0, width; first < lanes_; first += width, ++passes_) {
    width = panel_of((lanes_ - first) / kLanes) * kLanes;
    for (int64_t r = first; r < first + width; r += kLanes) {
      float* to = panels_.at(first * depth + r - first);
      const int64_t some = std::min<int64_t>(kLanes, others - r), whole = some == kLanes ? depth / 4 * 4 : 0;
      int64_t k = 0;
      for (; k < whole; k += 4) {
        Vec at[4];
        transpose_four(x + r * depth + k, depth, at);
        for (int i = 0; i < 4; ++i) store(to + (k + i) * width, at[i]);
      }
      for (; k < depth; ++k)
        for (int64_t l = 0; l < kLanes; ++l) to[k * width + l] = l < some ? x[(r + l) * depth + k] : 0.f;
    }
  }
}

// Returns the part of later columns that is prefetched while columns from the n-th on are multiplied.
const char* FewRows::asked(const Product& product, int64_t n, int64_t pass) const {
  return reinterpret_cast<const char*>(product.weight + (n + kTogether) * depth_ + pass * kTogether * depth_ / passes_);
}

void FewRows::multiply_lanes(const Product& product, int64_t n, int64_t count, float* room) const {
  float* by_column = room;                     // [kTogether, lanes_]
  float* by_row = room + kTogether * lanes_;  // [lanes_, kTogether]
  int64_t pass = 0;
  const auto panel = [&](auto vectors, int64_t first) {
    constexpr int kVectors = decltype(vectors)::value, kTile = std::min(kAccumulators / kVectors, 12);
    constexpr int64_t kFloat = sizeof(float);
    const Weights columns{product.weight + n * depth_, depth_, asked(product, n, pass++), kFloat * depth_ / passes_,
                          kFloat * kTile / passes_};
    const Packed rows{panels_.at(first * depth_), kVectors * kLanes};
    gemm_panel<kVectors>(count, depth_, columns, rows, 0, by_column + first, lanes_, false);
    return first + kVectors * kLanes;
  };
  for (int64_t first = 0; first < lanes_;) {
    const int64_t vectors = panel_of((lanes_ - first) / kLanes);
    if (vectors == kPanelVectors) first = panel(std::integral_constant<int, kPanelVectors>{}, first);
    else if (vectors == 2) first = panel(std::integral_constant<int, 2>{}, first);
    else first = panel(std::integral_constant<int, 1>{}, first);
  }
  transpose(Packed{by_column, lanes_}, padded(count), lanes_, by_row, kTogether);
  for (int64_t r = 0; r < rows_ - alone_; ++r)
    for (int64_t c = 0; c < count; c += kLanes) put(load(by_row + r * kTogether + c), product, r, n + c, count - c);
}

void FewRows::multiply_alone(const Product& product, int64_t n, int64_t count) const {
  const float* x = x_ + (rows_ - alone_) * depth_;
  const char* next = asked(product, n, passes_ - 1);
  const int64_t ahead = kLanes * 4 * sizeof(float) / passes_;  // bytes with every four steps
  Vec sums[kAlone];
  for (int64_t c = 0; c < count; c += kLanes, next += ahead * (depth_ / 4)) {
    const float* columns = product.weight + (n + c) * depth_;
    const int64_t some = std::min<int64_t>(kLanes, count - c);
    std::optional<Buffer> end;
    if (some < kLanes) {  // nothing is read after the end of the weight
      end.emplace(kLanes * depth_);
      std::fill_n(std::copy_n(columns, some * depth_, end->at(0)), (kLanes - some) * depth_, 0.f);
      columns = end->at(0);
    }
    dot_columns<kAlone>(alone_, x, columns, depth_, next, ahead, sums);
    for (int64_t r = 0; r < alone_; ++r) put(sums[r], product, rows_ - alone_ + r, n + c, some);
  }
}

void FewRows::multiply(const Product& product, int64_t begin, int64_t end) const {
  static_assert(kTogether % kLanes == 0);
  const Buffer room(2 * kTogether * lanes_);
  const int64_t last = std::min(end * kColumns, product.width);
  for (int64_t n = begin * kColumns; n < last; n += kTogether) {
    const int64_t count = std::min(kTogether, last - n);
    if (lanes_) multiply_lanes(product, n, count, room.at(0));
    if (alone_) multiply_alone(product, n, count);
  }
}

void FewRows::multiply(std::span<const Product> products) const {
  int64_t blocks = 0;
  for (const Product& product : products) blocks += product.blocks();
  torch::stable::parallel_for(0, blocks, worth_a_thread(), [&](int64_t begin, int64_t end) {
    int64_t first = 0;
    for (const Product& product : products) {
      const int64_t own = product.blocks();
      multiply(product, std::max<int64_t>(begin - first, 0), std::min(end - first, own));
      first += own;
    }
  });
}

namespace {

void linear(const Tensor& x, const Tensor& weight, Tensor out) {
  const int64_t rows = x.size(0), width = weight.size(0);
  STD_TORCH_CHECK(rows <= few_rows(), "linear: more than ", few_rows(), " rows");
  const int64_t stride = rows > 1 ? out.stride(0) : width;
  const Product product{weight.const_data_ptr<float>(), nullptr, width, out.mutable_data_ptr<float>(), stride};
  FewRows(x.const_data_ptr<float>(), rows, x.size(1)).multiply({&product, 1});
}

}  // namespace
}  // namespace rolltree

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cpu, m) {
  m.def("few_rows() -> int");
  m.def("linear(Tensor x, Tensor weight, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CompositeExplicitAutograd, m) { m.impl("few_rows", TORCH_BOX(&rolltree::few_rows)); }

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CPU, m) { m.impl("linear", TORCH_BOX(&rolltree::linear)); }
