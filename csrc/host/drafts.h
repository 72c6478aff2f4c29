// How much of a draft is worth its rows, and what of it stood.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "draft_index.h"
#include "step_cost.h"

namespace rolltree {

// How often drafted tokens were right, by the kind of evidence that spoke for them.
class Acceptance {
 public:
  static constexpr int kKinds = DraftIndex::kKinds, kAlike = DraftIndex::kShares, kSources = DraftIndex::kSources;

  Acceptance() { learn(); }

  // A step sampled, of the slots' branches, the offset[i]-th new token: those there was a draft of are counted. -1 is none.
  void count(const Drafted& drafted, const int64_t* slots, const int64_t* offset, const int64_t* token, int64_t n);

  // Cuts a draft to as many tokens, likely ones first and those of long branches, as give the most sampled tokens a second.
  // `length` is by branch; in all there are `room` tokens at most, and `others` rows besides; `look` seconds went to find them.
  // Returns the seconds that a step saves by it. Where that is no more than `look` only kinds that were hardly tried are left.
  double choose(Drafted& drafted, const int64_t* length, const Fit& fit, int64_t others, int64_t room, double look) const;

  // As counted, and where little was, as in its source and share of the votes, whatever the length of its context.
  std::array<float, kKinds> rates;
  // Tokens of each kind that a step may draft, lest a large batch tries at once what has hardly been tried.
  std::array<int64_t, kKinds> limits;
  std::array<int64_t, kSources> drafted{}, right{};  // in all

 private:
  void learn();

  std::array<double, kKinds> tries_{}, hits_{};
};

// Cuts drafts, so many tokens for each branch, to nothing behind a token that ends it, most[i] tokens of the i-th branch, and
// `room` in all; both are changed in place.
void cut(std::vector<int64_t>& counts, std::vector<int64_t>& tokens, const bool* ends, const int64_t* most, int64_t room);

// Which samples stand behind what was sampled before them: sample i was drawn behind the token behind[i], and offset[i] tokens
// of the draft stand before it, whose samples are the entries before i.
std::vector<uint8_t> on_path(const int64_t* token, const int64_t* behind, const int64_t* offset, int64_t n);

// The samples of each branch up to the first that ends it.
std::vector<uint8_t> up_to_end(const bool* ends, const int64_t* offset, int64_t n);

}  // namespace rolltree
