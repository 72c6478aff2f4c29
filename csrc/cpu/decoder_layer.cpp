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

#include "products/few_rows.h"
#include "layer_rows.h"
#include "products/low_rank.h"
#include "attention/tree_decode.h"

namespace rolltree {
namespace {

using torch::stable::Tensor;

constexpr int64_t kLongestHead = 1024;

// The data of a tensor of T.
template <class T>
const T* data(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}
template <class T>
T* data(Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}
template <class T>
const T* data(const std::optional<Tensor>& x) {
  return x ? data<T>(*x) : nullptr;
}

// out = RMSNorm of the rows.
template <class T>
void rms_norms(const float* x, const T* weight, float eps, int64_t rows, int64_t width, float* out) {
  torch::stable::parallel_for(0, rows, std::max<int64_t>(kGrain / width, 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) rms_norm(x + row * width, weight, eps, width, out + row * width);
  });
}

// residual += x if x is given; returns RMSNorm of the sums.
template <class T>
Tensor add_rms_norm_of(Tensor& residual, const std::optional<Tensor>& x, const Tensor& weight, float eps) {
  Tensor out = torch::stable::empty_like(residual);
  T *sums = data<T>(residual), *to = data<T>(out);
  const T *added = data<T>(x), *weights = data<T>(weight);
  const int64_t rows = residual.size(0), width = residual.size(1);
  torch::stable::parallel_for(0, rows, std::max<int64_t>(kGrain / width, 1), [&](int64_t begin, int64_t end) {
    const Buffer row(width), normed(width);
    for (int64_t first = begin * width; first < end * width; first += width) {
      widen(sums + first, width, row.at(0));
      if (added) {
        for (int64_t d = 0; d < width; ++d) row.at(0)[d] = rounded<T>(row.at(0)[d] + added[first + d]);
        narrow(row.at(0), width, sums + first);
      }
      rms_norm(row.at(0), weights, eps, width, normed.at(0));
      narrow(normed.at(0), width, to + first);
    }
  });
  return out;
}

Tensor add_rms_norm(Tensor residual, const std::optional<Tensor>& x, const Tensor& weight, double eps) {
  const auto run = residual.scalar_type() == ScalarType::BFloat16 ? add_rms_norm_of<Bf16> : add_rms_norm_of<float>;
  return run(residual, x, weight, static_cast<float>(eps));
}

// Cosines and sines [*, dim], and the index of each row's: `turns[row]`, or `row` where `turns` is null.
template <class T>
struct Turns {
  const T *cos, *sin;
  const int32_t* turns;
  int64_t of(int64_t row) const { return turns ? turns[row] : row; }
};

// out = rotary embedding of x, after RMSNorm if there is a weight; they do not overlap.
template <class T>
void rotate(const float* x, const T* weight, float eps, const T* cos, const T* sin, int64_t dim, float* out) {
  float normed[kLongestHead];
  if (weight) rms_norm(x, weight, eps, dim, normed);
  turn(weight ? normed : x, cos, sin, dim, out);
}

// The rows of q, k and v are X, whose values T holds.
template <class T, class X, class Slot>
void rotate_and_store(X* q, const X* k, const X* v, const T* q_weight, const T* k_weight, float eps, const Turns<T>& turns,
                      const Slot* slots, T* k_pages, T* v_pages, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim) {
  STD_TORCH_CHECK(dim <= kLongestHead, "rotate_and_store: heads of more than 1024 numbers");
  const int64_t width = kv_heads * dim;
  torch::stable::parallel_for(0, rows, std::max<int64_t>(kGrain / (8 * heads * dim), 1), [&](int64_t begin, int64_t end) {
    float from[kLongestHead], turned[kLongestHead];
    for (int64_t row = begin; row < end; ++row) {
      const T *c = turns.cos + turns.of(row) * dim, *s = turns.sin + turns.of(row) * dim;
      const int64_t slot = slots[row] * width;
      for (int64_t at = row * heads * dim; at < (row + 1) * heads * dim; at += dim) {
        widen(q + at, dim, from);
        rotate(from, q_weight, eps, c, s, dim, turned);
        narrow(turned, dim, q + at);
      }
      for (int64_t h = 0; h < width; h += dim) {
        widen(k + row * width + h, dim, from);
        rotate(from, k_weight, eps, c, s, dim, turned);
        narrow(turned, dim, k_pages + slot + h);
      }
      for (int64_t d = 0; d < width; ++d) v_pages[slot + d] = narrowed<T>(v[row * width + d]);
    }
  });
}

template <class T>
void rotate_and_store_of(Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& q_weight,
                         const std::optional<Tensor>& k_weight, float eps, const Tensor& cos, const Tensor& sin,
                         const Tensor& slots, Tensor& k_pages, Tensor& v_pages) {
  const Turns<T> turns{data<T>(cos), data<T>(sin), nullptr};
  rotate_and_store(data<T>(q), data<T>(k), data<T>(v), data<T>(q_weight), data<T>(k_weight), eps, turns, data<int64_t>(slots),
                   data<T>(k_pages), data<T>(v_pages), q.size(0), q.size(1), k.size(1), q.size(2));
}

void rotate_and_store_op(Tensor q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& q_weight,
                         const std::optional<Tensor>& k_weight, double eps, const Tensor& cos, const Tensor& sin,
                         const Tensor& slots, Tensor k_pages, Tensor v_pages) {
  const auto run = q.scalar_type() == ScalarType::BFloat16 ? rotate_and_store_of<Bf16> : rotate_and_store_of<float>;
  run(q, k, v, q_weight, k_weight, static_cast<float>(eps), cos, sin, slots, k_pages, v_pages);
}

// ---- a whole decoder -------------------------------------------------------------------------------------------------

template <size_t kCount>
Tensor aten(const char* op, const char* overload, std::array<StableIValue, kCount> stack) {
  STD_TORCH_CHECK(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION) == 0, "a decoder: ", op, " failed");
  return torch::stable::detail::to<Tensor>(stack[0]);
}

using Weight = std::optional<Tensor>;
enum { kOfQ, kOfK, kOfV, kOfO, kOfGate, kOfUp, kOfDown, kProducts };  // the products of a layer, for adapters
enum { kInputNorm, kQ, kQBias, kK, kKBias, kV, kVBias, kQNorm, kKNorm, kO, kOBias, kMlpNorm, kGate, kUp, kDown, kOfLayer };

Tensor linear(const Tensor& x, const Weight& weight, const Weight& bias) {
  using torch::stable::detail::from;
  return aten<3>("aten::linear", "", {from(x), from(*weight), from(bias)});
}

template <class T>
Product<T> product_into(float* out, const Weight& weight, const Weight& bias, bool add = false) {
  const int64_t width = weight->size(0);
  return {data<T>(weight), data<T>(bias), width, weight->size(1), out, width, add};
}

// x / (1 + e^-x) * up, in place; every element by the same arithmetic, whatever its position.
template <class T>
void silu_and_multiply(float* x, const float* up, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    silu_mul(x, up, count, x);  // as in training
  } else {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(x + i, silu_mul<T>(load(x + i), load(up + i)));
    if (i < count) store_some(x + i, silu_mul<T>(load_some(x + i, count - i), load_some(up + i, count - i)), count - i);
  }
}

// The data that all layers share in a step: the rows, the slots of their keys, and the nodes that they see.
template <class T>
struct Step {
  int64_t rows;
  Turns<T> turns;
  const int32_t* slots;
  Plan plan;
  float eps;
  double scale;
  bool library;  // multiplies more than few_rows() rows of fp32
  std::vector<Run> runs;  // the rows with an adapter
};

template <class T>
struct Layer {
  const Weight* weights;  // kOfLayer
  T *k_pages, *v_pages;
  AttentionShape shape;
  std::optional<int64_t> window;
  const LowRank<T>* adapters;  // kProducts, where rows have any

  const Weight& operator[](int which) const { return weights[which]; }
};

// The result of one of a layer's products, in rows of `width`.
struct Into {
  int product;
  float* out;
  int64_t width;
};

// Adds the adapters of the rows of `x` to the results of products of it.
template <class T, size_t kCount>
void add_adapters(const float* x, int64_t depth, const Layer<T>& layer, const Step<T>& step, const std::array<Into, kCount>& results) {
  if (step.runs.empty()) return;
  std::array<Adapted<T>, kCount> adapted;
  for (size_t i = 0; i < kCount; ++i)
    adapted[i] = {layer.adapters[results[i].product], results[i].out, results[i].width};
  add_low_rank<T>(x, depth, adapted, step.runs);
}

template <class T>
void norm(const float* residual, const Weight& weight, const Step<T>& step, float* out) {
  rms_norms(residual, data<T>(weight), step.eps, step.rows, weight->size(0), out);
}

template <class T>
void store_and_attend(float* q, const float* k, const float* v, const Layer<T>& layer, const Step<T>& step, float* out) {
  const auto [heads, kv_heads, dim, page_size] = layer.shape;
  rotate_and_store(q, k, v, data<T>(layer[kQNorm]), data<T>(layer[kKNorm]), step.eps, step.turns, step.slots, layer.k_pages,
                   layer.v_pages, step.rows, heads, kv_heads, dim);
  const Rows keys = Rows::paged(layer.k_pages, page_size, kv_heads, dim), values = Rows::paged(layer.v_pages, page_size, kv_heads, dim);
  tree_decode(Rows(q, heads, dim), keys, values, Rows(out, heads, dim), nullptr, layer.shape, step.plan, step.scale, layer.window,
              std::nullopt);
  if constexpr (!std::is_same_v<T, float>) {
    const int64_t width = heads * dim;
    torch::stable::parallel_for(0, step.rows, std::max<int64_t>(kGrain / width, 1), [&](int64_t begin, int64_t end) {
      for (int64_t at = begin * width; at < end * width; ++at) out[at] = rounded<T>(out[at]);
    });
  }
}

// Scratch for the rows of a step that all layers use in turn, so that it stays in the cache.
struct Room {
  template <class T>
  Room(const Layer<T>& layer, int64_t rows)
      : wide(std::max(layer.shape.heads * layer.shape.dim, layer[kGate]->size(0))),
        first(rows * wide),
        second(rows * wide),
        keys(rows * layer[kK]->size(0)),
        values(rows * layer[kV]->size(0)) {}
  template <class T>
  bool fits(const Layer<T>& layer) const {
    return layer[kGate]->size(0) <= wide;
  }

  int64_t wide;
  Buffer first, second, keys, values;
};

template <class T>
void add(float* sums, const float* more, int64_t count) {
  torch::stable::parallel_for(0, count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sums[i] = rounded<T>(sums[i] + more[i]);
  });
}

// residual += x weight^T + bias; rows with adapters need the product by itself first, in `own`.
template <class T>
void add_product(float* residual, const float* x, int64_t depth, int product, const Weight& weight, const Weight& bias,
                 const Layer<T>& layer, const Step<T>& step, float* own) {
  const auto rows = FewRows<T>::of(x, step.rows, depth);
  if (step.runs.empty()) return rows->multiply(std::array{product_into<T>(residual, weight, bias, true)});
  const int64_t width = weight->size(0);
  rows->multiply(std::array{product_into<T>(own, weight, bias)});
  add_adapters<T, 1>(x, depth, layer, step, {{{product, own, width}}});
  add<T>(residual, own, step.rows * width);
}

// A layer with the products of few_rows.h: as few passes over the rows and thread barriers as possible.
template <class T>
void few_rows_layer(float* residual, float* x, const Layer<T>& layer, const Step<T>& step, const Room& room) {
  const int64_t rows = step.rows, width = layer[kInputNorm]->size(0), wide = layer[kGate]->size(0);
  float *first = room.first.at(0), *second = room.second.at(0), *keys = room.keys.at(0), *values = room.values.at(0);
  norm(residual, layer[kInputNorm], step, x);
  FewRows<T>::of(x, rows, width)
      ->multiply(std::array{product_into<T>(first, layer[kQ], layer[kQBias]), product_into<T>(keys, layer[kK], layer[kKBias]),
                            product_into<T>(values, layer[kV], layer[kVBias])});
  const int64_t heads = layer[kQ]->size(0), kv_heads = layer[kK]->size(0);
  add_adapters<T, 3>(x, width, layer, step, {{{kOfQ, first, heads}, {kOfK, keys, kv_heads}, {kOfV, values, kv_heads}}});
  store_and_attend(first, keys, values, layer, step, second);
  add_product(residual, second, heads, kOfO, layer[kO], layer[kOBias], layer, step, x);
  norm(residual, layer[kMlpNorm], step, x);
  const Product<T> gate = product_into<T>(first, layer[kGate], {}), up = product_into<T>(second, layer[kUp], {});
  const auto normed = FewRows<T>::of(x, rows, width);
  if (!step.runs.empty()) {
    normed->multiply(std::array{gate, up});
    add_adapters<T, 2>(x, width, layer, step, {{{kOfGate, first, wide}, {kOfUp, second, wide}}});
    torch::stable::parallel_for(0, rows * wide, kGrain, [&](int64_t begin, int64_t end) {
      silu_and_multiply<T>(first + begin, second + begin, end - begin);
    });
    return add_product(residual, first, wide, kOfDown, layer[kDown], {}, layer, step, x);
  }
  torch::stable::parallel_for(0, gate.blocks(), normed->worth_a_thread(), [&](int64_t begin, int64_t end) {
    normed->multiply(gate, begin, end);
    normed->multiply(up, begin, end);
    const int64_t from = begin * kColumns, count = std::min(end * kColumns, wide) - from;
    for (int64_t at = from; at < rows * wide; at += wide) silu_and_multiply<T>(first + at, second + at, count);
  });
  FewRows<T>::of(first, rows, wide)->multiply(std::array{product_into<T>(residual, layer[kDown], {}, true)});
}

// A layer with a library's products.
void many_rows_layer(float* residual, Tensor& normed, const Layer<float>& layer, const Step<float>& step) {
  float* x = data<float>(normed);
  const auto multiply = [&](const Tensor& rows, int product, int weight, const Weight& bias) {
    Tensor out = linear(rows, layer[weight], bias);
    add_adapters<float, 1>(data<float>(rows), rows.size(1), layer, step, {{{product, data<float>(out), out.size(1)}}});
    return out;
  };
  norm(residual, layer[kInputNorm], step, x);
  Tensor q = multiply(normed, kOfQ, kQ, layer[kQBias]);
  const Tensor k = multiply(normed, kOfK, kK, layer[kKBias]), v = multiply(normed, kOfV, kV, layer[kVBias]);
  Tensor seen = torch::stable::empty_like(q);
  store_and_attend(data<float>(q), data<float>(k), data<float>(v), layer, step, data<float>(seen));
  const Tensor attended = multiply(seen, kOfO, kO, layer[kOBias]);
  add<float>(residual, data<float>(attended), attended.numel());
  norm(residual, layer[kMlpNorm], step, x);
  Tensor gate = multiply(normed, kOfGate, kGate, {});
  const Tensor up = multiply(normed, kOfUp, kUp, {});
  float* first = data<float>(gate);
  const float* second = data<float>(up);
  torch::stable::parallel_for(0, gate.numel(), kGrain, [&](int64_t begin, int64_t end) {
    silu_and_multiply<float>(first + begin, second + begin, end - begin);
  });
  const Tensor down = multiply(gate, kOfDown, kDown, {});
  add<float>(residual, data<float>(down), down.numel());
}

// Runs all layers on the rows of `residual`, and writes the last norm to `out`.
template <class T>
void run_layers(float* residual, Tensor& out, const std::vector<Weight>& weights, std::vector<Tensor>& pages,
                const std::vector<int64_t>& windows, const Tensor& last_norm, const Step<T>& step,
                const std::vector<LowRank<T>>& adapters) {
  const int64_t rows = step.rows, width = last_norm.size(0);
  const Buffer own(std::is_same_v<T, float> ? 0 : rows * width);
  float* x = own.at(0);
  if constexpr (std::is_same_v<T, float>) x = data<float>(out);
  std::optional<Room> room;
  for (size_t i = 0; i < windows.size(); ++i) {
    Tensor &k_pages = pages[2 * i], &v_pages = pages[2 * i + 1];
    const Weight* of_layer = &weights[i * kOfLayer];
    const int64_t dim = k_pages.size(3);
    const Layer<T> layer{of_layer, data<T>(k_pages), data<T>(v_pages),
                         {of_layer[kQ]->size(0) / dim, k_pages.size(2), dim, k_pages.size(1)},
                         windows[i] ? std::optional(windows[i]) : std::nullopt,
                         adapters.data() + (adapters.empty() ? 0 : i * kProducts)};
    if constexpr (std::is_same_v<T, float>) {
      if (step.library && rows > few_rows()) {
        many_rows_layer(residual, out, layer, step);
        continue;
      }
    }
    if (!room || !room->fits(layer)) room.emplace(layer, rows);
    few_rows_layer(residual, x, layer, step, *room);
  }
  norm(residual, last_norm, step, x);
  if constexpr (!std::is_same_v<T, float>) narrow(x, rows * width, data<T>(out));
}

// Returns the adapters of each product: matrices [products, adapters, 3] and scales [products, adapters] as in `LowRank`.
template <class T>
std::vector<LowRank<T>> adapters_of(const std::optional<Tensor>& matrices, const std::optional<Tensor>& scales, int64_t layers) {
  std::vector<LowRank<T>> products;
  if (!matrices) return products;
  STD_TORCH_CHECK(matrices->size(0) == layers * kProducts, "a decoder: adapters of ", matrices->size(0), " products");
  const int64_t count = matrices->size(1);
  for (int64_t i = 0; i < matrices->size(0); ++i)
    products.push_back({matrices->const_data_ptr<int64_t>() + 3 * count * i, scales->const_data_ptr<float>() + count * i});
  return products;
}

// The whole decoder, from token ids to the last hidden states. `windows` has 0 for none.
template <class T>
Tensor decoder_of(const Tensor& input_ids, const Tensor& embedding, const std::vector<Weight>& weights, const Tensor& last_norm,
                  std::vector<Tensor>& pages, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& turns,
                  const int32_t* slots, const Plan& plan, double eps, double scale, const std::vector<int64_t>& windows, bool library,
                  const std::optional<Tensor>& matrices, const std::optional<Tensor>& scales, const std::vector<int64_t>& runs) {
  const int64_t rows = input_ids.size(0), width = embedding.size(1), vocabulary = embedding.size(0);
  const Step<T> step{rows,  {data<T>(cos), data<T>(sin), turns ? turns->const_data_ptr<int32_t>() : nullptr}, slots, plan,
                     static_cast<float>(eps), scale, library, runs_of(runs, rows, matrices ? matrices->size(1) : 0)};
  Tensor out = torch::stable::new_empty(embedding, {rows, width});
  const Buffer sums(rows * width);
  const int32_t* ids = input_ids.const_data_ptr<int32_t>();
  for (int64_t row = 0; row < rows; ++row) {
    STD_TORCH_CHECK(ids[row] >= 0 && ids[row] < vocabulary, "a decoder: token ", ids[row], " is outside the vocabulary");
    widen(data<T>(embedding) + ids[row] * width, width, sums.at(row * width));
  }
  const auto adapters = adapters_of<T>(matrices, scales, static_cast<int64_t>(windows.size()));
  run_layers(sums.at(0), out, weights, pages, windows, last_norm, step, adapters);
  return out;
}

Tensor decoder(const Tensor& input_ids, const Tensor& embedding, const std::vector<Weight>& weights, const Tensor& last_norm,
               std::vector<Tensor> pages, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& turns,
               const Tensor& slots, const Tensor& page_indptr, const Tensor& page_ids, const Tensor& node_offset,
               const Tensor& node_length, const Tensor& node_position, const Tensor& row_begin, const Tensor& row_end,
               const Tensor& query_position, double eps, double scale, std::vector<int64_t> windows, bool library,
               const std::optional<Tensor>& matrices, const std::optional<Tensor>& scales, std::vector<int64_t> runs) {
  const Plan plan{node_length.size(0), input_ids.size(0), page_indptr.const_data_ptr<int32_t>(), page_ids.const_data_ptr<int32_t>(),
                  node_offset.const_data_ptr<int32_t>(), node_length.const_data_ptr<int32_t>(),
                  node_position.const_data_ptr<int32_t>(), row_begin.const_data_ptr<int32_t>(), row_end.const_data_ptr<int32_t>(),
                  query_position.const_data_ptr<int32_t>()};
  const auto run = embedding.scalar_type() == ScalarType::BFloat16 ? decoder_of<Bf16> : decoder_of<float>;
  return run(input_ids, embedding, weights, last_norm, pages, cos, sin, turns, slots.const_data_ptr<int32_t>(), plan, eps, scale,
             windows, library, matrices, scales, runs);
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
      "Tensor node_position, Tensor row_begin, Tensor row_end, Tensor query_position, float eps, float scale, int[] windows, "
      "bool library, Tensor? matrices, Tensor? scales, int[] runs) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CPU, m) {
  m.impl("add_rms_norm", TORCH_BOX(&rolltree::add_rms_norm));
  m.impl("rotate_and_store", TORCH_BOX(&rolltree::rotate_and_store_op));
  m.impl("decoder", TORCH_BOX(&rolltree::decoder));
}
