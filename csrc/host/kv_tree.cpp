#include "kv_tree.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

namespace rolltree {

KvTree::KvTree(int num_pages, int page_size) : page_size_(page_size) {
  if (num_pages < 1 || page_size < 1) throw std::invalid_argument("KvTree needs at least one page of at least one token.");
  page_count_.assign(num_pages, 0);
  free_pages_.resize(num_pages);
  std::iota(free_pages_.rbegin(), free_pages_.rend(), 0);  // page 0 is handed out first
}

const KvTree::Node& KvTree::at(int node) const {
  if (node < 0 || node >= static_cast<int>(nodes_.size()) || !nodes_[node].live)
    throw std::invalid_argument("KvTree has no node " + std::to_string(node) + ".");
  return nodes_[node];
}

int KvTree::held(int node) const {
  if (at(node).holds < 1) throw std::invalid_argument("No sequence holds node " + std::to_string(node) + ".");
  return node;
}

int KvTree::new_node(int parent, int64_t position) {
  int id;
  if (free_nodes_.empty()) {
    id = static_cast<int>(nodes_.size());
    nodes_.emplace_back();
  } else {
    id = free_nodes_.back();
    free_nodes_.pop_back();
    nodes_[id] = Node();
  }
  Node& node = nodes_[id];
  node.parent = parent;
  node.position = position;
  node.holds = 1;
  node.live = true;
  return id;
}

int KvTree::root() {
  return new_node(-1, 0);
}

std::vector<int> KvTree::fork(int id, int n) {
  if (n < 1) throw std::invalid_argument("A node is forked into at least one child.");
  Node& node = nodes_[held(id)];
  if (node.sealed == kOpen) node.sealed = node.length;
  if (node.length != node.sealed) throw std::invalid_argument("Node " + std::to_string(id) + " is forked before its keys are back.");
  --node.holds;
  node.children += n;
  const int64_t end = node.position + node.sealed;
  std::vector<int> children(n);
  for (int& child : children) child = new_node(id, end);  // invalidates `node`
  return children;
}

int KvTree::rewind(int id, int64_t position) {
  at(id);
  if (position < 1) throw std::invalid_argument("A rewind keeps at least one token.");
  while (nodes_[id].position >= position) id = nodes_[id].parent;
  const int64_t keep = position - nodes_[id].position;
  if (nodes_[id].sealed != kOpen && keep > nodes_[id].sealed)
    throw std::invalid_argument("Position " + std::to_string(position) + " is past the end of node " + std::to_string(id) + ".");
  if (keep == nodes_[id].sealed) {
    ++nodes_[id].holds;
    return id;
  }
  // Split: the new node is the upper half, so that children and sequences keep the id they know.
  const int upper_id = new_node(nodes_[id].parent, nodes_[id].position);
  Node& upper = nodes_[upper_id];
  Node& lower = nodes_[id];
  upper.children = 1;  // the lower half; the hold is the caller's
  upper.sealed = keep;
  upper.offset = lower.offset;
  lower.parent = upper_id;
  lower.position = position;
  if (lower.sealed != kOpen) lower.sealed -= keep;
  if (lower.length <= keep) {  // every key lies in the upper half
    upper.length = lower.length;
    upper.pages = std::move(lower.pages);
    lower.pages.clear();
    lower.length = 0;
    lower.offset = 0;
    return upper_id;
  }
  const int64_t cut = lower.offset + keep;
  const int64_t first = cut / page_size_;
  const bool straddles = cut % page_size_ != 0;
  upper.length = keep;
  upper.pages.assign(lower.pages.begin(), lower.pages.begin() + first + straddles);
  lower.pages.erase(lower.pages.begin(), lower.pages.begin() + first);
  lower.length -= keep;
  lower.offset = static_cast<int>(cut % page_size_);
  if (straddles) ++page_count_[lower.pages.front()];
  return upper_id;
}

void KvTree::drop_pages(Node& node) {
  for (const int page : node.pages)
    if (--page_count_[page] == 0) free_pages_.push_back(page);
  tokens_ -= node.length;
  node.pages.clear();
  node.length = 0;
  node.offset = 0;
}

void KvTree::evict(int id) { drop_pages(at(id)); }

int64_t KvTree::evict_others(const int64_t* keep, int64_t n, int64_t pages) {
  std::vector<char> kept(nodes_.size(), 0);
  for (int64_t i = 0; i < n; ++i) {
    at(static_cast<int>(keep[i]));
    for (auto id = static_cast<int>(keep[i]); id >= 0 && !kept[id]; id = nodes_[id].parent) kept[id] = 1;
  }
  std::vector<int> others;
  for (size_t id = 0; id < nodes_.size(); ++id)
    if (nodes_[id].live && !kept[id] && nodes_[id].length > 0) others.push_back(static_cast<int>(id));
  std::stable_sort(others.begin(), others.end(), [&](int a, int b) { return nodes_[a].position > nodes_[b].position; });
  for (size_t i = 0; i < others.size() && free_pages() < pages; ++i) drop_pages(nodes_[others[i]]);
  return free_pages();
}

void KvTree::release(int id) {
  --nodes_[held(id)].holds;
  while (id >= 0 && refs(id) == 0) {
    drop_pages(nodes_[id]);
    nodes_[id].live = false;
    free_nodes_.push_back(id);
    id = nodes_[id].parent;
    if (id >= 0) --nodes_[id].children;
  }
}

int64_t KvTree::pages_for(const Node& node, int64_t count) const {
  const int64_t end = node.offset + node.length + count;
  return count == 0 ? 0 : (end + page_size_ - 1) / page_size_ - static_cast<int64_t>(node.pages.size());
}

int64_t KvTree::pages_needed(const int64_t* nodes, const int64_t* counts, int64_t n) const {
  int64_t pages = 0;
  for (int64_t i = 0; i < n; ++i) pages += pages_for(at(static_cast<int>(nodes[i])), counts[i]);
  return pages;
}

std::vector<int64_t> KvTree::append(const int64_t* nodes, const int64_t* counts, int64_t n) {
  std::vector<int64_t> order(nodes, nodes + n);
  std::sort(order.begin(), order.end());
  if (std::adjacent_find(order.begin(), order.end()) != order.end())
    throw std::invalid_argument("The nodes of one append must be distinct.");
  int64_t total = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Node& node = at(static_cast<int>(nodes[i]));
    if (counts[i] < 0 || (node.sealed != kOpen && node.length + counts[i] > node.sealed))
      throw std::invalid_argument("Node " + std::to_string(nodes[i]) + " cannot take " + std::to_string(counts[i]) + " more keys.");
    total += counts[i];
  }
  const int64_t needed = pages_needed(nodes, counts, n);
  if (needed > free_pages())
    throw KvExhausted(std::to_string(needed) + " KV pages are needed and " + std::to_string(free_pages()) + " are free.");
  std::vector<int64_t> slots;
  slots.reserve(total);
  for (int64_t i = 0; i < n; ++i) {
    Node& node = nodes_[nodes[i]];
    for (int64_t more = pages_for(node, counts[i]); more > 0; --more) {
      node.pages.push_back(free_pages_.back());
      page_count_[free_pages_.back()] = 1;
      free_pages_.pop_back();
    }
    for (int64_t at = node.offset + node.length, end = at + counts[i]; at < end; ++at)
      slots.push_back(static_cast<int64_t>(node.pages[at / page_size_]) * page_size_ + at % page_size_);
    node.length += counts[i];
  }
  tokens_ += total;
  peak_tokens_ = std::max(peak_tokens_, tokens_);
  peak_pages_ = std::max(peak_pages_, num_pages() - free_pages());
  return slots;
}

std::vector<int64_t> KvTree::depth_first(const int64_t* nodes, int64_t n) const {
  // Paths from the root, compared id by id: rows that share a node share the whole path above it, so they sort together.
  std::vector<std::vector<int>> paths(n);
  for (int64_t i = 0; i < n; ++i) {
    at(static_cast<int>(nodes[i]));
    for (int id = static_cast<int>(nodes[i]); id >= 0; id = nodes_[id].parent) paths[i].push_back(id);
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
      if (node.parent >= 0 && node.position != nodes_[node.parent].position + nodes_[node.parent].length)
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

int64_t KvTree::last_page_end(const Node& node) const {
  const bool may_write = node.sealed == kOpen || node.length < node.sealed;
  return may_write ? static_cast<int64_t>(node.pages.size()) * page_size_ : node.offset + node.length;
}

void KvTree::check() const {
  const auto fail = [](const std::string& what) { throw std::logic_error("KvTree: " + what + "."); };
  std::vector<int> children(nodes_.size(), 0), holders(page_count_.size(), 0);
  std::vector<char> taken(page_count_.size() * page_size_, 0);
  int64_t live = 0, tokens = 0;
  for (size_t id = 0; id < nodes_.size(); ++id) {
    const Node& node = nodes_[id];
    if (!node.live) continue;
    const std::string name = "node " + std::to_string(id);
    ++live;
    tokens += node.length;
    if (node.parent >= 0) {
      const Node& parent = nodes_[node.parent];
      ++children[node.parent];
      if (!parent.live) fail(name + " has a freed parent");
      if (parent.sealed == kOpen) fail(name + " hangs below an open node");
      if (node.position != parent.position + parent.sealed) fail(name + " does not start where its parent ends");
    }
    if (node.sealed != kOpen && node.length > node.sealed) fail(name + " holds more keys than it has tokens");
    if (node.offset < 0 || node.offset >= page_size_) fail(name + " starts outside its first page");
    const int64_t pages = (node.offset + node.length + page_size_ - 1) / page_size_;
    if (node.length == 0 ? !node.pages.empty() : static_cast<int64_t>(node.pages.size()) != pages)
      fail(name + " holds " + std::to_string(node.pages.size()) + " pages for " + std::to_string(node.length) + " keys");
    for (const int page : node.pages) ++holders[page];
    if (node.length == 0) continue;
    for (int64_t at = node.offset, end = last_page_end(node); at < end; ++at) {
      char& owner = taken[static_cast<size_t>(node.pages[at / page_size_]) * page_size_ + at % page_size_];
      if (owner) fail("a slot of page " + std::to_string(node.pages[at / page_size_]) + " belongs to two nodes");
      owner = 1;
    }
  }
  for (size_t id = 0; id < nodes_.size(); ++id)
    if (nodes_[id].live && (nodes_[id].children != children[id] || nodes_[id].holds < 0 || refs(static_cast<int>(id)) < 1))
      fail("the references of node " + std::to_string(id) + " are miscounted");
  if (live != nodes()) fail("the list of free nodes is wrong");
  if (tokens != tokens_) fail("the count of keys is wrong");
  if (holders != page_count_) fail("the holders of a page are miscounted");
  std::vector<char> free(page_count_.size(), 0);
  for (const int page : free_pages_) {
    if (free[page] || holders[page]) fail("page " + std::to_string(page) + " is free twice, or free and held");
    free[page] = 1;
  }
  for (size_t page = 0; page < holders.size(); ++page)
    if (!free[page] && !holders[page]) fail("page " + std::to_string(page) + " is lost");
}

}  // namespace rolltree
