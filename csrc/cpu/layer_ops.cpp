// RMSNorm and rotary embedding of a decoder layer for training, each with its gradient in one pass.
//
// All are bound by memory: forwards read a row and write it, backwards read it and its gradient and write the row's. A
// row is computed by one thread and by the same arithmetic, whatever its position. The gradient of a norm's weight, a sum
// over rows, is summed over chunks of kChunk rows, and then over the chunks, whatever the number of threads.
#pragma GCC optimize("fp-contract=off")

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "layer_rows.h"

namespace rolltree {
namespace {

using torch::stable::Tensor;

constexpr int64_t kChunk = 64;  // rows

// Returns how many rows of `width` numbers justify a thread.
inline int64_t rows_of_a_thread(int64_t width) { return std::max<int64_t>(kGrain / std::max<int64_t>(width, 1), 1); }

std::tuple<Tensor, Tensor> rms_norm_forward(const Tensor& x, const Tensor& weight, double eps) {
  const int64_t rows = x.size(0), width = x.size(1);
  Tensor out = torch::stable::empty_like(x), factor = torch::stable::new_empty(x, {rows});
  const float *from = x.const_data_ptr<float>(), *weights = weight.const_data_ptr<float>();
  float *to = out.mutable_data_ptr<float>(), *factors = factor.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, rows, rows_of_a_thread(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      factors[row] = rms_norm(from + row * width, weights, static_cast<float>(eps), width, to + row * width);
  });
  return {out, factor};
}

// Returns the sum of a b c.
float sum_of_products(const float* a, const float* b, const float* c, int64_t n) {
  Eight sum[kPartials];
#pragma GCC unroll 4
  for (int64_t p = 0; p < kPartials; ++p) sum[p] = Eight{};
  int64_t i = 0;
  for (; i + kPartials * kEight <= n; i += kPartials * kEight)
#pragma GCC unroll 4
    for (int64_t p = 0; p < kPartials; ++p) {
      const int64_t at = i + p * kEight;
      sum[p] += load_as<Eight>(a + at) * load_as<Eight>(b + at) * load_as<Eight>(c + at);
    }
  for (; i + kEight <= n; i += kEight) sum[0] += load_as<Eight>(a + i) * load_as<Eight>(b + i) * load_as<Eight>(c + i);
#pragma GCC unroll 4
  for (int64_t p = 1; p < kPartials; ++p) sum[0] += sum[p];
  float total = 0.f;
  for (; i < n; ++i) total += a[i] * b[i] * c[i];
  for (int64_t l = 0; l < kEight; ++l) total += sum[0][l];
  return total;
}

// With r the row's factor and g = dy * weight: dx = r (g - x r^2 mean(g x)), and to the weight's gradient dy x r.
template <bool kWeight>
void rms_norm_row(const float* __restrict dy, const float* __restrict x, const float* __restrict weight, float r, int64_t n,
                  float* __restrict dx, float* __restrict dweight) {
  const float along = sum_of_products(dy, weight, x, n) / static_cast<float>(n) * r * r;
  for (int64_t d = 0; d < n; ++d) {
    dx[d] = r * (dy[d] * weight[d] - x[d] * along);
    if (kWeight) dweight[d] += dy[d] * (x[d] * r);
  }
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& factor,
                                             bool need_weight) {
  const int64_t rows = x.size(0), width = x.size(1), chunks = (rows + kChunk - 1) / kChunk;
  Tensor dx = torch::stable::empty_like(x), dweight = torch::stable::new_empty(x, {need_weight ? width : 0});
  std::vector<float> partial(need_weight ? chunks * width : 0, 0.f);
  const float *grad = dy.const_data_ptr<float>(), *from = x.const_data_ptr<float>(), *weights = weight.const_data_ptr<float>();
  const float* factors = factor.const_data_ptr<float>();
  float *to = dx.mutable_data_ptr<float>(), *sums = partial.data();
  const int64_t grain = std::max<int64_t>(rows_of_a_thread(width) / kChunk, 1);
  torch::stable::parallel_for(0, chunks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk)
      for (int64_t row = chunk * kChunk; row < std::min(rows, (chunk + 1) * kChunk); ++row) {
        const int64_t at = row * width;
        if (need_weight)
          rms_norm_row<true>(grad + at, from + at, weights, factors[row], width, to + at, sums + chunk * width);
        else
          rms_norm_row<false>(grad + at, from + at, weights, factors[row], width, to + at, nullptr);
      }
  });
  if (need_weight) {
    std::vector<double> total(width, 0.);
    for (int64_t chunk = 0; chunk < chunks; ++chunk)
      for (int64_t d = 0; d < width; ++d) total[d] += sums[chunk * width + d];
    std::copy(total.begin(), total.end(), dweight.mutable_data_ptr<float>());
  }
  return {dx, dweight};
}

// The transpose of `turn`: the rotation by the negative angle if both halves of cos and sin are the same.
inline void turn_back(const float* __restrict y, const float* cos, const float* sin, int64_t dim, float* __restrict out) {
  const int64_t half = dim / 2;
  for (int64_t d = 0; d < half; ++d) {
    const float kept = y[d] * cos[d], turned = y[d + half] * sin[d + half];
    out[d] = kept + turned;
  }
  for (int64_t d = half; d < dim; ++d) {
    const float kept = y[d] * cos[d], turned = -y[d - half] * sin[d - half];
    out[d] = kept + turned;
  }
}

// A tensor [B, H, T, D] whose last dimension is contiguous.
template <class Number>
struct Heads {
  Number* data;
  int64_t batch, head, token;  // strides
  Number* at(int64_t b, int64_t h, int64_t t) const { return data + b * batch + h * head + t * token; }
};

std::tuple<Tensor, Tensor> rotate(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool back) {
  const int64_t tokens = q.size(2), dim = q.size(3), rows = q.size(0) * tokens, every = cos.size(0) == 1 ? 0 : tokens * dim;
  Tensor q_out = torch::stable::empty_like(q), k_out = torch::stable::empty_like(k);
  const auto reads = [](const Tensor& x) { return Heads<const float>{x.const_data_ptr<float>(), x.stride(0), x.stride(1), x.stride(2)}; };
  const auto writes = [](Tensor& x) { return Heads<float>{x.mutable_data_ptr<float>(), x.stride(0), x.stride(1), x.stride(2)}; };
  const Heads<const float> from[] = {reads(q), reads(k)};
  const Heads<float> to[] = {writes(q_out), writes(k_out)};
  const int64_t heads[] = {q.size(1), k.size(1)};
  const float *cosines = cos.const_data_ptr<float>(), *sines = sin.const_data_ptr<float>();
  const auto one = back ? turn_back : turn<float>;
  torch::stable::parallel_for(0, rows, rows_of_a_thread((heads[0] + heads[1]) * dim), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t b = row / tokens, t = row % tokens, at = b * every + t * dim;
      for (int i = 0; i < 2; ++i)
        for (int64_t h = 0; h < heads[i]; ++h) one(from[i].at(b, h, t), cosines + at, sines + at, dim, to[i].at(b, h, t));
    }
  });
  return {q_out, k_out};
}

}  // namespace
}  // namespace rolltree

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cpu, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def("rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor factor, bool need_weight) -> (Tensor, Tensor)");
  m.def("rotate(Tensor q, Tensor k, Tensor cos, Tensor sin, bool back) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rolltree::rms_norm_forward));
  m.impl("rms_norm_backward", TORCH_BOX(&rolltree::rms_norm_backward));
  m.impl("rotate", TORCH_BOX(&rolltree::rotate));
}
