// Decode attention over a paged tree, for others than its op: see tree_decode.cpp.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace rolltree {

std::tuple<torch::stable::Tensor, torch::stable::Tensor> tree_decode(
    const torch::stable::Tensor& q, const torch::stable::Tensor& k_pages, const torch::stable::Tensor& v_pages,
    const torch::stable::Tensor& page_indptr, const torch::stable::Tensor& page_ids, const torch::stable::Tensor& node_offset,
    const torch::stable::Tensor& node_length, const torch::stable::Tensor& node_position, const torch::stable::Tensor& row_begin,
    const torch::stable::Tensor& row_end, const torch::stable::Tensor& query_position, double scale,
    std::optional<int64_t> window, std::optional<double> softcap);

}  // namespace rolltree
