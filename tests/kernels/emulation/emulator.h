// Runs the kernels of csrc/cuda on the CPU: one block at a time, a fiber for each thread, warps in step where they exchange.
//
// Fibers change turns where a thread waits for others, in an order that changes from round to round; now and then a warp
// is held back, so a missing barrier shows.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)

using __nv_bfloat16 = torch::headeronly::BFloat16;
using __half = torch::headeronly::Half;
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
};

struct Meeting {
  int arrived = 0, round = 0;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Meeting> warps;
  Meeting all;
  std::vector<uint64_t> exchange;  // 8 words a thread
  ucontext_t scheduler;
  int current = 0;
  std::function<void()> body;
};
inline Block* block = nullptr;

constexpr size_t kStack = 1 << 18;
constexpr int kHold = 100;  // rounds

inline uint32_t random() {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 33);
}

inline void yield() { swapcontext(&block->fibers[block->current].context, &block->scheduler); }

inline void meet(Meeting& meeting, int count) {
  const int round = meeting.round;
  if (++meeting.arrived == count) {
    meeting.arrived = 0, ++meeting.round;
    return;
  }
  while (meeting.round == round) yield();
}

inline int lane() { return block->current % 32; }
inline void meet_warp() {
  const int warp = block->current / 32, left = static_cast<int>(block->fibers.size()) - 32 * warp;
  meet(block->warps[warp], std::min(left, 32));
}
inline uint64_t* words_of(int lane) { return &block->exchange[(block->current / 32 * 32 + lane) * 8]; }

inline void start() {
  block->body();
  block->fibers[block->current].done = true;
  yield();
}

inline void run_block(unsigned threads) {
  Block& b = *block;
  b.fibers = std::vector<Fiber>(threads);
  b.warps.assign((threads + 31) / 32, {});
  b.all = {};
  b.exchange.assign(threads * 8, 0);
  for (Fiber& fiber : b.fibers) {
    fiber.stack.reset(new char[kStack]);
    getcontext(&fiber.context);
    fiber.context.uc_stack = {.ss_sp = fiber.stack.get(), .ss_flags = 0, .ss_size = kStack};
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, start, 0);
  }
  int held_back = -1;
  bool waiting = true;
  for (int round = 0; waiting; ++round) {
    waiting = false;
    if (round % kHold == 0) held_back = static_cast<int>(random() % (b.warps.size() + 1));
    const unsigned first = random() % threads, step = random() % 2 ? 1 : threads - 1;
    for (unsigned i = 0; i < threads; ++i) {
      b.current = static_cast<int>((first + static_cast<uint64_t>(i) * step) % threads);
      if (b.fibers[b.current].done) continue;
      waiting = true;
      if (b.current / 32 == held_back) continue;
      threadIdx = dim3(b.current);
      swapcontext(&b.scheduler, &b.fibers[b.current].context);
    }
  }
}

// kernel<<<grid, threads, shared, stream>>>(arguments) is rewritten to Launch(grid, threads, shared, stream)(kernel, ...);
// no kernel has shared memory whose size the launch tells.
class Launch {
 public:
  Launch(dim3 grid, dim3 threads, int, cudaStream_t) : grid_(grid), threads_(threads) {}

  template <class... Parameters, class... Arguments>
  void operator()(void (*kernel)(Parameters...), Arguments&&... arguments) const {
    Block own;
    block = &own;
    own.body = [&] { kernel(arguments...); };
    gridDim = grid_, blockDim = threads_;
    for (unsigned x = 0; x < grid_.x; ++x) {
      blockIdx = dim3(x);
      run_block(threads_.x);
    }
    block = nullptr;
  }

 private:
  dim3 grid_, threads_;
};

template <class T>
T shuffle(T value, int from) {
  static_assert(sizeof(T) <= 8);
  std::memcpy(words_of(lane()), &value, sizeof value);
  meet_warp();
  std::memcpy(&value, words_of(from < 32 ? from : lane()), sizeof value);
  meet_warp();
  return value;
}

}  // namespace emulator

inline void __syncthreads() { emulator::meet(emulator::block->all, static_cast<int>(emulator::block->fibers.size())); }
template <class T>
T __shfl_down_sync(unsigned, T value, int offset) { return emulator::shuffle(value, emulator::lane() + offset); }
inline float __expf(float x) { return std::exp(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmul_rn(float x, float y) {
  volatile float product = x * y;  // which the compiler does not contract
  return product;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
