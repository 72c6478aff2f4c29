// Products of few rows with a weight matrix, for each kind of number: see few_rows.cpp.
//
// Memory is read as words of four bytes: an fp32 number or a pair of bf16. `Terms` adds the products of a word to sums:
//
//   kNumbers               numbers of a word
//   add(sum, word, words)  sum + word * words, lane by lane
//   block(words)           words of the depth that are summed before their sum is added to that of the words before
//   kBiasFirst             whether the bias is the first of these sums, or is added to the last
#pragma once

#include <algorithm>
#include <optional>

#include "../attention/attention_tiles.h"
#include "few_rows.h"

namespace rolltree {

// Writes the sums of `count` columns from the n-th on to the output; they have the bias already where kBiasFirst.
template <class T, bool kBiasFirst = false>
inline void put(Vec sum, const Product<T>& product, int64_t row, int64_t n, int64_t count) {
  float* to = product.out + row * product.stride + n;
  const bool whole = count >= kLanes;
  if (!kBiasFirst && product.bias) sum += whole ? load(product.bias + n) : load_some(product.bias + n, count);
  if (product.rounded) sum = rounded<T>(sum);
  if (product.add) {
    sum += whole ? load(to) : load_some(to, count);
    if (product.rounded) sum = rounded<T>(sum);
  }
  if (whole) store(to, sum);
  else store_some(to, sum, count);
}

namespace {

constexpr int64_t kTogether = 2 * kAccumulators;  // columns that all rows are multiplied with before the next columns are read
constexpr int64_t kAlone = kLanes * 3 / 4;        // most rows for which columns are in the lanes
constexpr int64_t kBusy = kVectorBytes == 64 ? kLanes : 2 * kLanes;  // rows in lanes that keep the multipliers busy

// Columns of a weight as the left matrix of a GEMM. The columns after them are prefetched meanwhile, little by little:
// weights do not fit in a cache, and a core has some twenty reads in flight; more would stall it.
struct Weights {
  const float* first;
  int64_t stride;
  const char* next;
  int64_t share;  // bytes prefetched with each column
  int64_t ahead;  // bytes prefetched with each step
  float operator()(int64_t column, int64_t k) const {
    if (column == 0) __builtin_prefetch(next + k * ahead, 0, 2);
    return first[column * stride + k];
  }
  Weights from(int64_t column) const { return {first + column * stride, stride, next + column * share, share, ahead}; }
  Weights at(int64_t k) const { return {first + k, stride, next + k * ahead, share, ahead}; }
};

typedef float Quad __attribute__((vector_size(16)));

template <class V, int... kLane>
inline auto beside(V a, V b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(a, b, kLane...);
}

// Loads four words of each of kCount columns, every fourth column.
template <int kCount>
inline auto quads(const float* column, int64_t stride) {
  if constexpr (kCount == 1) return load_as<Quad>(column);
  else
    return beside(quads<kCount / 2>(column, stride), quads<kCount / 2>(column + 2 * kCount * stride, stride),
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

// Makes lane l of at[k] column[l * stride + k].
inline void transpose_four(const float* column, int64_t stride, Vec (&at)[4]) {
  constexpr int kQuads = kLanes / 4;
  const Vec a = quads<kQuads>(column, stride), b = quads<kQuads>(column + stride, stride);
  const Vec c = quads<kQuads>(column + 2 * stride, stride), d = quads<kQuads>(column + 3 * stride, stride);
  const Vec first = in_turn<false>(a, b, Lanes{}), second = in_turn<false>(c, d, Lanes{});
  const Vec third = in_turn<true>(a, b, Lanes{}), fourth = in_turn<true>(c, d, Lanes{});
  at[0] = halves<false>(first, second, Lanes{}), at[1] = halves<true>(first, second, Lanes{});
  at[2] = halves<false>(third, fourth, Lanes{}), at[3] = halves<true>(third, fourth, Lanes{});
}

// out[r] = x[r] . each of kLanes columns over `words`, block by block, added to out[r] where `add`.
template <class Terms, int kRows>
__attribute__((noinline)) void dot_columns(const float* x, int64_t x_stride, const float* column, int64_t stride, int64_t words,
                                           int64_t block, const char* next, int64_t ahead, Vec* out, bool add) {
  for (; words > 0; words -= block, x += block, column += block, add = true) {
    const int64_t some = std::min(block, words);
    Vec sum[kRows] = {};
    const auto take = [&](Vec at, int64_t k) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) sum[r] = Terms::add(sum[r], x[r * x_stride + k], at);
    };
    int64_t k = 0;
    for (; k + 4 <= some; k += 4) {
      for (const char* stop = next + ahead; next < stop; next += 64) __builtin_prefetch(next, 0, 2);
      Vec at[4];
      transpose_four(column + k, stride, at);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) take(at[i], k + i);
    }
    for (; k < some; ++k) {
      Vec at{};
      for (int l = 0; l < kLanes; ++l) std::memcpy(reinterpret_cast<char*>(&at) + 4 * l, column + l * stride + k, 4);
      take(at, k);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) out[r] = add ? out[r] + sum[r] : sum[r];
  }
}

template <class Terms, int kRows, class... Arguments>
inline void dot_some_columns(int64_t rows, Arguments... arguments) {
  if constexpr (kRows > 0) {
    if (rows == kRows) dot_columns<Terms, kRows>(arguments...);
    else dot_some_columns<Terms, kRows - 1>(rows, arguments...);
  }
}

inline int64_t alone_of(int64_t rows) {
  const int64_t rest = rows % kBusy;
  return rest <= kAlone ? rest : 0;
}

// Returns the vectors of the next panel, given how many are left.
inline int64_t panel_of(int64_t vectors) { return vectors >= kPanelVectors ? kPanelVectors : vectors >= 2 ? 2 : 1; }

// The terms of bf16 but for their products, which `Widened` and `Dots` compute with the same bits.
struct PairsOfBf16 {
  static constexpr int64_t kNumbers = 2;
  static constexpr bool kBiasFirst = false;
  static int64_t block(int64_t words) { return words > 512 ? 512 : 256; }
};

template <class T, class Terms>
class RowsInLanes final : public FewRows<T> {
 public:
  RowsInLanes(const float* x, int64_t rows, int64_t depth)
      : FewRows<T>(rows, depth),
        words_((depth + Terms::kNumbers - 1) / Terms::kNumbers),
        block_(Terms::block(words_)),
        alone_(alone_of(rows)),
        lanes_(padded(rows - alone_)),
        passes_(alone_ > 0),
        pairs_(Terms::kNumbers == 1 ? 0 : rows * words_),
        x_(Terms::kNumbers == 1 ? x : pairs_.at(0)),
        panels_(lanes_ * words_) {
    if (Terms::kNumbers > 1)
      for (int64_t r = 0; r < rows; ++r) {
        T* to = reinterpret_cast<T*>(pairs_.at(r * words_));
        narrow(x + r * depth, depth, to);
        std::fill(to + depth, to + words_ * Terms::kNumbers, T{});
      }
    const int64_t others = rows - alone_;
    for (int64_t first = 0, width; first < lanes_; first += width, ++passes_) {
      width = panel_of((lanes_ - first) / kLanes) * kLanes;
      for (int64_t r = first; r < first + width; r += kLanes) {
        float* to = panels_.at(first * words_ + r - first);
        const int64_t some = std::min<int64_t>(kLanes, others - r), whole = some == kLanes ? words_ / 4 * 4 : 0;
        int64_t k = 0;
        for (; k < whole; k += 4) {
          Vec at[4];
          transpose_four(x_ + r * words_ + k, words_, at);
          for (int i = 0; i < 4; ++i) store(to + (k + i) * width, at[i]);
        }
        for (; k < words_; ++k)
          for (int64_t l = 0; l < kLanes; ++l) {
            if (l < some) std::memcpy(to + k * width + l, x_ + (r + l) * words_ + k, 4);
            else to[k * width + l] = 0.f;
          }
      }
    }
  }

  void multiply(const Product<T>& product, int64_t begin, int64_t end) const override {
    static_assert(kTogether % kLanes == 0);
    // a pair may not have a number of the next column, or lie across two words
    const bool packed = Terms::kNumbers > 1 && (this->depth_ % Terms::kNumbers || product.weight_stride % Terms::kNumbers);
    const Buffer room(2 * kTogether * lanes_), own(packed ? kTogether * words_ : 0);
    const int64_t last = std::min(end * kColumns, product.width);
    for (int64_t n = begin * kColumns; n < last; n += kTogether) {
      const int64_t count = std::min(kTogether, last - n);
      Columns columns{reinterpret_cast<const float*>(product.weight + n * product.weight_stride),
                      product.weight_stride / Terms::kNumbers};
      if (packed) columns = pack(product, n, count, own.at(0));
      if (lanes_) multiply_lanes(product, columns, n, count, room.at(0));
      if (alone_) multiply_alone(product, columns, n, count);
    }
  }

 private:
  struct Columns {
    const float* first;
    int64_t stride;  // words
  };

  Columns pack(const Product<T>& product, int64_t n, int64_t count, float* to) const {
    for (int64_t c = 0; c < count; ++c) {
      T* column = reinterpret_cast<T*>(to + c * words_);
      std::copy_n(product.weight + (n + c) * product.weight_stride, this->depth_, column);
      std::fill(column + this->depth_, column + words_ * Terms::kNumbers, T{});
    }
    return {to, words_};
  }

  // Returns the part of later columns that is prefetched while columns are multiplied.
  const char* asked(const Columns& columns, int64_t pass) const {
    return reinterpret_cast<const char*>(columns.first + kTogether * columns.stride + pass * kTogether * columns.stride / passes_);
  }

  void multiply_lanes(const Product<T>& product, const Columns& columns, int64_t n, int64_t count, float* room) const {
    float* by_column = room;                    // [kTogether, lanes_]
    float* by_row = room + kTogether * lanes_;  // [lanes_, kTogether]
    const bool begun = Terms::kBiasFirst && product.bias;
    int64_t pass = 0;
    const auto panel = [&](auto vectors, int64_t first) {
      constexpr int kVectors = decltype(vectors)::value, kTile = std::min(kAccumulators / kVectors, 12);
      constexpr int64_t kWord = sizeof(float), kWide = kVectors * kLanes;
      const Weights weights{columns.first, columns.stride, asked(columns, pass++), kWord * columns.stride / passes_,
                            kWord * kTile / passes_};
      if (begun)
        for (int64_t c = 0; c < count; ++c)
          std::fill_n(by_column + c * lanes_ + first, kWide, static_cast<float>(product.bias[n + c]));
      for (int64_t k = 0; k < words_; k += block_)
        gemm_panel<kVectors, Terms>(count, std::min(block_, words_ - k), weights.at(k),
                                    Packed{panels_.at(first * words_ + k * kWide), kWide}, 0, by_column + first, lanes_,
                                    k || begun ? Into::added : Into::set);
      return first + kWide;
    };
    for (int64_t first = 0; first < lanes_;) {
      const int64_t vectors = panel_of((lanes_ - first) / kLanes);
      if (vectors == kPanelVectors) first = panel(std::integral_constant<int, kPanelVectors>{}, first);
      else if (vectors == 2) first = panel(std::integral_constant<int, 2>{}, first);
      else first = panel(std::integral_constant<int, 1>{}, first);
    }
    transpose(Packed{by_column, lanes_}, padded(count), lanes_, by_row, kTogether);
    for (int64_t r = 0; r < this->rows_ - alone_; ++r)
      for (int64_t c = 0; c < count; c += kLanes)
        put<T, Terms::kBiasFirst>(load(by_row + r * kTogether + c), product, r, n + c, count - c);
  }

  void multiply_alone(const Product<T>& product, const Columns& columns, int64_t n, int64_t count) const {
    const float* x = x_ + (this->rows_ - alone_) * words_;
    const char* next = asked(columns, passes_ - 1);
    const int64_t ahead = kLanes * 4 * sizeof(float) / passes_;  // bytes with every four steps
    Vec sums[kAlone];
    for (int64_t c = 0; c < count; c += kLanes, next += ahead * (words_ / 4)) {
      Columns some{columns.first + c * columns.stride, columns.stride};
      const int64_t wanted = std::min<int64_t>(kLanes, count - c);
      std::optional<Buffer> end;
      if (wanted < kLanes) {  // nothing is read after the end of the weight
        end.emplace(kLanes * words_);
        for (int64_t l = 0; l < kLanes; ++l) {
          if (l < wanted) std::copy_n(some.first + l * some.stride, words_, end->at(l * words_));
          else std::fill_n(end->at(l * words_), words_, 0.f);
        }
        some = {end->at(0), words_};
      }
      const bool begun = Terms::kBiasFirst && product.bias;
      if (begun) {
        const T* bias = product.bias + n + c;
        std::fill_n(sums, alone_, wanted < kLanes ? load_some(bias, wanted) : load(bias));
      }
      dot_some_columns<Terms, kAlone>(alone_, x, words_, some.first, some.stride, words_, block_, next, ahead, +sums, begun);
      for (int64_t r = 0; r < alone_; ++r) put<T, Terms::kBiasFirst>(sums[r], product, this->rows_ - alone_ + r, n + c, wanted);
    }
  }

  const int64_t words_, block_;  // of the depth; see Terms
  const int64_t alone_, lanes_;  // rows at the end that are multiplied with columns in lanes; lanes of the other rows
  int64_t passes_;               // over a weight
  const Buffer pairs_;
  const float* x_;  // [rows, words]
  const Buffer panels_;  // the other rows, transposed: panel after panel, each [words, its lanes]
};

}  // namespace
}  // namespace rolltree
