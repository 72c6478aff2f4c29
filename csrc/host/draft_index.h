// Texts that branches have sampled, indexed by what stands before each token, and drafts of what a branch samples next.
//
// A text is a run of blocks of `kBlock` tokens: the last tokens before it, for context, then its own. Every own token is put
// on three chains, by the hash of the tokens before it: a long and a short context within its scope (a prompt), and one
// across scopes. A chain leads from the latest place backwards; `kWalk` places of it are looked at, and compared token by
// token with the text that is to be continued, so a hash that collides, or a link to a block that was taken since, costs a
// look and never counts. Places vote for the token that stands there, the more the longer their context agrees.
//
// Where they disagree the votes are drawn from as the sampler draws from probabilities, with the very random number that the
// token will be sampled with (Gumbel-max over Philox4x32-10 noise of seed, step and token; kernels/sampling/reference.py).
// So where the votes are as the probabilities are, the draft is right, however unsure the policy is.
//
// When no block is free the text that was begun first goes. Memory is kBytesAToken a token of the capacity, whatever was
// read; a token costs O(1) to append and O(kWalk kContext) to draft.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace rolltree {

struct Drafted {
  std::vector<int64_t> slot;    // of each branch
  std::vector<int64_t> count;   // tokens for each branch
  std::vector<int64_t> token;   // one branch after the other
  std::vector<int64_t> kind;    // of each token's evidence, see DraftIndex::kKinds
  std::vector<float> survival;  // probability that it and those before it are right, by the rates given
};

struct Branches {
  const int64_t *slot, *segment_end, *length, *forks, *seed;
  const float* temperature;  // 0: the likeliest token is taken
};

class DraftIndex {
 public:
  static constexpr int kBlock = 64, kContext = 32, kWalk = 24;
  static constexpr int kChains = 3, kOrder[kChains] = {6, 2, 5};  // tokens of context: long, short, across scopes
  // Evidence: where the best place lies (own text or prompt, sibling, earlier request of the scope, another scope), how long
  // its context agrees (< 3, < 6, < 12, < 24 tokens, more), which share of the votes the token has (< 0.5, < 0.9, more).
  static constexpr int kSources = 4, kMatches = 5, kShares = 3, kKinds = kSources * kMatches * kShares;
  static constexpr int kBytesAToken = 4 + 2 * 4 * kChains;  // the token, its links, and as many heads of chains

  explicit DraftIndex(int64_t capacity);  // tokens, own and of contexts

  // Branches in `slots` go on behind `before`, of which the last kContext tokens are kept as context and the last one stands
  // at `position` of their paths. `group` is their request.
  void begin(const int64_t* slots, int64_t n, int64_t scope, int64_t group, const int64_t* branch, int64_t version,
             int64_t position, const int32_t* before, int64_t m);
  void append(int64_t slot, int32_t token);  // the branch's next one; not written where it failed (-1) or the text has gone
  // Append what branches sampled since their slots were told last, by which position they have come to. `own[i]` tokens of
  // the i-th one lie at hand, the last at last[i] and each `stride` bytes behind the one before. Returns the slots whose text
  // is another branch's, or lacks more than that.
  std::vector<int64_t> follow(const int64_t* slots, int64_t n, const int64_t* branch, const int64_t* position, const int64_t* own,
                              const int32_t* const* last, int64_t stride);
  // Of the last token of `branch` that the slot has been told of; -1 where it is another branch's.
  int64_t position(int64_t slot, int64_t branch) const {
    return slot < static_cast<int64_t>(slot_run_.size()) && slot_branch_[slot] == branch ? slot_position_[slot] : -1;
  }
  // A text of the scope without a slot: a prompt, or a response of before.
  void add(int64_t scope, int64_t group, int64_t version, const int32_t* before, int64_t m, const int32_t* tokens, int64_t n);
  void forget(int64_t version);  // the texts of older versions
  bool knows(int64_t slot) const { return slot < static_cast<int64_t>(slot_run_.size()) && slot_run_[slot] >= 0; }
  int64_t tokens() const { return tokens_; }
  int64_t capacity() const { return static_cast<int64_t>(token_.size()); }

  // Up to `most` tokens for each branch, as long as their survival is at least `least` and they lie inside the branch's
  // segment; none where it forks. Of each of the kKinds kinds: its rate, and how many tokens of it there may be.
  Drafted propose(const Branches& branches, int64_t n, int64_t most, const float* rates, const int64_t* limits,
                  float least) const;
  void check() const;  // throws std::logic_error

 private:
  struct Run {
    int64_t scope = 0, group = 0, branch = 0, version = 0, slot = -1;
    uint32_t first = 0, last = 0;  // blocks
    int older = -1, newer = -1;
    bool live = false;
  };
  struct Place {
    uint32_t at;  // of the token that it votes for
    int agrees;   // tokens before it, at most kContext
  };
  using Places = std::vector<Place>;

  int open(int64_t slot, int64_t scope, int64_t group, int64_t branch, int64_t version);
  void write(int run, int32_t token, bool indexed);
  uint32_t take_block();
  void drop(int run);
  uint32_t before(uint32_t at) const;  // 0 where the text begins
  uint32_t after(uint32_t at) const;   // 0 where it ends
  bool written(uint32_t at) const { return block_run_[at / kBlock] >= 0 && static_cast<int>(at % kBlock) < block_used_[at / kBlock]; }
  size_t bucket(int chain, int64_t scope, const int32_t* end) const;  // of the tokens before `end`
  int agreement(uint32_t at, const int32_t* end, int most) const;
  void look_up(const Run& run, const int32_t* end, int known, Places& found) const;
  int source(const Run& asking, uint32_t at) const;

  std::vector<int32_t> token_;
  std::array<std::vector<uint32_t>, kChains> link_, head_;  // places; 0 is none
  std::vector<int> block_run_;                              // -1: free
  std::vector<int> block_used_;
  std::vector<uint32_t> block_next_, block_before_, free_blocks_;
  std::vector<Run> runs_;
  std::vector<int> free_runs_, slot_run_;
  std::vector<int64_t> slot_branch_, slot_position_;  // whose text it is and how far it has come, also where the run has gone
  int oldest_ = -1, newest_ = -1;
  int64_t tokens_ = 0;
  int shift_;
};

}  // namespace rolltree
