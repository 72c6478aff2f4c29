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
#include <memory>

#include "../attention/attention_tiles.h"
#include "few_rows.h"

namespace rolltree {
namespace {

constexpr int64_t kAtOnce = 384;  // rows whose panels stay in the cache

// A product of some rows, which is then added to `sums` by `scale` if these are given; both in rows of its width.
template <class T>
struct Task {
  const FewRows<T>* rows;
  Product<T> product;
  int64_t count;  // of the rows
  float* sums = nullptr;
  float scale = 0;

  void compute(int64_t first, int64_t last) const {
    rows->multiply(product, first, last);
    if (!sums) return;
    const int64_t width = product.width, from = first * kColumns, to = std::min(last * kColumns, width);
    for (int64_t row = 0; row < count; ++row) {
      float* sum = sums + row * width;
      const float* found = product.out + row * width;
      int64_t at = from;
      for (; at + kLanes <= to; at += kLanes) store(sum + at, added(load(sum + at), load(found + at)));
      if (at < to) store_some(sum + at, added(load_some(sum + at, to - at), load_some(found + at, to - at)), to - at);
    }
  }
  Vec added(Vec sum, Vec found) const { return rounded<T>(sum + rounded<T>(found * scale)); }
};

// Computes tasks block by block in parallel: the matrices of one are too small to keep all threads busy.
template <class T>
void compute(const std::vector<Task<T>>& tasks) {
  if (tasks.empty()) return;
  int64_t blocks = 0, grain = INT64_MAX;
  for (const Task<T>& task : tasks) blocks += task.product.blocks(), grain = std::min(grain, task.rows->worth_a_thread());
  torch::stable::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
    for (const Task<T>& task : tasks) {
      const int64_t own = task.product.blocks(), first = std::max<int64_t>(begin, 0), last = std::min(end, own);
      if (first < last) task.compute(first, last);
      begin -= own, end -= own;
    }
  });
}

// Adds the adapters of some runs together.
template <class T>
void add_runs(const float* x, int64_t depth, std::span<const Adapted<T>> products, std::span<const Run> runs) {
  std::vector<std::unique_ptr<const FewRows<T>>> prepared;
  std::vector<Buffer> results;
  std::vector<Task<T>> down, up;
  for (const auto& [begin, end, adapter] : runs) {
    const int64_t rows = end - begin;
    prepared.push_back(FewRows<T>::of(x + begin * depth, rows, depth));
    for (const auto& [adapters, out, width] : products) {
      const int64_t rank = adapters.rank(adapter);
      if (rank == 0) continue;
      float *inner = results.emplace_back(rows * rank).at(0), *outer = results.emplace_back(rows * width).at(0);
      down.push_back({prepared.back().get(), {adapters.a(adapter), nullptr, rank, depth, inner, rank}, rows});
      up.push_back({nullptr, {adapters.b(adapter), nullptr, width, rank, outer, width}, rows, out + begin * width,
                    adapters.scales[adapter]});
    }
  }
  compute(down);
  for (size_t i = 0; i < up.size(); ++i) {
    prepared.push_back(FewRows<T>::of(down[i].product.out, down[i].count, down[i].product.width));
    up[i].rows = prepared.back().get();
  }
  compute(up);
}

template <class T>
void add_low_rank_of(Tensor& out, const Tensor& x, const LowRank<T>& adapters, const std::vector<Run>& runs) {
  const int64_t rows = x.size(0), depth = x.size(1), width = out.size(1);
  const T* from = static_cast<const T*>(x.const_data_ptr());
  T* to = static_cast<T*>(out.mutable_data_ptr());
  if constexpr (std::is_same_v<T, float>) {
    const Adapted<T> product{adapters, to, width};
    add_low_rank<T>(from, depth, std::span(&product, 1), runs);
  } else {
    const Buffer wide(rows * depth), sums(rows * width);
    widen(from, rows * depth, wide.at(0));
    widen(to, rows * width, sums.at(0));
    const Adapted<T> product{adapters, sums.at(0), width};
    add_low_rank<T>(wide.at(0), depth, std::span(&product, 1), runs);
    narrow(sums.at(0), rows * width, to);
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
  std::vector<Run> some;
  int64_t rows = 0;
  for (const auto& [begin, end, adapter] : runs)
    for (int64_t first = begin; first < end; first += kAtOnce) {
      const int64_t last = std::min(first + kAtOnce, end);
      if (rows + last - first > kAtOnce) add_runs<T>(x, depth, products, some), some.clear(), rows = 0;
      some.push_back({first, last, adapter});
      rows += last - first;
    }
  add_runs<T>(x, depth, products, some);
}

template void add_low_rank<float>(const float*, int64_t, std::span<const Adapted<float>>, std::span<const Run>);
template void add_low_rank<Bf16>(const float*, int64_t, std::span<const Adapted<Bf16>>, std::span<const Run>);

}  // namespace rolltree

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cpu, m) {
  m.def("add_low_rank(Tensor(a!) out, Tensor x, Tensor matrices, Tensor scales, int[] runs) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CPU, m) { m.impl("add_low_rank", TORCH_BOX(&rolltree::add_low_rank_op)); }
