// Low-rank products of adapters. The weights of the base are multiplied with all rows before; here the rows of each adapter
// are multiplied with its two small matrices alone. A row's result does not depend on the other rows (few_rows.h), and has
// the bits of the modules of peft where these compute each row by itself: nothing is contracted.
#pragma GCC optimize("fp-contract=off")

#include "low_rank.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>

#include "attention_tiles.h"
#include "few_rows.h"

namespace rolltree {
namespace {

constexpr int64_t kAtOnce = 384;  // rows whose panels stay in the cache

template <class T>
void add_scaled(const float* x, float scale, float* sums, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sums[i] = rounded<T>(sums[i] + rounded<T>(x[i] * scale));
}

// Adds the adapter of the rows [begin, end).
template <class T>
void add_run(const float* x, int64_t depth, std::span<const Adapted<T>> products, int64_t begin, int64_t end, int64_t adapter) {
  const int64_t rows = end - begin;
  int64_t ranks = 0, widest = 0;
  for (const Adapted<T>& product : products) {
    const int64_t rank = product.adapters.rank(adapter);
    ranks += rank;
    if (rank) widest = std::max(widest, product.width);
  }
  if (ranks == 0) return;
  const Buffer inner(rows * ranks), found(rows * widest);
  std::vector<Product<T>> down;
  float* next = inner.at(0);
  for (const Adapted<T>& product : products) {
    const int64_t rank = product.adapters.rank(adapter);
    if (rank) down.push_back({product.adapters.a(adapter), nullptr, rank, depth, next, rank});
    next += rows * rank;
  }
  FewRows<T>::of(x + begin * depth, rows, depth)->multiply(down);
  next = inner.at(0);
  for (const Adapted<T>& product : products) {
    const int64_t rank = product.adapters.rank(adapter), width = product.width;
    if (rank == 0) continue;
    const auto low = FewRows<T>::of(next, rows, rank);
    const Product<T> up{product.adapters.b(adapter), nullptr, width, rank, found.at(0), width};
    torch::stable::parallel_for(0, up.blocks(), low->worth_a_thread(), [&](int64_t first, int64_t last) {
      low->multiply(up, first, last);
      const int64_t from = first * kColumns, count = std::min(last * kColumns, width) - from;
      for (int64_t row = 0; row < rows; ++row)
        add_scaled<T>(found.at(row * width + from), product.adapters.scales[adapter],
                      product.out + (begin + row) * width + from, count);
    });
    next += rows * rank;
  }
}

template <class T>
void add_low_rank_of(Tensor& out, const Tensor& x, const LowRank<T>& adapters, const std::vector<Run>& runs) {
  const int64_t depth = x.size(1), width = out.size(1);
  const T* from = static_cast<const T*>(x.const_data_ptr());
  T* to = static_cast<T*>(out.mutable_data_ptr());
  for (const auto& [begin, end, adapter] : runs) {
    const int64_t rows = end - begin;
    const Run whole{0, rows, adapter};
    if constexpr (std::is_same_v<T, float>) {
      const Adapted<T> product{adapters, to + begin * width, width};
      add_low_rank<T>(from + begin * depth, depth, std::span(&product, 1), std::span(&whole, 1));
    } else {
      const Buffer wide(rows * depth), sums(rows * width);
      widen(from + begin * depth, rows * depth, wide.at(0));
      widen(to + begin * width, rows * width, sums.at(0));
      const Adapted<T> product{adapters, sums.at(0), width};
      add_low_rank<T>(wide.at(0), depth, std::span(&product, 1), std::span(&whole, 1));
      narrow(sums.at(0), rows * width, to + begin * width);
    }
  }
}

// Operands are of one type, fp32 or bf16, and contiguous.
void add_low_rank_op(Tensor out, const Tensor& x, const Tensor& matrices, const Tensor& scales, std::vector<int64_t> numbers) {
  const std::vector<Run> runs = runs_of(numbers, x.size(0), matrices.size(0));
  const int64_t* addresses = matrices.const_data_ptr<int64_t>();
  const float* factors = scales.const_data_ptr<float>();
  if (out.scalar_type() == ScalarType::BFloat16) add_low_rank_of<Bf16>(out, x, {addresses, factors}, runs);
  else add_low_rank_of<float>(out, x, {addresses, factors}, runs);
}

}  // namespace

std::vector<Run> runs_of(std::span<const int64_t> numbers, int64_t rows, int64_t adapters) {
  std::vector<Run> runs;
  int64_t last = 0;
  for (size_t i = 0; i + 3 <= numbers.size(); i += 3) {
    const Run run{numbers[i], numbers[i + 1], numbers[i + 2]};
    STD_TORCH_CHECK(last <= run.begin && run.begin <= run.end && run.end <= rows && 0 <= run.adapter && run.adapter < adapters,
                    "rows ", run.begin, " to ", run.end, " of adapter ", run.adapter, " are not in order, or not there");
    runs.push_back(run);
    last = run.end;
  }
  return runs;
}

template <class T>
void add_low_rank(const float* x, int64_t depth, std::span<const Adapted<T>> products, std::span<const Run> runs) {
  for (const auto& [begin, end, adapter] : runs)
    for (int64_t first = begin; first < end; first += kAtOnce)
      add_run<T>(x, depth, products, first, std::min(first + kAtOnce, end), adapter);
}

template void add_low_rank<float>(const float*, int64_t, std::span<const Adapted<float>>, std::span<const Run>);
template void add_low_rank<Bf16>(const float*, int64_t, std::span<const Adapted<Bf16>>, std::span<const Run>);

}  // namespace rolltree

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cpu, m) {
  m.def("add_low_rank(Tensor(a!) out, Tensor x, Tensor matrices, Tensor scales, int[] runs) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CPU, m) { m.impl("add_low_rank", TORCH_BOX(&rolltree::add_low_rank_op)); }
