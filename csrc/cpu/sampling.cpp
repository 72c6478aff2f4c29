// sample_tokens on the CPU: rows in parallel, each row in a few vectorised passes over a scratch copy that stays in cache.
//
// Definition: kernels/sampling/reference.py. A row of V logits costs one pass for the maximum, one for the softmax sums and
// one for the draw; top-k and top-p add a bisection on the value of the last kept logit (at most 32 cheap passes) instead of a
// sort. Sums run in float lanes for kFlush elements (those of softmax.h for its blocks) and are then added up in double, always
// in the same order, so a row's result depends on that row alone. Without a filter the log-prob is that of linear_logprob on
// the same logits, to the bit.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "softmax.h"

namespace {

using torch::stable::Tensor;
using rolltree::IVec, rolltree::kInfinity, rolltree::kLanes, rolltree::UVec, rolltree::Vec;
using rolltree::load, rolltree::log_positive, rolltree::store, rolltree::softmax::log_prob;

constexpr int64_t kBlock = 64;  // tokens whose noise is drawn together; rows are padded to a multiple of it
constexpr int64_t kFlush = 2048;
constexpr float kTiny = std::numeric_limits<float>::min();

inline double sum(Vec v) {
  double total = 0;
  for (int l = 0; l < kLanes; ++l) total += v[l];
  return total;
}

// e^z for z <= 0; exactly 0 below -87, where e^z leaves the normal range.
inline Vec exp_nonpositive(Vec z) {
  const IVec zero = z < -87.0f;
  return zero ? Vec{} : rolltree::exp(zero ? Vec{} : z);
}

// words[0..kBlock) = the Philox4x32-10 words of tokens first..first + kBlock - 1; four tokens share a counter.
void philox_block(int64_t seed, int64_t step, int64_t first, uint32_t* words) {
  const uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
  const uint32_t step0 = static_cast<uint32_t>(step), step1 = static_cast<uint32_t>(static_cast<uint64_t>(step) >> 32);
  const uint32_t group = static_cast<uint32_t>(first / 4);
  for (uint32_t i = 0; i < kBlock / 4; ++i) {
    uint32_t c0 = group + i, c1 = 0, c2 = step0, c3 = step1, k0 = key0, k1 = key1;
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const uint32_t hi0 = (static_cast<uint64_t>(c0) * 0xD2511F53u) >> 32, lo0 = c0 * 0xD2511F53u;
      const uint32_t hi1 = (static_cast<uint64_t>(c2) * 0xCD9E8D57u) >> 32, lo1 = c2 * 0xCD9E8D57u;
      c0 = hi1 ^ c1 ^ k0, c1 = lo1, c2 = hi0 ^ c3 ^ k1, c3 = lo0;
      k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    words[4 * i] = c0, words[4 * i + 1] = c1, words[4 * i + 2] = c2, words[4 * i + 3] = c3;
  }
}

// E = -log(1 - t) with t = (word + 1/2) / 2^32. Below 1/64 by its series: 1 - t would round t away.
inline Vec arrival(const uint32_t* words) {
  UVec w;
  __builtin_memcpy(&w, words, sizeof w);
  Vec t = (__builtin_convertvector(w, Vec) + 0.5f) * 0x1p-32f;
  t = t > 1 - 0x1p-24f ? Vec{} + (1 - 0x1p-24f) : t;
  const Vec series = t + t * t * (t * (t * 0.25f + 0.33333333f) + 0.5f);
  return t < 0x1p-6f ? series : -log_positive(1.0f - t);
}

// Maps floats to int32 keys in the same order; its own inverse on bit patterns.
inline int32_t ordered(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }
inline int32_t key_of(float x) { return ordered(std::bit_cast<int32_t>(x)); }
inline float value_of(int32_t key) { return std::bit_cast<float>(ordered(key)); }

struct Settings {
  float temperature;
  int64_t top_k;  // < 1: no limit
  float top_p;    // >= 1: no limit
  float min_p;    // 0: no limit
  int64_t seed, step;
};

struct Draw {
  int64_t token = -1, last_kept = -1;
  float logprob = NAN, raw_logprob = NAN, entropy = NAN;
};

// The tokens kept by top-k and top-p: those above `last`, and the first `ties` of those equal to it, by index.
struct Prefix {
  float last = -kInfinity;
  int64_t ties = std::numeric_limits<int64_t>::max();
  double mass;
};

class Row {
 public:
  // x: [padded] logits followed by -inf; w: [padded] scratch.
  Row(const float* x, float* w, int64_t vocab, int64_t padded) : x_(x), w_(w), vocab_(vocab), padded_(padded) {}

  Draw draw(const Settings& s) {
    if (!find_best() || !(s.temperature >= 0 && s.top_p >= 0 && s.min_p >= 0) || s.temperature == kInfinity) return {};
    Draw out;
    if (s.temperature < kTiny) {
      const Sums sums = softmax(1.0f);
      out.token = out.last_kept = std::find(x_, x_ + vocab_, best_) - x_;
      out.logprob = 0, out.entropy = 0, out.raw_logprob = log_prob(best_, best_, 1.0f, sums.log());
      return out;
    }
    scale_ = 1.0f / s.temperature;
    const Sums raw = s.temperature == 1.0f ? Sums{} : softmax(1.0f);
    const Sums sums = softmax(scale_);
    const Prefix kept = filter(s, sums.weights);
    const double mass = race(kept, s, &out), log_sum = sums.log();
    const float x = x_[out.token];
    out.logprob = log_prob(x, best_, s.temperature, is_filtered(s) ? std::log(mass) : log_sum);
    out.raw_logprob = log_prob(x, best_, 1.0f, s.temperature == 1.0f ? log_sum : raw.log());
    out.entropy = static_cast<float>(sums.entropy());
    return out;
  }

 private:
  using Sums = rolltree::softmax::Sums;

  bool find_best() {
    Vec best = Vec{} - kInfinity;
    IVec bad{};
    for (int64_t i = 0; i < padded_; i += kLanes) {
      const Vec x = load(x_ + i);
      bad |= ~(x < kInfinity);  // NaN or +inf
      best = x > best ? x : best;
    }
    best_ = -kInfinity;
    for (int l = 0; l < kLanes; ++l) {
      if (bad[l]) return false;
      best_ = std::max(best_, best[l]);
    }
    return best_ > -kInfinity;
  }

  // Computes w = exp((x - best) * scale) and its sums.
  Sums softmax(float scale) const {
    return rolltree::softmax::sum_weights<float, true, false, true>(x_, padded_, best_, scale, w_);
  }

  // Returns number and mass of the tokens whose logit exceeds `value`.
  std::pair<int64_t, double> above(float value) const {
    int64_t count = 0;
    double mass = 0;
    for (int64_t begin = 0; begin < padded_; begin += kFlush) {
      Vec lane_mass{};
      IVec lane_count{};
      for (int64_t i = begin; i < std::min(begin + kFlush, padded_); i += kLanes) {
        const IVec over = load(x_ + i) > value;
        lane_count -= over;
        lane_mass += over ? load(w_ + i) : Vec{};
      }
      for (int l = 0; l < kLanes; ++l) count += lane_count[l];
      mass += sum(lane_mass);
    }
    return {count, mass};
  }

  // Returns the smallest logit in [lo, best] for which `holds(count above, mass above)`; it holds for the best one.
  template <class Holds>
  float bisect(float lo_value, const Holds& holds) const {
    int32_t lo = key_of(lo_value), hi = key_of(best_);
    while (lo < hi) {
      const int32_t mid = (lo & hi) + ((lo ^ hi) >> 1);
      const auto [count, mass] = above(value_of(mid));
      if (holds(count, mass)) hi = mid; else lo = mid + 1;
    }
    return value_of(hi);
  }

  double weight_at(float x) const { return exp_nonpositive(Vec{} + (x - best_) * scale_)[0]; }

  bool is_filtered(const Settings& s) const { return (s.top_k >= 1 && s.top_k < vocab_) || s.top_p < 1 || s.min_p > 0; }

  Prefix filter(const Settings& s, double total) const {
    Prefix kept{.mass = total};
    if (s.top_k >= 1 && s.top_k < vocab_) {
      kept.last = bisect(-kInfinity, [&](int64_t count, double) { return count < s.top_k; });
      const auto [count, mass] = above(kept.last);
      kept.ties = s.top_k - count;
      kept.mass = mass + kept.ties * weight_at(kept.last);
    }
    if (s.top_p < 1) {
      const double limit = s.top_p * kept.mass;
      const float weightless = best_ - 104.0f * s.temperature;
      const float last = bisect(std::max(kept.last, weightless), [&](int64_t, double mass) { return mass < limit; });
      const double missing = (limit - above(last).second) / weight_at(last);
      const int64_t ties = std::max<int64_t>(1, static_cast<int64_t>(std::min(std::ceil(missing), double(vocab_))));
      kept.ties = last == kept.last ? std::min(ties, kept.ties) : ties;
      kept.last = last;
    }
    return kept;
  }

  // Returns the index of the last kept tie, or vocab when all of them are kept.
  int64_t last_tie(const Prefix& kept) const {
    if (kept.ties >= vocab_) return vocab_;
    int64_t left = kept.ties;
    for (int64_t i = 0; i < vocab_; ++i)
      if (x_[i] == kept.last && --left == 0) return i;
    return vocab_;
  }

  // Draws the token, finds the last one kept, and returns the mass of the kept ones.
  double race(const Prefix& kept, const Settings& s, Draw* out) const {
    const int32_t tie_end = static_cast<int32_t>(last_tie(kept));
    Vec best = Vec{} - 1.0f, least = Vec{} + kInfinity;
    IVec best_index{}, last{}, lane{};
    for (int l = 0; l < kLanes; ++l) lane[l] = l;
    const float min_weight = std::min(s.min_p, 1.0f);  // the best token, of weight 1, is always kept
    double mass = 0;
    uint32_t words[kBlock];
    float weight[kBlock];
    for (int64_t begin = 0; begin < padded_; begin += kBlock) {
      Vec block_mass{};
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        const Vec x = load(x_ + begin + i), w = load(w_ + begin + i);
        const IVec index = lane + static_cast<int32_t>(begin + i);
        const IVec in = (w >= min_weight) & ((x > kept.last) | ((x == kept.last) & (index <= tie_end)));
        const Vec masked = in ? w : Vec{};
        store(weight + i, masked);
        const IVec later = (masked > 0.0f) & (x <= least);
        least = later ? x : least;
        last = later ? index : last;
        block_mass += masked;
      }
      const double added = sum(block_mass);
      if (added == 0) continue;
      mass += added;
      philox_block(s.seed, s.step, begin, words);
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        const Vec score = load(weight + i) / arrival(words + i);
        const IVec wins = score > best;
        best = wins ? score : best;
        best_index = wins ? lane + static_cast<int32_t>(begin + i) : best_index;
      }
    }
    int winner = 0;
    for (int l = 1; l < kLanes; ++l)
      if (best[l] > best[winner] || (best[l] == best[winner] && best_index[l] < best_index[winner])) winner = l;
    int end = 0;
    for (int l = 1; l < kLanes; ++l)
      if (least[l] < least[end] || (least[l] == least[end] && last[l] > last[end])) end = l;
    out->token = best_index[winner], out->last_kept = last[end];
    return mass;
  }

  const float* x_;
  float* w_;
  int64_t vocab_, padded_;
  float best_ = -kInfinity, scale_ = 1.0f;
};

template <class T>
void sample_rows(const Tensor& logits, const float* temperature, const int32_t* top_k, const float* top_p, const float* min_p,
                 const int64_t* seed, const int64_t* step, int64_t* token, float* logprob, float* raw, float* entropy,
                 int64_t* last_kept) {
  const int64_t rows = logits.size(0), vocab = logits.size(1), stride = logits.stride(0);
  const int64_t padded = (vocab + kBlock - 1) / kBlock * kBlock;
  const T* data = reinterpret_cast<const T*>(logits.const_data_ptr());
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, 8192 / padded), [&](int64_t begin, int64_t end) {
    std::vector<float> x(padded, -kInfinity), w(padded);
    for (int64_t n = begin; n < end; ++n) {
      for (int64_t i = 0; i < vocab; ++i) x[i] = static_cast<float>(data[n * stride + i]);
      const Settings settings{temperature[n],           top_k ? top_k[n] : 0, top_p ? top_p[n] : 1.0f,
                              min_p ? min_p[n] : 0.0f, seed[n],              step[n]};
      const Draw draw = Row(x.data(), w.data(), vocab, padded).draw(settings);
      token[n] = draw.token, logprob[n] = draw.logprob, raw[n] = draw.raw_logprob, entropy[n] = draw.entropy;
      last_kept[n] = draw.last_kept;
    }
  });
}

// All but logits must be contiguous, as api.py passes them; the last five are written.
void sample_tokens(const Tensor& logits, const Tensor& temperature, const std::optional<Tensor>& top_k,
                   const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p, const Tensor& seed, const Tensor& step,
                   Tensor token, Tensor logprob, Tensor raw, Tensor entropy, Tensor last_kept) {
  const auto run = [&](auto element) {
    sample_rows<decltype(element)>(
        logits, temperature.const_data_ptr<float>(), top_k ? top_k->const_data_ptr<int32_t>() : nullptr,
        top_p ? top_p->const_data_ptr<float>() : nullptr, min_p ? min_p->const_data_ptr<float>() : nullptr,
        seed.const_data_ptr<int64_t>(), step.const_data_ptr<int64_t>(), token.mutable_data_ptr<int64_t>(),
        logprob.mutable_data_ptr<float>(), raw.mutable_data_ptr<float>(), entropy.mutable_data_ptr<float>(),
        last_kept.mutable_data_ptr<int64_t>());
  };
  using torch::headeronly::ScalarType;
  switch (logits.scalar_type()) {
    case ScalarType::Float: run(float{}); break;
    case ScalarType::BFloat16: run(torch::headeronly::BFloat16{}); break;
    case ScalarType::Half: run(torch::headeronly::Half{}); break;
    default: STD_TORCH_CHECK(false, "sample_tokens takes float32, bfloat16 or float16 logits.");
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cpu, m) {
  m.def(
      "sample_tokens(Tensor logits, Tensor temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, Tensor seed, "
      "Tensor step, Tensor(a!) token, Tensor(b!) logprob, Tensor(c!) raw, Tensor(d!) entropy, Tensor(e!) last_kept) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CPU, m) { m.impl("sample_tokens", TORCH_BOX(&sample_tokens)); }
