// csrc/cuda/tensor_core.cuh by the tables of the PTX manual ("Matrix Fragments for mma.m16n8k16", "ldmatrix").
#pragma once

#include "emulator.h"

namespace rolltree {

template <typename T>
uint32_t pack(float low, float high) {
  const T pair[2] = {static_cast<T>(low), static_cast<T>(high)};
  uint32_t bits;
  std::memcpy(&bits, pair, sizeof bits);
  return bits;
}

template <typename T>
float half_of(uint64_t bits, int which) {
  T pair[2];
  std::memcpy(pair, &bits, sizeof pair);
  return static_cast<float>(pair[which]);
}

template <typename T>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  uint64_t* mine = emulator::words_of(emulator::lane());
  for (int i = 0; i < 4; ++i) mine[i] = a[i];
  mine[4] = b0, mine[5] = b1;
  emulator::meet_warp();
  const int group = emulator::lane() / 4, within = emulator::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = group + (i < 2 ? 0 : 8), column = within * 2 + i % 2;
    float sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const int holder = k % 8 / 2;  // of the four lanes of a row or column
      const float x = half_of<T>(emulator::words_of(row % 8 * 4 + holder)[(row >= 8 ? 1 : 0) + (k >= 8 ? 2 : 0)], k % 2);
      sum += x * half_of<T>(emulator::words_of(column * 4 + holder)[k >= 8 ? 5 : 4], k % 2);
    }
    c[i] = sum;
  }
  emulator::meet_warp();
}

// Of each of four matrices two values: `at(i)` says in which row and column.
template <typename At>
void load_pairs(uint32_t (&r)[4], const void* row, At at) {
  std::memcpy(emulator::words_of(emulator::lane()), &row, sizeof row);
  emulator::meet_warp();
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t pair[2];
    for (int i = 0; i < 2; ++i) {
      const auto [from, column] = at(i);
      const uint16_t* source;
      std::memcpy(&source, emulator::words_of(matrix * 8 + from), sizeof source);
      pair[i] = source[column];
    }
    std::memcpy(&r[matrix], pair, sizeof pair);
  }
  emulator::meet_warp();
}

inline void load_matrices(uint32_t (&r)[4], const void* row) {
  load_pairs(r, row, [](int i) { return std::pair(emulator::lane() / 4, emulator::lane() % 4 * 2 + i); });
}

inline void load_transposed(uint32_t (&r)[4], const void* row) {
  load_pairs(r, row, [](int i) { return std::pair(emulator::lane() % 4 * 2 + i, emulator::lane() / 4); });
}

inline void arrive(const emulator::Copy& copy) { std::memcpy(copy.to, copy.from, 16); }

inline void copy_async(void* to, const void* from) {
  const emulator::Copy copy{to, from};
  if (emulator::random() % 2)
    arrive(copy);
  else
    emulator::block->fibers[emulator::block->current].groups.back().push_back(copy);
}

inline void commit_copies() { emulator::block->fibers[emulator::block->current].groups.emplace_back(); }

template <int pending>
void wait_for_copies() {
  auto& groups = emulator::block->fibers[emulator::block->current].groups;
  for (; groups.size() > pending + 1; groups.pop_front())
    for (const emulator::Copy& copy : groups.front()) arrive(copy);
}

}  // namespace rolltree
