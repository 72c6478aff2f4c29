// The KV tree: which slots of the paged KV cache hold the keys of which node of which tree of rollouts.
//
// A node is a run of tokens without a branch. Its keys lie in `pages`, starting `offset` slots into the first one. Node ids
// and page ids are recycled. No key is ever copied here: a fork starts its children on pages of their own, and a rewind into
// the middle of a node splits it into two nodes that share the straddled page by (page, offset, length).
//
// Invariants (`check` verifies them):
//   1. A node has children or sequences holding it; one without either is freed, and so up its path.
//   2. A page is free, or held by as many nodes as its count says; each of its slots belongs to one node. Two nodes share a
//      page only after a split, and only a node that is open or not yet refilled may write, past its own end.
//   3. A sealed node (one with children) holds at most `sealed` keys, and its children start right behind them. It holds
//      fewer only after an eviction, until it is refilled.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

namespace rolltree {

struct KvExhausted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The nodes that some rows of queries read, for `tree_decode_attention`; all of length K (nodes), but page_indptr (K + 1).
struct Plan {
  std::vector<int32_t> page_indptr{0}, page_ids, node_offset, node_length, node_position, row_begin, row_end;
};

class KvTree {
 public:
  KvTree(int num_pages, int page_size);

  int root();                             // a new tree: one empty node, held by the caller
  std::vector<int> fork(int node, int n);  // seals the node; n empty children take the place of the caller's hold on it
  // The node whose last token is at `position - 1`, on the path of `node`, split off where needed and held by the caller.
  int rewind(int node, int64_t position);
  void evict(int node);    // forgets the keys of the node, not the node
  // Evicts nodes that lie on the path of none of `keep`, deepest first, until `pages` are free; returns the free pages.
  int64_t evict_others(const int64_t* keep, int64_t n, int64_t pages);
  void release(int node);  // gives up one hold; frees the node and its ancestors where it was the last

  // Slots for counts[i] further keys of nodes[i], in order; nodes must be distinct. All or nothing.
  std::vector<int64_t> append(const int64_t* nodes, const int64_t* counts, int64_t n);
  int64_t pages_needed(const int64_t* nodes, const int64_t* counts, int64_t n) const;

  // The order of `nodes` in which the rows below any node are adjacent.
  std::vector<int64_t> depth_first(const int64_t* nodes, int64_t n) const;
  // Rows in that order: counts[i] consecutive rows end their path in nodes[i].
  Plan plan(const int64_t* nodes, const int64_t* counts, int64_t n) const;

  int64_t length(int node) const { return at(node).length; }
  int64_t position(int node) const { return at(node).position; }
  int parent(int node) const { return at(node).parent; }
  int refs(int node) const { return at(node).children + at(node).holds; }
  int num_pages() const { return static_cast<int>(page_count_.size()); }
  int page_size() const { return page_size_; }
  int64_t free_pages() const { return static_cast<int64_t>(free_pages_.size()); }
  int64_t nodes() const { return static_cast<int64_t>(nodes_.size() - free_nodes_.size()); }
  int64_t tokens() const { return tokens_; }
  int64_t peak_pages() const { return peak_pages_; }
  int64_t peak_tokens() const { return peak_tokens_; }
  void check() const;  // throws std::logic_error naming the broken invariant

 private:
  static constexpr int64_t kOpen = -1;
  struct Node {
    int parent = -1;
    int children = 0;
    int holds = 0;  // sequences
    int offset = 0;
    int64_t length = 0;
    int64_t position = 0;
    int64_t sealed = kOpen;
    std::vector<int> pages;
    bool live = false;
  };

  const Node& at(int node) const;
  Node& at(int node) { return const_cast<Node&>(static_cast<const KvTree*>(this)->at(node)); }
  int new_node(int parent, int64_t position);
  int held(int node) const;
  void drop_pages(Node& node);
  int64_t pages_for(const Node& node, int64_t count) const;
  int64_t last_page_end(const Node& node) const;

  int page_size_;
  std::vector<Node> nodes_;
  std::vector<int> free_nodes_;
  std::vector<int> free_pages_;
  std::vector<int> page_count_;  // nodes holding the page
  int64_t tokens_ = 0, peak_tokens_ = 0, peak_pages_ = 0;
};

}  // namespace rolltree
