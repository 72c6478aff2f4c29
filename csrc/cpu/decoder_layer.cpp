// A decoder layer where it decodes: products of few rows, and between them RMSNorm together with the sum before it, and
// rotary embedding on the way into the pages. These go over a row once, where PyTorch's modules go over all rows five to
// ten times. Rows are small and few when decoding, so passes and calls, not arithmetic, are what takes the time.
//
// Norms and rotary embedding have every rounding of PyTorch's own operators: nothing is contracted.
#pragma GCC optimize("fp-contract=off")

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "few_rows.h"
#include "layer_rows.h"
#include "tree_decode.h"

namespace rolltree {
namespace {

using torch::stable::Tensor;

constexpr int64_t kLongestHead = 1024;

Tensor add_rms_norm(Tensor residual, const std::optional<Tensor>& x, const Tensor& weight, double eps) {
  const int64_t rows = residual.size(0), width = residual.size(1);
  Tensor out = torch::stable::empty_like(residual);
  float* sums = residual.mutable_data_ptr<float>();
  const float* added = x ? x->const_data_ptr<float>() : nullptr;
  const float* weights = weight.const_data_ptr<float>();
  float* normed = out.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, rows, std::max<int64_t>(kGrain / width, 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* sum = sums + row * width;
      if (added)
        for (int64_t d = 0; d < width; ++d) sum[d] += added[row * width + d];
      rms_norm(sum, weights, static_cast<float>(eps), width, normed + row * width);
    }
  });
  return out;
}

// out = rotary embedding of x, normed if there is a weight; `out` may be x.
void rotate(const float* x, const float* weight, float eps, const float* cos, const float* sin, int64_t dim, float* out) {
  float from[kLongestHead];
  if (weight) rms_norm(x, weight, eps, dim, from);
  else std::copy_n(x, dim, from);
  turn(from, cos, sin, dim, out);
}

void rotate_and_store(Tensor q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& q_weight,
                      const std::optional<Tensor>& k_weight, double eps, const Tensor& cos, const Tensor& sin,
                      const Tensor& slots, Tensor k_pages, Tensor v_pages) {
  const int64_t rows = q.size(0), heads = q.size(1), dim = q.size(2), kv_heads = k.size(1), width = kv_heads * dim;
  STD_TORCH_CHECK(dim <= kLongestHead, "rotate_and_store: heads of more than 1024 numbers");
  float* query = q.mutable_data_ptr<float>();
  const float *key = k.const_data_ptr<float>(), *value = v.const_data_ptr<float>();
  const float* q_weights = q_weight ? q_weight->const_data_ptr<float>() : nullptr;
  const float* k_weights = k_weight ? k_weight->const_data_ptr<float>() : nullptr;
  const float *cosines = cos.const_data_ptr<float>(), *sines = sin.const_data_ptr<float>();
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  float *keys = k_pages.mutable_data_ptr<float>(), *values = v_pages.mutable_data_ptr<float>();
  const float epsilon = static_cast<float>(eps);
  torch::stable::parallel_for(0, rows, std::max<int64_t>(kGrain / (heads * dim), 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float *c = cosines + row * dim, *s = sines + row * dim;
      for (int64_t at = row * heads * dim; at < (row + 1) * heads * dim; at += dim)
        rotate(query + at, q_weights, epsilon, c, s, dim, query + at);
      for (int64_t h = 0; h < width; h += dim)
        rotate(key + row * width + h, k_weights, epsilon, c, s, dim, keys + slot[row] * width + h);
      std::copy_n(value + row * width, width, values + slot[row] * width);
    }
  });
}

// ---- a whole layer ---------------------------------------------------------------------------------------------------

template <size_t kCount>
Tensor aten(const char* op, const char* overload, std::array<StableIValue, kCount> stack) {
  STD_TORCH_CHECK(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION) == 0, "a decoder layer: ", op, " failed");
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  using torch::stable::detail::from;
  const int64_t rows = x.size(0), width = weight.size(0), depth = x.size(1);
  if (rows > kFewRows) return aten<3>("aten::linear", "", {from(x), from(weight), from(bias)});
  Tensor out = torch::stable::new_empty(x, {rows, width});
  few_rows_product(x.const_data_ptr<float>(), weight.const_data_ptr<float>(), bias ? bias->const_data_ptr<float>() : nullptr, rows,
                   width, depth, out.mutable_data_ptr<float>(), width);
  return out;
}

// x / (1 + e^-x) * up, in place; every element by the same arithmetic, wherever it lies.
void silu_and_multiply(const Tensor& gate, const Tensor& up) {
  float* x = gate.mutable_data_ptr<float>();
  const float* factor = up.const_data_ptr<float>();
  torch::stable::parallel_for(0, gate.numel(), kGrain, [&](int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) store(x + i, silu_mul(load(x + i), load(factor + i)));
    if (i < end) store_some(x + i, silu_mul(load_some(x + i, end - i), load_some(factor + i, end - i)), end - i);
  });
}

void decoder_layer(Tensor residual, const Tensor& input_norm, const Tensor& q_weight, const std::optional<Tensor>& q_bias,
                   const Tensor& k_weight, const std::optional<Tensor>& k_bias, const Tensor& v_weight,
                   const std::optional<Tensor>& v_bias, const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm,
                   const Tensor& o_weight, const std::optional<Tensor>& o_bias, const Tensor& mlp_norm, const Tensor& gate_weight,
                   const Tensor& up_weight, const Tensor& down_weight, double eps, const Tensor& cos, const Tensor& sin,
                   const Tensor& slots, Tensor k_pages, Tensor v_pages, const Tensor& page_indptr, const Tensor& page_ids,
                   const Tensor& node_offset, const Tensor& node_length, const Tensor& node_position, const Tensor& row_begin,
                   const Tensor& row_end, const Tensor& query_position, double scale, std::optional<int64_t> window) {
  const int64_t rows = residual.size(0), width = residual.size(1), dim = k_pages.size(3);
  const auto heads = [&](const Tensor& x) { return torch::stable::view(x, {rows, x.size(1) / dim, dim}); };
  const Tensor x = add_rms_norm(residual, std::nullopt, input_norm, eps);
  const Tensor q = heads(linear(x, q_weight, q_bias));
  rotate_and_store(q, heads(linear(x, k_weight, k_bias)), heads(linear(x, v_weight, v_bias)), q_norm, k_norm, eps, cos, sin, slots,
                   k_pages, v_pages);
  const Tensor seen = std::get<0>(tree_decode(q, k_pages, v_pages, page_indptr, page_ids, node_offset, node_length, node_position,
                                              row_begin, row_end, query_position, scale, window, std::nullopt));
  const Tensor mixed = linear(torch::stable::view(seen, {rows, o_weight.size(1)}), o_weight, o_bias);
  const Tensor y = add_rms_norm(residual, mixed, mlp_norm, eps);
  const Tensor gated = linear(y, gate_weight, std::nullopt);
  silu_and_multiply(gated, linear(y, up_weight, std::nullopt));
  const Tensor added = linear(gated, down_weight, std::nullopt);
  float* sums = residual.mutable_data_ptr<float>();
  const float* more = added.const_data_ptr<float>();
  torch::stable::parallel_for(0, rows * width, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sums[i] += more[i];
  });
}

}  // namespace
}  // namespace rolltree

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cpu, m) {
  m.def("add_rms_norm(Tensor(a!) residual, Tensor? x, Tensor weight, float eps) -> Tensor");
  m.def(
      "rotate_and_store(Tensor(a!) q, Tensor k, Tensor v, Tensor? q_weight, Tensor? k_weight, float eps, Tensor cos, "
      "Tensor sin, Tensor slots, Tensor(b!) k_pages, Tensor(c!) v_pages) -> ()");
  m.def(
      "decoder_layer(Tensor(a!) residual, Tensor input_norm, Tensor q_weight, Tensor? q_bias, Tensor k_weight, Tensor? k_bias, "
      "Tensor v_weight, Tensor? v_bias, Tensor? q_norm, Tensor? k_norm, Tensor o_weight, Tensor? o_bias, Tensor mlp_norm, "
      "Tensor gate_weight, Tensor up_weight, Tensor down_weight, float eps, Tensor cos, Tensor sin, Tensor slots, "
      "Tensor(b!) k_pages, Tensor(c!) v_pages, Tensor page_indptr, Tensor page_ids, Tensor node_offset, Tensor node_length, "
      "Tensor node_position, Tensor row_begin, Tensor row_end, Tensor query_position, float scale, int? window) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CPU, m) {
  m.impl("add_rms_norm", TORCH_BOX(&rolltree::add_rms_norm));
  m.impl("rotate_and_store", TORCH_BOX(&rolltree::rotate_and_store));
  m.impl("decoder_layer", TORCH_BOX(&rolltree::decoder_layer));
}
