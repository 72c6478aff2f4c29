// Python face of the KV tree and of the index of drafts: module rolltree.engine.rollout._host. Arrays in are int64; a plan's
// arrays are int32.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>

#include "draft_index.h"
#include "kv_tree.h"

namespace py = pybind11;
using rolltree::DraftIndex;
using rolltree::KvTree;
using Ids = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;
using Tokens = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;
using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;

namespace {

template <typename T>
py::array_t<T> to_numpy(std::vector<T>&& values) {
  auto owner = std::make_unique<std::vector<T>>(std::move(values));
  T* data = owner->data();
  const auto size = static_cast<py::ssize_t>(owner->size());
  py::capsule free(owner.release(), [](void* p) { delete static_cast<std::vector<T>*>(p); });
  return py::array_t<T>(size, data, free);
}

int64_t same_length(const py::array& nodes, const py::array& counts) {
  if (nodes.ndim() != 1 || counts.ndim() != 1 || nodes.size() != counts.size())
    throw std::invalid_argument("nodes and counts must be vectors of one length.");
  return nodes.size();
}

void check_slots(const Ids& slots, const Ids& column, const Ids& other) {
  const int64_t known = same_length(column, other), *slot = slots.data();
  if (std::any_of(slot, slot + slots.size(), [&](int64_t s) { return s < 0 || s >= known; }))
    throw std::invalid_argument("Every slot needs its columns, of one length.");
}

py::tuple to_tuple(rolltree::Plan&& p) {
  return py::make_tuple(to_numpy(std::move(p.page_indptr)), to_numpy(std::move(p.page_ids)), to_numpy(std::move(p.node_offset)),
                        to_numpy(std::move(p.node_length)), to_numpy(std::move(p.node_position)),
                        to_numpy(std::move(p.row_begin)), to_numpy(std::move(p.row_end)));
}

py::tuple plan(const KvTree& tree, const Ids& nodes, const Ids& counts) {
  return to_tuple(tree.plan(nodes.data(), counts.data(), same_length(nodes, counts)));
}

py::tuple arrange(KvTree& tree, const Ids& nodes, const Ids& counts, const Ids& appended, int64_t spare) {
  same_length(counts, appended);
  rolltree::Arranged a = tree.arrange(nodes.data(), counts.data(), appended.data(), same_length(nodes, counts), spare);
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

py::tuple propose(const DraftIndex& index, const Ids& slots, const Ids& segment_end, const Ids& length, const Ids& forks,
                  const Ids& seed, const Floats& temperature, int64_t most, const Floats& rates, const Ids& limits,
                  float least) {
  check_slots(slots, segment_end, length);
  if (forks.size() != length.size() || seed.size() != length.size() || temperature.size() != length.size())
    throw std::invalid_argument("The columns of the branches must be of one length.");
  if (rates.size() != DraftIndex::kKinds || limits.size() != DraftIndex::kKinds)
    throw std::invalid_argument("propose needs a rate and a limit of each kind.");
  const rolltree::Branches branches{segment_end.data(), length.data(), forks.data(), seed.data(), temperature.data()};
  rolltree::Drafted d = index.propose(slots.data(), slots.size(), branches, most, rates.data(), limits.data(), least);
  return py::make_tuple(to_numpy(std::move(d.count)), to_numpy(std::move(d.token)), to_numpy(std::move(d.kind)),
                        to_numpy(std::move(d.survival)));
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "Node table and page allocator of the KV tree; index of texts for drafts.";
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
      .def("arrange", &arrange, py::arg("nodes"), py::arg("counts"), py::arg("appended"), py::arg("spare"))
      .def("length", &KvTree::length, py::arg("node"))
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
  py::class_<DraftIndex>(m, "DraftIndex")
      .def(py::init<int64_t>(), py::arg("capacity"))
      .def("begin",
           [](DraftIndex& index, int64_t slot, int64_t scope, int64_t group, int64_t branch, int64_t version, int64_t position,
              const Tokens& before) {
             index.begin(slot, scope, group, branch, version, position, before.data(), before.size());
           },
           py::arg("slot"), py::arg("scope"), py::arg("group"), py::arg("branch"), py::arg("version"), py::arg("position"),
           py::arg("before"))
      .def("append",
           [](DraftIndex& index, const Ids& slots, const Tokens& tokens) {
             if (slots.size() != tokens.size()) throw std::invalid_argument("slots and tokens must be of one length.");
             for (py::ssize_t i = 0; i < slots.size(); ++i) index.append(slots.data()[i], tokens.data()[i]);
           },
           py::arg("slots"), py::arg("tokens"))
      .def("follow",
           [](DraftIndex& index, const Ids& slots, const Ids& tokens, const Ids& branch, const Ids& position) {
             const int64_t n = same_length(slots, tokens);
             check_slots(slots, branch, position);
             return index.follow(slots.data(), tokens.data(), n, branch.data(), position.data());
           },
           py::arg("slots"), py::arg("tokens"), py::arg("branch"), py::arg("position"))
      .def("behind",
           [](const DraftIndex& index, const Ids& slots, const Ids& branch, const Ids& position) {
             check_slots(slots, branch, position);
             return index.behind(slots.data(), slots.size(), branch.data(), position.data());
           },
           py::arg("slots"), py::arg("branch"), py::arg("position"))
      .def("position", &DraftIndex::position, py::arg("slot"), py::arg("branch"))
      .def("add",
           [](DraftIndex& index, int64_t scope, int64_t group, int64_t version, const Tokens& before, const Tokens& tokens) {
             index.add(scope, group, version, before.data(), before.size(), tokens.data(), tokens.size());
           },
           py::arg("scope"), py::arg("group"), py::arg("version"), py::arg("before"), py::arg("tokens"))
      .def("propose", &propose, py::arg("slots"), py::arg("segment_end"), py::arg("length"), py::arg("forks"), py::arg("seed"),
           py::arg("temperature"), py::arg("most"), py::arg("rates"), py::arg("limits"), py::arg("least"))
      .def("forget", &DraftIndex::forget, py::arg("version"))
      .def("knows", &DraftIndex::knows, py::arg("slot"))
      .def("check", &DraftIndex::check)
      .def_property_readonly("tokens", &DraftIndex::tokens)
      .def_property_readonly("capacity", &DraftIndex::capacity)
      .def_readonly_static("CONTEXT", &DraftIndex::kContext)
      .def_readonly_static("WALK", &DraftIndex::kWalk)
      .def_readonly_static("BYTES_A_TOKEN", &DraftIndex::kBytesAToken)
      .def_property_readonly_static("KINDS", [](const py::object&) {
        return py::make_tuple(DraftIndex::kSources + 0, DraftIndex::kMatches + 0, DraftIndex::kShares + 0);
      });
}
