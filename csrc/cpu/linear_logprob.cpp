// Row kernels of linear_logprob on a tile of logits [C, V] (kernels/linear_logprob/reference.py has the formulas).
//
// A row is scanned for its maximum and summed (softmax.h) while it is in the cache, so a tile is read from memory once.
// Half-precision logits are widened into a row of scratch; their gradient is rounded once, when it is written. One thread
// per run of rows; a row's result depends on that row alone.
//
// NaN and +inf make their own row NaN; -inf is a logit of probability zero.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "logits.h"

namespace {

using torch::stable::Tensor;

using namespace rolltree::softmax;

// With the targets of its rows.
template <class T, class In>
struct Tile : Rows<T, In> {
  const int64_t* start;
  const int64_t* target;
};

template <class T, bool Entropy, bool SumP2, class In>
void statistics(const Tile<T, In>& tile, T* logprob, T* logsumexp, T* correction, T* entropy, T* sum_p2) {
  torch::stable::parallel_for(0, tile.rows, tile.grain(), [&](int64_t from, int64_t to) {
    std::vector<T> scratch(tile.width);
    for (int64_t i = from; i < to; ++i) {
      const T* x = tile.capped(i, scratch.data());
      const T most = maximum(x, tile.width), top = most == -kInfinity<T> ? T(0) : most;
      const T inverse = tile.inverse_temperature(i);
      const Sums sums = sum_weights<T, Entropy, SumP2, false>(x, tile.width, top, inverse, nullptr);
      const double log_sum = sums.log();
      const T shift = top * inverse;  // z of the greatest logit
      logsumexp[i] = static_cast<T>(shift + log_sum);
      correction[i] = static_cast<T>((static_cast<double>(shift) - logsumexp[i]) + log_sum);
      if constexpr (Entropy) entropy[i] = static_cast<T>(sums.entropy());
      if constexpr (SumP2) sum_p2[i] = static_cast<T>(sums.squares / (sums.weights * sums.weights));
      for (int64_t m = tile.start[i]; m < tile.start[i + 1]; ++m)
        logprob[m] = log_prob(x[tile.target[m]], top, tile.temperature[i * tile.temperature_stride], log_sum);
    }
  });
}

// g = p (c - b log p + q p) dz/du: the softmax part of the gradient. `z` may be `g`.
template <class T, class In>
void softmax_gradient(const Tile<T, In>& tile, int64_t i, const T* z, T lse, T correction, T c, T b, T q, T* g) {
  const T inverse = tile.inverse_temperature(i);
  const T untanh = tile.softcap != 0 ? 1 / (inverse * tile.softcap) : 0;
  for (int64_t j = 0; j < tile.width; j += kLanes<T>) {
    const Vec<T> v = load_some(z + j, tile.width - j, T(0));
    Vec<T> logp = (v - lse) - correction;
    const auto none = logp < Vector<T>::lowest;
    logp = none ? Vec<T>{} : logp;
    const Vec<T> p = none ? Vec<T>{} : exponential(logp);
    Vec<T> value = p * (c - b * logp + q * p) * inverse;
    if (untanh != 0) value *= 1 - (v * untanh) * (v * untanh);
    store_some<T>(g + j, value, tile.width - j);
  }
}

template <class T, class In>
void gradient(
    const Tile<T, In>& tile, const T* logsumexp, const T* correction, const T* grad_logprob, const T* constant,
    const T* per_log, const T* per_p, In* out) {
  torch::stable::parallel_for(0, tile.rows, tile.grain(), [&](int64_t from, int64_t to) {
    std::vector<T> onehot, scratch(std::is_same_v<In, T> ? 0 : tile.width);
    for (int64_t i = from; i < to; ++i) {
      const int64_t first = tile.start[i], last = tile.start[i + 1];
      T a = 0;
      bool live = false;
      for (int64_t m = first; m < last; ++m) {
        a += grad_logprob[m];
        live |= grad_logprob[m] != 0;
      }
      const T b = per_log ? per_log[i] : 0, q = per_p ? per_p[i] : 0;
      In* d_row = out + i * tile.width;
      if (!live && b == 0 && q == 0 && constant[i] == 0) {  // a masked row: its logits may have any values
        std::fill(d_row, d_row + tile.width, In(0));
        continue;
      }
      T* g;
      if constexpr (std::is_same_v<In, T>)
        g = d_row;
      else
        g = scratch.data();
      const T* z = tile.scaled(i, g);
      const T inverse = tile.inverse_temperature(i);
      onehot.clear();
      for (int64_t m = first; m < last; ++m) {
        const T slope = tile.softcap != 0 ? tile.slope(z[tile.target[m]], inverse) : T(1);
        onehot.push_back(grad_logprob[m] * inverse * slope);
      }
      softmax_gradient(tile, i, z, logsumexp[i], correction[i], constant[i] - a, b, q, g);
      for (int64_t m = first; m < last; ++m) g[tile.target[m]] += onehot[m - first];
      if constexpr (!std::is_same_v<In, T>)
        for (int64_t j = 0; j < tile.width; ++j) d_row[j] = static_cast<In>(g[j]);
    }
  });
}

template <class T, class In>
Tile<T, In> tile_of(
    const Tensor& logits, const Tensor& bias, const Tensor& temperature, double softcap, const Tensor& start,
    const Tensor& target) {
  STD_TORCH_CHECK(logits.is_contiguous() && start.is_contiguous() && target.is_contiguous(), "logits, start and target must be contiguous");
  return {
      {static_cast<const In*>(logits.data_ptr()),
       logits.sizes()[0],
       logits.sizes()[1],
       bias.numel() ? static_cast<const T*>(bias.data_ptr()) : nullptr,
       static_cast<const T*>(temperature.data_ptr()),
       temperature.stride(0),
       static_cast<T>(softcap)},
      static_cast<const int64_t*>(start.data_ptr()),
      static_cast<const int64_t*>(target.data_ptr())};
}

template <class T>
T* data_or_null(const Tensor& t) {
  return t.numel() ? static_cast<T*>(t.data_ptr()) : nullptr;
}

// Calls f(T{}, In{}) with the element type In of `logits` and the type T to compute in.
template <class F>
void with_types(const Tensor& logits, F f) {
  using torch::headeronly::ScalarType;
  switch (logits.scalar_type()) {
    case ScalarType::Float:
      return f(float{}, float{});
    case ScalarType::Double:
      return f(double{}, double{});
    case ScalarType::BFloat16:
      return f(float{}, torch::headeronly::BFloat16{});
    case ScalarType::Half:
      return f(float{}, torch::headeronly::Half{});
    default:
      STD_TORCH_CHECK(false, "logits must be bf16, fp16, fp32 or fp64");
  }
}

void logit_statistics(
    Tensor logits, Tensor bias, Tensor temperature, double softcap, Tensor start, Tensor target, Tensor logprob,
    Tensor logsumexp, Tensor correction, Tensor entropy, Tensor sum_p2) {
  with_types(logits, [&](auto zero, auto in) {
    using T = decltype(zero);
    using In = decltype(in);
    const Tile<T, In> tile = tile_of<T, In>(logits, bias, temperature, softcap, start, target);
    T* h = data_or_null<T>(entropy);
    T* p2 = data_or_null<T>(sum_p2);
    const auto run = h ? (p2 ? statistics<T, true, true, In> : statistics<T, true, false, In>)
                       : (p2 ? statistics<T, false, true, In> : statistics<T, false, false, In>);
    run(tile, data_or_null<T>(logprob), data_or_null<T>(logsumexp), data_or_null<T>(correction), h, p2);
  });
}

// Caps logits in place as the statistics do; rows may lie apart.
void cap_logits(Tensor logits, double softcap) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float && logits.dim() == 2, "logits must be fp32, [rows, vocabulary]");
  float* x = logits.mutable_data_ptr<float>();
  const int64_t width = logits.size(1), stride = logits.stride(0);
  torch::stable::parallel_for(0, logits.size(0), std::max<int64_t>(1, 32768 / width), [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) cap(x + i * stride, width, static_cast<float>(softcap));
  });
}

void logit_gradient(
    Tensor logits, Tensor bias, Tensor temperature, double softcap, Tensor start, Tensor target, Tensor logsumexp,
    Tensor correction, Tensor grad_logprob, Tensor constant, Tensor per_log, Tensor per_p, Tensor out) {
  STD_TORCH_CHECK(
      out.scalar_type() == logits.scalar_type() && out.is_contiguous(), "out must be contiguous, of the logits' dtype");
  with_types(logits, [&](auto zero, auto in) {
    using T = decltype(zero);
    using In = decltype(in);
    gradient<T, In>(
        tile_of<T, In>(logits, bias, temperature, softcap, start, target), data_or_null<T>(logsumexp),
        data_or_null<T>(correction), data_or_null<T>(grad_logprob), data_or_null<T>(constant),
        data_or_null<T>(per_log), data_or_null<T>(per_p), data_or_null<In>(out));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cpu, m) {
  m.def(
      "logit_statistics(Tensor logits, Tensor bias, Tensor temperature, float softcap, Tensor start, Tensor target, "
      "Tensor(a!) logprob, Tensor(b!) logsumexp, Tensor(c!) correction, Tensor(d!) entropy, Tensor(e!) sum_p2) -> ()");
  m.def("cap_logits(Tensor(a!) logits, float softcap) -> ()");
  m.def(
      "logit_gradient(Tensor logits, Tensor bias, Tensor temperature, float softcap, Tensor start, Tensor target, "
      "Tensor logsumexp, Tensor correction, Tensor grad_logprob, Tensor constant, Tensor per_log, Tensor per_p, "
      "Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CPU, m) {
  m.impl("logit_statistics", TORCH_BOX(&logit_statistics));
  m.impl("cap_logits", TORCH_BOX(&cap_logits));
  m.impl("logit_gradient", TORCH_BOX(&logit_gradient));
}
