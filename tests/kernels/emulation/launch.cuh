// csrc/cuda/launch.cuh without a device.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "emulator.h"

namespace rolltree {

struct OnDevice {
  explicit OnDevice(const torch::stable::Tensor&) {}
  cudaStream_t stream() const { return nullptr; }
};

inline void check(cudaError_t) {}

}  // namespace rolltree
