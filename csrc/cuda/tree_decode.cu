// Decode attention over a paged tree in bf16 and fp16 (kernels/tree_decode/reference.py defines it).
//
//   partial  a block takes item after item (kernels/tree_decode/schedule.py): up to 512 keys of a node, 64 (row, head)
//            queries below it, one key head. Keys and values go through shared memory in three stages, so that two tiles
//            are in flight while a third is multiplied; each of four warps multiplies 16 queries, held in registers,
//            with mma.sync, if any of them exists. A key's place in the pages is computed once, by one thread, a tile
//            before it is copied, from a page id loaded one tile earlier.
//   merge    a warp adds one (row, head)'s partials in the order of its path, weighted by their log-sum-exps.
//
// Chunks are counted from a node's first key and partials are added in a fixed order, so a row's bits do not depend on the
// other rows.
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "launch.cuh"
#include "tensor_core.cuh"

namespace {

using namespace rolltree;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kQueries = 16 * kWarps;  // of an item
constexpr int kStages = 3;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

struct alignas(16) Item {
  int32_t first_page, slot, keys, position, first_row, rows, before, unused;
};

struct Problem {
  const void *q, *k_pages, *v_pages;
  const int32_t *page_ids, *query_position, *partial_begin;
  const Item* items;  // the first holds their number
  float *partial_out, *partial_lse;
  int64_t q_row, q_head, page_stride, slot_stride, head_stride;  // in elements
  int page_shift, heads, group, window;
  // In the log2 domain: scores are scale x, or cap (1 - 2 / (2^(scale x) + 1)), which is cap tanh.
  float scale, cap;
};

__device__ float of_quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ float of_quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

template <typename T, int D>
struct Tiles {
  static constexpr int kKeys = D < 256 ? 64 : 32;  // of a tile
  static constexpr int kStride = D + 8;  // 16 bytes more than a row, so that eight rows are in different banks
  T k[kStages][kKeys][kStride];
  T v[kStages][kKeys][kStride];
  int64_t place[kStages][kKeys];  // of a key in the pages, in elements
};

// Begins the copy of a tile's keys and values of one head.
template <typename T, int D>
__device__ void fetch(Tiles<T, D>& tiles, int stage, const T* k, const T* v) {
  constexpr int kPieces = D / 8;  // of 16 bytes in a row
  const int column = threadIdx.x % kPieces * 8;
#pragma unroll
  for (int i = 0; i < Tiles<T, D>::kKeys * kPieces / kThreads; ++i) {
    const int key = threadIdx.x / kPieces + i * (kThreads / kPieces);
    const int64_t from = tiles.place[stage][key] + column;
    copy_async(&tiles.k[stage][key][column], k + from);
    copy_async(&tiles.v[stage][key][column], v + from);
  }
}

template <typename T, int D, bool kWindow, bool kSoftcap>
__global__ void __launch_bounds__(kThreads) partial_kernel(const Problem p) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& tiles = *reinterpret_cast<Tiles<T, D>*>(memory);
  constexpr int kSteps = D / 16, kKeys = Tiles<T, D>::kKeys;
  const int64_t kv_head = blockIdx.x;
  const T* k = static_cast<const T*>(p.k_pages) + kv_head * p.head_stride;
  const T* v = static_cast<const T*>(p.v_pages) + kv_head * p.head_stride;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int count = p.items[0].first_page;
  for (int at = 1 + blockIdx.y; at <= count; at += gridDim.y) {
    const Item item = p.items[at];
    const int32_t* pages = p.page_ids + item.first_page;
    const int last = item.slot + item.keys - 1, end = (item.keys + kKeys - 1) / kKeys;

    // This thread's key of a tile; past the item's last key it is that key again, hidden from all queries.
    const auto slot_of = [&](int tile) { return min(item.slot + tile * kKeys + static_cast<int>(threadIdx.x), last); };
    const auto page_of = [&](int tile) { return pages[slot_of(tile) >> p.page_shift]; };
    const auto find = [&](int tile, int64_t page) {
      if (threadIdx.x >= kKeys) return;
      const int within = slot_of(tile) & ((1 << p.page_shift) - 1);
      tiles.place[tile % kStages][threadIdx.x] = page * p.page_stride + within * p.slot_stride;
    };
    for (int tile = 0; tile < kStages; ++tile) find(tile, page_of(tile));
    __syncthreads();  // places are written, and all warps have finished the last item's tiles
    for (int tile = 0; tile < kStages - 1; ++tile) {
      if (tile < end) fetch<T, D>(tiles, tile, k, v);
      commit_copies();
    }
    int page = page_of(kStages);

    // the two queries of this thread: rows g and g + 8 of the warp's sixteen
    const auto query_of = [&](int i) { return warp * 16 + g + 8 * i; };
    const auto row_of = [&](int i) { return item.first_row + query_of(i) / p.group; };
    const auto head_of = [&](int i) { return static_cast<int>(kv_head) * p.group + query_of(i) % p.group; };
    const auto exists = [&](int i) { return query_of(i) < item.rows * p.group; };
    uint32_t query[kSteps][4];
    int newest[2], oldest[2];  // keys [oldest, newest] of the item are seen
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool live = exists(i);
      const int age = live ? p.query_position[row_of(i)] - item.position : -1;
      newest[i] = min(age, item.keys - 1);
      oldest[i] = age - p.window + 1;
      const T* from = static_cast<const T*>(p.q) + row_of(i) * p.q_row + head_of(i) * p.q_head + 2 * t;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        query[step][i] = live ? *reinterpret_cast<const uint32_t*>(from + step * 16) : 0u;
        query[step][i + 2] = live ? *reinterpret_cast<const uint32_t*>(from + step * 16 + 8) : 0u;
      }
    }
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
    float out[D / 8][4] = {};

    for (int tile = 0, stage = 0; tile < end; ++tile, stage = stage == kStages - 1 ? 0 : stage + 1) {
      wait_for_copies<kStages - 2>();
      __syncthreads();  // this tile has arrived, and the one before is done: its stage is free
      if (tile + kStages - 1 < end) fetch<T, D>(tiles, stage == 0 ? kStages - 1 : stage - 1, k, v);
      commit_copies();
      find(tile + kStages, page);
      page = page_of(tile + kStages + 1);
      if (warp * 16 >= item.rows * p.group) continue;  // none of the warp's queries exists

      float scores[kKeys / 8][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int n = 0; n < kKeys / 8; n += 2) {
          uint32_t b[4];
          load_matrices(b, &tiles.k[stage][n * 8 + lane / 16 * 8 + lane % 8][step * 16 + lane / 8 % 2 * 8]);
          mma<T>(scores[n], query[step], b[0], b[1]);
          mma<T>(scores[n + 1], query[step], b[2], b[3]);
        }

      float best[2] = {-INFINITY, -INFINITY};
      const int first = tile * kKeys + 2 * t;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = e / 2, beyond = n * 8 + e % 2;
          float s = scores[n][e] * p.scale;
          if constexpr (kSoftcap) s = p.cap * (1.0f - 2.0f / (exp2f(s) + 1.0f));
          bool seen = beyond <= newest[i] - first;
          if constexpr (kWindow) seen = seen && beyond >= oldest[i] - first;
          scores[n][e] = seen ? s : -INFINITY;
          best[i] = fmaxf(best[i], scores[n][e]);
        }
      float base[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float new_top = fmaxf(top[i], of_quad_max(best[i]));
        base[i] = new_top == -INFINITY ? 0.0f : new_top;
        const float keep = exp2f(top[i] - base[i]);
        top[i] = new_top;
        total[i] *= keep;
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
          out[n][2 * i] *= keep;
          out[n][2 * i + 1] *= keep;
        }
      }
      float sum[2] = {0.0f, 0.0f};
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          scores[n][e] = exp2f(scores[n][e] - base[e / 2]);
          sum[e / 2] += scores[n][e];
        }
      for (int i = 0; i < 2; ++i) total[i] += of_quad_sum(sum[i]);

#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        const uint32_t a[4] = {
            pack<T>(scores[2 * j][0], scores[2 * j][1]), pack<T>(scores[2 * j][2], scores[2 * j][3]),
            pack<T>(scores[2 * j + 1][0], scores[2 * j + 1][1]), pack<T>(scores[2 * j + 1][2], scores[2 * j + 1][3])};
        const int key = j * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
          uint32_t b[4];
          load_transposed(b, &tiles.v[stage][key][n * 8 + lane / 16 * 8]);
          mma<T>(out[n], a, b[0], b[1]);
          mma<T>(out[n + 1], a, b[2], b[3]);
        }
      }
    }

#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!exists(i)) continue;
      const bool saw = total[i] != 0.0f;
      const float factor = saw ? 1.0f / total[i] : 0.0f;
      const int64_t to = static_cast<int64_t>(p.partial_begin[row_of(i)] + item.before) * p.heads + head_of(i);
      float* target = p.partial_out + to * D + 2 * t;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        target[n * 8] = out[n][2 * i] * factor;
        target[n * 8 + 1] = out[n][2 * i + 1] * factor;
      }
      if (t == 0) p.partial_lse[to] = saw ? top[i] + log2f(total[i]) : -INFINITY;
    }
  }
}

template <typename T, int D>
__global__ void merge_kernel(
    const float* partial_out, const float* partial_lse, const int32_t* begins, T* out, float* lse, int heads, int64_t queries) {
  const int64_t query = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (query >= queries) return;
  const int lane = threadIdx.x % 32;
  const int64_t row = query / heads, head = query % heads;
  float top = -INFINITY, total = 0.0f, sum[D / 32] = {};
  for (int64_t i = begins[row]; i < begins[row + 1]; ++i) {
    const int64_t which = i * heads + head;
    const float part = partial_lse[which];
    const float new_top = fmaxf(top, part);
    const float base = new_top == -INFINITY ? 0.0f : new_top;
    const float keep = exp2f(top - base), weight = exp2f(part - base);
    total = total * keep + weight;
    for (int d = 0; d < D / 32; ++d) sum[d] = sum[d] * keep + weight * partial_out[which * D + d * 32 + lane];
    top = new_top;
  }
  const bool saw = total != 0.0f;
  for (int d = 0; d < D / 32; ++d) out[query * D + d * 32 + lane] = static_cast<T>(saw ? sum[d] / total : 0.0f);
  if (lane == 0) lse[query] = saw ? (top + log2f(total)) * kLn2 : -INFINITY;
}

// Calls with a condition's value as a template argument.
template <typename F>
void with_flag(bool flag, F f) {
  flag ? f(std::true_type{}) : f(std::false_type{});
}

template <typename T, int D>
void launch(const Problem& p, bool softcap, dim3 grid, Tensor& out, Tensor& lse, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Tiles<T, D>);
  with_flag(p.window > 0, [&](auto window) {
    with_flag(softcap, [&](auto capped) {
      const auto kernel = partial_kernel<T, D, decltype(window)::value, decltype(capped)::value>;
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
      kernel<<<grid, kThreads, kBytes, stream>>>(p);
    });
  });
  check(cudaGetLastError());
  const int64_t queries = out.size(0) * p.heads;
  merge_kernel<T, D><<<static_cast<unsigned>((queries + 3) / 4), 128, 0, stream>>>(
      p.partial_out, p.partial_lse, p.partial_begin, static_cast<T*>(out.data_ptr()), static_cast<float*>(lse.data_ptr()),
      p.heads, queries);
  check(cudaGetLastError());
}

template <typename T>
void launch_by_dim(
    const Problem& p, int64_t dim, bool softcap, dim3 grid, Tensor& out, Tensor& lse, cudaStream_t stream) {
  switch (dim) {
    case 64:
      return launch<T, 64>(p, softcap, grid, out, lse, stream);
    case 128:
      return launch<T, 128>(p, softcap, grid, out, lse, stream);
    case 256:
      return launch<T, 256>(p, softcap, grid, out, lse, stream);
    default:
      STD_TORCH_CHECK(false, "head dimension ", dim, " is not one of 64, 128, 256");
  }
}

template <typename T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.data_ptr());
}

int log2_of(int64_t x) {
  int shift = 0;
  while (int64_t{1} << shift < x) ++shift;
  STD_TORCH_CHECK(int64_t{1} << shift == x, "the page size ", x, " is not a power of two");
  return shift;
}

void tree_decode(
    Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_ids, Tensor query_position, Tensor partial_begin, Tensor items,
    double scale, int64_t window, double softcap, int64_t programs, Tensor partial_out, Tensor partial_lse, Tensor out,
    Tensor lse) {
  const int kv_heads = static_cast<int>(k_pages.size(2)), heads = static_cast<int>(q.size(1));
  STD_TORCH_CHECK(heads / kv_heads <= kQueries, "a key head serves more than ", kQueries, " query heads");
  const bool capped = softcap > 0.0;
  const Problem p{
      q.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr(), data<int32_t>(page_ids), data<int32_t>(query_position),
      data<int32_t>(partial_begin), data<Item>(items), static_cast<float*>(partial_out.data_ptr()),
      static_cast<float*>(partial_lse.data_ptr()), q.stride(0), q.stride(1), k_pages.stride(0), k_pages.stride(1),
      k_pages.stride(2), log2_of(k_pages.size(1)), heads, heads / kv_heads, static_cast<int>(window),
      static_cast<float>((capped ? 2.0 / softcap : 1.0) * scale * kLog2E), static_cast<float>(softcap * kLog2E)};
  const OnDevice on(q);
  const dim3 grid(kv_heads, static_cast<unsigned>(programs));
  if (q.scalar_type() == ScalarType::BFloat16)
    launch_by_dim<__nv_bfloat16>(p, q.size(2), capped, grid, out, lse, on.stream());
  else
    launch_by_dim<__half>(p, q.size(2), capped, grid, out, lse, on.stream());
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cuda, m) {
  m.def(
      "tree_decode(Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_ids, Tensor query_position, Tensor partial_begin, "
      "Tensor items, float scale, int window, float softcap, int programs, Tensor(a!) partial_out, Tensor(b!) partial_lse, "
      "Tensor(c!) out, Tensor(d!) lse) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cuda, CUDA, m) {
  m.impl("tree_decode", TORCH_BOX(&tree_decode));
}
