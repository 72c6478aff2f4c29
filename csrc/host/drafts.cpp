#include "drafts.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace rolltree {
namespace {

constexpr double kMemory = 2000;  // drafted tokens of a kind after which the counts are halved
constexpr double kPrior = 4, kGuess[] = {0.3, 0.5, 0.7};  // rates at first, by share of the votes: as if so many had been drafted
constexpr int64_t kUntried = 16;  // drafted tokens that tell how right a kind is; until then a step drafts no more of it
constexpr double kMargin = 1.1;   // how much faster a step with drafts must be: estimates are estimates
constexpr double kLead = 0.6;     // how far the slowest of many branches gets ahead, as a part of the mean, as measured

static_assert(std::size(kGuess) == Acceptance::kAlike);

// Keeps the first kept[i] tokens of each branch.
void keep(Drafted& drafted, const std::vector<int64_t>& kept) {
  int64_t to = 0, first = 0;
  for (size_t i = 0; i < kept.size(); first += drafted.count[i++])
    for (int64_t j = first; j < first + kept[i]; ++j, ++to)
      drafted.token[to] = drafted.token[j], drafted.kind[to] = drafted.kind[j], drafted.survival[to] = drafted.survival[j];
  drafted.token.resize(to), drafted.kind.resize(to), drafted.survival.resize(to);
  drafted.count = kept;
}

}  // namespace

void Acceptance::count(const Drafted& draft, const int64_t* slots, const int64_t* offset, const int64_t* token, int64_t n) {
  const int64_t branches = static_cast<int64_t>(draft.slot.size());
  std::vector<int64_t> first(branches), branch(branches ? *std::max_element(draft.slot.begin(), draft.slot.end()) + 1 : 0, -1);
  std::exclusive_scan(draft.count.begin(), draft.count.end(), first.begin(), int64_t{0});
  for (int64_t i = 0; i < branches; ++i) branch[draft.slot[i]] = i;
  for (int64_t e = 0; e < n; ++e) {
    if (token[e] < 0 || slots[e] >= static_cast<int64_t>(branch.size())) continue;
    const int64_t i = branch[slots[e]];
    if (i < 0 || offset[e] >= draft.count[i]) continue;
    const int64_t at = first[i] + offset[e], kind = draft.kind[at], source = kind / (kKinds / kSources);
    const bool hit = draft.token[at] == token[e];
    ++tries_[kind], ++drafted[source];
    hits_[kind] += hit, right[source] += hit;
  }
  for (int kind = 0; kind < kKinds; ++kind)
    if (tries_[kind] > kMemory) tries_[kind] /= 2, hits_[kind] /= 2;
  learn();
}

void Acceptance::learn() {
  constexpr int kMatches = DraftIndex::kMatches;
  for (int source = 0; source < kSources; ++source)
    for (int share = 0; share < kAlike; ++share) {
      double tries = 0, hits = 0;
      const auto kind = [&](int match) { return (source * kMatches + match) * kAlike + share; };
      for (int match = 0; match < kMatches; ++match) tries += tries_[kind(match)], hits += hits_[kind(match)];
      const double alike = (hits + kPrior * kGuess[share]) / (tries + kPrior);
      for (int match = 0; match < kMatches; ++match) {
        const int k = kind(match);
        rates[k] = static_cast<float>((hits_[k] + kPrior * alike) / (tries_[k] + kPrior));
        limits[k] = tries_[k] < kUntried ? kUntried : std::numeric_limits<int64_t>::max();
      }
    }
}

double Acceptance::choose(Drafted& draft, const int64_t* length, const Fit& fit, int64_t others, int64_t room, double look) const {
  const int64_t n = static_cast<int64_t>(draft.count.size()), tokens = static_cast<int64_t>(draft.token.size());
  const int64_t undrafted = n + others, longest = std::max<int64_t>(*std::max_element(length, length + n), 1);
  // A token drafted right saves its row later, and its part of the rest of a step as far as the slowest branch gets ahead.
  const double plain = fit.seconds(n, undrafted), share = fit.share(n, others);
  const int64_t ahead = std::count_if(draft.count.begin(), draft.count.end(), [](int64_t count) { return count > 0; });
  const double worth = share + (1 - share) * (kLead + (1 - kLead) / n) * ahead / n;

  std::vector<int64_t> owner, order(tokens);
  std::vector<double> value;
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < draft.count[i]; ++j) {
      value.push_back(draft.survival[owner.size()] * (1 + static_cast<double>(length[i]) / longest));
      owner.push_back(i);
    }
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return value[a] > value[b]; });
  order.resize(std::min(tokens, room));
  double sampled = static_cast<double>(n), fastest = 0, saved = 0;
  size_t best = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    sampled += worth * draft.survival[order[i]];
    const double took = fit.seconds(n, undrafted + static_cast<int64_t>(i) + 1);
    if (sampled / (took + look) > fastest)
      fastest = sampled / (took + look), best = i + 1, saved = plain * sampled / n / kMargin - took;
  }
  std::vector<int64_t> kept(n);
  if (saved > look) {
    for (size_t i = 0; i < best; ++i) ++kept[owner[order[i]]];  // a branch's survival falls, so these are beginnings
  } else {
    for (int64_t i = 0, first = 0, left = room; i < n; first += draft.count[i++])
      while (kept[i] < draft.count[i] && left > 0 && limits[draft.kind[first + kept[i]]] == kUntried) ++kept[i], --left;
  }
  keep(draft, kept);
  return saved;
}

void cut(std::vector<int64_t>& counts, std::vector<int64_t>& tokens, const bool* ends, const int64_t* most, int64_t room) {
  int64_t to = 0;
  size_t first = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    const int64_t given = counts[i];
    int64_t kept = 0;
    while (kept < std::min(given, most[i]) && to < room && !ends[first + kept]) tokens[to++] = tokens[first + kept++];
    first += given, counts[i] = kept;
  }
  tokens.resize(to);
}

std::vector<uint8_t> on_path(const int64_t* token, const int64_t* behind, const int64_t* offset, int64_t n) {
  std::vector<uint8_t> stands(n);
  for (int64_t i = 0; i < n; ++i) stands[i] = offset[i] == 0 || (i > 0 && stands[i - 1] && token[i - 1] == behind[i]);
  return stands;
}

std::vector<uint8_t> up_to_end(const bool* ends, const int64_t* offset, int64_t n) {
  std::vector<uint8_t> stands(n);
  for (int64_t i = 0; i < n; ++i) stands[i] = offset[i] == 0 || (i > 0 && stands[i - 1] && !ends[i - 1]);
  return stands;
}

}  // namespace rolltree
