// Products of few rows of bf16 by AMX tiles: products of bf16 are exact in fp32 and are summed in it.
//
// A tile holds 16 columns of the weight as they lie in memory, 32 numbers of each. The rows are packed once, as pairs, 16
// rows a tile. A tile's product sums the even and the odd numbers of its depth separately, and adds both to the sum of the
// tiles before, so the order of a row's sums does not depend on the other rows. It is not the order of few_rows.cpp.
//
// `emulate` is the twin in plain C++, for any machine, with the same sums in the same order; machine.h decides between them.
#include <cmath>
#include <vector>

#include "few_rows_in_lanes.h"
#include "../machine.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && (__GNUC__ >= 11 || defined(__clang__))
#define ROLLTREE_AMX 1
#include <immintrin.h>
#endif

namespace rolltree {
namespace {

constexpr int64_t kTile = 16;   // columns and rows of a tile's product
constexpr int64_t kDepth = 32;  // numbers of the depth in a tile

class RowsInTiles final : public FewRows<Bf16> {
 public:
  RowsInTiles(const float* x, int64_t rows, int64_t depth)
      : FewRows<Bf16>(rows, depth),
        steps_((depth + kDepth - 1) / kDepth),
        groups_((rows + kTile - 1) / kTile),
        panels_(groups_ * steps_ * kTile * kTile, 0) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = 0; k < depth; ++k)
        panels_[(r / kTile * steps_ * kTile + k / 2) * kTile + r % kTile] |= uint32_t{narrowed<Bf16>(x[r * depth + k]).bits} << 16 * (k % 2);
  }

  void multiply(const Product<Bf16>& product, int64_t begin, int64_t end) const override {
    constexpr int64_t kWide = 2 * kTile;
    const int64_t lanes = padded(groups_ * kTile), first = begin * kColumns, last = std::min(end * kColumns, product.width);
    const Buffer by_column(kWide * lanes), by_row(lanes * kWide);
    std::fill_n(by_column.at(0), kWide * lanes, 0.f);
    std::vector<Bf16> own;
    for (int64_t n = first; n < last; n += kWide) {
      const int64_t count = std::min(kWide, last - n);
      const Bf16* columns = product.weight + n * product.weight_stride;
      int64_t stride = product.weight_stride;
      if (count < kWide || depth_ % kDepth) {  // nothing is read after the end of a column or of the weight
        stride = steps_ * kDepth;
        own.assign(kWide * stride, Bf16{});
        for (int64_t c = 0; c < count; ++c) std::copy_n(columns + c * product.weight_stride, depth_, own.data() + c * stride);
        columns = own.data();
      }
      if (tiles() == Tiles::emulated) emulate(columns, stride, count, by_column.at(0), lanes);
      else multiply_tiles(columns, stride, by_column.at(0), lanes);
      transpose(Packed{by_column.at(0), lanes}, kWide, lanes, by_row.at(0), kWide);
      for (int64_t r = 0; r < rows_; ++r)
        for (int64_t c = 0; c < count; c += kLanes) put(load(by_row.at(r * kWide + c)), product, r, n + c, count - c);
    }
  }

 private:
  // The pairs [kTile, kTile] of a step of 16 rows.
  const uint32_t* panel(int64_t group, int64_t step) const { return panels_.data() + (group * steps_ + step) * kTile * kTile; }

  static float half(uint32_t pair, bool odd) { return Bf16{static_cast<uint16_t>(odd ? pair >> 16 : pair)}; }

  void emulate(const Bf16* columns, int64_t stride, int64_t count, float* to, int64_t ld) const {
    for (int64_t c = 0; c < count; ++c)
      for (int64_t r = 0; r < rows_; ++r) {
        float sum = 0;
        for (int64_t step = 0; step < steps_; ++step) {
          const uint32_t* rows = panel(r / kTile, step) + r % kTile;
          const Bf16* w = columns + c * stride + step * kDepth;
          float even = 0, odd = 0;
          for (int64_t k = 0; k < kTile; ++k) {
            even = std::fma(half(rows[k * kTile], false), w[2 * k], even);
            odd = std::fma(half(rows[k * kTile], true), w[2 * k + 1], odd);
          }
          sum += even + odd;
        }
        to[c * ld + r] = sum;
      }
  }

#ifdef ROLLTREE_AMX
  struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_a_row[16] = {};
    uint8_t rows[16] = {};
  };

  // Multiplies two tiles of columns with all rows, two tiles of rows at once.
  __attribute__((target("amx-tile,amx-bf16"))) void multiply_tiles(const Bf16* columns, int64_t stride, float* to, int64_t ld) const {
    TileConfig config;
    for (int t = 0; t < 8; ++t) config.bytes_a_row[t] = 64, config.rows[t] = kTile;
    _tile_loadconfig(&config);
    const int64_t bytes = stride * 2, ld_bytes = ld * 4;
    for (int64_t g = 0; g < groups_; g += 2) {
      const bool second = g + 1 < groups_;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t step = 0; step < steps_; ++step) {
        _tile_loadd(4, columns + step * kDepth, bytes);
        _tile_loadd(5, columns + kTile * stride + step * kDepth, bytes);
        _tile_loadd(6, panel(g, step), 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if (!second) continue;
        _tile_loadd(7, panel(g + 1, step), 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
      float* at = to + g * kTile;
      _tile_stored(0, at, ld_bytes);
      _tile_stored(2, at + kTile * ld, ld_bytes);
      if (second) {
        _tile_stored(1, at + kTile, ld_bytes);
        _tile_stored(3, at + kTile * ld + kTile, ld_bytes);
      }
    }
    _tile_release();
  }
#else
  void multiply_tiles(const Bf16*, int64_t, float*, int64_t) const {
    STD_TORCH_CHECK(false, "this library was built without AMX tiles");
  }
#endif

  const int64_t steps_, groups_;
  std::vector<uint32_t> panels_;  // 16 rows after 16 rows: for each step the pairs [kTile, 16 rows]
};

}  // namespace

std::unique_ptr<const FewRows<Bf16>> rows_for_tiles(const float* x, int64_t rows, int64_t depth) {
  return std::make_unique<RowsInTiles>(x, rows, depth);
}

}  // namespace rolltree
