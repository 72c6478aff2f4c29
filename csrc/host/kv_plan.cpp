// The order and description of the rows of a step: which keys each row reads, and where its own go.

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "kv_tree.h"

namespace rolltree {

std::vector<int64_t> KvTree::depth_first(const int64_t* nodes, int64_t n) const {
  // Paths from the root, compared node by node: rows that share a node share the whole path above it, so they sort
  // together, and so do the rows of one key. Ids are recycled, so what tells nodes apart is when they were made: the order
  // depends on no earlier call.
  std::vector<std::vector<int64_t>> paths(n);
  for (int64_t i = 0; i < n; ++i) {
    at(static_cast<int>(nodes[i]));
    int top = -1;
    for (int id = static_cast<int>(nodes[i]); id >= 0; id = nodes_[top = id].parent) paths[i].push_back(nodes_[id].serial);
    paths[i].push_back(root_key_.at(top));
    std::reverse(paths[i].begin(), paths[i].end());
  }
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return paths[a] < paths[b]; });
  return order;
}

Plan KvTree::plan(const int64_t* nodes, const int64_t* counts, int64_t n) const {
  Plan plan;
  std::vector<int> entry(nodes_.size(), -1);  // index of the node in the plan
  std::vector<int> path;
  int64_t row = 0;
  for (int64_t i = 0; i < n; ++i) {
    at(static_cast<int>(nodes[i]));
    const auto end = static_cast<int32_t>(row + counts[i]);
    path.clear();
    for (int id = static_cast<int>(nodes[i]); id >= 0; id = nodes_[id].parent) {
      const Node& node = nodes_[id];
      if (node.parent >= 0 && nodes_[node.parent].length != nodes_[node.parent].size())
        throw std::invalid_argument("Node " + std::to_string(id) + " is read before the keys above it are back.");
      if (entry[id] >= 0) {
        if (plan.row_end[entry[id]] != row) throw std::invalid_argument("The rows of a plan must be in depth-first order.");
        plan.row_end[entry[id]] = end;
      } else if (node.length > 0) {
        path.push_back(id);
      }
    }
    for (auto id = path.rbegin(); id != path.rend(); ++id) {
      const Node& node = nodes_[*id];
      entry[*id] = static_cast<int>(plan.row_begin.size());
      plan.page_ids.insert(plan.page_ids.end(), node.pages.begin(), node.pages.end());
      plan.page_indptr.push_back(static_cast<int32_t>(plan.page_ids.size()));
      plan.node_offset.push_back(node.offset);
      plan.node_length.push_back(static_cast<int32_t>(node.length));
      plan.node_position.push_back(static_cast<int32_t>(node.position));
      plan.row_begin.push_back(static_cast<int32_t>(row));
      plan.row_end.push_back(end);
    }
    row = end;
  }
  return plan;
}

Arranged KvTree::arrange(const int64_t* nodes, const int64_t* counts, const int64_t* appended, int64_t n, int64_t spare,
                         int64_t ahead) {
  if (arranged_at_ != clock_ || !std::equal(nodes, nodes + n, arranged_.begin(), arranged_.end())) {
    order_ = depth_first(nodes, n);
    arranged_.assign(nodes, nodes + n);
    arranged_at_ = clock_;
  }
  std::vector<int64_t> node(n), count(n), writer, written;
  int64_t rows = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t from = order_[i];
    node[i] = nodes[from], rows += count[i] = counts[from];
    if (ahead != 0 && (ahead < 0 || count[i] != 1 || appended[from] != 1))
      throw std::invalid_argument("Items that append keys ahead have one row, whose key is appended.");
    if (appended[from] == 0) continue;
    if (appended[from] != count[i]) throw std::invalid_argument("An item appends the keys of all its rows, or of none.");
    writer.push_back(node[i]), written.push_back(count[i] + ahead);
  }
  std::vector<int64_t> slots = append(writer.data(), written.data(), static_cast<int64_t>(writer.size()));
  if (static_cast<int64_t>(slots.size()) < rows) {
    std::vector<int64_t> all;
    all.reserve(rows);
    auto next = slots.begin();
    for (int64_t i = 0; i < n; ++i) {
      if (appended[order_[i]] == 0) all.insert(all.end(), count[i], spare);
      else all.insert(all.end(), next, next + count[i]), next += count[i];
    }
    slots = std::move(all);
  }
  Plan rows_plan = plan(node.data(), count.data(), n);
  // A row's own node is the last that begins with it.
  for (size_t i = 0; ahead != 0 && i < rows_plan.row_begin.size(); ++i)
    if (i + 1 == rows_plan.row_begin.size() || rows_plan.row_begin[i + 1] > rows_plan.row_begin[i])
      rows_plan.node_length[i] -= static_cast<int32_t>(ahead);
  return {order_, std::move(slots), std::move(rows_plan)};
}

}  // namespace rolltree
