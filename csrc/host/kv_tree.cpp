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
  node.serial = ++clock_;
  node.live = true;
  if (parent >= 0) {
    cached_.erase(turn(parent));
    nodes_[parent].children.push_back(id);
  }
  return id;
}

// -- references -------------------------------------------------------------------------------------------------------

void KvTree::hold(int id) {
  cached_.erase(turn(id));
  nodes_[id].used = ++clock_;
  ++nodes_[id].holds;
}

// Takes the node out of its parent's children, or out of the roots.
void KvTree::unhook(int id) {
  const int parent = nodes_[id].parent;
  std::vector<int>* siblings = parent >= 0 ? &nodes_[parent].children : nullptr;
  if (siblings == nullptr) {
    const auto key = root_key_.find(id);
    siblings = &roots_[key->second];
    siblings->erase(std::find(siblings->begin(), siblings->end(), id));
    if (siblings->empty()) roots_.erase(key->second);
    root_key_.erase(key);
    return;
  }
  siblings->erase(std::find(siblings->begin(), siblings->end(), id));
}

// A node that has lost a reference: cached if it was the last and there is something to find again, else freed.
void KvTree::settle(int id) {
  while (id >= 0 && refs(id) == 0) {
    Node& node = nodes_[id];
    node.tokens.resize(node.length);  // what has no keys is not worth finding
    node.sealed = true;
    if (node.length > 0) {
      cached_.insert(turn(id));
      return;
    }
    drop_keys(node);
    for (const int64_t owner : std::exchange(node.owners, {})) {
      const auto kept = kept_.find(owner);
      kept->second.erase(std::find(kept->second.begin(), kept->second.end(), id));
      if (kept->second.empty()) kept_.erase(kept);
    }
    unhook(id);
    node.live = false;
    free_nodes_.push_back(id);
    id = node.parent;
  }
}

void KvTree::release(int id) {
  Node& node = nodes_[held(id)];
  --node.holds;
  node.used = ++clock_;
  settle(id);
}

void KvTree::keep(int id, int64_t owner) {
  std::vector<int64_t>& owners = nodes_[held(id)].owners;
  if (std::find(owners.begin(), owners.end(), owner) != owners.end()) return;
  owners.push_back(owner);
  kept_[owner].push_back(id);
}

void KvTree::let_go(int64_t owner) {
  const auto found = kept_.find(owner);
  if (found == kept_.end()) return;
  for (const int id : found->second) {
    const bool was_cached = cached_.erase(turn(id)) > 0;
    std::vector<int64_t>& owners = nodes_[id].owners;
    owners.erase(std::find(owners.begin(), owners.end(), owner));
    if (was_cached) cached_.insert(turn(id));
  }
  kept_.erase(found);
}

void KvTree::let_go_all() {
  while (!kept_.empty()) let_go(kept_.begin()->first);
}

int KvTree::insert(int64_t key, const int32_t* tokens, int64_t n) {
  if (n < 1) throw std::invalid_argument("A path has at least one token.");
  int id = -1;
  int64_t done = 0;
  while (done < n) {
    static const std::vector<int> none;
    const auto root = roots_.find(key);
    const std::vector<int>& below = id >= 0 ? nodes_[id].children : root == roots_.end() ? none : root->second;
    int best = -1;
    int64_t most = 0;  // siblings that were sampled may begin alike
    for (const int child : below) {
      const Node& node = nodes_[child];
      if (!node.sealed || node.tokens.empty() || node.tokens[0] != tokens[done]) continue;
      const int64_t limit = std::min(node.size(), n - done);
      const auto end = std::mismatch(node.tokens.begin(), node.tokens.begin() + limit, tokens + done).first;
      if (end - node.tokens.begin() > most) most = end - node.tokens.begin(), best = child;
    }
    if (best < 0) break;
    id = most < nodes_[best].size() ? split(best, most) : best;
    reused_ += nodes_[id].length;
    done += most;
  }
  if (done < n) {
    const int child = new_node(id, done);
    nodes_[child].tokens.assign(tokens + done, tokens + n);
    nodes_[child].sealed = true;
    if (id < 0) roots_[key].push_back(child), root_key_[child] = key;
    id = child;
  }
  hold(id);
  return id;
}

std::vector<int> KvTree::fork(int id, int n) {
  if (n < 1) throw std::invalid_argument("A node is forked into at least one child.");
  held(id);
  nodes_[id].sealed = true;
  --nodes_[id].holds;
  const int64_t end = nodes_[id].position + nodes_[id].size();
  std::vector<int> children(n);
  for (int& child : children) {
    child = new_node(id, end);
    hold(child);
  }
  return children;
}

void KvTree::extend(int id, const int32_t* tokens, int64_t n) {
  Node& node = at(id);
  if (node.sealed) throw std::invalid_argument("Node " + std::to_string(id) + " is sealed and takes no further tokens.");
  node.tokens.insert(node.tokens.end(), tokens, tokens + n);
}

void KvTree::truncate(int id, int64_t end) {
  Node& node = nodes_[held(id)];
  const int64_t keep = end - node.position;
  if (node.sealed) throw std::invalid_argument("Node " + std::to_string(id) + " is sealed and keeps its tokens.");
  if (keep < 0 || keep > node.size())
    throw std::invalid_argument("Node " + std::to_string(id) + " does not reach position " + std::to_string(end) + ".");
  node.tokens.resize(keep);
  if (node.length <= keep) return;
  keys_ -= node.length - keep;
  node.length = keep;
  if (keep == 0) node.offset = 0;
  const int64_t pages = (node.offset + keep + page_size_ - 1) / page_size_;
  for (; static_cast<int64_t>(node.pages.size()) > pages; node.pages.pop_back())
    if (--page_count_[node.pages.back()] == 0) free_pages_.push_back(node.pages.back());
}

void KvTree::name(int id, int64_t begin, const int32_t* tokens, int64_t n) {
  Node& node = nodes_[held(id)];
  const int64_t at = begin - node.position;
  if (node.sealed) throw std::invalid_argument("Node " + std::to_string(id) + " is sealed and keeps its tokens.");
  if (at < 0 || at + n > node.size())
    throw std::invalid_argument("Node " + std::to_string(id) + " has no tokens at the positions from " + std::to_string(begin) + " on.");
  std::copy(tokens, tokens + n, node.tokens.begin() + at);
}

int KvTree::rewind(int id, int64_t position) {
  at(id);
  if (position < 1) throw std::invalid_argument("A rewind keeps at least one token.");
  if (position > nodes_[id].position + nodes_[id].size())
    throw std::invalid_argument("Position " + std::to_string(position) + " is past the end of node " + std::to_string(id) + ".");
  while (nodes_[id].position >= position) id = nodes_[id].parent;
  const int64_t keep = position - nodes_[id].position;
  if (keep < nodes_[id].size()) id = split(id, keep);
  nodes_[id].sealed = true;
  hold(id);
  return id;
}

// The first `keep` tokens become a new node above: children and sequences keep the id they know. Nobody holds the new one.
int KvTree::split(int id, int64_t keep) {
  const int upper_id = new_node(-1, nodes_[id].position);
  Node& upper = nodes_[upper_id];
  Node& lower = nodes_[id];
  upper.parent = lower.parent;
  std::vector<int>& siblings = lower.parent >= 0 ? nodes_[lower.parent].children : roots_[root_key_[id]];
  *std::find(siblings.begin(), siblings.end(), id) = upper_id;
  if (lower.parent < 0) root_key_[upper_id] = root_key_[id], root_key_.erase(id);
  upper.children.push_back(id);
  upper.sealed = true;
  upper.used = lower.used;
  upper.serial = lower.serial;
  upper.offset = lower.offset;
  upper.tokens.assign(lower.tokens.begin(), lower.tokens.begin() + keep);
  lower.tokens.erase(lower.tokens.begin(), lower.tokens.begin() + keep);
  lower.parent = upper_id;
  lower.position += keep;
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

// -- keys -------------------------------------------------------------------------------------------------------------

void KvTree::drop_keys(Node& node) {
  if (records_drops_ && node.length > 0 && node.holds + node.children.size() > 0) {
    dropped_.serial.push_back(node.serial);
    dropped_.position.push_back(node.position);
    dropped_.count.push_back(node.length);
    for (int64_t at = node.offset; at < node.offset + node.length; ++at)
      dropped_.slots.push_back(static_cast<int64_t>(node.pages[at / page_size_]) * page_size_ + at % page_size_);
  }
  for (const int page : node.pages)
    if (--page_count_[page] == 0) free_pages_.push_back(page);
  keys_ -= node.length;
  node.pages.clear();
  node.length = 0;
  node.offset = 0;
}

void KvTree::evict(int id) {
  drop_keys(at(id));
  if (refs(id) == 0) {
    cached_.erase(turn(id));
    settle(id);
  }
}

int64_t KvTree::make_room(int64_t pages) {
  while (free_pages() < pages && !cached_.empty()) evict(std::get<2>(*cached_.begin()));
  return free_pages();
}

void KvTree::forget() {
  while (!cached_.empty()) evict(std::get<2>(*cached_.begin()));
}

int64_t KvTree::evict_others(const int64_t* keep, int64_t n, int64_t pages) {
  if (make_room(pages) >= pages) return free_pages();
  std::vector<char> kept(nodes_.size(), 0);
  for (int64_t i = 0; i < n; ++i) {
    at(static_cast<int>(keep[i]));
    for (auto id = static_cast<int>(keep[i]); id >= 0 && !kept[id]; id = nodes_[id].parent) kept[id] = 1;
  }
  std::vector<int> others;
  for (size_t id = 0; id < nodes_.size(); ++id)
    if (nodes_[id].live && !kept[id] && nodes_[id].length > 0) others.push_back(static_cast<int>(id));
  std::stable_sort(others.begin(), others.end(), [&](int a, int b) { return nodes_[a].position > nodes_[b].position; });
  for (size_t i = 0; i < others.size() && free_pages() < pages; ++i) drop_keys(nodes_[others[i]]);
  return free_pages();
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
    if (counts[i] < 0 || node.length + counts[i] > node.size())
      throw std::invalid_argument("Node " + std::to_string(nodes[i]) + " lacks fewer than " + std::to_string(counts[i]) + " keys.");
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
  keys_ += total;
  peak_keys_ = std::max(peak_keys_, keys_);
  peak_pages_ = std::max(peak_pages_, num_pages() - free_pages());
  return slots;
}

Missing KvTree::missing(int id) const {
  Missing runs;
  at(id);
  for (; id >= 0; id = nodes_[id].parent) {
    const Node& node = nodes_[id];
    if (node.length == node.size()) continue;
    runs.node.push_back(id);
    runs.begin.push_back(node.length);
    runs.count.push_back(node.size() - node.length);
  }
  for (auto* run : {&runs.node, &runs.begin, &runs.count}) std::reverse(run->begin(), run->end());
  return runs;
}

std::vector<int32_t> KvTree::tokens(int id, int64_t begin, int64_t count) const {
  const Node& node = at(id);
  if (begin < 0 || count < 0 || begin + count > node.size())
    throw std::invalid_argument("Node " + std::to_string(id) + " has " + std::to_string(node.size()) + " tokens.");
  return {node.tokens.begin() + begin, node.tokens.begin() + begin + count};
}

int64_t KvTree::last_page_end(const Node& node) const {
  const bool may_write = !node.sealed || node.length < node.size();
  return may_write ? static_cast<int64_t>(node.pages.size()) * page_size_ : node.offset + node.length;
}

void KvTree::check() const {
  const auto fail = [](const std::string& what) { throw std::logic_error("KvTree: " + what + "."); };
  std::vector<int> holders(page_count_.size(), 0), parents(nodes_.size(), 0);
  std::map<int64_t, std::vector<int>> kept;
  std::vector<char> taken(page_count_.size() * page_size_, 0);
  int64_t live = 0, keys = 0;
  size_t cached = 0, roots = 0;
  for (size_t id = 0; id < nodes_.size(); ++id) {
    const Node& node = nodes_[id];
    if (!node.live) continue;
    const std::string name = "node " + std::to_string(id);
    ++live;
    keys += node.length;
    for (const int child : node.children) {
      const Node& below = nodes_[child];
      if (!below.live || below.parent != static_cast<int>(id)) fail("a child of " + name + " is not its child");
      if (!node.sealed) fail("the open " + name + " has children");
      if (below.position != node.position + node.size()) fail("a child of " + name + " does not start where it ends");
      if (++parents[child] > 1) fail("node " + std::to_string(child) + " is a child twice");
    }
    if (node.parent < 0 && (++roots, root_key_.count(static_cast<int>(id)) == 0)) fail(name + " is lost above");
    if (node.parent >= 0 && !nodes_[node.parent].live) fail(name + " has a freed parent");
    if (node.holds < 0) fail("the holds of " + name + " are miscounted");
    for (const int64_t owner : node.owners) kept[owner].push_back(static_cast<int>(id));
    if (node.holds == 0 && node.children.empty()) {
      ++cached;
      if (cached_.count(turn(static_cast<int>(id))) == 0) fail(name + " is neither held nor cached");
      if (!node.sealed || node.length == 0 || node.length != node.size()) fail("the cached " + name + " is open or lacks keys");
    }
    if (node.length > node.size()) fail(name + " holds more keys than it has tokens");
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
    if (nodes_[id].live && nodes_[id].parent >= 0 && parents[id] != 1) fail("node " + std::to_string(id) + " is no child of its parent");
  for (const auto& [key, ids] : roots_) roots -= ids.size();
  for (auto [owner, ids] : kept_) {
    std::sort(ids.begin(), ids.end());
    if (ids != kept[owner]) fail("the nodes that owner " + std::to_string(owner) + " keeps are wrong");
  }
  if (kept.size() != kept_.size()) fail("an owner keeps nodes unknown to it");
  if (roots != 0 || cached != cached_.size()) fail("the list of roots or of cached nodes is wrong");
  if (live != nodes()) fail("the list of free nodes is wrong");
  if (keys != keys_) fail("the count of keys is wrong");
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
