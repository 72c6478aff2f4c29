// Row kernels of logprob_from_logits on half-precision logits [C, V] (kernels/linear_logprob/reference.py has the formulas).
//
// One block a row. `statistics_kernel` reads the row once: each thread keeps a running maximum and sums of its elements,
// and the block combines them in a fixed order. `gradient_kernel` reads the row once and writes the gradient, which may lie
// over the logits; only packs with a target in them read the targets. Both move 16 bytes at a time wherever the row is
// aligned to that (an odd V leaves most rows unaligned: a few leading elements are then moved singly).
// The running maximum starts at -inf. NaN and +inf make their own row NaN; -inf is a logit of probability zero.
//
// Compiled with --use_fast_math, so functions that need more accuracy than 2^-21 are written out: the logarithm in fp64 (one
// a row), tanh from exp.
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "launch.cuh"

namespace {

using namespace rolltree;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr float kLowest = -100.0f;  // exp of less counts as zero
constexpr int kPack = 8;            // elements a thread takes at once: 16 bytes

struct Scale {
  const float* bias;  // [V] or null
  float inverse_temperature;
  float softcap;  // 0: none

  // z = softcap(u + bias) / T; `slope` is dz/du without the 1 / T.
  __device__ float operator()(float u, int64_t column, float& slope) const {
    slope = 1.0f;
    if (bias) u += bias[column];
    if (softcap != 0.0f) {
      const float decay = __expf(-2.0f * fabsf(u / softcap));
      const float t = copysignf((1.0f - decay) / (1.0f + decay), u);
      slope = 1.0f - t * t;
      u = softcap * t;
    }
    return __fmul_rn(u, inverse_temperature);  // never contracted: both kernels have to round z alike
  }
};

template <class T>
__device__ float widen(T x) {
  return static_cast<float>(x);
}

template <class T>
struct alignas(16) Pack {
  T value[kPack];
};

// Returns the number of leading elements before both pointers are aligned to 16 bytes; V if they never are.
template <class T>
__device__ int64_t unaligned_head(const T* in, const T* out, int64_t V) {
  for (int64_t head = 0; head < kPack; ++head)
    if (reinterpret_cast<uintptr_t>(in + head) % 16 == 0 && reinterpret_cast<uintptr_t>(out + head) % 16 == 0)
      return head < V ? head : V;
  return V;
}

// Returns exp(d) and d, both 0 where exp underflows; NaN stays NaN.
__device__ float exponential(float& d) {
  if (d <= kLowest) {
    d = 0.0f;
    return 0.0f;
  }
  return __expf(d);
}

struct Running {
  float most = -INFINITY;
  float e = 0, ed = 0, e2 = 0;  // sums of exp(d), d exp(d), exp(d)^2 with d = z - shift()

  __device__ float shift() const {
    return most == -INFINITY ? 0.0f : most;
  }
  // Returns the sums so far relative to the maximum `larger` >= most.
  __device__ void raise(float larger) {
    if (larger == most) return;
    float step = most - larger;  // -inf from -inf: then there is nothing in the sums yet
    const float factor = exponential(step);
    ed = factor * (ed + step * e);
    e *= factor;
    e2 *= factor * factor;
    most = larger;
  }
  __device__ void add(float z) {
    if (z > most) raise(z);
    float d = z - shift();
    const float value = exponential(d);
    e += value;
    ed += value * d;
    e2 += value * value;
  }
  __device__ void join(Running other) {
    const float larger = fmaxf(most, other.most);
    raise(larger);
    other.raise(larger);
    e += other.e;
    ed += other.ed;
    e2 += other.e2;
  }
};

__device__ Running shuffle_down(const Running& r, int offset) {
  Running other;
  other.most = __shfl_down_sync(0xffffffffu, r.most, offset);
  other.e = __shfl_down_sync(0xffffffffu, r.e, offset);
  other.ed = __shfl_down_sync(0xffffffffu, r.ed, offset);
  other.e2 = __shfl_down_sync(0xffffffffu, r.e2, offset);
  return other;
}

// Returns the block's result in every thread, combined in a tree over lanes, then in order over warps.
__device__ Running join_block(Running mine) {
  __shared__ Running of_warp[kWarps];
  for (int offset = 16; offset > 0; offset /= 2) mine.join(shuffle_down(mine, offset));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  Running all = of_warp[0];
  for (int w = 1; w < kWarps; ++w) all.join(of_warp[w]);
  return all;
}

template <class T>
__global__ void __launch_bounds__(kThreads) statistics_kernel(
    const T* logits, int64_t V, const float* bias, const float* temperature, int64_t temperature_stride, float softcap,
    const int64_t* start, const int64_t* target, float* logprob, float* logsumexp, float* correction, float* entropy,
    float* sum_p2) {
  const int64_t row = blockIdx.x;
  const T* u = logits + row * V;
  const Scale scale{bias, __frcp_rn(temperature[row * temperature_stride]), softcap};
  float slope;

  Running mine;
  const int64_t head = unaligned_head(u, u, V);
  const int64_t packs = (V - head) / kPack;
  for (int64_t j = threadIdx.x; j < head; j += kThreads) mine.add(scale(widen(u[j]), j, slope));
  for (int64_t i = threadIdx.x; i < packs; i += kThreads) {
    const int64_t j = head + i * kPack;
    const Pack<T> pack = *reinterpret_cast<const Pack<T>*>(u + j);
    float z[kPack];
    float most = -INFINITY;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      z[k] = scale(widen(pack.value[k]), j + k, slope);
      most = fmaxf(most, z[k]);
    }
    if (most > mine.most) mine.raise(most);
    const float shift = mine.shift();
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      float d = z[k] - shift;
      const float value = exponential(d);
      mine.e += value;
      mine.ed += value * d;
      mine.e2 += value * value;
    }
  }
  for (int64_t j = head + packs * kPack + threadIdx.x; j < V; j += kThreads) mine.add(scale(widen(u[j]), j, slope));

  const Running all = join_block(mine);
  const float shift = all.shift();
  const float log_sum = static_cast<float>(log(static_cast<double>(all.e)));
  if (threadIdx.x == 0) {
    const float rounded = shift + log_sum;
    logsumexp[row] = rounded;
    correction[row] = (shift - rounded) + log_sum;
    if (entropy) entropy[row] = log_sum - all.ed / all.e;
    if (sum_p2) sum_p2[row] = all.e2 / (all.e * all.e);
  }
  for (int64_t m = start[row] + threadIdx.x; m < start[row + 1]; m += kThreads) {
    const int64_t y = target[m];
    const bool known = y >= 0 && y < V;
    logprob[m] = known ? (scale(widen(u[y]), y, slope) - shift) - log_sum : NAN;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) gradient_kernel(
    const T* logits, int64_t V, const float* bias, const float* temperature, int64_t temperature_stride, float softcap,
    const int64_t* start, const int64_t* target, const float* logsumexp, const float* correction,
    const float* grad_logprob, const float* constant, const float* per_log, const float* per_p, T* out) {
  const int64_t row = blockIdx.x;
  const T* u = logits + row * V;
  T* g = out + row * V;
  const Scale scale{bias, __frcp_rn(temperature[row * temperature_stride]), softcap};
  const int64_t first = start[row], last = start[row + 1];

  float c = constant[row], size = fabsf(c);
  for (int64_t m = first; m < last; ++m) {
    c -= grad_logprob[m];
    size += fabsf(grad_logprob[m]);
  }
  const float b = per_log ? per_log[row] : 0.0f;
  const float q = per_p ? per_p[row] : 0.0f;
  size += fabsf(b) + fabsf(q);
  const float lse = logsumexp[row], low = correction[row];

  // The gradient of one logit before the targets' share, and the slope of its scaling.
  const auto without_targets = [&](T value, int64_t column, float& slope) {
    const float logp = (scale(widen(value), column, slope) - lse) - low;
    float d = logp;
    const float p = exponential(d);
    return p * (c - b * d + q * p);
  };
  const auto scaled = [&](float sum, float slope) {  // a masked row's logits may have any values
    return static_cast<T>(size == 0.0f ? 0.0f : sum * slope * scale.inverse_temperature);
  };
  const auto single = [&](int64_t j) {
    float slope;
    float sum = without_targets(u[j], j, slope);
#pragma unroll 1
    for (int64_t m = first; m < last; ++m)
      if (target[m] == j) sum += grad_logprob[m];
    g[j] = scaled(sum, slope);
  };

  const int64_t head = unaligned_head(u, g, V);
  const int64_t packs = (V - head) / kPack;
  // Targets are few: each thread finds once which of its packs has one, instead of a search for each element.
  int64_t marked = -1;
  bool several = false;
#pragma unroll 1
  for (int64_t m = first; m < last; ++m) {
    const int64_t i = target[m] < head ? -1 : (target[m] - head) / kPack;
    if (i < 0 || i % kThreads != threadIdx.x) continue;
    several = several || (marked >= 0 && marked != i);
    marked = i;
  }
  for (int64_t j = threadIdx.x; j < head; j += kThreads) single(j);
  for (int64_t i = threadIdx.x; i < packs; i += kThreads) {
    const int64_t j = head + i * kPack;
    const Pack<T> pack = *reinterpret_cast<const Pack<T>*>(u + j);
    Pack<T> result;
    float sum[kPack], slope[kPack];
#pragma unroll
    for (int k = 0; k < kPack; ++k) sum[k] = without_targets(pack.value[k], j + k, slope[k]);
    if (i == marked || several) {
#pragma unroll 1
      for (int64_t m = first; m < last; ++m)
#pragma unroll
        for (int k = 0; k < kPack; ++k)
          if (target[m] == j + k) sum[k] += grad_logprob[m];
    }
#pragma unroll
    for (int k = 0; k < kPack; ++k) result.value[k] = scaled(sum[k], slope[k]);
    *reinterpret_cast<Pack<T>*>(g + j) = result;
  }
  for (int64_t j = head + packs * kPack + threadIdx.x; j < V; j += kThreads) single(j);
}

template <class T>
T* data_or_null(const Tensor& t) {
  return t.numel() ? static_cast<T*>(t.data_ptr()) : nullptr;
}

// Calls f(T{}) with the element type of `t`.
template <class F>
void with_type(const Tensor& t, F f) {
  switch (t.scalar_type()) {
    case ScalarType::BFloat16:
      return f(__nv_bfloat16{});
    case ScalarType::Half:
      return f(__half{});
    default:
      STD_TORCH_CHECK(false, "logits must be bf16 or fp16");
  }
}

void check_tile(const Tensor& logits, const Tensor& start, const Tensor& target) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.is_contiguous(), "logits must be a contiguous [C, V]");
  STD_TORCH_CHECK(start.is_contiguous() && target.is_contiguous(), "start and target must be contiguous");
}

void logit_statistics(
    Tensor logits, Tensor bias, Tensor temperature, double softcap, Tensor start, Tensor target, Tensor logprob,
    Tensor logsumexp, Tensor correction, Tensor entropy, Tensor sum_p2) {
  check_tile(logits, start, target);
  const int64_t rows = logits.sizes()[0];
  if (rows == 0) return;
  const OnDevice on(logits);
  with_type(logits, [&](auto zero) {
    using T = decltype(zero);
    statistics_kernel<T><<<static_cast<unsigned>(rows), kThreads, 0, on.stream()>>>(
        static_cast<const T*>(logits.data_ptr()), logits.sizes()[1], data_or_null<float>(bias),
        static_cast<const float*>(temperature.data_ptr()), temperature.stride(0), static_cast<float>(softcap),
        static_cast<const int64_t*>(start.data_ptr()), data_or_null<int64_t>(target), data_or_null<float>(logprob),
        data_or_null<float>(logsumexp), data_or_null<float>(correction), data_or_null<float>(entropy),
        data_or_null<float>(sum_p2));
  });
  check(cudaGetLastError());
}

void logit_gradient(
    Tensor logits, Tensor bias, Tensor temperature, double softcap, Tensor start, Tensor target, Tensor logsumexp,
    Tensor correction, Tensor grad_logprob, Tensor constant, Tensor per_log, Tensor per_p, Tensor out) {
  check_tile(logits, start, target);
  STD_TORCH_CHECK(
      out.is_contiguous() && out.scalar_type() == logits.scalar_type(),
      "the gradient must be contiguous and have the dtype of the logits");
  const int64_t rows = logits.sizes()[0];
  if (rows == 0) return;
  const OnDevice on(logits);
  with_type(logits, [&](auto zero) {
    using T = decltype(zero);
    gradient_kernel<T><<<static_cast<unsigned>(rows), kThreads, 0, on.stream()>>>(
        static_cast<const T*>(logits.data_ptr()), logits.sizes()[1], data_or_null<float>(bias),
        static_cast<const float*>(temperature.data_ptr()), temperature.stride(0), static_cast<float>(softcap),
        static_cast<const int64_t*>(start.data_ptr()), data_or_null<int64_t>(target), data_or_null<float>(logsumexp),
        data_or_null<float>(correction), data_or_null<float>(grad_logprob), data_or_null<float>(constant),
        data_or_null<float>(per_log), data_or_null<float>(per_p), static_cast<T*>(out.data_ptr()));
  });
  check(cudaGetLastError());
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cuda, m) {
  m.def(
      "logit_statistics(Tensor logits, Tensor bias, Tensor temperature, float softcap, Tensor start, Tensor target, "
      "Tensor(a!) logprob, Tensor(b!) logsumexp, Tensor(c!) correction, Tensor(d!) entropy, Tensor(e!) sum_p2) -> ()");
  m.def(
      "logit_gradient(Tensor logits, Tensor bias, Tensor temperature, float softcap, Tensor start, Tensor target, "
      "Tensor logsumexp, Tensor correction, Tensor grad_logprob, Tensor constant, Tensor per_log, Tensor per_p, "
      "Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cuda, CUDA, m) {
  m.impl("logit_statistics", TORCH_BOX(&logit_statistics));
  m.impl("logit_gradient", TORCH_BOX(&logit_gradient));
}
