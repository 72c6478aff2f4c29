// Training attention over packed trees: row i sees key j iff j <= i < subtree_end[j] (and position[i] - position[j] < window).
// The queries are those of the last rows: the first `offset` keys belong to an earlier piece of the tree.
//
// Work is tiled into blocks of rows and blocks of 64 keys. A pair of blocks is skipped, computed unmasked, or computed
// with a mask on only the keys that some row of it sees, depending on the largest and smallest subtree_end of the key
// block. Blocks of rows end where a nearby subtree ends, so that siblings seldom share a block.
//
// Forward, for a head and a block of rows: S = Q K^T, online softmax, O += P V over the visible key blocks.
// Backward, for a key/value head and a run of key blocks: the rows that can see a key block are contiguous, from its first
// key to its largest subtree_end. P = exp2(S - lse), dS = P * (dO V^T - rowsum(dO * O)); dV += P^T dO, dK += dS^T Q and
// dQ += dS K: five GEMMs, nothing computed twice. Each run has its own dQ, added up in a fixed order at the end: results do
// not depend on the number of threads.
#include <torch/csrc/stable/library.h>

#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "attention_tiles.h"

namespace rolltree {
namespace {

constexpr int64_t kRowBlock = 48;    // rows of a score tile: whole register blocks for head sizes 32 and 64 alike
constexpr int64_t kBackwardRuns = 16;  // wanted work items of the backward pass, whatever the number of threads
constexpr int64_t kNoWindow = int64_t(1) << 30;

// The visible part of a pair of blocks: keys [first, last) of the key block; first == last: nothing.
struct Visible {
  int64_t first, last;
  bool full;  // every row sees every key
};

// The mask, tiled.
class Tiling {
 public:
  Tiling(const Tensor& subtree_end, const std::optional<Tensor>& position, std::optional<int64_t> window, int64_t offset)
      : tokens_(subtree_end.size(0)),
        offset_(offset),
        key_blocks_((tokens_ + kTileKeys - 1) / kTileKeys),
        window_(window ? std::min(*window, kNoWindow) : 0),
        ends_(key_blocks_ * kTileKeys, 0),
        extent_(key_blocks_) {
    std::copy_n(subtree_end.const_data_ptr<int32_t>(), tokens_, ends_.begin());
    if (window_) {
      positions_.assign(ends_.size(), 0);
      std::copy_n(position->const_data_ptr<int32_t>(), tokens_, positions_.begin());
    }
    for (int64_t b = 0; b < key_blocks_; ++b) {
      const auto begin = ends_.begin() + b * kTileKeys, end = ends_.begin() + std::min(tokens_, (b + 1) * kTileKeys);
      extent_[b] = {*std::min_element(begin, end), *std::max_element(begin, end)};
    }
    cut_rows();
  }

  int64_t tokens() const { return tokens_; }
  int64_t key_blocks() const { return key_blocks_; }
  int64_t row_blocks() const { return static_cast<int64_t>(row_begin_.size()) - 1; }
  int64_t row_begin(int64_t m) const { return row_begin_[m]; }
  int64_t row_end(int64_t m) const { return row_begin_[m + 1]; }
  int64_t last_row(int64_t b) const { return std::min<int64_t>(extent_[b].max, tokens_); }  // exclusive
  // Returns one past the last row of the row blocks that see a key of key blocks [first, last).
  int64_t rows_end(int64_t first, int64_t last) const {
    int64_t end = offset_;
    for (int64_t b = first; b < last; ++b) end = std::max(end, last_row(b));
    return *std::lower_bound(row_begin_.begin(), row_begin_.end(), end);
  }
  int64_t row_block_of(int64_t row) const {
    return std::upper_bound(row_begin_.begin(), row_begin_.end(), std::max(row, offset_)) - row_begin_.begin() - 1;
  }

  Visible visible(int64_t m, int64_t b) const {
    const int64_t m0 = row_begin(m), m1 = row_end(m), n0 = b * kTileKeys, n1 = n0 + kTileKeys;
    if (extent_[b].max <= m0 || n0 >= m1) return {0, 0, false};
    if (!window_ && n1 - 1 <= m0 && extent_[b].min >= m1) return {0, kTileKeys, true};
    int32_t oldest = 0;
    if (window_) oldest = *std::min_element(positions_.begin() + m0, positions_.begin() + m1) - static_cast<int32_t>(window_);
    int64_t first = kTileKeys, last = 0;
    const int64_t limit = std::min(n1, m1) - n0;
    for (int64_t j = 0; j < limit; ++j) {
      if (ends_[n0 + j] <= m0 || (window_ && positions_[n0 + j] <= oldest)) continue;
      first = std::min(first, j);
      last = j + 1;
    }
    return first < last ? Visible{first / kLanes * kLanes, last, false} : Visible{0, 0, false};
  }

  // Sets the keys [first, padded(last)) of block b that row m0 + r does not see to `hidden`.
  void mask(float* tile, int64_t m0, int64_t rows, int64_t b, int64_t first, int64_t last, float hidden) const {
    const int64_t n0 = b * kTileKeys;
    IVec lane;
    for (int l = 0; l < kLanes; ++l) lane[l] = l;
    for (int64_t j = first; j < last; j += kLanes) {
      const IVec key = lane + static_cast<int32_t>(n0 + j), end = load_as<IVec>(ends_.data() + n0 + j);
      const IVec at = window_ ? load_as<IVec>(positions_.data() + n0 + j) : IVec{};
      for (int64_t r = 0; r < rows; ++r) {
        const int32_t row = static_cast<int32_t>(m0 + r);
        IVec seen = (key <= row) & (end > row);
        if (window_) seen &= at > positions_[row] - static_cast<int32_t>(window_);
        float* p = tile + r * kTileKeys + j;
        store(p, seen ? load(p) : splat(hidden));
      }
    }
  }

  // Returns the row blocks by falling amount of work.
  std::vector<int64_t> heavy_first() const {
    std::vector<int64_t> work(row_blocks(), 0), order(row_blocks());
    for (int64_t m = 0; m < row_blocks(); ++m)
      for (int64_t b = 0; b * kTileKeys < row_end(m); ++b) work[m] += extent_[b].max > row_begin(m);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return work[a] > work[b]; });
    return order;
  }

  // Cuts the key blocks into `runs` contiguous runs of about equal work; returns their bounds.
  std::vector<int64_t> key_runs(int64_t runs) const {
    std::vector<int64_t> work(key_blocks_ + 1, 0), bounds{0};
    for (int64_t b = 0; b < key_blocks_; ++b) work[b + 1] = work[b] + std::max<int64_t>(last_row(b) - std::max(b * kTileKeys, offset_), 1);
    for (int64_t i = 1; i <= runs; ++i) {
      const int64_t bound = std::lower_bound(work.begin(), work.end(), work.back() * i / runs) - work.begin();
      if (bound > bounds.back()) bounds.push_back(bound);
    }
    return bounds;
  }

 private:
  struct Extent {
    int32_t min, max;
  };

  void cut_rows() {
    std::vector<char> closes(tokens_ + 1, 0);
    for (int64_t j = 0; j < tokens_; ++j)
      if (ends_[j] > 0 && ends_[j] <= tokens_) closes[ends_[j]] = 1;
    row_begin_.push_back(offset_);
    for (int64_t at = offset_; at < tokens_; row_begin_.push_back(at)) {
      const int64_t longest = std::min(at + kRowBlock, tokens_), shortest = std::min(at + kRowBlock / 2, tokens_);
      int64_t cut = longest;
      while (cut > shortest && !closes[cut]) --cut;
      at = cut > shortest ? cut : longest;
    }
  }

  int64_t tokens_, offset_, key_blocks_, window_;
  std::vector<int32_t> ends_, positions_;  // padded to whole key blocks: no row sees the padding
  std::vector<Extent> extent_;
  std::vector<int64_t> row_begin_;
};

// The attention problem: sizes and the scale of loaded queries.
struct Shape {
  int64_t tokens, keys, heads, kv_heads, group, width;  // tokens: rows of queries; width: padded head dimension
  float query_scale, cap;                         // cap: softcap in the log2 domain, 0 for none

  Shape(const Tensor& q, const Tensor& k, double scale, std::optional<double> softcap)
      : tokens(q.size(0)),
        keys(k.size(0)),
        heads(q.size(1)),
        kv_heads(k.size(1)),
        group(heads / kv_heads),
        width(padded(q.size(2))),
        query_scale(static_cast<float>(softcap ? scale / *softcap : scale * kLog2e)),
        cap(static_cast<float>(softcap ? *softcap * kLog2e : 0.)) {}

  int64_t offset() const { return keys - tokens; }  // of row 0 among the keys
  int64_t key_tokens() const { return (keys + kTileKeys - 1) / kTileKeys * kTileKeys; }
};

// All heads of keys or values in fp32: rows [kv_heads, key_tokens, width], and per block transposed [width, 64].
struct PackedKeys {
  Buffer rows, transposed;

  PackedKeys(const Tensor& t, const Shape& shape, bool with_rows, bool with_transposed)
      : rows(with_rows ? shape.kv_heads * shape.key_tokens() * shape.width : 0),
        transposed(with_transposed ? shape.kv_heads * shape.key_tokens() * shape.width : 0) {
    const Rows source(t);
    const int64_t size = kTileKeys * shape.width;
    torch::stable::parallel_for(0, shape.kv_heads * (shape.key_tokens() / kTileKeys), 4, [&](int64_t begin, int64_t end) {
      const Buffer spare(with_rows ? 0 : size);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t head = i / (shape.key_tokens() / kTileKeys), n0 = i % (shape.key_tokens() / kTileKeys) * kTileKeys;
        float* tile = with_rows ? rows.at(i * size) : spare.at(0);
        const int64_t count = std::min(kTileKeys, shape.keys - n0);
        for (int64_t j = 0; j < count; ++j)
          source.load_row(source.offset(n0 + j, head), 1.f, tile + j * shape.width);
        std::fill(tile + count * shape.width, tile + size, 0.f);
        if (with_transposed) transpose(Packed{tile, shape.width}, kTileKeys, shape.width, transposed.at(i * size), kTileKeys);
      }
    });
  }
};

std::tuple<Tensor, Tensor> tree_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& subtree_end,
                                          std::optional<Tensor> position, double scale, std::optional<int64_t> window,
                                          std::optional<double> softcap) {
  const Shape shape(q, k, scale, softcap);
  Tensor out = torch::stable::new_empty(q, {shape.tokens, shape.heads, q.size(2)});
  Tensor lse = torch::stable::new_empty(q, {shape.heads, shape.tokens}, ScalarType::Float);
  if (q.numel() == 0) return {out, lse};

  const Tiling tiling(subtree_end, position, window, shape.offset());
  const PackedKeys keys(k, shape, false, true), values(v, shape, true, false);
  const std::vector<int64_t> order = tiling.heavy_first();
  const Rows queries(q), outputs(out);
  float* lse_data = lse.mutable_data_ptr<float>();

  work_queue(static_cast<int64_t>(order.size()) * shape.heads, [&] {
    return [&, query = Buffer(kRowBlock * shape.width), scores = Buffer(kRowBlock * kTileKeys), max = Buffer(kRowBlock),
            sum = Buffer(kRowBlock * kLanes), acc = Buffer(kRowBlock * shape.width)](int64_t item) {
      const int64_t m = order[item / shape.heads], head = item % shape.heads;
      const int64_t m0 = tiling.row_begin(m), rows = tiling.row_end(m) - m0, at = m0 - shape.offset();
      for (int64_t r = 0; r < rows; ++r)
        queries.load_row(queries.offset(at + r, head), shape.query_scale, query.at(r * shape.width));
      const Running running{max.at(0), sum.at(0), acc.at(0), shape.width};
      running.reset(rows);
      for (int64_t b = 0; b * kTileKeys < m0 + rows; ++b) {
        const Visible seen = tiling.visible(m, b);
        if (seen.first == seen.last) continue;
        const int64_t tile = ((head / shape.group) * tiling.key_blocks() + b) * kTileKeys * shape.width;
        const int64_t end = padded(seen.last);
        gemm(rows, end - seen.first, shape.width, Across{query.at(0), shape.width}, Packed{keys.transposed.at(tile + seen.first), kTileKeys},
             scores.at(seen.first), kTileKeys, false);
        if (shape.cap != 0.f) soft_cap(scores.at(0), rows, seen.first, end, shape.cap);
        if (!seen.full) tiling.mask(scores.at(0), m0, rows, b, seen.first, end, -kInfinity);
        running.take(scores.at(0), rows, seen.first, seen.last, Packed{values.rows.at(tile), shape.width});
      }
      for (int64_t r = 0; r < rows; ++r) {
        const auto [log_sum, factor] = running.finish(r);
        lse_data[head * shape.tokens + at + r] = log_sum;
        outputs.store_row(outputs.offset(at + r, head), running.out + r * shape.width, factor);
      }
    };
  });
  return {out, lse};
}

// Computes P and dS from S (log2 domain) and dP, in place. scores: S -> P; grads: dP -> dS / scale.
void backward_softmax(float* scores, float* grads, int64_t rows, int64_t first, int64_t end, const float* lse2,
                      const float* delta, float cap) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = first; j < end; j += kLanes) {
      float *s = scores + r * kTileKeys + j, *g = grads + r * kTileKeys + j;
      Vec score = load(s), slope = splat(1.f);
      if (cap != 0.f) {
        score = tanh(score);
        slope = 1.f - score * score;
        score *= cap;
      }
      const Vec p = exp2(score - lse2[r]);
      store(s, p);
      Vec ds = p * (load(g) - delta[r]);
      if (cap != 0.f) ds *= slope;
      store(g, ds);
    }
}

std::tuple<Tensor, Tensor, Tensor> tree_attention_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                                           const Tensor& v, const Tensor& out, const Tensor& lse,
                                                           const Tensor& subtree_end, std::optional<Tensor> position,
                                                           double scale, std::optional<int64_t> window,
                                                           std::optional<double> softcap) {
  const Shape shape(q, k, scale, softcap);
  const int64_t tokens = shape.tokens, width = shape.width, dim = q.size(2);
  Tensor dq = torch::stable::new_empty(q, {tokens, shape.heads, dim});
  Tensor dk = torch::stable::new_empty(k, {shape.keys, shape.kv_heads, dim});
  Tensor dv = torch::stable::new_empty(v, {shape.keys, shape.kv_heads, dim});
  if (k.numel() == 0) return {dq, dk, dv};

  const Tiling tiling(subtree_end, position, window, shape.offset());
  const PackedKeys keys(k, shape, true, true), values(v, shape, false, true);
  // Per head: scaled queries, output gradients, lse in the log2 domain, delta = rowsum(dO * O).
  const Buffer queries(shape.heads * tokens * width), grads(shape.heads * tokens * width);
  const Buffer lse2(shape.heads * tokens), delta(shape.heads * tokens);
  const Rows q_rows(q), out_rows(out), grad_rows(grad_out);
  const float* lse_data = lse.const_data_ptr<float>();
  const int64_t lse_stride[2] = {lse.stride(0), lse.stride(1)};
  torch::stable::parallel_for(0, tokens, 64, [&](int64_t begin, int64_t end) {
    const Buffer row(width);
    for (int64_t i = begin; i < end; ++i)
      for (int64_t head = 0; head < shape.heads; ++head) {
        const int64_t at = head * tokens + i;
        q_rows.load_row(q_rows.offset(i, head), shape.query_scale, queries.at(at * width));
        grad_rows.load_row(grad_rows.offset(i, head), 1.f, grads.at(at * width));
        out_rows.load_row(out_rows.offset(i, head), 1.f, row.at(0));
        Vec dot{};
        for (int64_t d = 0; d < width; d += kLanes) dot += load(row.at(d)) * load(grads.at(at * width + d));
        *delta.at(at) = horizontal_sum(dot);
        *lse2.at(at) = lse_data[head * lse_stride[0] + i * lse_stride[1]] * kLog2e;
      }
  });

  const std::vector<int64_t> bounds = tiling.key_runs(std::max<int64_t>(kBackwardRuns / shape.kv_heads, 1));
  const int64_t runs = static_cast<int64_t>(bounds.size()) - 1;
  // dQ of every run, for the rows that see one of its keys.
  std::vector<int64_t> first_row(runs), end_row(runs), dq_offset(runs + 1, 0);
  for (int64_t c = 0; c < runs; ++c) {
    first_row[c] = std::max<int64_t>(bounds[c] * kTileKeys - shape.offset(), 0);
    end_row[c] = std::max(tiling.rows_end(bounds[c], bounds[c + 1]) - shape.offset(), first_row[c]);
    dq_offset[c + 1] = dq_offset[c] + shape.heads * (end_row[c] - first_row[c]) * width;
  }
  const Buffer dq_parts(dq_offset[runs]);
  const Rows dk_rows(dk), dv_rows(dv), dq_rows(dq);
  // dS is kept without the scale; the factors of dQ and dK (dK is computed with scaled queries).
  const float dq_scale = static_cast<float>(scale), dk_scale = static_cast<float>(softcap ? *softcap : 1. / kLog2e);

  work_queue(runs * shape.kv_heads, [&] {
    return [&, scores = Buffer(kRowBlock * kTileKeys), dscores = Buffer(kRowBlock * kTileKeys),
            dk_tile = Buffer(kTileKeys * width), dv_tile = Buffer(kTileKeys * width)](int64_t item) {
      const int64_t run = item / shape.kv_heads, kv_head = item % shape.kv_heads, origin = first_row[run];
      const int64_t part_rows = end_row[run] - origin;
      float* dq_part = dq_parts.at(dq_offset[run] + kv_head * shape.group * part_rows * width);
      std::fill_n(dq_part, shape.group * part_rows * width, 0.f);
      for (int64_t b = bounds[run]; b < bounds[run + 1]; ++b) {
        const int64_t n0 = b * kTileKeys, tile = (kv_head * tiling.key_blocks() + b) * kTileKeys * width;
        std::fill_n(dk_tile.at(0), kTileKeys * width, 0.f);
        std::fill_n(dv_tile.at(0), kTileKeys * width, 0.f);
        for (int64_t m = tiling.row_block_of(n0); m < tiling.row_blocks() && tiling.row_begin(m) < tiling.last_row(b); ++m) {
          const Visible seen = tiling.visible(m, b);
          if (seen.first == seen.last) continue;
          const int64_t first = seen.first, keys_seen = seen.last - first, end = padded(seen.last);
          // Rows before the key block do not see it.
          const int64_t m0 = std::max(tiling.row_begin(m), n0), rows = tiling.row_end(m) - m0, row = m0 - shape.offset();
          for (int64_t g = 0; g < shape.group; ++g) {
            const int64_t at = (kv_head * shape.group + g) * tokens + row;
            const float *query = queries.at(at * width), *grad = grads.at(at * width);
            gemm(rows, end - first, width, Across{query, width}, Packed{keys.transposed.at(tile + first), kTileKeys},
                 scores.at(first), kTileKeys, false);
            gemm(rows, end - first, width, Across{grad, width}, Packed{values.transposed.at(tile + first), kTileKeys},
                 dscores.at(first), kTileKeys, false);
            backward_softmax(scores.at(0), dscores.at(0), rows, first, end, lse2.at(at), delta.at(at), shape.cap);
            if (!seen.full) {
              tiling.mask(scores.at(0), m0, rows, b, first, end, 0.f);
              tiling.mask(dscores.at(0), m0, rows, b, first, end, 0.f);
            }
            gemm(keys_seen, width, rows, Down{scores.at(first), kTileKeys}, Packed{grad, width}, dv_tile.at(first * width), width,
                       true);
            gemm(keys_seen, width, rows, Down{dscores.at(first), kTileKeys}, Packed{query, width}, dk_tile.at(first * width), width,
                       true);
            gemm(rows, width, keys_seen, AcrossTile{dscores.at(first)}, Packed{keys.rows.at(tile + first * width), width},
                 dq_part + (g * part_rows + row - origin) * width, width, true);
          }
        }
        for (int64_t j = 0; j < std::min(kTileKeys, shape.keys - n0); ++j) {
          dk_rows.store_row(dk_rows.offset(n0 + j, kv_head), dk_tile.at(j * width), dk_scale);
          dv_rows.store_row(dv_rows.offset(n0 + j, kv_head), dv_tile.at(j * width), 1.f);
        }
      }
    };
  });

  torch::stable::parallel_for(0, tokens, 64, [&](int64_t begin, int64_t end) {
    const Buffer row(width);
    for (int64_t i = begin; i < end; ++i)
      for (int64_t head = 0; head < shape.heads; ++head) {
        std::fill_n(row.at(0), width, 0.f);
        for (int64_t c = 0; c < runs && first_row[c] <= i; ++c) {
          if (i >= end_row[c]) continue;
          const int64_t origin = first_row[c];
          const float* part = dq_parts.at(dq_offset[c] + (head * (end_row[c] - origin) + i - origin) * width);
          for (int64_t d = 0; d < width; d += kLanes) store(row.at(d), load(row.at(d)) + load(part + d));
        }
        dq_rows.store_row(dq_rows.offset(i, head), row.at(0), dq_scale);
      }
  });
  return {dq, dk, dv};
}

}  // namespace
}  // namespace rolltree

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cpu, m) {
  m.def(
      "tree_attention(Tensor q, Tensor k, Tensor v, Tensor subtree_end, Tensor? position, float scale, int? window, "
      "float? softcap) -> (Tensor, Tensor)");
  m.def(
      "tree_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor subtree_end, "
      "Tensor? position, float scale, int? window, float? softcap) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CPU, m) {
  m.impl("tree_attention", TORCH_BOX(&rolltree::tree_attention));
  m.impl("tree_attention_backward", TORCH_BOX(&rolltree::tree_attention_backward));
}
