// Decode attention over a paged tree, node-major: a node's keys and values are read once for all rows below it.
//
// A work item is a contiguous group of rows. It visits the nodes in the plan's order and each node in tiles of 64 keys
// counted from the node's first key, and adds every tile to the running softmax of the rows that see it. Tiles depend on
// the node alone and a row's arithmetic does not depend on the other rows (attention_tiles.h), so a row's bits do not
// depend on the batch. fp32 keys and values are used in place, others are widened first.
#include "tree_decode.h"

#include <torch/csrc/stable/library.h>

#include <numeric>
#include <tuple>
#include <vector>

namespace rolltree {
namespace {

constexpr int64_t kBlockQueries = 48;  // query vectors (rows x query heads of one key head) of a score tile
constexpr int64_t kGroupRows = 64;     // approximate rows of a work item: their running softmax stays in the cache

// Cuts the rows into about `groups` contiguous groups, between trees where that is possible.
std::vector<int64_t> row_groups(const Plan& plan, int64_t groups) {
  std::vector<int32_t> inside(plan.rows + 1, 0);  // number of nodes that a cut before this row would divide
  for (int64_t n = 0; n < plan.nodes; ++n)
    if (plan.row_end[n] > plan.row_begin[n] + 1) ++inside[plan.row_begin[n] + 1], --inside[plan.row_end[n]];
  for (int64_t r = 1; r <= plan.rows; ++r) inside[r] += inside[r - 1];
  std::vector<int64_t> bounds{0};
  for (int64_t g = 1; g < groups; ++g) {
    const int64_t target = plan.rows * g / groups, limit = plan.rows * (g + 1) / groups;
    int64_t cut = target;
    while (cut < limit && inside[cut]) ++cut;
    if (cut == limit) cut = target;
    if (cut > bounds.back()) bounds.push_back(cut);
  }
  bounds.push_back(plan.rows);
  return bounds;
}

// Iterates over a node's keys by its page list.
class SlotWalk {
 public:
  SlotWalk(const Plan& plan, int64_t node, int64_t first, int64_t page_size)
      : ids_(plan.page_ids + plan.page_indptr[node] + (plan.offset[node] + first) / page_size),
        slot_((plan.offset[node] + first) % page_size),
        page_size_(page_size) {}
  int64_t page() const { return *ids_; }
  int64_t slot() const { return slot_; }
  void skip(int64_t keys) {  // to the end of the page at most
    if ((slot_ += keys) == page_size_) slot_ = 0, ++ids_;
  }

 private:
  const int32_t* ids_;
  int64_t slot_, page_size_;
};

// Up to 64 keys of a node, and the rows [row_begin, row_end) of an item that may see them.
struct Tile {
  int64_t node, first, keys, row_begin, row_end;
};

std::vector<Tile> tiles_of(const Plan& plan, int64_t r0, int64_t r1) {
  std::vector<Tile> tiles;
  for (int64_t n = 0; n < plan.nodes; ++n) {
    const int64_t begin = std::max<int64_t>(plan.row_begin[n], r0), end = std::min<int64_t>(plan.row_end[n], r1);
    if (begin >= end) continue;
    for (int64_t t = 0; t < plan.length[n]; t += kTileKeys)
      tiles.push_back({n, t, std::min(kTileKeys, plan.length[n] - t), begin, end});
  }
  return tiles;
}

// Hides keys [0, count) of a tile from the rows that may not see them, and the lanes after `count` from all.
void mask_positions(float* scores, const int32_t* query_position, int64_t rows, int64_t group, int64_t count,
                    int64_t first_position, int64_t window) {
  IVec lane;
  for (int l = 0; l < kLanes; ++l) lane[l] = l;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t last = std::min(count - 1, query_position[r] - first_position);
    const int64_t before = window ? query_position[r] - window - first_position : -1;  // keys up to here are too old
    for (int64_t j = 0; j < count; j += kLanes) {
      const IVec key = lane + static_cast<int32_t>(j);
      const IVec seen = (key <= static_cast<int32_t>(last)) & (key > static_cast<int32_t>(std::max<int64_t>(before, -1)));
      for (int64_t g = 0; g < group; ++g) {
        float* p = scores + (r * group + g) * kTileKeys + j;
        store(p, seen ? load(p) : splat(-kInfinity));
      }
    }
  }
}

}  // namespace

void tree_decode(const Rows& q_rows, const Rows& k_rows, const Rows& v_rows, const Rows& out_rows, float* lse_data,
                 const AttentionShape& shape, const Plan& plan, double scale, std::optional<int64_t> window,
                 std::optional<double> softcap) {
  // no structured binding: clang before 16 captures none
  const int64_t heads = shape.heads, kv_heads = shape.kv_heads, dim = shape.dim, page_size = shape.page_size;
  const int64_t rows = plan.rows, width = padded(dim), group = heads / kv_heads;
  if (rows == 0) return;

  const float query_scale = static_cast<float>(softcap ? scale / *softcap : scale * kLog2e);
  const float cap = static_cast<float>(softcap ? *softcap * kLog2e : 0.);
  // Items: groups of rows, and parts of the key/value heads where the groups alone would not keep the threads busy. A node's
  // pages hold all heads of a key next to each other, so an item takes its heads node by node. Parts of a single group have
  // equal sizes, or the group is cut too: with two heads of three on one thread the other thread would wait.
  const int64_t threads = torch::stable::get_num_threads(), even = std::gcd(kv_heads, threads);
  const bool many = rows > kGroupRows;
  const std::vector<int64_t> bounds = row_groups(plan, many ? (rows + kGroupRows - 1) / kGroupRows : std::min(rows, threads / even));
  const int64_t groups = static_cast<int64_t>(bounds.size()) - 1;
  const int64_t least = (threads + groups - 1) / groups;  // parts that give every thread an item
  const int64_t parts = many ? std::clamp<int64_t>(2 * threads / groups, 1, kv_heads) : least <= even ? even : std::min(kv_heads, least);
  const int64_t block_rows = std::max<int64_t>(kBlockQueries / group, 1);
  const int64_t k_step = k_rows.offset(0, 1), v_step = v_rows.offset(0, 1);  // from key to key of a page
  const Buffer zeros(width);
  std::fill_n(zeros.at(0), width, 0.f);

  work_queue(groups * parts, [&] {
    return [&, key_tile = Buffer(kTileKeys * width), keys = Buffer(kTileKeys * width), values = Buffer(kTileKeys * width),
            scores = Buffer(block_rows * group * kTileKeys)](int64_t item) {
      const int64_t r0 = bounds[item / parts], r1 = bounds[item / parts + 1], count = (r1 - r0) * group;
      const int64_t h0 = kv_heads * (item % parts) / parts, h1 = kv_heads * (item % parts + 1) / parts;
      // Per key head: the query vectors (row, query head of the key head), transposed, and their running softmax.
      const int64_t all = (h1 - h0) * count, ld = padded(count);
      const Buffer query((h1 - h0) * width * ld), max(all), sum(all * kLanes), acc(all * width);
      const Running running{max.at(0), sum.at(0), acc.at(0), width};
      running.reset(all);
      int64_t k_offset[kTileKeys], v_offset[kTileKeys];
      for (int64_t head = h0; head < h1; ++head)
        for (int64_t i = 0; i < count; i += kLanes) {
          const int64_t some = std::min<int64_t>(kLanes, count - i);
          for (int64_t j = 0; j < some; ++j)
            k_offset[j] = q_rows.offset(r0 + (i + j) / group, head * group + (i + j) % group);
          q_rows.load_rows(k_offset, some, 0, query_scale, key_tile.at(0));
          std::fill(key_tile.at(some * width), key_tile.at(kLanes * width), 0.f);
          transpose(Packed{key_tile.at(0), width}, kLanes, width, query.at((head - h0) * width * ld + i), ld);
        }
      std::fill_n(key_tile.at(0), kTileKeys * width, 0.f);

      const std::vector<Tile> tiles = tiles_of(plan, r0, r1);
      const float *key_rows[kTileKeys], *value_rows[kTileKeys];
      for (size_t i = 0; i < tiles.size(); ++i) {
        const auto [node, t, tile_keys, first_row, last_row] = tiles[i];
        const int64_t end = padded(tile_keys), tile_position = plan.position[node] + t;
        // The next tile is prefetched little by little: prefetched all at once it would stall.
        const Tile& later = tiles[std::min(i + 1, tiles.size() - 1)];
        SlotWalk next(plan, later.node, later.first, page_size);
        int64_t left = i + 1 < tiles.size() ? later.keys : 0;
        const auto look_ahead = [&](int64_t count) {
          for (count = std::min(count, left), left -= count; count > 0; --count, next.skip(1)) {
            k_rows.prefetch(k_rows.offset(next.page(), next.slot(), h0), (h1 - h0) * dim);
            v_rows.prefetch(v_rows.offset(next.page(), next.slot(), h0), (h1 - h0) * dim);
          }
        };
        const int64_t step = kTileKeys / (3 * (h1 - h0)) + 1;
        SlotWalk walk(plan, node, t, page_size);
        for (int64_t j = 0; j < tile_keys;) {  // page by page
          const int64_t run = std::min(page_size - walk.slot(), tile_keys - j);
          const int64_t k_first = k_rows.offset(walk.page(), walk.slot()), v_first = v_rows.offset(walk.page(), walk.slot());
          for (int64_t i = 0; i < run; ++i) k_offset[j + i] = k_first + i * k_step, v_offset[j + i] = v_first + i * v_step;
          walk.skip(run);
          j += run;
        }
        for (int64_t head = h0; head < h1; ++head) {
          bool packed = false;
          look_ahead(step);
          for (int64_t row = first_row; row < last_row; row += block_rows) {
            const int64_t block = std::min(block_rows, last_row - row);
            const int32_t* positions = plan.query_position + row;
            const auto [oldest, newest] = std::minmax_element(positions, positions + block);
            if (tile_position > *newest) continue;
            if (window && *oldest - (tile_position + tile_keys - 1) >= *window) continue;
            if (!packed) {
              const int64_t k_head = k_rows.offset(0, 0, head);
              if (k_rows.in_place()) {
                for (int64_t j = 0; j < tile_keys; ++j) key_rows[j] = k_rows.at(k_offset[j] + k_head);
                for (int64_t j = tile_keys; j < end; ++j) key_rows[j] = zeros.at(0);
                transpose(Scattered{key_rows}, end, width, keys.at(0), kTileKeys);
              } else {
                k_rows.load_rows(k_offset, tile_keys, k_head, 1.f, key_tile.at(0));
                transpose(Packed{key_tile.at(0), width}, end, width, keys.at(0), kTileKeys);
              }
              const int64_t v_head = v_rows.offset(0, 0, head);
              if (v_rows.in_place())
                for (int64_t j = 0; j < tile_keys; ++j) value_rows[j] = v_rows.at(v_offset[j] + v_head);
              else
                v_rows.load_rows(v_offset, tile_keys, v_head, 1.f, values.at(0));
              packed = true;
              // prefetch the next rows into the nearest cache
              for (int64_t j = 0; j < tile_keys; ++j) v_rows.prefetch<3>(v_offset[j] + v_head, dim);
              if (head + 1 < h1)
                for (int64_t j = 0; j < tile_keys; ++j) k_rows.prefetch<3>(k_offset[j] + k_rows.offset(0, 0, head + 1), dim);
            }
            const int64_t at = (head - h0) * count + (row - r0) * group, queries = block * group;
            gemm(queries, end, width, Down{query.at((head - h0) * width * ld + (row - r0) * group), ld},
                 Packed{keys.at(0), kTileKeys}, scores.at(0), kTileKeys, false);
            look_ahead(step);
            if (cap != 0.f) soft_cap(scores.at(0), queries, 0, end, cap);
            const bool all_seen = tile_position + tile_keys - 1 <= *oldest && !(window && *newest - tile_position >= *window);
            if (!all_seen || end != tile_keys)
              mask_positions(scores.at(0), positions, block, group, tile_keys, tile_position, window.value_or(0));
            if (v_rows.in_place())
              running.from(at).take(scores.at(0), queries, 0, tile_keys, Scattered{value_rows});
            else
              running.from(at).take(scores.at(0), queries, 0, tile_keys, Packed{values.at(0), width});
          }
          look_ahead(step);
        }
      }

      for (int64_t head = h0 * group, i; head < h1 * group; ++head) {
        i = (head / group - h0) * count + head % group;
        for (int64_t row = r0; row < r1; ++row, i += group) {
          const auto [log_sum, factor] = running.finish(i);
          if (lse_data) lse_data[row * heads + head] = log_sum;
          out_rows.store_row(out_rows.offset(row, head), running.out + i * width, factor);
        }
      }
    };
  });
}

namespace {

std::tuple<Tensor, Tensor> tree_decode_op(const Tensor& q, const Tensor& k_pages, const Tensor& v_pages, const Tensor& page_indptr,
                                          const Tensor& page_ids, const Tensor& node_offset, const Tensor& node_length,
                                          const Tensor& node_position, const Tensor& row_begin, const Tensor& row_end,
                                          const Tensor& query_position, double scale, std::optional<int64_t> window,
                                          std::optional<double> softcap) {
  const int64_t rows = q.size(0), heads = q.size(1), dim = q.size(2);
  Tensor out = torch::stable::new_empty(q, {rows, heads, dim});
  Tensor lse = torch::stable::new_empty(q, {rows, heads}, ScalarType::Float);
  if (q.numel() == 0) return {out, lse};
  const Plan plan{node_length.size(0),
                  rows,
                  page_indptr.const_data_ptr<int32_t>(),
                  page_ids.const_data_ptr<int32_t>(),
                  node_offset.const_data_ptr<int32_t>(),
                  node_length.const_data_ptr<int32_t>(),
                  node_position.const_data_ptr<int32_t>(),
                  row_begin.const_data_ptr<int32_t>(),
                  row_end.const_data_ptr<int32_t>(),
                  query_position.const_data_ptr<int32_t>()};
  tree_decode(Rows(q), Rows(k_pages), Rows(v_pages), Rows(out), lse.mutable_data_ptr<float>(),
              {heads, k_pages.size(2), dim, k_pages.size(1)}, plan, scale, window, softcap);
  return {out, lse};
}

}  // namespace
}  // namespace rolltree

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cpu, m) {
  m.def(
      "tree_decode(Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_indptr, Tensor page_ids, Tensor node_offset, "
      "Tensor node_length, Tensor node_position, Tensor row_begin, Tensor row_end, Tensor query_position, float scale, "
      "int? window, float? softcap) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CPU, m) { m.impl("tree_decode", TORCH_BOX(&rolltree::tree_decode_op)); }
