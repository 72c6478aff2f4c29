// Helpers around an op's launches: the tensors' device, its current stream, and the error.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

#include <cuda_runtime.h>

namespace rolltree {

// Makes the device of `t` the current one during its lifetime.
class OnDevice {
 public:
  explicit OnDevice(const torch::stable::Tensor& t) : guard_(t.get_device_index()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

inline void check(cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, "launch failed: ", cudaGetErrorString(error));
}

}  // namespace rolltree
