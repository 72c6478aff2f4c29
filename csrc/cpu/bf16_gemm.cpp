// Logits [M, N] fp32 = hidden [M, K] bf16 x weight [N, K]^T bf16, on AMX tiles: products of bf16 are exact in fp32 and are
// summed in it, so the only roundings are those of a product of widened operands.
//
// A thread takes 32 rows of the weight, packs them once (tiles of 16 x 16 pairs of k) and multiplies them with every block
// of 32 rows of hidden: four accumulator tiles, K summed in order. A row's result does not depend on the other rows.
//
// `emulate` is the twin in plain C++, for any machine, with the same sums in the same order; machine.h decides between them.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "machine.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && (__GNUC__ >= 11 || defined(__clang__))
#define ROLLTREE_AMX 1
#include <immintrin.h>
#endif

namespace {

using rolltree::Tiles;
using rolltree::tiles;
using torch::stable::Tensor;

constexpr int64_t kTile = 16;       // rows of a tile, and columns of an accumulator
constexpr int64_t kDepth = 32;      // bf16 of k in a tile's row
constexpr int64_t kBlock = 2 * kTile;

// The matrices of a product; rows may lie apart, the elements of a row are neighbours.
struct Product {
  const uint16_t *hidden, *weight;
  float* out;
  int64_t M, N, K, hidden_stride, weight_stride, out_stride;
};

#ifdef ROLLTREE_AMX

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_a_row[16] = {};
  uint8_t rows[16] = {};
};

// Transposes 16 x 16 words of four bytes in place.
__attribute__((target("avx512f"))) void transpose(__m512i (&r)[kTile]) {
  __m512i t[kTile];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // r[i + c]: column c of every four, rows i .. i + 3
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 16; i += 8)
    for (int c = 0; c < 4; ++c) {
      t[i + c] = _mm512_shuffle_i32x4(r[i + c], r[i + c + 4], 0x88);
      t[i + c + 4] = _mm512_shuffle_i32x4(r[i + c], r[i + c + 4], 0xdd);
    }
  for (int c = 0; c < 8; ++c) {
    r[c] = _mm512_shuffle_i32x4(t[c], t[c + 8], 0x88);
    r[c + 8] = _mm512_shuffle_i32x4(t[c], t[c + 8], 0xdd);
  }
}

// Weight rows n0 .. n0 + 31 as tiles: panel[k block][half][k pair][column] holds the bf16 of 2 k pair and 2 k pair + 1.
__attribute__((target("avx512f,avx512bw"))) void pack(
    const Product& p, int64_t n0, uint32_t* panel) {
  for (int64_t k = 0; k < p.K; k += kDepth) {
    const __mmask32 inside = p.K - k >= kDepth ? ~__mmask32{0} : (__mmask32{1} << (p.K - k)) - 1;
    for (int64_t half = 0; half < 2; ++half, panel += kTile * kTile) {
      __m512i rows[kTile];
      for (int64_t i = 0; i < kTile; ++i) {
        const int64_t n = n0 + half * kTile + i;
        rows[i] = n < p.N ? _mm512_maskz_loadu_epi16(inside, p.weight + n * p.weight_stride + k) : _mm512_setzero_si512();
      }
      transpose(rows);
      for (int64_t i = 0; i < kTile; ++i) _mm512_storeu_si512(panel + i * kTile, rows[i]);
    }
  }
}

__attribute__((target("amx-tile,amx-bf16"))) void multiply(
    const Product& p, const uint16_t* hidden, int64_t padded, const uint32_t* panel, int64_t n0) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) config.bytes_a_row[t] = 64, config.rows[t] = kTile;
  _tile_loadconfig(&config);
  alignas(64) float block[kBlock * kBlock];
  const int64_t depth = padded / kDepth, stride = padded * 2;
  for (int64_t r = 0; r * kBlock < p.M; ++r) {
    const uint16_t* a = hidden + r * kBlock * padded;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth; ++k) {
      _tile_loadd(4, a + k * kDepth, stride);
      _tile_loadd(5, a + kTile * padded + k * kDepth, stride);
      _tile_loadd(6, panel + (k * 2) * kTile * kTile, 64);
      _tile_loadd(7, panel + (k * 2 + 1) * kTile * kTile, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, block, kBlock * 4);
    _tile_stored(1, block + kTile, kBlock * 4);
    _tile_stored(2, block + kTile * kBlock, kBlock * 4);
    _tile_stored(3, block + kTile * kBlock + kTile, kBlock * 4);
    const int64_t columns = std::min(kBlock, p.N - n0), last = std::min(p.M, (r + 1) * kBlock);
    for (int64_t m = r * kBlock; m < last; ++m)
      std::memcpy(p.out + m * p.out_stride + n0, block + (m - r * kBlock) * kBlock, columns * sizeof(float));
  }
  _tile_release();
}

#endif

// The twin of `multiply` for one column: in a tile's 32 k the even and the odd ones are a chain of FMA each.
float widened(uint16_t value) {
  const uint32_t bits = uint32_t{value} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

void emulate(const Product& p, int64_t n) {
  const uint16_t* w = p.weight + n * p.weight_stride;
  for (int64_t m = 0; m < p.M; ++m) {
    const uint16_t* h = p.hidden + m * p.hidden_stride;
    float sum = 0;
    for (int64_t k = 0; k < p.K; k += kDepth) {
      float even = 0, odd = 0;
      for (int64_t j = k; j < std::min(p.K, k + kDepth); j += 2) {
        even = std::fma(widened(h[j]), widened(w[j]), even);
        if (j + 1 < p.K) odd = std::fma(widened(h[j + 1]), widened(w[j + 1]), odd);
      }
      sum += even + odd;
    }
    p.out[m * p.out_stride + n] = sum;
  }
}

bool rows_are_contiguous(const Tensor& t) {
  return t.sizes()[1] <= 1 || t.strides()[1] == 1;
}

void bf16_logits(Tensor hidden, Tensor weight, Tensor out) {
  STD_TORCH_CHECK(tiles() != Tiles::none, "this machine has no AMX tiles for bf16");
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(
      hidden.scalar_type() == ScalarType::BFloat16 && weight.scalar_type() == ScalarType::BFloat16 &&
          out.scalar_type() == ScalarType::Float,
      "operands must be bf16 and the result fp32");
  STD_TORCH_CHECK(
      rows_are_contiguous(hidden) && rows_are_contiguous(weight) && rows_are_contiguous(out),
      "bf16_logits: the elements of a row of hidden, weight and out must be neighbours");
  const int64_t M = hidden.sizes()[0], K = hidden.sizes()[1], N = weight.sizes()[0];
  STD_TORCH_CHECK(
      weight.sizes()[1] == K && out.sizes()[0] == M && out.sizes()[1] == N, "shapes of the operands do not fit");
  if (M == 0 || N == 0) return;
  const Product p{
      static_cast<const uint16_t*>(hidden.data_ptr()), static_cast<const uint16_t*>(weight.data_ptr()),
      static_cast<float*>(out.data_ptr()), M, N, K, hidden.strides()[0], weight.strides()[0], out.strides()[0]};
  if (tiles() == Tiles::emulated) {
    torch::stable::parallel_for(0, N, 64, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) emulate(p, n);
    });
    return;
  }
#ifdef ROLLTREE_AMX
  const int64_t padded = (K + kDepth - 1) / kDepth * kDepth, row_blocks = (M + kBlock - 1) / kBlock;
  // hidden with rows and k padded with zeros; an empty k is one tile of zeros
  std::vector<uint16_t> rows(row_blocks * kBlock * padded, 0);
  for (int64_t m = 0; m < M; ++m)
    std::memcpy(rows.data() + m * padded, p.hidden + m * p.hidden_stride, K * sizeof(uint16_t));
  torch::stable::parallel_for(0, (N + kBlock - 1) / kBlock, 8, [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> panel(padded * kTile);
    for (int64_t c = begin; c < end; ++c) {
      pack(p, c * kBlock, panel.data());
      multiply(p, rows.data(), padded, panel.data(), c * kBlock);
    }
  });
#endif
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cpu, m) {
  m.def("bf16_logits(Tensor hidden, Tensor weight, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CPU, m) {
  m.impl("bf16_logits", TORCH_BOX(&bf16_logits));
}
