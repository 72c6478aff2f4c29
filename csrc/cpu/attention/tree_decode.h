// Decode attention over a paged tree, for use outside its op: see tree_decode.cpp.
#pragma once

#include <cstdint>
#include <optional>

#include "attention_tiles.h"

namespace rolltree {

// The plan of a step, see `DecodePlan`.
struct Plan {
  int64_t nodes, rows;
  const int32_t *page_indptr, *page_ids, *offset, *length, *position, *row_begin, *row_end, *query_position;
};

struct AttentionShape {
  int64_t heads, kv_heads, dim, page_size;
};

// q, out [plan.rows, heads, dim]; pages [*, page_size, kv_heads, dim]; lse [plan.rows, heads] or null.
void tree_decode(const Rows& q, const Rows& k_pages, const Rows& v_pages, const Rows& out, float* lse, const AttentionShape& shape,
                 const Plan& plan, double scale, std::optional<int64_t> window, std::optional<double> softcap);

}  // namespace rolltree
