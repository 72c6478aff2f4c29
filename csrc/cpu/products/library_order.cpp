// The order in which a library's fp32 products sum over the depth, found by comparing bits: libraries do not say it.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <optional>

#include "../machine.h"
#include "../vectors.h"

namespace rolltree {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kRows = 64, kWidth = 256;  // of a product that is compared; a library may have another order for fewer
constexpr int64_t kStep = 5;

// Numbers in [-1, 1) that are the same in each process.
void fill(float* to, int64_t count, uint32_t seed) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits = (static_cast<uint32_t>(i) + seed) * 0x9E3779B1u;
    bits = (bits ^ bits >> 15) * 0x85EBCA77u;
    bits = (bits ^ bits >> 13) * 0xC2B2AE3Du;
    to[i] = static_cast<float>(static_cast<int32_t>(bits ^ bits >> 16)) * 0x1p-31f;
  }
}

// Computes products of the first kLanes rows with each kStep-th column as few_rows.cpp does, a row in each lane.
bool has_order(const float* x, const float* w, const float* out, int64_t depth, int64_t block) {
  for (int64_t n = 0; n < kWidth; n += kStep) {
    Vec total{};
    for (int64_t first = 0; first < depth; first += block) {
      Vec sum{};
      for (int64_t k = first; k < std::min(first + block, depth); ++k) {
        Vec row;
        for (int l = 0; l < kLanes; ++l) row[l] = x[l * depth + k];
        sum = sum + w[n * depth + k] * row;
      }
      total = first ? total + sum : sum;
    }
    for (int l = 0; l < kLanes; ++l)
      if (total[l] != out[l * kWidth + n]) return false;
  }
  return true;
}

int64_t find_block(int64_t depth) {
  if (depth < 2) return depth;
  Tensor x = torch::stable::empty({kRows, depth}, ScalarType::Float);
  Tensor w = torch::stable::empty({kWidth, depth}, ScalarType::Float);
  float *rows = x.mutable_data_ptr<float>(), *columns = w.mutable_data_ptr<float>();
  fill(rows, kRows * depth, 1);
  fill(columns, kWidth * depth, 0x40000000u);
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack{from(x), from(w), from(std::optional<Tensor>())};
  STD_TORCH_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION) == 0, "a product of fp32 failed");
  const Tensor out = torch::stable::detail::to<Tensor>(stack[0]);
  if (out.scalar_type() != ScalarType::Float) return 0;  // autocast
  const float* found = out.const_data_ptr<float>();
  if (has_order(rows, columns, found, depth, depth)) return depth;
  if (has_order(rows, columns, found, depth, depth / 2)) return depth / 2;
  for (int64_t block = 64; block <= std::min<int64_t>(1024, depth - 1); block += 32)
    if (has_order(rows, columns, found, depth, block)) return block;
  return 0;
}

}  // namespace

int64_t library_block(int64_t depth) {
  thread_local int64_t last_depth = -1, last_block = 0;
  if (depth == last_depth) return last_block;
  static std::mutex mutex;
  static std::map<int64_t, int64_t> blocks;
  const std::lock_guard lock(mutex);
  const auto [at, first] = blocks.try_emplace(depth);
  if (first) at->second = find_block(depth);
  last_depth = depth, last_block = at->second;
  return last_block;
}

}  // namespace rolltree

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cpu, m) { m.def("library_block(int depth) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CompositeExplicitAutograd, m) {
  m.impl("library_block", TORCH_BOX(&rolltree::library_block));
}
