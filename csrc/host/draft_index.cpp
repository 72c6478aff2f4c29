#include "draft_index.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace rolltree {
namespace {

// Returns word `index % 4` of Philox4x32-10 as a number in (0, 1): the sampler's random number of this token.
float uniform(uint64_t seed, uint64_t step, uint32_t index) {
  uint32_t c[4] = {index / 4, 0, static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32)};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t a = uint64_t{0xD2511F53u} * c[0], b = uint64_t{0xCD9E8D57u} * c[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(a)};
    std::copy(next, next + 4, c);
  }
  return std::min((static_cast<float>(c[index % 4]) + 0.5f) * 0x1p-32f, 1 - 0x1p-24f);
}

constexpr int kSure = 16;  // tokens of context, beyond which a longer one weighs no more
constexpr float kVoteBase = 1.5f;
constexpr int kFew = 4;  // places, below which more are looked for

const std::array<float, kSure + 1>& votes() {
  static const auto table = [] {
    std::array<float, kSure + 1> t{};
    for (int i = 0; i <= kSure; ++i) t[i] = std::pow(kVoteBase, static_cast<float>(i));
    return t;
  }();
  return table;
}

uint64_t mix(uint64_t h) {
  h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
  h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
  return h ^ (h >> 31);
}

}  // namespace

DraftIndex::DraftIndex(int64_t capacity) {
  if (capacity < 4 * kBlock || capacity > (int64_t{1} << 31))
    throw std::invalid_argument("A DraftIndex has room for " + std::to_string(4 * kBlock) + " to 2^31 tokens.");
  const int64_t blocks = capacity / kBlock;
  int bits = 0;
  while ((int64_t{2} << bits) <= blocks * kBlock) ++bits;  // no more heads than tokens
  shift_ = 64 - bits;
  token_.resize(blocks * kBlock);
  for (int chain = 0; chain < kChains; ++chain) link_[chain].resize(blocks * kBlock), head_[chain].resize(size_t{1} << bits);
  block_run_.assign(blocks, -1);
  block_used_.resize(blocks);
  block_next_.resize(blocks);
  block_before_.resize(blocks);
  for (int64_t block = blocks - 1; block > 0; --block) free_blocks_.push_back(static_cast<uint32_t>(block));  // place 0 is none
}

// -- texts ------------------------------------------------------------------------------------------------------------

int DraftIndex::open(int64_t slot, int64_t scope) {
  const uint32_t block = take_block();  // first: it may free a run
  int id = static_cast<int>(runs_.size());
  if (free_runs_.empty()) {
    runs_.emplace_back();
  } else {
    id = free_runs_.back();
    free_runs_.pop_back();
  }
  Run& run = runs_[id] = Run();
  run.scope = scope, run.slot = slot;
  run.first = run.last = block;
  run.live = true;
  run.older = newest_;
  (newest_ >= 0 ? runs_[newest_].newer : oldest_) = id;
  newest_ = id;
  block_run_[block] = id;
  block_before_[block] = 0;
  return id;
}

uint32_t DraftIndex::take_block() {
  while (free_blocks_.empty()) drop(oldest_);
  const uint32_t block = free_blocks_.back();
  free_blocks_.pop_back();
  block_used_[block] = 0;
  block_next_[block] = 0;
  return block;
}

void DraftIndex::drop(int id) {
  Run& run = runs_[id];
  for (uint32_t block = run.first; block != 0; block = block_next_[block]) {
    tokens_ -= block_used_[block];
    block_run_[block] = -1;
    free_blocks_.push_back(block);
  }
  if (run.slot >= 0) slot_run_[run.slot] = -1;
  (run.older >= 0 ? runs_[run.older].newer : oldest_) = run.newer;
  (run.newer >= 0 ? runs_[run.newer].older : newest_) = run.older;
  run.live = false;
  free_runs_.push_back(id);
}

void DraftIndex::begin(const int64_t* slots, int64_t n, int64_t scope, const int64_t* branch, int64_t position,
                       const int32_t* before, int64_t m) {
  if (std::any_of(slots, slots + n, [](int64_t slot) { return slot < 0; })) throw std::invalid_argument("A slot is not negative.");
  for (int64_t i = 0; i < n; ++i) {
    const int64_t slot = slots[i];
    if (slot >= static_cast<int64_t>(slot_run_.size())) {
      slot_run_.resize(slot + 1, -1);
      slot_branch_.resize(slot + 1, -1);
      slot_position_.resize(slot + 1, -1);
    }
    slot_branch_[slot] = branch[i];
    slot_position_[slot] = position;
    if (slot_run_[slot] >= 0) runs_[slot_run_[slot]].slot = -1;
    slot_run_[slot] = -1;
    const int run = open(slot, scope);
    slot_run_[slot] = run;
    for (int64_t j = std::max<int64_t>(0, m - kContext); j < m; ++j) write(run, before[j], false);
  }
}

void DraftIndex::append(int64_t slot, int32_t token) {
  if (slot >= static_cast<int64_t>(slot_run_.size())) return;
  ++slot_position_[slot];
  if (slot_run_[slot] >= 0 && token >= 0) write(slot_run_[slot], token, true);
}

std::vector<int64_t> DraftIndex::follow(const int64_t* slots, int64_t n, const int64_t* branch, const int64_t* position,
                                        const int64_t* own, const int32_t* const* last, int64_t stride) {
  std::vector<int64_t> behind;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t known = this->position(slots[i], branch[i]), missing = position[i] - known;
    if (known < 0 || missing < 0 || missing > own[i]) {
      behind.push_back(slots[i]);
      continue;
    }
    for (int64_t j = missing; j-- > 0;)
      append(slots[i], *reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(last[i]) - stride * j));
  }
  return behind;
}

void DraftIndex::add(int64_t scope, const int32_t* before, int64_t m, const int32_t* tokens, int64_t n) {
  const int run = open(-1, scope);
  for (int64_t i = std::max<int64_t>(0, m - kContext); i < m; ++i) write(run, before[i], false);
  for (int64_t i = 0; i < n && runs_[run].live; ++i) write(run, tokens[i], true);
}

void DraftIndex::write(int id, int32_t token, bool indexed) {
  if (block_used_[runs_[id].last] == kBlock) {
    const uint32_t block = take_block();
    Run& run = runs_[id];
    if (!run.live) {  // it was the oldest itself: the text exceeds the capacity
      free_blocks_.push_back(block);
      return;
    }
    block_next_[run.last] = block;
    block_before_[block] = run.last;
    block_run_[block] = id;
    run.last = block;
  }
  const Run& run = runs_[id];
  const uint32_t at = run.last * kBlock + block_used_[run.last];
  token_[at] = token;
  ++block_used_[run.last];
  ++tokens_;
  if (!indexed) return;
  int32_t context[kOrder[0]];
  int known = 0;
  for (uint32_t q = before(at); q != 0 && known < kOrder[0]; q = before(q)) context[kOrder[0] - ++known] = token_[q];
  for (int chain = 0; chain < kChains; ++chain) {
    link_[chain][at] = 0;
    if (known < kOrder[chain]) continue;
    uint32_t& head = head_[chain][bucket(chain, run.scope, context + kOrder[0])];
    link_[chain][at] = head == at ? 0 : head;
    head = at;
  }
}

uint32_t DraftIndex::before(uint32_t at) const {
  if (at % kBlock != 0) return at - 1;
  const uint32_t block = block_before_[at / kBlock];
  return block == 0 ? 0 : block * kBlock + kBlock - 1;
}

uint32_t DraftIndex::after(uint32_t at) const {
  if (at % kBlock == kBlock - 1) return block_next_[at / kBlock] * kBlock;
  return static_cast<int>(at % kBlock) + 1 < block_used_[at / kBlock] ? at + 1 : 0;
}

size_t DraftIndex::bucket(int chain, int64_t scope, const int32_t* end) const {
  uint64_t h = mix(chain == kChains - 1 ? 0 : static_cast<uint64_t>(scope)) + static_cast<uint64_t>(chain);
  for (int i = 1; i <= kOrder[chain]; ++i) h = mix(h ^ static_cast<uint32_t>(end[-i]));
  return h >> shift_;
}

// -- drafts -----------------------------------------------------------------------------------------------------------

int DraftIndex::agreement(uint32_t at, const int32_t* end, int most) const {
  int same = 0;
  for (uint32_t q = before(at); q != 0 && same < most && token_[q] == end[-1 - same]; q = before(q)) ++same;
  return same;
}

// Finds places whose context equals the `known` tokens before `end`: by the scope's long contexts, also by its short ones if
// these are few, and in other scopes if there are none.
void DraftIndex::look_up(const Run& run, const int32_t* end, int known, Places& found) const {
  for (int chain = 0; chain < kChains; ++chain) {
    if (known < kOrder[chain]) continue;
    if (chain == kChains - 1 ? !found.empty() : static_cast<int>(found.size()) >= kFew) continue;
    uint32_t at = head_[chain][bucket(chain, run.scope, end)];
    for (int looked = 0; at != 0 && looked < kWalk; ++looked, at = link_[chain][at]) {
      if (!written(at)) break;
      if (chain < kChains - 1 && runs_[block_run_[at / kBlock]].scope != run.scope) continue;
      const int agrees = agreement(at, end, std::min(known, kContext));
      if (agrees < kOrder[chain]) continue;
      if (std::none_of(found.begin(), found.end(), [&](const Place& p) { return p.at == at; })) found.push_back({at, agrees});
    }
  }
}

Drafted DraftIndex::propose(const Branches& branches, int64_t n, int64_t most) const {
  Drafted out;
  out.count.assign(n, 0);
  Places places, next;
  std::vector<int32_t> text;
  struct Vote {
    int32_t token;
    float weight;
  };
  std::vector<Vote> cast;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t slot = branches.slot[i], step = branches.length[i];
    const int64_t room = branches.forks[i] > 0 ? 0 : std::min(most, branches.segment_end[i] - step - 1);
    if (!knows(slot) || room < 1) continue;
    const Run& run = runs_[slot_run_[slot]];
    if (block_used_[run.last] == 0) continue;
    text.clear();
    for (uint32_t q = run.last * kBlock + block_used_[run.last] - 1; q != 0 && text.size() < kContext; q = before(q))
      text.push_back(token_[q]);
    std::reverse(text.begin(), text.end());
    places.clear();
    for (int64_t j = 0; j < room; ++j) {
      const int32_t* end = text.data() + text.size();
      if (static_cast<int>(places.size()) < kFew) look_up(run, end, static_cast<int>(text.size()), places);
      if (places.empty()) break;
      cast.clear();
      for (const Place& place : places) {
        const float weight = votes()[std::min(place.agrees, kSure)];
        const int32_t token = token_[place.at];
        const auto vote = std::find_if(cast.begin(), cast.end(), [&](const Vote& v) { return v.token == token; });
        if (vote == cast.end()) {
          cast.push_back({token, weight});
        } else {
          vote->weight += weight;
        }
      }
      const Vote* won = &cast[0];
      if (cast.size() > 1) {
        float best = -1;
        for (const Vote& vote : cast) {
          float score = vote.weight;
          if (branches.temperature[i] != 0)
            score /= -std::log1p(-uniform(static_cast<uint64_t>(branches.seed[i]), static_cast<uint64_t>(step + j),
                                          static_cast<uint32_t>(vote.token)));
          if (score > best) best = score, won = &vote;
        }
      }
      out.token.push_back(won->token);
      ++out.count[i];
      next.clear();
      for (const Place& place : places)
        if (token_[place.at] == won->token)
          if (const uint32_t at = after(place.at); at != 0 && written(at)) next.push_back({at, std::min(place.agrees + 1, kContext)});
      text.push_back(won->token);
      places.swap(next);
    }
  }
  return out;
}

void DraftIndex::check() const {
  const auto fail = [](const char* what) { throw std::logic_error(std::string("DraftIndex: ") + what + "."); };
  int64_t tokens = 0;
  size_t blocks = free_blocks_.size() + 1, live = 0;
  int newer = -1;
  for (int id = newest_; id >= 0; newer = id, id = runs_[id].older, ++live) {
    const Run& run = runs_[id];
    if (!run.live || run.newer != newer) fail("the list of runs is broken");
    if (run.slot >= 0 && slot_run_[run.slot] != id) fail("a slot does not know its run");
    uint32_t last = 0;
    for (uint32_t block = run.first; block != 0; last = block, block = block_next_[block], ++blocks) {
      if (block_run_[block] != id || block_before_[block] != last) fail("a block is not of its run");
      if (block != run.last && block_used_[block] != kBlock) fail("a block in the middle of a run is not full");
      tokens += block_used_[block];
    }
    if (last != run.last) fail("a run does not end in its last block");
  }
  if (newer != oldest_ || live + free_runs_.size() != runs_.size()) fail("a run is lost");
  if (blocks != block_run_.size() || tokens != tokens_) fail("a block is lost or has two owners");
}

}  // namespace rolltree
