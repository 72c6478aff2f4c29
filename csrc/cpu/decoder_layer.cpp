// A decoder layer for decoding: products of few rows, and between them RMSNorm together with the sum before it, and rotary
// embedding while keys are written to the pages. Each pass reads a row once, where PyTorch's modules read all rows five to
// ten times. Rows are small and few when decoding, so passes and calls take the time, not arithmetic.
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

// residual += x if x is given; out = RMSNorm of the sums.
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

// Cosines and sines [*, dim], and the index of each row's: `turns[row]`, or `row` where `turns` is null.
struct Turns {
  const float *cos, *sin;
  const int32_t* turns;
  int64_t of(int64_t row) const { return turns ? turns[row] : row; }
};

// out = rotary embedding of x, after RMSNorm if there is a weight; `out` may be x.
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
  torch::stable::parallel_for(0, rows, std::max<int64_t>(kGrain / (8 * heads * dim), 1), [&](int64_t begin, int64_t end) {
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

Product product_into(float* out, const Weight& weight, const Weight& bias, bool add = false) {
  const int64_t width = weight->size(0);
  return {weight->const_data_ptr<float>(), data_of(bias), width, out, width, add};
}

// x / (1 + e^-x) * up, in place; every element by the same arithmetic, whatever its position.
void silu_and_multiply(float* x, const float* up, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(x + i, silu_mul(load(x + i), load(up + i)));
  if (i < count) store_some(x + i, silu_mul(load_some(x + i, count - i), load_some(up + i, count - i)), count - i);
}

// The data that all layers share in a step: the rows, the slots of their keys, and the nodes that they see.
struct Step {
  int64_t rows;
  Turns turns;
  const int32_t* slots;
  Plan plan;
  float eps;
  double scale;
};

struct Layer {
  const Weight* weights;  // kOfLayer
  float *k_pages, *v_pages;
  AttentionShape shape;
  std::optional<int64_t> window;

  const Weight& operator[](int which) const { return weights[which]; }
};

void norm(float* residual, const Weight& weight, const Step& step, float* out) {
  add_rms_norm(residual, nullptr, weight->const_data_ptr<float>(), step.eps, step.rows, weight->size(0), out);
}

void store_and_attend(float* q, const float* k, const float* v, const Layer& layer, const Step& step, float* out) {
  const auto [heads, kv_heads, dim, page_size] = layer.shape;
  rotate_and_store(q, k, v, data_of(layer[kQNorm]), data_of(layer[kKNorm]), step.eps, step.turns, step.slots, layer.k_pages,
                   layer.v_pages, step.rows, heads, kv_heads, dim);
  const Rows keys = Rows::paged(layer.k_pages, page_size, kv_heads, dim), values = Rows::paged(layer.v_pages, page_size, kv_heads, dim);
  tree_decode(Rows(q, heads, dim), keys, values, Rows(out, heads, dim), nullptr, layer.shape, step.plan, step.scale, layer.window,
              std::nullopt);
}

// Scratch for up to few_rows() rows that all layers use in turn, so that it stays in the cache.
struct Room {
  Room(const Layer& layer, int64_t rows)
      : wide(std::max(layer.shape.heads * layer.shape.dim, layer[kGate]->size(0))),
        first(rows * wide),
        second(rows * wide),
        keys(rows * layer[kK]->size(0)),
        values(rows * layer[kV]->size(0)) {}
  bool fits(const Layer& layer) const { return layer[kGate]->size(0) <= wide; }

  int64_t wide;
  Buffer first, second, keys, values;
};

// A layer with the products of few_rows.h: as few passes over the rows and thread barriers as possible.
void few_rows_layer(float* residual, float* x, const Layer& layer, const Step& step, const Room& room) {
  const int64_t rows = step.rows, width = layer[kInputNorm]->size(0), wide = layer[kGate]->size(0);
  float *first = room.first.at(0), *second = room.second.at(0), *keys = room.keys.at(0), *values = room.values.at(0);
  norm(residual, layer[kInputNorm], step, x);
  FewRows(x, rows, width)
      .multiply(std::array{product_into(first, layer[kQ], layer[kQBias]), product_into(keys, layer[kK], layer[kKBias]),
                           product_into(values, layer[kV], layer[kVBias])});
  store_and_attend(first, keys, values, layer, step, second);
  FewRows(second, rows, layer[kQ]->size(0)).multiply(std::array{product_into(residual, layer[kO], layer[kOBias], true)});
  norm(residual, layer[kMlpNorm], step, x);
  const Product gate = product_into(first, layer[kGate], {}), up = product_into(second, layer[kUp], {});
  const FewRows normed(x, rows, width);
  torch::stable::parallel_for(0, gate.blocks(), normed.worth_a_thread(), [&](int64_t begin, int64_t end) {
    normed.multiply(gate, begin, end);
    normed.multiply(up, begin, end);
    const int64_t from = begin * kColumns, count = std::min(end * kColumns, wide) - from;
    for (int64_t at = from; at < rows * wide; at += wide) silu_and_multiply(first + at, second + at, count);
  });
  FewRows(first, rows, wide).multiply(std::array{product_into(residual, layer[kDown], {}, true)});
}

void add(float* sums, const Tensor& more) {
  const float* added = more.const_data_ptr<float>();
  torch::stable::parallel_for(0, more.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sums[i] += added[i];
  });
}

// A layer with a library's products.
void many_rows_layer(float* residual, Tensor& normed, const Layer& layer, const Step& step) {
  float* x = normed.mutable_data_ptr<float>();
  norm(residual, layer[kInputNorm], step, x);
  Tensor q = linear(normed, layer[kQ], layer[kQBias]);
  const Tensor k = linear(normed, layer[kK], layer[kKBias]), v = linear(normed, layer[kV], layer[kVBias]);
  Tensor seen = torch::stable::empty_like(q);
  store_and_attend(q.mutable_data_ptr<float>(), k.const_data_ptr<float>(), v.const_data_ptr<float>(), layer, step,
                   seen.mutable_data_ptr<float>());
  add(residual, linear(seen, layer[kO], layer[kOBias]));
  norm(residual, layer[kMlpNorm], step, x);
  Tensor gate = linear(normed, layer[kGate], {});
  const Tensor up = linear(normed, layer[kUp], {});
  float* first = gate.mutable_data_ptr<float>();
  const float* second = up.const_data_ptr<float>();
  torch::stable::parallel_for(0, gate.numel(), kGrain, [&](int64_t begin, int64_t end) {
    silu_and_multiply(first + begin, second + begin, end - begin);
  });
  add(residual, linear(gate, layer[kDown], {}));
}

// The whole decoder, from token ids to the last hidden states. `windows` has 0 for none.
Tensor decoder(const Tensor& input_ids, const Tensor& embedding, const std::vector<Weight>& weights, const Tensor& last_norm,
               std::vector<Tensor> pages, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& turns,
               const Tensor& slots, const Tensor& page_indptr, const Tensor& page_ids, const Tensor& node_offset,
               const Tensor& node_length, const Tensor& node_position, const Tensor& row_begin, const Tensor& row_end,
               const Tensor& query_position, double eps, double scale, std::vector<int64_t> windows) {
  const int64_t rows = input_ids.size(0), width = embedding.size(1), vocabulary = embedding.size(0);
  const Step step{rows,
                  {cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), turns ? turns->const_data_ptr<int32_t>() : nullptr},
                  slots.const_data_ptr<int32_t>(),
                  {node_length.size(0), rows, page_indptr.const_data_ptr<int32_t>(), page_ids.const_data_ptr<int32_t>(),
                   node_offset.const_data_ptr<int32_t>(), node_length.const_data_ptr<int32_t>(),
                   node_position.const_data_ptr<int32_t>(), row_begin.const_data_ptr<int32_t>(), row_end.const_data_ptr<int32_t>(),
                   query_position.const_data_ptr<int32_t>()},
                  static_cast<float>(eps),
                  scale};
  Tensor out = torch::stable::new_empty(embedding, {rows, width});
  const Buffer sums(rows * width);
  float *residual = sums.at(0), *x = out.mutable_data_ptr<float>();
  const int32_t* ids = input_ids.const_data_ptr<int32_t>();
  const float* embedded = embedding.const_data_ptr<float>();
  for (int64_t row = 0; row < rows; ++row) {
    STD_TORCH_CHECK(ids[row] >= 0 && ids[row] < vocabulary, "a decoder: token ", ids[row], " is outside the vocabulary");
    std::copy_n(embedded + ids[row] * width, width, residual + row * width);
  }
  std::optional<Room> room;
  for (size_t i = 0; i < windows.size(); ++i) {
    Tensor &k_pages = pages[2 * i], &v_pages = pages[2 * i + 1];
    const Weight* own = &weights[i * kOfLayer];
    const int64_t dim = k_pages.size(3);
    const Layer layer{own, k_pages.mutable_data_ptr<float>(), v_pages.mutable_data_ptr<float>(),
                      {own[kQ]->size(0) / dim, k_pages.size(2), dim, k_pages.size(1)},
                      windows[i] ? std::optional(windows[i]) : std::nullopt};
    if (rows > few_rows()) {
      many_rows_layer(residual, out, layer, step);
      continue;
    }
    if (!room || !room->fits(layer)) room.emplace(layer, rows);
    few_rows_layer(residual, x, layer, step, *room);
  }
  add_rms_norm(residual, nullptr, last_norm.const_data_ptr<float>(), step.eps, rows, width, x);
  return out;
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
