// Products of few rows with a weight matrix.
//
// A decode step multiplies a handful of rows with every weight. Libraries pack the weight first; here it is read once,
// in place. Rows are transposed, which is little work, and are in the lanes; weights are broadcast. Where this would leave
// most lanes empty, columns of the weight are in the lanes instead and are transposed while they are read. Both ways sum
// over the depth in the same order, whatever the number of rows, so a row's result does not depend on the others.
//
// fp32 has the order of torch's library, if it is one that `library_block` knows: blocks of the depth are summed one number
// after the other, and the sums of blocks are added in order, to the bias if there is one. bf16 has the order of oneDNN's
// products on AVX-512: pairs of numbers, the odd one first, in blocks of 512 along the depth (1,024 where it is above 1,024)
// whose sums are added in order. Products of bf16 are exact in fp32. AVX-512 BF16 does it with one instruction a pair, other
// processors with two after widening.
#include "few_rows.h"

#include <torch/csrc/stable/library.h>

#include "few_rows_in_lanes.h"
#include "../machine.h"

namespace rolltree {
namespace {

struct Single {
  static constexpr int64_t kNumbers = 1;
  static constexpr bool kBiasFirst = true;
  static Vec add(Vec sum, float x, Vec w) { return fused(sum, x - Vec{}, w); }
  static int64_t block(int64_t words) {
    const int64_t block = library_block(words);
    return block ? block : words;
  }
};

// The twin of `Dots` (few_rows_dots.cpp).
struct Widened : PairsOfBf16 {
  static Vec add(Vec sum, float x, Vec w) {
    uint32_t pair;
    std::memcpy(&pair, &x, 4);
    const UVec own = pair - UVec{}, odd = own & 0xffff0000u, even = own << 16;
    sum = fused(sum, (Vec)odd, (Vec)((UVec)w & 0xffff0000u));
    return fused(sum, (Vec)even, (Vec)((UVec)w << 16));
  }
};

}  // namespace

int64_t few_rows() { return library_is_fast() ? 64 : 384; }

template <class T>
void FewRows<T>::multiply(std::span<const Product<T>> products) const {
  int64_t blocks = 0;
  for (const Product<T>& product : products) blocks += product.blocks();
  torch::stable::parallel_for(0, blocks, worth_a_thread(), [&](int64_t begin, int64_t end) {
    int64_t first = 0;
    for (const Product<T>& product : products) {
      const int64_t own = product.blocks();
      multiply(product, std::max<int64_t>(begin - first, 0), std::min(end - first, own));
      first += own;
    }
  });
}

template <>
std::unique_ptr<const FewRows<float>> FewRows<float>::of(const float* x, int64_t rows, int64_t depth) {
  return std::make_unique<RowsInLanes<float, Single>>(x, rows, depth);
}

template <>
std::unique_ptr<const FewRows<Bf16>> FewRows<Bf16>::of(const float* x, int64_t rows, int64_t depth) {
  if (tiles() != Tiles::none) return rows_for_tiles(x, rows, depth);
  if (pairs() == Pairs::dots) return rows_for_dots(x, rows, depth);
  return std::make_unique<RowsInLanes<Bf16, Widened>>(x, rows, depth);
}

template class FewRows<float>;
template class FewRows<Bf16>;

namespace {

constexpr int64_t kAtOnce = 384;  // rows whose panels stay in the cache

// out [M, N] = x [M, K] weight [N, K]^T + bias [N], of any number of rows; those of `out` may lie apart.
template <class T>
void linear_of(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, Tensor& out) {
  const int64_t rows = x.size(0), width = weight.size(0), depth = x.size(1), stride = rows > 1 ? out.stride(0) : width;
  const T *from = static_cast<const T*>(x.const_data_ptr()), *columns = static_cast<const T*>(weight.const_data_ptr());
  const T* added = bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr;
  T* to = static_cast<T*>(out.mutable_data_ptr());
  constexpr bool kWide = std::is_same_v<T, float>;
  const int64_t most = std::min(rows, kAtOnce);
  const Buffer widened(kWide ? 0 : most * depth), sums(kWide ? 0 : most * width);
  for (int64_t first = 0; first < rows; first += kAtOnce) {
    const int64_t some = std::min(kAtOnce, rows - first);
    const T* own = from + first * depth;
    if constexpr (kWide) {
      const Product<T> product{columns, added, width, depth, to + first * stride, stride};
      FewRows<T>::of(own, some, depth)->multiply(std::span(&product, 1));
    } else {
      widen(own, some * depth, widened.at(0));
      const Product<T> product{columns, added, width, depth, sums.at(0), width};
      FewRows<T>::of(widened.at(0), some, depth)->multiply(std::span(&product, 1));
      for (int64_t r = 0; r < some; ++r) narrow(sums.at(r * width), width, to + (first + r) * stride);
    }
  }
}

// Operands are of one type, fp32 or bf16, and contiguous but for the rows of `out`.
void linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, Tensor out) {
  const auto run = x.scalar_type() == ScalarType::BFloat16 ? linear_of<Bf16> : linear_of<float>;
  run(x, weight, bias, out);
}

bool rows_are_contiguous(const Tensor& t) { return t.size(1) <= 1 || t.stride(1) == 1; }

// out [M, N] fp32 = hidden [M, K] weight [N, K]^T, of bf16; the rows of each may lie apart.
void bf16_logits(const Tensor& hidden, const Tensor& weight, Tensor out) {
  STD_TORCH_CHECK(hidden.scalar_type() == ScalarType::BFloat16 && weight.scalar_type() == ScalarType::BFloat16 &&
                      out.scalar_type() == ScalarType::Float,
                  "operands must be bf16 and the result fp32");
  STD_TORCH_CHECK(rows_are_contiguous(hidden) && rows_are_contiguous(weight) && rows_are_contiguous(out),
                  "bf16_logits: the elements of a row of hidden, weight and out must be neighbours");
  const int64_t rows = hidden.size(0), depth = hidden.size(1), width = weight.size(0);
  STD_TORCH_CHECK(weight.size(1) == depth && out.size(0) == rows && out.size(1) == width, "shapes of the operands do not fit");
  const Bf16* from = static_cast<const Bf16*>(hidden.const_data_ptr());
  const Bf16* columns = static_cast<const Bf16*>(weight.const_data_ptr());
  float* to = static_cast<float*>(out.mutable_data_ptr());
  const Buffer widened(std::min(rows, kAtOnce) * depth);
  for (int64_t first = 0; first < rows; first += kAtOnce) {
    const int64_t some = std::min(kAtOnce, rows - first);
    for (int64_t r = 0; r < some; ++r) widen(from + (first + r) * hidden.stride(0), depth, widened.at(r * depth));
    const Product<Bf16> product{
        columns, nullptr, width, weight.stride(0), to + first * out.stride(0), out.stride(0), false, false};
    FewRows<Bf16>::of(widened.at(0), some, depth)->multiply(std::span(&product, 1));
  }
}

}  // namespace
}  // namespace rolltree

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cpu, m) {
  m.def("few_rows() -> int");
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()");
  m.def("bf16_logits(Tensor hidden, Tensor weight, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CompositeExplicitAutograd, m) { m.impl("few_rows", TORCH_BOX(&rolltree::few_rows)); }

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CPU, m) {
  m.impl("linear", TORCH_BOX(&rolltree::linear));
  m.impl("bf16_logits", TORCH_BOX(&rolltree::bf16_logits));
}
