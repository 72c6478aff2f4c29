// Index of texts by the tokens before each token, and drafts of what a branch samples next.
//
// A text is a run of blocks of `kBlock` tokens: the last tokens before it, for context, then its own. Every own token is put
// on three chains, by the hash of the tokens before it: a long and a short context within its scope (a prompt), and one
// across scopes. A chain leads from the latest place backwards; `kWalk` places of it are read and compared token by token
// with the text to be continued, so a hash collision, or a link to a block that was reused since, costs time and never
// counts. Places vote for the token that stands there, with a weight that grows with the length of the equal context.
//
// Where votes disagree, one is drawn as the sampler draws from probabilities, with the random number that the token will be
// sampled with (Gumbel-max over Philox4x32-10 noise of seed, step and token; kernels/sampling/reference.py). So if the votes
// are distributed as the probabilities are, the draft is right however uncertain the policy is.
//
// When no block is free the text that was begun first is dropped. Memory is kBytesAToken for each token of the capacity; a
// token costs O(1) to append and O(kWalk kContext) to draft.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace rolltree {

struct Drafted {
  std::vector<int64_t> count;  // tokens of each branch
  std::vector<int64_t> token;  // one branch after another
};

struct Branches {
  const int64_t *slot, *segment_end, *length, *forks, *seed;
  const float* temperature;  // 0: the most probable token is taken
};

class DraftIndex {
 public:
  static constexpr int kBlock = 64, kContext = 32, kWalk = 24;
  static constexpr int kChains = 3, kOrder[kChains] = {6, 2, 5};  // tokens of context: long, short, across scopes
  static constexpr int kBytesAToken = 4 + 2 * 4 * kChains;        // the token, its links, and as many heads of chains

  explicit DraftIndex(int64_t capacity);  // tokens, own and of contexts

  // Branches in `slots` continue after `before`, whose last kContext tokens are kept as context; the last one stands at
  // `position` of their paths.
  void begin(const int64_t* slots, int64_t n, int64_t scope, const int64_t* branch, int64_t position, const int32_t* before,
             int64_t m);
  void append(int64_t slot, int32_t token);  // the branch's next one; not written if it failed (-1) or the text was dropped
  // Appends what branches have sampled since the last call, up to their positions. `own[i]` tokens of the i-th branch are in
  // memory, the last at last[i] and each one `stride` bytes after the one before. Returns the slots whose text is another
  // branch's, or which lack more tokens than that.
  std::vector<int64_t> follow(const int64_t* slots, int64_t n, const int64_t* branch, const int64_t* position, const int64_t* own,
                              const int32_t* const* last, int64_t stride);
  // Position of the last token of `branch` that was appended to the slot; -1 if the slot is another branch's.
  int64_t position(int64_t slot, int64_t branch) const {
    return slot < static_cast<int64_t>(slot_run_.size()) && slot_branch_[slot] == branch ? slot_position_[slot] : -1;
  }
  // A text of the scope without a slot: a prompt, or an earlier response.
  void add(int64_t scope, const int32_t* before, int64_t m, const int32_t* tokens, int64_t n);
  bool knows(int64_t slot) const { return slot < static_cast<int64_t>(slot_run_.size()) && slot_run_[slot] >= 0; }
  int64_t tokens() const { return tokens_; }
  int64_t capacity() const { return static_cast<int64_t>(token_.size()); }

  // Up to `most` tokens of each branch, inside its segment; none if it forks.
  Drafted propose(const Branches& branches, int64_t n, int64_t most) const;
  void check() const;  // throws std::logic_error

 private:
  struct Run {
    int64_t scope = 0, slot = -1;
    uint32_t first = 0, last = 0;  // blocks
    int older = -1, newer = -1;
    bool live = false;
  };
  struct Place {
    uint32_t at;  // of the token that it votes for
    int agrees;   // equal tokens before it, at most kContext
  };
  using Places = std::vector<Place>;

  int open(int64_t slot, int64_t scope);
  void write(int run, int32_t token, bool indexed);
  uint32_t take_block();
  void drop(int run);
  uint32_t before(uint32_t at) const;  // 0 where the text begins
  uint32_t after(uint32_t at) const;   // 0 where it ends
  bool written(uint32_t at) const { return block_run_[at / kBlock] >= 0 && static_cast<int>(at % kBlock) < block_used_[at / kBlock]; }
  size_t bucket(int chain, int64_t scope, const int32_t* end) const;  // of the tokens before `end`
  int agreement(uint32_t at, const int32_t* end, int most) const;
  void look_up(const Run& run, const int32_t* end, int known, Places& found) const;

  std::vector<int32_t> token_;
  std::array<std::vector<uint32_t>, kChains> link_, head_;  // places; 0 is none
  std::vector<int> block_run_;                              // -1: free
  std::vector<int> block_used_;
  std::vector<uint32_t> block_next_, block_before_, free_blocks_;
  std::vector<Run> runs_;
  std::vector<int> free_runs_, slot_run_;
  std::vector<int64_t> slot_branch_, slot_position_;  // the slot's branch and its last position, also after its run was dropped
  int oldest_ = -1, newest_ = -1;
  int64_t tokens_ = 0;
  int shift_;
};

}  // namespace rolltree
