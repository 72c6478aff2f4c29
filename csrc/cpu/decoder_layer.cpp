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
#include <tuple>
#include <vector>

#include "few_rows.h"
#include "layer_rows.h"
#include "tree_decode.h"

namespace rolltree {
namespace {

using torch::stable::Tensor;

constexpr int64_t kLongestHead = 1024;

// residual += x where there is one; out = RMSNorm of the sums.
void add_rms_norm(float* residual, const float* x, const float* weight, float eps, int64_t rows, int64_t width, float* out) {
  torch::stable::parallel_for(0, rows, std::max<int64_t>(kGrain / width, 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* sum = residual + row * width;
      if (x)
        for (int64_t d = 0; d < width; ++d) sum[d] += x[row * width + d];
      rms_norm(sum, weight, eps, width, out + row * width);
    }
  });
}

const float* data_of(const std::optional<Tensor>& x) { return x ? x->const_data_ptr<float>() : nullptr; }

Tensor add_rms_norm_op(Tensor residual, const std::optional<Tensor>& x, const Tensor& weight, double eps) {
  Tensor out = torch::stable::empty_like(residual);
  add_rms_norm(residual.mutable_data_ptr<float>(), data_of(x), weight.const_data_ptr<float>(), static_cast<float>(eps),
               residual.size(0), residual.size(1), out.mutable_data_ptr<float>());
  return out;
}

// Cosines and sines [*, dim], and which of them each row has: the `turns[row]`-th, or the `row`-th where that is null.
struct Turns {
  const float *cos, *sin;
  const int32_t* turns;
  int64_t of(int64_t row) const { return turns ? turns[row] : row; }
};

// out = rotary embedding of x, normed if there is a weight; `out` may be x.
void rotate(const float* x, const float* weight, float eps, const float* cos, const float* sin, int64_t dim, float* out) {
  float from[kLongestHead];
  if (weight) rms_norm(x, weight, eps, dim, from);
  else std::copy_n(x, dim, from);
  turn(from, cos, sin, dim, out);
}

template <class Slot>
void rotate_and_store(float* q, const float* k, const float* v, const float* q_weight, const float* k_weight, float eps,
                      const Turns& turns, const Slot* slots, float* k_pages, float* v_pages, int64_t rows, int64_t heads,
                      int64_t kv_heads, int64_t dim) {
  STD_TORCH_CHECK(dim <= kLongestHead, "rotate_and_store: heads of more than 1024 numbers");
  const int64_t width = kv_heads * dim;
  torch::stable::parallel_for(0, rows, std::max<int64_t>(kGrain / (heads * dim), 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float *c = turns.cos + turns.of(row) * dim, *s = turns.sin + turns.of(row) * dim;
      const int64_t slot = slots[row];
      for (int64_t at = row * heads * dim; at < (row + 1) * heads * dim; at += dim) rotate(q + at, q_weight, eps, c, s, dim, q + at);
      for (int64_t h = 0; h < width; h += dim) rotate(k + row * width + h, k_weight, eps, c, s, dim, k_pages + slot * width + h);
      std::copy_n(v + row * width, width, v_pages + slot * width);
    }
  });
}

void rotate_and_store_op(Tensor q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& q_weight,
                      const std::optional<Tensor>& k_weight, double eps, const Tensor& cos, const Tensor& sin,
                      const Tensor& slots, Tensor k_pages, Tensor v_pages) {
  const Turns turns{cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), nullptr};
  rotate_and_store(q.mutable_data_ptr<float>(), k.const_data_ptr<float>(), v.const_data_ptr<float>(), data_of(q_weight),
                   data_of(k_weight), static_cast<float>(eps), turns, slots.const_data_ptr<int64_t>(),
                   k_pages.mutable_data_ptr<float>(), v_pages.mutable_data_ptr<float>(), q.size(0), q.size(1), k.size(1), q.size(2));
}

// ---- a whole decoder -------------------------------------------------------------------------------------------------

template <size_t kCount>
Tensor aten(const char* op, const char* overload, std::array<StableIValue, kCount> stack) {
  STD_TORCH_CHECK(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION) == 0, "a decoder: ", op, " failed");
  return torch::stable::detail::to<Tensor>(stack[0]);
}

using Weight = std::optional<Tensor>;
enum { kInputNorm, kQ, kQBias, kK, kKBias, kV, kVBias, kQNorm, kKNorm, kO, kOBias, kMlpNorm, kGate, kUp, kDown, kOfLayer };

Tensor linear(const Tensor& x, const Weight& weight, const Weight& bias) {
  using torch::stable::detail::from;
  return aten<3>("aten::linear", "", {from(x), from(*weight), from(bias)});
}

Tensor room_for(const Tensor& x, const Weight& weight) { return torch::stable::new_empty(x, {x.size(0), weight->size(0)}); }

Product product_into(Tensor& out, const Weight& weight, const Weight& bias, bool add = false) {
  const int64_t width = weight->size(0);
  return {weight->const_data_ptr<float>(), data_of(bias), width, out.mutable_data_ptr<float>(), width, add};
}

// x / (1 + e^-x) * up, in place; every element by the same arithmetic, wherever it lies.
void silu_and_multiply(float* x, const float* up, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(x + i, silu_mul(load(x + i), load(up + i)));
  if (i < count) store_some(x + i, silu_mul(load_some(x + i, count - i), load_some(up + i, count - i)), count - i);
}

// silu(x gate^T) * (x up^T)
Tensor gated_unit(const Tensor& x, const Weight& gate, const Weight& up) {
  const int64_t rows = x.size(0), depth = x.size(1), width = gate->size(0);
  if (rows > kFewRows) {
    Tensor out = linear(x, gate, {}), factor = linear(x, up, {});
    float* first = out.mutable_data_ptr<float>();
    const float* second = factor.const_data_ptr<float>();
    torch::stable::parallel_for(0, rows * width, kGrain, [&](int64_t begin, int64_t end) {
      silu_and_multiply(first + begin, second + begin, end - begin);
    });
    return out;
  }
  Tensor out = room_for(x, gate), factor = room_for(x, up);
  const Product gates = product_into(out, gate, {}), ups = product_into(factor, up, {});
  const float* from = x.const_data_ptr<float>();
  torch::stable::parallel_for(0, gates.blocks(), worth_a_thread(2 * rows, depth), [&](int64_t begin, int64_t end) {
    few_rows_blocks(from, rows, depth, gates, begin, end);
    few_rows_blocks(from, rows, depth, ups, begin, end);
    const int64_t first = begin * kColumns, count = std::min(end * kColumns, width) - first;
    for (int64_t at = first; at < rows * width; at += width) silu_and_multiply(gates.out + at, ups.out + at, count);
  });
  return out;
}

// residual += x weight^T + bias
void add_product(Tensor& residual, const Tensor& x, const Weight& weight, const Weight& bias) {
  if (x.size(0) <= kFewRows) {
    const Product product = product_into(residual, weight, bias, true);
    few_rows_products(x.const_data_ptr<float>(), x.size(0), x.size(1), {&product, 1});
    return;
  }
  const Tensor more = linear(x, weight, bias);
  float* sums = residual.mutable_data_ptr<float>();
  const float* added = more.const_data_ptr<float>();
  torch::stable::parallel_for(0, residual.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sums[i] += added[i];
  });
}

// What all layers share in a step: which rows there are, where their keys go and what they see.
struct Step {
  Turns turns;
  const int32_t* slots;
  std::array<const Tensor*, 8> plan;
  float eps;
  double scale;
};

void decoder_layer(Tensor& residual, Tensor& x, const Weight* w, Tensor& k_pages, Tensor& v_pages, int64_t window, const Step& step) {
  const int64_t rows = residual.size(0), width = residual.size(1), kv_heads = k_pages.size(2), dim = k_pages.size(3);
  const int64_t heads = w[kQ]->size(0) / dim;
  const auto norm = [&](int which) {
    add_rms_norm(residual.mutable_data_ptr<float>(), nullptr, w[which]->const_data_ptr<float>(), step.eps, rows, width,
                 x.mutable_data_ptr<float>());
  };
  norm(kInputNorm);
  const bool few = rows <= kFewRows;
  Tensor q = few ? room_for(x, w[kQ]) : linear(x, w[kQ], w[kQBias]);
  Tensor k = few ? room_for(x, w[kK]) : linear(x, w[kK], w[kKBias]);
  Tensor v = few ? room_for(x, w[kV]) : linear(x, w[kV], w[kVBias]);
  if (few)
    few_rows_products(x.const_data_ptr<float>(), rows, width,
                      std::array{product_into(q, w[kQ], w[kQBias]), product_into(k, w[kK], w[kKBias]), product_into(v, w[kV], w[kVBias])});
  rotate_and_store(q.mutable_data_ptr<float>(), k.const_data_ptr<float>(), v.const_data_ptr<float>(), data_of(w[kQNorm]),
                   data_of(w[kKNorm]), step.eps, step.turns, step.slots, k_pages.mutable_data_ptr<float>(),
                   v_pages.mutable_data_ptr<float>(), rows, heads, kv_heads, dim);
  const auto& [indptr, ids, offset, length, position, row_begin, row_end, query] = step.plan;
  const Tensor seen = std::get<0>(tree_decode(torch::stable::view(q, {rows, heads, dim}), k_pages, v_pages, *indptr, *ids, *offset,
                                              *length, *position, *row_begin, *row_end, *query, step.scale,
                                              window ? std::optional(window) : std::nullopt, std::nullopt));
  add_product(residual, torch::stable::view(seen, {rows, heads * dim}), w[kO], w[kOBias]);
  norm(kMlpNorm);
  add_product(residual, gated_unit(x, w[kGate], w[kUp]), w[kDown], {});
}

// All between token ids and the last hidden states. `windows` has 0 for none.
Tensor decoder(const Tensor& input_ids, const Tensor& embedding, const std::vector<Weight>& weights, const Tensor& norm,
               std::vector<Tensor> pages, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& turns,
               const Tensor& slots, const Tensor& page_indptr, const Tensor& page_ids, const Tensor& node_offset,
               const Tensor& node_length, const Tensor& node_position, const Tensor& row_begin, const Tensor& row_end,
               const Tensor& query_position, double eps, double scale, std::vector<int64_t> windows) {
  const int64_t rows = input_ids.size(0), width = embedding.size(1), vocabulary = embedding.size(0);
  Tensor residual = torch::stable::new_empty(embedding, {rows, width}), x = torch::stable::new_empty(embedding, {rows, width});
  const int32_t* ids = input_ids.const_data_ptr<int32_t>();
  for (int64_t row = 0; row < rows; ++row) {
    STD_TORCH_CHECK(ids[row] >= 0 && ids[row] < vocabulary, "a decoder: token ", ids[row], " is outside the vocabulary");
    std::copy_n(embedding.const_data_ptr<float>() + ids[row] * width, width, residual.mutable_data_ptr<float>() + row * width);
  }
  const Step step{{cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), turns ? turns->const_data_ptr<int32_t>() : nullptr},
                  slots.const_data_ptr<int32_t>(),
                  {&page_indptr, &page_ids, &node_offset, &node_length, &node_position, &row_begin, &row_end, &query_position},
                  static_cast<float>(eps),
                  scale};
  for (size_t i = 0; i < windows.size(); ++i)
    decoder_layer(residual, x, &weights[i * kOfLayer], pages[2 * i], pages[2 * i + 1], windows[i], step);
  add_rms_norm(residual.mutable_data_ptr<float>(), nullptr, norm.const_data_ptr<float>(), step.eps, rows, width,
               x.mutable_data_ptr<float>());
  return x;
}

}  // namespace
}  // namespace rolltree

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cpu, m) {
  m.def("add_rms_norm(Tensor(a!) residual, Tensor? x, Tensor weight, float eps) -> Tensor");
  m.def(
      "rotate_and_store(Tensor(a!) q, Tensor k, Tensor v, Tensor? q_weight, Tensor? k_weight, float eps, Tensor cos, "
      "Tensor sin, Tensor slots, Tensor(b!) k_pages, Tensor(c!) v_pages) -> ()");
  m.def(
      "decoder(Tensor input_ids, Tensor embedding, Tensor?[] weights, Tensor norm, Tensor(a!)[] pages, Tensor cos, Tensor sin, "
      "Tensor? turns, Tensor slots, Tensor page_indptr, Tensor page_ids, Tensor node_offset, Tensor node_length, "
      "Tensor node_position, Tensor row_begin, Tensor row_end, Tensor query_position, float eps, float scale, int[] windows) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CPU, m) {
  m.impl("add_rms_norm", TORCH_BOX(&rolltree::add_rms_norm_op));
  m.impl("rotate_and_store", TORCH_BOX(&rolltree::rotate_and_store_op));
  m.impl("decoder", TORCH_BOX(&rolltree::decoder));
}
