// The gated unit of a decoder layer for training: a pass over gate and up, and one for their gradients.
//
// Every element is computed by the same vector code, whatever its position. Contraction is on: half the work is e^x.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <tuple>

#include "layer_rows.h"

namespace rolltree {

void silu_mul(const float* x, const float* up, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, silu_mul(load(x + i), load(up + i)));
  if (i < count) store_some(out + i, silu_mul(load_some(x + i, count - i), load_some(up + i, count - i)), count - i);
}

namespace {

using torch::stable::Tensor;

Tensor silu_mul_forward(const Tensor& gate, const Tensor& up) {
  Tensor out = torch::stable::empty_like(gate);
  const float *x = gate.const_data_ptr<float>(), *factor = up.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, gate.numel(), kGrain, [&](int64_t begin, int64_t end) {
    silu_mul(x + begin, factor + begin, end - begin, to + begin);
  });
  return out;
}

// With s = 1 / (1 + e^-x): d gate = dy up s (1 + x (1 - s)), d up = dy x s.
std::tuple<Tensor, Tensor> silu_mul_backward(const Tensor& dy, const Tensor& gate, const Tensor& up) {
  Tensor dgate = torch::stable::empty_like(gate), dup = torch::stable::empty_like(up);
  const float *grad = dy.const_data_ptr<float>(), *gates = gate.const_data_ptr<float>(), *ups = up.const_data_ptr<float>();
  float *to_gate = dgate.mutable_data_ptr<float>(), *to_up = dup.mutable_data_ptr<float>();
  const auto of = [](Vec dy, Vec x, Vec up, Vec& dx, Vec& dup) {
    const Vec s = 1.f / one_plus_exp_of_minus(x);
    dx = dy * up * (s * (1.f + x * (1.f - s)));
    dup = dy * (x * s);
  };
  torch::stable::parallel_for(0, gate.numel(), kGrain, [&](int64_t begin, int64_t end) {
    Vec dx, d;
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      of(load(grad + i), load(gates + i), load(ups + i), dx, d);
      store(to_gate + i, dx), store(to_up + i, d);
    }
    if (const int64_t n = end - i; n > 0) {
      of(load_some(grad + i, n), load_some(gates + i, n), load_some(ups + i, n), dx, d);
      store_some(to_gate + i, dx, n), store_some(to_up + i, d, n);
    }
  });
  return {dgate, dup};
}

}  // namespace
}  // namespace rolltree

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cpu, m) {
  m.def("silu_mul(Tensor gate, Tensor up) -> Tensor");
  m.def("silu_mul_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CPU, m) {
  m.impl("silu_mul", TORCH_BOX(&rolltree::silu_mul_forward));
  m.impl("silu_mul_backward", TORCH_BOX(&rolltree::silu_mul_backward));
}
