// Decode attention over a paged tree in bf16 and fp16 (kernels/tree_decode/reference.py defines it).
//
//   partial  a block takes item after item: 512 keys of a node, 64 (row, head) queries below it, one key head. Keys and
//            values go through shared memory, double-buffered; each of four warps multiplies 16 queries with mma.sync.
//   merge    a warp adds one (row, head)'s partials in the order of its path, weighted by their log-sum-exps.
//
// The work list is kernels/tree_decode/work.py's. Chunks are counted from a node's first key and partials are added in a
// fixed order, so a row's bits do not depend on the other rows.
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
#include <cstdint>

#include "launch.cuh"
#include "tensor_core.cuh"

namespace {

using namespace rolltree;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kQueries = 16 * kWarps;  // of an item
constexpr int kChunk = 512;            // keys of an item
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

struct Problem {
  const void *q, *k_pages, *v_pages;
  const int32_t *page_indptr, *page_ids, *node_offset, *node_length, *node_position, *row_begin, *row_end, *query_position;
  const int32_t* item_end;
  const int64_t* partial_base;
  float *partial_out, *partial_lse;
  int64_t q_row, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head;
  int nodes, page, heads, group, window;  // window 0: none
  float scale, softcap;                   // softcap 0: none
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
  static constexpr int kStride = D + 8;  // 16 bytes more than a row, so that eight rows lie in different banks
  T k[2][kKeys][kStride];
  T v[2][kKeys][kStride];
};

// Begins the copy of a tile of the node's keys, from `begin`, into one half of the buffers.
template <typename T, int D>
__device__ void fetch(Tiles<T, D>& tiles, int half, const Problem& p, int node, int begin, int64_t kv_head) {
  constexpr int kPieces = D / 8;  // of 16 bytes in a row
  constexpr int kKeys = Tiles<T, D>::kKeys;
  const int length = p.node_length[node], offset = p.node_offset[node];
  const int32_t* pages = p.page_ids + p.page_indptr[node];
  for (int i = threadIdx.x; i < kKeys * kPieces; i += kThreads) {
    const int key = i / kPieces, column = i % kPieces * 8;
    const int index = begin + key;
    const bool held = index < length;
    const int slot = offset + (held ? index : 0);
    const int64_t page = pages[slot / p.page], within = slot % p.page;
    const T* from_k = static_cast<const T*>(p.k_pages) + page * p.k_page + within * p.k_slot + kv_head * p.k_head + column;
    const T* from_v = static_cast<const T*>(p.v_pages) + page * p.v_page + within * p.v_slot + kv_head * p.v_head + column;
    copy_async(&tiles.k[half][key][column], from_k, held ? 16 : 0);
    copy_async(&tiles.v[half][key][column], from_v, held ? 16 : 0);
  }
  commit_copies();
}

template <typename T, int D>
__global__ void __launch_bounds__(kThreads) partial_kernel(const Problem p) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& tiles = *reinterpret_cast<Tiles<T, D>*>(memory);
  constexpr int kSteps = D / 16, kKeys = Tiles<T, D>::kKeys;
  const int64_t kv_head = blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rows_a_tile = kQueries / p.group;
  const int items = p.item_end[p.nodes - 1];
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    int node = 0;
    for (int last = p.nodes - 1; node < last;) {
      const int middle = (node + last) / 2;
      if (p.item_end[middle] > item)
        last = middle;
      else
        node = middle + 1;
    }
    const int local = item - (node > 0 ? p.item_end[node - 1] : 0);
    const int first_row = p.row_begin[node], stop_row = p.row_end[node];
    const int row_tiles = (stop_row - first_row + rows_a_tile - 1) / rows_a_tile;
    const int chunk = local / row_tiles, length = p.node_length[node], position = p.node_position[node];

    // the two queries of this thread: rows g and g + 8 of the warp's sixteen
    const T* query[2];
    int row[2], head[2], at[2];
    bool live[2];
    for (int i = 0; i < 2; ++i) {
      const int within = warp * 16 + g + 8 * i;
      row[i] = first_row + (local % row_tiles) * rows_a_tile + within / p.group;
      head[i] = static_cast<int>(kv_head) * p.group + within % p.group;
      live[i] = within / p.group < rows_a_tile && row[i] < stop_row;
      at[i] = live[i] ? p.query_position[row[i]] : -1;
      query[i] = static_cast<const T*>(p.q) + (live[i] ? row[i] * p.q_row + head[i] * p.q_head : 0);
    }
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
    float out[D / 8][4] = {};

    const int begin = chunk * kChunk, end = min(begin + kChunk, length);
    fetch<T, D>(tiles, 0, p, node, begin, kv_head);
    for (int tile = begin, half = 0; tile < end; tile += kKeys, half ^= 1) {
      if (tile + kKeys < end) {
        fetch<T, D>(tiles, half ^ 1, p, node, tile + kKeys, kv_head);
        wait_for_copies<1>();
      } else {
        wait_for_copies<0>();
      }
      __syncthreads();

      float scores[kKeys / 8][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int column = step * 16 + 2 * t;
        uint32_t a[4];
        for (int i = 0; i < 2; ++i) {
          a[i] = live[i] ? *reinterpret_cast<const uint32_t*>(query[i] + column) : 0u;
          a[i + 2] = live[i] ? *reinterpret_cast<const uint32_t*>(query[i] + column + 8) : 0u;
        }
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          const T* key = &tiles.k[half][n * 8 + g][column];
          mma<T>(scores[n], a, *reinterpret_cast<const uint32_t*>(key), *reinterpret_cast<const uint32_t*>(key + 8));
        }
      }

      float best[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = e / 2, index = tile + n * 8 + 2 * t + e % 2;
          float s = scores[n][e] * p.scale;
          if (p.softcap > 0.0f) s = p.softcap * (1.0f - 2.0f / (exp2f(2.0f * kLog2E * s / p.softcap) + 1.0f));  // tanh
          const int age = at[i] - (position + index);
          const bool seen = live[i] && index < end && age >= 0 && (p.window == 0 || age < p.window);
          scores[n][e] = seen ? s * kLog2E : -INFINITY;
          best[i] = fmaxf(best[i], scores[n][e]);
        }
      }
      float base[2];
      for (int i = 0; i < 2; ++i) {
        const float new_top = fmaxf(top[i], of_quad_max(best[i]));
        base[i] = new_top == -INFINITY ? 0.0f : new_top;
        const float keep = exp2f(top[i] - base[i]);
        top[i] = new_top;
        total[i] *= keep;
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
      for (int k = 0; k < kKeys / 16; ++k) {
        const uint32_t a[4] = {
            pack<T>(scores[2 * k][0], scores[2 * k][1]), pack<T>(scores[2 * k][2], scores[2 * k][3]),
            pack<T>(scores[2 * k + 1][0], scores[2 * k + 1][1]), pack<T>(scores[2 * k + 1][2], scores[2 * k + 1][3])};
        const int key = k * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
          uint32_t b[4];
          load_transposed(b, &tiles.v[half][key][n * 8 + lane / 16 * 8]);
          mma<T>(out[n], a, b[0], b[1]);
          mma<T>(out[n + 1], a, b[2], b[3]);
        }
      }
      __syncthreads();  // before the next tile's copy overwrites this half
    }

    for (int i = 0; i < 2; ++i) {
      if (!live[i]) continue;
      const bool saw = total[i] != 0.0f;
      const int64_t to = p.partial_base[node] + static_cast<int64_t>(chunk) * (stop_row - first_row) + row[i] - first_row;
      float* target = p.partial_out + (to * p.heads + head[i]) * D;
      for (int n = 0; n < D / 8; ++n)
        for (int e = 0; e < 2; ++e) target[n * 8 + 2 * t + e] = saw ? out[n][2 * i + e] / total[i] : 0.0f;
      if (t == 0) p.partial_lse[to * p.heads + head[i]] = saw ? top[i] + log2f(total[i]) : -INFINITY;
    }
  }
}

template <typename T, int D>
__global__ void merge_kernel(
    const float* partial_out, const float* partial_lse, const int64_t* ids, const int64_t* begins, T* out, float* lse, int heads,
    int64_t queries) {
  const int64_t query = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (query >= queries) return;
  const int lane = threadIdx.x % 32;
  const int64_t row = query / heads, head = query % heads;
  float top = -INFINITY, total = 0.0f, sum[D / 32] = {};
  for (int64_t i = begins[row]; i < begins[row + 1]; ++i) {
    const int64_t which = ids[i] * heads + head;
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

template <typename T, int D>
void launch(
    const Problem& p, int kv_heads, int programs, const Tensor& partial_ids, const Tensor& partial_begin, Tensor& out, Tensor& lse,
    cudaStream_t stream) {
  constexpr int kBytes = sizeof(Tiles<T, D>);
  check(cudaFuncSetAttribute(partial_kernel<T, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const dim3 grid(programs, kv_heads);
  partial_kernel<T, D><<<grid, kThreads, kBytes, stream>>>(p);
  check(cudaGetLastError());
  const int64_t queries = out.size(0) * p.heads;
  merge_kernel<T, D><<<static_cast<unsigned>((queries + 3) / 4), 128, 0, stream>>>(
      p.partial_out, p.partial_lse, static_cast<const int64_t*>(partial_ids.data_ptr()),
      static_cast<const int64_t*>(partial_begin.data_ptr()), static_cast<T*>(out.data_ptr()),
      static_cast<float*>(lse.data_ptr()), p.heads, queries);
  check(cudaGetLastError());
}

template <typename T>
void launch_by_dim(
    const Problem& p, int64_t dim, int kv_heads, int programs, const Tensor& ids, const Tensor& begins, Tensor& out, Tensor& lse,
    cudaStream_t stream) {
  switch (dim) {
    case 64:
      return launch<T, 64>(p, kv_heads, programs, ids, begins, out, lse, stream);
    case 128:
      return launch<T, 128>(p, kv_heads, programs, ids, begins, out, lse, stream);
    case 256:
      return launch<T, 256>(p, kv_heads, programs, ids, begins, out, lse, stream);
    default:
      STD_TORCH_CHECK(false, "head dimension ", dim, " is not one of 64, 128, 256");
  }
}

template <typename T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.data_ptr());
}

void tree_decode(
    Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_indptr, Tensor page_ids, Tensor node_offset, Tensor node_length,
    Tensor node_position, Tensor row_begin, Tensor row_end, Tensor query_position, Tensor item_end, Tensor partial_base,
    Tensor partial_ids, Tensor partial_begin, double scale, int64_t window, double softcap, int64_t programs, Tensor partial_out,
    Tensor partial_lse, Tensor out, Tensor lse) {
  const int kv_heads = static_cast<int>(k_pages.size(2)), heads = static_cast<int>(q.size(1));
  STD_TORCH_CHECK(heads / kv_heads <= kQueries, "a key head serves more than ", kQueries, " query heads");
  const Problem p{
      q.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr(), data<int32_t>(page_indptr), data<int32_t>(page_ids),
      data<int32_t>(node_offset), data<int32_t>(node_length), data<int32_t>(node_position), data<int32_t>(row_begin),
      data<int32_t>(row_end), data<int32_t>(query_position), data<int32_t>(item_end), data<int64_t>(partial_base),
      static_cast<float*>(partial_out.data_ptr()), static_cast<float*>(partial_lse.data_ptr()), q.stride(0), q.stride(1),
      k_pages.stride(0), k_pages.stride(1), k_pages.stride(2), v_pages.stride(0), v_pages.stride(1), v_pages.stride(2),
      static_cast<int>(node_length.numel()), static_cast<int>(k_pages.size(1)), heads, heads / kv_heads,
      static_cast<int>(window), static_cast<float>(scale), static_cast<float>(softcap)};
  const OnDevice on(q);
  const int blocks = static_cast<int>(programs);
  if (q.scalar_type() == ScalarType::BFloat16)
    launch_by_dim<__nv_bfloat16>(p, q.size(2), kv_heads, blocks, partial_ids, partial_begin, out, lse, on.stream());
  else
    launch_by_dim<__half>(p, q.size(2), kv_heads, blocks, partial_ids, partial_begin, out, lse, on.stream());
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cuda, m) {
  m.def(
      "tree_decode(Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_indptr, Tensor page_ids, Tensor node_offset, Tensor "
      "node_length, Tensor node_position, Tensor row_begin, Tensor row_end, Tensor query_position, Tensor item_end, Tensor "
      "partial_base, Tensor partial_ids, Tensor partial_begin, float scale, int window, float softcap, int programs, "
      "Tensor(a!) partial_out, Tensor(b!) partial_lse, Tensor(c!) out, Tensor(d!) lse) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cuda, CUDA, m) {
  m.impl("tree_decode", TORCH_BOX(&tree_decode));
}
