// Products of few rows of bf16 by AVX-512's dot products of pairs. setup.py compiles this file with -mavx512bf16 for AVX-512;
// machine.h decides whether the processor has it.
#include "few_rows_in_lanes.h"

#ifdef __AVX512BF16__
#include <immintrin.h>

namespace rolltree {
namespace {

struct Dots : PairsOfBf16 {
  static Vec add(Vec sum, float x, Vec w) {
    uint32_t pair;
    std::memcpy(&pair, &x, 4);
    const __m512i own = _mm512_set1_epi32(static_cast<int>(pair));
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)own, (__m512bh)w);
  }
};

}  // namespace

std::unique_ptr<const FewRows<Bf16>> rows_for_dots(const float* x, int64_t rows, int64_t depth) {
  return std::make_unique<RowsInLanes<Bf16, Dots>>(x, rows, depth);
}

}  // namespace rolltree

#else

namespace rolltree {

std::unique_ptr<const FewRows<Bf16>> rows_for_dots(const float*, int64_t, int64_t) {
  STD_TORCH_CHECK(false, "this library was built without AVX-512 BF16");
}

}  // namespace rolltree

#endif
