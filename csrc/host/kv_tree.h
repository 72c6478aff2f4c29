// The KV tree: which tokens are known to the paged KV cache, and which slots hold their keys.
//
// A node is a run of tokens without a branch. The keys of its first `length` tokens lie in `pages`, starting `offset` slots
// into the first one; the keys of the others are missing: not computed yet, or dropped. Node ids and page ids are recycled.
// No key is ever copied: a fork starts its children on pages of their own, and a cut in the middle of a node splits it into
// two nodes that share the straddled page by (page, offset, length).
//
// Sequences hold nodes. A node that nobody holds and that has no children is cached: `insert` finds it again by the tokens of
// its path, under the same key (weights version, adapter), until `make_room` needs its pages, least recently used first.
//
// Invariants (`check` verifies them):
//   1. References are counted right; the cached nodes are those without any, and are sealed and not empty.
//   2. A page is free, or held by as many nodes as its count says; each of its slots belongs to one node. Two nodes share a
//      page only after a split, and only a node that is open or lacks keys may write, past its own end.
//   3. A node with children is sealed (it takes no further tokens), and its children start right behind its last token.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

namespace rolltree {

struct KvExhausted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The nodes that some rows of queries read, for `tree_decode_attention`; all of length K (nodes), but page_indptr (K + 1).
struct Plan {
  std::vector<int32_t> page_indptr{0}, page_ids, node_offset, node_length, node_position, row_begin, row_end;
};

// The rows of a step.
struct Arranged {
  std::vector<int64_t> order;  // of the items they were made of
  std::vector<int64_t> slots;  // one a row, and those ahead of it
  Plan plan;
};

// Runs of tokens without keys on a path, nodes nearest the root first.
struct Missing {
  std::vector<int64_t> node, begin, count;
};

// Runs of keys that held nodes have lost. Their slots, one run after the other, hold them until another key is written there.
struct Dropped {
  std::vector<int64_t> serial, position, count, slots;
};

class KvTree {
 public:
  KvTree(int num_pages, int page_size);

  // A node held by the caller whose path spells `tokens`: what is known of it under `key` is shared, the rest is new.
  int insert(int64_t key, const int32_t* tokens, int64_t n);
  std::vector<int> fork(int node, int n);  // seals the node; n empty children take the place of the caller's hold on it
  // The node whose last token is at `position - 1`, on the path of `node`, split off where needed and held by the caller.
  int rewind(int node, int64_t position);
  void release(int node);                         // gives up one hold
  void keep(int node, int64_t owner);             // drops the node after all cached ones that no owner keeps
  void let_go(int64_t owner);                     // the owner keeps nothing any more
  void let_go_all();                              // nor does any other
  void extend(int node, const int32_t* tokens, int64_t n);  // further tokens of an open node; their keys are missing
  void truncate(int node, int64_t end);  // forgets the tokens of an open node from position `end` on, and their keys
  void name(int node, int64_t begin, const int32_t* tokens, int64_t n);  // its tokens from position `begin` on, unknown before

  // Slots for the keys of the next counts[i] tokens of nodes[i], in order; nodes must be distinct. All or nothing.
  std::vector<int64_t> append(const int64_t* nodes, const int64_t* counts, int64_t n);
  int64_t pages_needed(const int64_t* nodes, const int64_t* counts, int64_t n) const;
  Missing missing(int node) const;
  std::vector<int32_t> tokens(int node, int64_t begin, int64_t count) const;

  void evict(int node);               // forgets the keys of the node, not its tokens
  int64_t make_room(int64_t pages);   // frees cached nodes until `pages` are free; returns the free pages
  // The same, then evicts held nodes that lie on the path of none of `keep`, deepest first.
  int64_t evict_others(const int64_t* keep, int64_t n, int64_t pages);
  void forget();                      // frees every cached node
  void record_drops() { records_drops_ = true; }
  Dropped take_dropped() { return std::exchange(dropped_, {}); }  // since the last call

  // The order of `nodes` in which the rows below any node are adjacent.
  std::vector<int64_t> depth_first(const int64_t* nodes, int64_t n) const;
  // Rows in that order: counts[i] consecutive rows end their path in nodes[i].
  Plan plan(const int64_t* nodes, const int64_t* counts, int64_t n) const;
  // Puts items in that order, appends the keys of those with appended[i] > 0 (then counts[i]), and plans their rows, which in
  // other items have the slot `spare`. With `ahead` each item appends the keys of as many further tokens: their slots follow
  // those of the item's row, and the plan has their pages but not yet their keys.
  Arranged arrange(const int64_t* nodes, const int64_t* counts, const int64_t* appended, int64_t n, int64_t spare, int64_t ahead);

  int64_t length(int node) const { return at(node).length; }
  int64_t position(int node) const { return at(node).position; }
  int64_t end(int node) const { return at(node).position + at(node).size(); }  // one past its last token
  int parent(int node) const { return at(node).parent; }
  int64_t serial(int node) const { return at(node).serial; }  // with a position it names a key for all time
  int refs(int node) const { return at(node).holds + static_cast<int>(at(node).children.size()); }
  int num_pages() const { return static_cast<int>(page_count_.size()); }
  int page_size() const { return page_size_; }
  int64_t free_pages() const { return static_cast<int64_t>(free_pages_.size()); }
  int64_t nodes() const { return static_cast<int64_t>(nodes_.size() - free_nodes_.size()); }
  int64_t keys() const { return keys_; }
  int64_t peak_pages() const { return peak_pages_; }
  int64_t peak_keys() const { return peak_keys_; }
  int64_t reused() const { return reused_; }
  void start_counting() { peak_pages_ = num_pages() - free_pages(), peak_keys_ = keys_, reused_ = 0; }
  void check() const;  // throws std::logic_error naming the broken invariant

 private:
  struct Node {
    int parent = -1;
    int holds = 0;  // sequences
    int offset = 0;
    bool sealed = false, live = false;
    int64_t length = 0;
    int64_t position = 0;
    int64_t used = 0;    // when it was last held, on a clock that counts events
    int64_t serial = 0;  // when it was made, on the same clock
    std::vector<int32_t> tokens;
    std::vector<int> pages, children;
    std::vector<int64_t> owners;  // that keep it
    int64_t size() const { return static_cast<int64_t>(tokens.size()); }
  };

  using Turn = std::tuple<bool, int64_t, int>;  // (kept, used, node)

  Turn turn(int node) const { return {!nodes_[node].owners.empty(), nodes_[node].used, node}; }
  const Node& at(int node) const;
  Node& at(int node) { return const_cast<Node&>(static_cast<const KvTree*>(this)->at(node)); }
  int new_node(int parent, int64_t position);
  int held(int node) const;
  void hold(int node);
  void unhook(int node);
  void settle(int node);
  void drop_keys(Node& node);
  int split(int node, int64_t keep);
  int64_t pages_for(const Node& node, int64_t count) const;
  int64_t last_page_end(const Node& node) const;

  int page_size_;
  std::vector<Node> nodes_;
  std::vector<int> free_nodes_;
  std::vector<int> free_pages_;
  std::vector<int> page_count_;                 // nodes holding the page
  std::map<int64_t, std::vector<int>> roots_;   // key -> first nodes of its paths
  std::map<int, int64_t> root_key_;             // the same, backwards
  std::set<Turn> cached_;                       // in the order in which they are dropped
  std::map<int64_t, std::vector<int>> kept_;    // owner -> nodes
  bool records_drops_ = false;
  Dropped dropped_;
  std::vector<int64_t> arranged_, order_;  // the nodes of the last `arrange` and their order, which stays
  int64_t arranged_at_ = -1;               // while no node is made or let go
  int64_t clock_ = 0, keys_ = 0, peak_keys_ = 0, peak_pages_ = 0, reused_ = 0;
};

}  // namespace rolltree
