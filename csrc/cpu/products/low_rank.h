// Low-rank products of adapters, added to the rows that have them: see low_rank.cpp.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "../numbers.h"

namespace rolltree {

// The rows [begin, end) have an adapter.
struct Run {
  int64_t begin, end, adapter;
};

// Returns the runs of rows whose numbers lie one after the other, checked: they are in order and among `rows` rows.
std::vector<Run> runs_of(std::span<const int64_t> numbers, int64_t rows, int64_t adapters);

// The adapters of a product, by their numbers, in memory that the caller keeps: a [rank, depth] and b [width, rank],
// contiguous. The rank is 0 where an adapter has no part in the product.
template <class T>
struct LowRank {
  const int64_t* matrices;  // [adapters, 3]: the addresses of a and b, and the rank
  const float* scales;      // [adapters]

  const T* a(int64_t adapter) const { return reinterpret_cast<const T*>(matrices[3 * adapter]); }
  const T* b(int64_t adapter) const { return reinterpret_cast<const T*>(matrices[3 * adapter + 1]); }
  int64_t rank(int64_t adapter) const { return matrices[3 * adapter + 2]; }
};

// The result of a product, out [rows, width], to which its adapters are added.
template <class T>
struct Adapted {
  LowRank<T> adapters;
  float* out;
  int64_t width;
};

// out[r] += scale (x[r] a^T) b^T for the rows of the runs, with the roundings to T of peft's modules; x [rows, depth] holds
// values of T.
template <class T>
void add_low_rank(const float* x, int64_t depth, std::span<const Adapted<T>> products, std::span<const Run> runs);

}  // namespace rolltree
