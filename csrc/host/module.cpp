// Python face of the KV tree: module rolltree.engine.rollout.native._host. Arrays in are int64; a plan's arrays are int32.
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <string>

#include "arrays.h"
#include "kv_tree.h"

using rolltree::KvTree;

void bind_drafts(py::module_& m);

namespace {

py::tuple to_tuple(rolltree::Plan&& p) {
  return py::make_tuple(to_numpy(std::move(p.page_indptr)), to_numpy(std::move(p.page_ids)), to_numpy(std::move(p.node_offset)),
                        to_numpy(std::move(p.node_length)), to_numpy(std::move(p.node_position)),
                        to_numpy(std::move(p.row_begin)), to_numpy(std::move(p.row_end)));
}

py::tuple plan(const KvTree& tree, const Ids& nodes, const Ids& counts) {
  return to_tuple(tree.plan(nodes.data(), counts.data(), same_length(nodes, counts)));
}

py::tuple arrange(KvTree& tree, const Ids& nodes, const Ids& counts, const Ids& appended, int64_t spare, int64_t ahead) {
  same_length(counts, appended);
  rolltree::Arranged a = tree.arrange(nodes.data(), counts.data(), appended.data(), same_length(nodes, counts), spare, ahead);
  return py::make_tuple(to_numpy(std::move(a.order)), to_numpy(std::move(a.slots)), to_tuple(std::move(a.plan)));
}

// What `sample_dtype` begins with.
struct Record {
  int32_t token;
  float logprob, raw_logprob, entropy;
  int32_t version, kept;
};

// Writes one more record to each slot, offset[i] behind those there are, and counts it in the table's row; `columns` are the
// places of fill, position, length, segment_tokens and last_token in a row, all int64. A slot's samples come in order. False,
// and nothing is done, where the records have no room.
bool push_tokens(py::array table, const std::array<int64_t, 5>& columns, py::array records, const Ids& slots, const Ids& offset,
                 const Ids& token, const Floats& logprob, const Floats& raw_logprob, const Floats& entropy, int32_t version) {
  const int64_t n = same_length(slots, offset), row = table.itemsize(), record = records.itemsize();
  if (token.size() != n || logprob.size() != n || raw_logprob.size() != n || entropy.size() != n)
    throw std::invalid_argument("Every sample needs its token and its numbers.");
  if (table.ndim() != 1 || records.ndim() != 2 || table.shape(0) != records.shape(0) || !(table.flags() & py::array::c_style) ||
      !(records.flags() & py::array::c_style) || record < static_cast<int64_t>(sizeof(Record)))
    throw std::invalid_argument("The table and its records must be contiguous, with a row of records for each row.");
  char *rows = static_cast<char*>(table.mutable_data()), *first = static_cast<char*>(records.mutable_data());
  const int64_t width = records.shape(1), *slot = slots.data(), *behind = offset.data();
  const auto at = [&](int64_t i, int column) -> int64_t& { return *reinterpret_cast<int64_t*>(rows + slot[i] * row + columns[column]); };
  for (int64_t i = 0; i < n; ++i) {
    if (slot[i] < 0 || slot[i] >= table.shape(0)) throw std::invalid_argument("The table has no slot " + std::to_string(slot[i]) + ".");
    if (at(i, 0) + behind[i] >= width) return false;
  }
  for (int64_t i = 0; i < n; ++i) {
    const Record written{static_cast<int32_t>(token.data()[i]), logprob.data()[i], raw_logprob.data()[i], entropy.data()[i], version, 0};
    std::memcpy(first + (slot[i] * width + at(i, 0)) * record, &written, sizeof written);
    for (int column = 0; column < 4; ++column) ++at(i, column);
    at(i, 4) = token.data()[i];
  }
  return true;
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "Node table and page allocator of the KV tree; index of drafts.";
  py::register_exception<rolltree::KvExhausted>(m, "KvExhaustedError", PyExc_RuntimeError);
  m.def("push_tokens", &push_tokens, py::arg("table"), py::arg("columns"), py::arg("records"), py::arg("slots"), py::arg("offset"),
        py::arg("token"), py::arg("logprob"), py::arg("raw_logprob"), py::arg("entropy"), py::arg("version"));
  py::class_<KvTree>(m, "KvTree")
      .def(py::init<int, int>(), py::arg("num_pages"), py::arg("page_size"))
      .def("insert", [](KvTree& tree, int64_t key, const Tokens& tokens) { return tree.insert(key, tokens.data(), tokens.size()); },
           py::arg("key"), py::arg("tokens"))
      .def("extend",
           [](KvTree& tree, const Ids& nodes, const Ids& counts, const Tokens& tokens) {  // counts[i] tokens each
             const int64_t n = same_length(nodes, counts), *count = counts.data();
             if (tokens.size() != std::accumulate(count, count + n, int64_t{0}) || std::any_of(count, count + n, [](int64_t c) { return c < 0; }))
               throw std::invalid_argument("There must be as many tokens as the counts add up to.");
             const int32_t* next = tokens.data();
             for (int64_t i = 0; i < n; next += count[i++]) tree.extend(static_cast<int>(nodes.data()[i]), next, count[i]);
           },
           py::arg("nodes"), py::arg("counts"), py::arg("tokens"))
      .def("truncate",
           [](KvTree& tree, const Ids& nodes, const Ids& ends) {
             const int64_t n = same_length(nodes, ends);
             for (int64_t i = 0; i < n; ++i) tree.truncate(static_cast<int>(nodes.data()[i]), ends.data()[i]);
           },
           py::arg("nodes"), py::arg("ends"))
      .def("name",
           [](KvTree& tree, const Ids& nodes, const Ids& begins, const Ids& counts, const Tokens& tokens) {  // counts[i] each
             const int64_t n = same_length(nodes, counts), *count = counts.data();
             same_length(nodes, begins);
             if (tokens.size() != std::accumulate(count, count + n, int64_t{0}) || std::any_of(count, count + n, [](int64_t c) { return c < 0; }))
               throw std::invalid_argument("There must be as many tokens as the counts add up to.");
             const int32_t* next = tokens.data();
             for (int64_t i = 0; i < n; next += count[i++]) tree.name(static_cast<int>(nodes.data()[i]), begins.data()[i], next, count[i]);
           },
           py::arg("nodes"), py::arg("begins"), py::arg("counts"), py::arg("tokens"))
      .def("extend_by", [](KvTree& tree, int node, const Tokens& tokens) { tree.extend(node, tokens.data(), tokens.size()); },
           py::arg("node"), py::arg("tokens"))
      .def("missing",
           [](const KvTree& tree, int node) {
             rolltree::Missing runs = tree.missing(node);
             return py::make_tuple(runs.node, runs.begin, runs.count);
           },
           py::arg("node"))
      .def("tokens", [](const KvTree& tree, int node, int64_t begin, int64_t count) { return to_numpy(tree.tokens(node, begin, count)); },
           py::arg("node"), py::arg("begin"), py::arg("count"))
      .def("fork", &KvTree::fork, py::arg("node"), py::arg("n"))
      .def("rewind", &KvTree::rewind, py::arg("node"), py::arg("position"))
      .def("evict", &KvTree::evict, py::arg("node"))
      .def("evict_others",
           [](KvTree& tree, const Ids& keep, int64_t pages) { return tree.evict_others(keep.data(), keep.size(), pages); },
           py::arg("keep"), py::arg("pages"))
      .def("make_room", &KvTree::make_room, py::arg("pages"))
      .def("forget", &KvTree::forget)
      .def("record_drops", &KvTree::record_drops)
      .def("take_dropped",
           [](KvTree& tree) {
             rolltree::Dropped d = tree.take_dropped();
             return py::make_tuple(to_numpy(std::move(d.serial)), to_numpy(std::move(d.position)), to_numpy(std::move(d.count)),
                                   to_numpy(std::move(d.slots)));
           })
      .def("start_counting", &KvTree::start_counting)
      .def("release", &KvTree::release, py::arg("node"))
      .def("keep", &KvTree::keep, py::arg("node"), py::arg("owner"))
      .def("let_go", &KvTree::let_go, py::arg("owner"))
      .def("let_go_all", &KvTree::let_go_all)
      .def("append",
           [](KvTree& tree, const Ids& nodes, const Ids& counts) {
             return to_numpy(tree.append(nodes.data(), counts.data(), same_length(nodes, counts)));
           },
           py::arg("nodes"), py::arg("counts"))
      .def("pages_needed",
           [](const KvTree& tree, const Ids& nodes, const Ids& counts) {
             return tree.pages_needed(nodes.data(), counts.data(), same_length(nodes, counts));
           },
           py::arg("nodes"), py::arg("counts"))
      .def("depth_first", [](const KvTree& tree, const Ids& nodes) { return to_numpy(tree.depth_first(nodes.data(), nodes.size())); },
           py::arg("nodes"))
      .def("plan", &plan, py::arg("nodes"), py::arg("counts"))
      .def("arrange", &arrange, py::arg("nodes"), py::arg("counts"), py::arg("appended"), py::arg("spare"),
           py::arg("ahead") = 0)
      .def("length", &KvTree::length, py::arg("node"))
      .def("lengths",
           [](const KvTree& tree, const Ids& nodes) {
             std::vector<int64_t> lengths(nodes.size());
             for (size_t i = 0; i < lengths.size(); ++i) lengths[i] = tree.length(static_cast<int>(nodes.data()[i]));
             return to_numpy(std::move(lengths));
           },
           py::arg("nodes"))
      .def("position", &KvTree::position, py::arg("node"))
      .def("end", &KvTree::end, py::arg("node"))
      .def("parent", &KvTree::parent, py::arg("node"))
      .def("serial", &KvTree::serial, py::arg("node"))
      .def("refs", &KvTree::refs, py::arg("node"))
      .def("check", &KvTree::check)
      .def_property_readonly("num_pages", &KvTree::num_pages)
      .def_property_readonly("page_size", &KvTree::page_size)
      .def_property_readonly("free_pages", &KvTree::free_pages)
      .def_property_readonly("nodes", &KvTree::nodes)
      .def_property_readonly("keys", &KvTree::keys)
      .def_property_readonly("reused", &KvTree::reused)
      .def_property_readonly("peak_pages", &KvTree::peak_pages)
      .def_property_readonly("peak_keys", &KvTree::peak_keys);
  bind_drafts(m);
}
