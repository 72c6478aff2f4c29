// The clipped-ratio policy loss on elements (kernels/policy_loss/elements.py has the formulas): value, derivatives and
// the sums its metrics are made of, in one pass.
//
// A thread takes four neighbouring elements, 16 bytes of each input at a time where all of them are aligned to that. A
// block adds its partial sums in a fixed order (lanes, then warps) and writes them; the blocks are added by the caller.
// Masked elements are computed on zeros and removed by selection, so their values reach no sum.
//
// Compiled with --use_fast_math; differences of exponentials near 1 use expm1f, which that option does not change.
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <cstdint>
#include <string>

#include "launch.cuh"

namespace {

using namespace rolltree;
using torch::stable::Tensor;

constexpr int kThreads = 256;
constexpr int kPack = 4;
constexpr int kWarps = kThreads / 32;
// The sums over the elements: the rows of `partial`, by the names of elements.Sums.
#define ROLLTREE_SUMS(X) \
  X(loss) X(pg_loss) X(clipped) X(clipped_lower) X(ppo_kl) X(entropy) X(kl) X(mismatch_k3) X(mismatch_probability) \
  X(mismatch_weight) X(mismatch_rejected) X(behaviour_count) X(tokens)
#define ROLLTREE_PLACE(name) name,
#define ROLLTREE_NAME(name) #name " "
namespace sum {
enum Sum : int { ROLLTREE_SUMS(ROLLTREE_PLACE) kSums };
}
constexpr int kSums = sum::kSums;
constexpr float kMaxLogRatio = 20.0f;

enum Kl : int { kK1, kK2, kK3, kLowVar, kAbs };
enum Mismatch : int { kNone, kTruncate, kMask };

struct Inputs {  // null where absent, except the first four
  const float *logprob, *adv_pos, *adv_neg, *weight;
  const float *entropy, *log_ratio, *old_logprob, *ref_logprob, *behaviour, *low, *high;
  const uint8_t* mask;
};

struct Numbers {
  float low, high, clip_ratio_c, kl_coef, entropy_coef, mismatch_low, mismatch_cap;
  int kl, mismatch;
  bool straight_through, kl_importance;
};

// Loads four elements from place i; `absent` beyond M and where there is no tensor.
__device__ float4 load(const float* p, int64_t i, int64_t M, bool aligned, float absent) {
  if (p == nullptr) return make_float4(absent, absent, absent, absent);
  if (aligned && i + kPack <= M) return *reinterpret_cast<const float4*>(p + i);
  float4 v = make_float4(absent, absent, absent, absent);
  float* each = &v.x;
  for (int k = 0; k < kPack; ++k)
    if (i + k < M) each[k] = p[i + k];
  return v;
}

__device__ void store(float* p, int64_t i, int64_t M, bool aligned, float4 v) {
  if (aligned && i + kPack <= M) {
    *reinterpret_cast<float4*>(p + i) = v;
    return;
  }
  for (int k = 0; k < kPack; ++k)
    if (i + k < M) p[i + k] = (&v.x)[k];
}

__device__ float clamp(float x, float low, float high) {
  return x < low ? low : (x > high ? high : x);  // NaN stays NaN
}

struct Kl2 {
  float value, derivative;
};

// Estimate and derivative by the log-prob; x = ref - logprob.
__device__ Kl2 kl_terms(float x, int kind) {
  switch (kind) {
    case kK1:
      return {-x, 1.0f};
    case kAbs:
      return {fabsf(x), x > 0 ? -1.0f : (x < 0 ? 1.0f : 0.0f)};
    case kK2:
      return {0.5f * x * x, -x};
  }
  const bool inside = fabsf(x) <= kMaxLogRatio;
  x = clamp(x, -kMaxLogRatio, kMaxLogRatio);
  const float growth = expm1f(x);
  Kl2 k3{growth - x, inside ? -growth : 0.0f};
  if (kind == kLowVar && k3.value > 10.0f) k3 = {10.0f, 0.0f};
  return k3;
}

__global__ void __launch_bounds__(kThreads) clipped_loss_kernel(
    Inputs in, Numbers n, int64_t M, bool aligned, float* d_logprob, float* d_entropy, float* partial, int64_t blocks) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kPack;
  const float4 lp4 = load(in.logprob, i, M, aligned, 0.0f), pos4 = load(in.adv_pos, i, M, aligned, 0.0f);
  const float4 neg4 = load(in.adv_neg, i, M, aligned, 0.0f), one4 = load(in.weight, i, M, aligned, 0.0f);
  const float4 h4 = load(in.entropy, i, M, aligned, 0.0f), d4 = load(in.log_ratio, i, M, aligned, 0.0f);
  const float4 old4 = load(in.old_logprob, i, M, aligned, 0.0f), ref4 = load(in.ref_logprob, i, M, aligned, 0.0f);
  const float4 sampled4 = load(in.behaviour, i, M, aligned, NAN);
  const float4 low4 = load(in.low, i, M, aligned, n.low), high4 = load(in.high, i, M, aligned, n.high);
  float4 grad4, grad_h4;
  float sums[kSums] = {};
  for (int k = 0; k < kPack; ++k) {
    const bool live = i + k < M && (in.mask == nullptr || in.mask[i + k] != 0);
    if (!live) {
      (&grad4.x)[k] = (&grad_h4.x)[k] = 0.0f;
      continue;
    }
    const float lp = (&lp4.x)[k], s_pos = (&pos4.x)[k], s_neg = (&neg4.x)[k], s_one = (&one4.x)[k];
    const float d = (&d4.x)[k], low = (&low4.x)[k], high = (&high4.x)[k];
    const float old = in.old_logprob ? (&old4.x)[k] : lp;
    const float r = expf(clamp(d, -kMaxLogRatio, kMaxLogRatio));
    const float dr = fabsf(d) <= kMaxLogRatio ? r : 0.0f;
    const bool over = r > high, under = r < low;
    const float floored = under ? low : r;
    const bool beyond = floored > n.clip_ratio_c;
    float pg = -s_pos * (over ? high : r) - s_neg * (beyond ? n.clip_ratio_c : floored);
    float grad = (over ? 0.0f : -s_pos * dr) - (under || beyond ? 0.0f : s_neg * dr);

    if (in.behaviour) {
      const bool known = isfinite((&sampled4.x)[k]);
      const float sampled = known ? (&sampled4.x)[k] : old;
      const float gap = clamp(old - sampled, -kMaxLogRatio, kMaxLogRatio);
      if (known) {
        sums[sum::mismatch_k3] += s_one * (expm1f(gap) - gap);
        sums[sum::mismatch_probability] += s_one * fabsf(expf(old) - expf(sampled));
        sums[sum::behaviour_count] += s_one;
      }
      if (n.mismatch != kNone) {
        float w = expf(gap);
        const bool outside = w > n.mismatch_cap || w < n.mismatch_low;
        if (n.mismatch == kMask) {
          w = outside ? 0.0f : w;
          sums[sum::mismatch_rejected] += outside ? s_one : 0.0f;
        } else {
          w = clamp(w, n.mismatch_low, n.mismatch_cap);
        }
        sums[sum::mismatch_weight] += s_one * w;
        pg *= w;
        grad *= w;
      }
    }
    float loss = pg;
    if (in.ref_logprob) {
      const float gap = (&ref4.x)[k] - lp;
      Kl2 kl = kl_terms(gap, n.kl);
      if (n.kl_importance) {
        kl.value *= r;
        kl.derivative = r * kl.derivative + (fabsf(d) <= kMaxLogRatio ? kl.value : 0.0f);
      }
      // The KL's gradient by itself, so that r has none.
      if (n.straight_through) kl.derivative = (n.kl_importance ? r : 1.0f) * -gap;
      loss += s_one * n.kl_coef * kl.value;
      grad += s_one * n.kl_coef * kl.derivative;
      sums[sum::kl] += s_one * kl.value;
    }
    if (in.entropy) {
      loss -= s_one * n.entropy_coef * (&h4.x)[k];
      sums[sum::entropy] += s_one * (&h4.x)[k];
    }
    (&grad4.x)[k] = grad;
    (&grad_h4.x)[k] = -n.entropy_coef * s_one;
    const float size = s_pos - s_neg;
    sums[sum::loss] += loss;
    sums[sum::pg_loss] += pg;
    if (size > 0) {
      sums[sum::clipped] += s_one * (((over ? s_pos : 0.0f) - (under ? s_neg : 0.0f)) / size);
      sums[sum::clipped_lower] += s_one * ((beyond ? -s_neg : 0.0f) / size);
    }
    sums[sum::ppo_kl] += s_one * (old - lp);
    sums[sum::tokens] += s_one;
  }
  store(d_logprob, i, M, aligned, grad4);
  if (d_entropy) store(d_entropy, i, M, aligned, grad_h4);

  __shared__ float of_warp[kWarps][kSums];
  for (int s = 0; s < kSums; ++s) {
    float value = sums[s];
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32][s] = value;
  }
  __syncthreads();
  if (threadIdx.x < kSums) {
    float total = 0.0f;
    for (int w = 0; w < kWarps; ++w) total += of_warp[w][threadIdx.x];
    partial[threadIdx.x * blocks + blockIdx.x] = total;
  }
}

const float* data_or_null(const Tensor& t) {
  STD_TORCH_CHECK(t.is_contiguous(), "inputs must be contiguous");
  return t.numel() ? static_cast<const float*>(t.data_ptr()) : nullptr;
}

bool is_aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

void clipped_loss(
    Tensor logprob, Tensor entropy, Tensor adv_pos, Tensor adv_neg, Tensor weight, Tensor mask, Tensor log_ratio,
    Tensor old_logprob, Tensor ref_logprob, Tensor behaviour, Tensor low, Tensor high, double low_bound,
    double high_bound, double clip_ratio_c, double kl_coef, double entropy_coef, double mismatch_low,
    double mismatch_cap, int64_t kl, int64_t mismatch, bool straight_through, bool kl_importance, Tensor d_logprob,
    Tensor d_entropy, Tensor partial) {
  const int64_t M = logprob.numel();
  if (M == 0) return;
  const Inputs in{
      data_or_null(logprob), data_or_null(adv_pos), data_or_null(adv_neg), data_or_null(weight), data_or_null(entropy),
      data_or_null(log_ratio), data_or_null(old_logprob), data_or_null(ref_logprob), data_or_null(behaviour),
      data_or_null(low), data_or_null(high), mask.numel() ? static_cast<const uint8_t*>(mask.data_ptr()) : nullptr};
  const Numbers numbers{
      static_cast<float>(low_bound), static_cast<float>(high_bound), static_cast<float>(clip_ratio_c),
      static_cast<float>(kl_coef), static_cast<float>(entropy_coef), static_cast<float>(mismatch_low),
      static_cast<float>(mismatch_cap), static_cast<int>(kl), static_cast<int>(mismatch), straight_through,
      kl_importance};
  float* gradient = static_cast<float*>(d_logprob.data_ptr());
  float* gradient_h = d_entropy.numel() ? static_cast<float*>(d_entropy.data_ptr()) : nullptr;
  bool aligned = is_aligned(gradient) && is_aligned(gradient_h);
  for (const void* p : {static_cast<const void*>(in.logprob), static_cast<const void*>(in.adv_pos),
                        static_cast<const void*>(in.adv_neg), static_cast<const void*>(in.weight),
                        static_cast<const void*>(in.entropy), static_cast<const void*>(in.log_ratio),
                        static_cast<const void*>(in.old_logprob), static_cast<const void*>(in.ref_logprob),
                        static_cast<const void*>(in.behaviour), static_cast<const void*>(in.low),
                        static_cast<const void*>(in.high)})
    aligned = aligned && is_aligned(p);
  const int64_t blocks = (M + kThreads * kPack - 1) / (kThreads * kPack);
  STD_TORCH_CHECK(partial.numel() == kSums * blocks, "partial must be [", kSums, ", ", blocks, "]");
  const OnDevice on(logprob);
  clipped_loss_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, on.stream()>>>(
      in, numbers, M, aligned, gradient, gradient_h, static_cast<float*>(partial.data_ptr()), blocks);
  check(cudaGetLastError());
}

std::string clipped_loss_sums() {
  return ROLLTREE_SUMS(ROLLTREE_NAME);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cuda, m) {
  m.def(
      "clipped_loss(Tensor logprob, Tensor entropy, Tensor adv_pos, Tensor adv_neg, Tensor weight, Tensor mask, Tensor "
      "log_ratio, Tensor old_logprob, Tensor ref_logprob, Tensor behaviour_logprob, Tensor low, Tensor high, float "
      "low_bound, float high_bound, float clip_ratio_c, float kl_coef, float entropy_coef, float mismatch_low, float "
      "mismatch_cap, int kl, int mismatch, bool straight_through, bool kl_importance, Tensor(a!) d_logprob, Tensor(b!) "
      "d_entropy, Tensor(c!) partial) -> ()");
  m.def("clipped_loss_sums() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cuda, CUDA, m) {
  m.impl("clipped_loss", TORCH_BOX(&clipped_loss));
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cuda, CompositeExplicitAutograd, m) {
  m.impl("clipped_loss_sums", TORCH_BOX(&clipped_loss_sums));
}
