// Python face of the KV tree: module rolltree.engine.rollout._host. Arrays in are int64; a plan's arrays are int32.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>

#include "kv_tree.h"

namespace py = pybind11;
using rolltree::KvTree;
using Ids = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;
using Tokens = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;

namespace {

template <typename T>
py::array_t<T> to_numpy(std::vector<T>&& values) {
  auto owner = std::make_unique<std::vector<T>>(std::move(values));
  T* data = owner->data();
  const auto size = static_cast<py::ssize_t>(owner->size());
  py::capsule free(owner.release(), [](void* p) { delete static_cast<std::vector<T>*>(p); });
  return py::array_t<T>(size, data, free);
}

int64_t same_length(const Ids& nodes, const Ids& counts) {
  if (nodes.ndim() != 1 || counts.ndim() != 1 || nodes.size() != counts.size())
    throw std::invalid_argument("nodes and counts must be vectors of one length.");
  return nodes.size();
}

py::tuple plan(const KvTree& tree, const Ids& nodes, const Ids& counts) {
  rolltree::Plan p = tree.plan(nodes.data(), counts.data(), same_length(nodes, counts));
  return py::make_tuple(to_numpy(std::move(p.page_indptr)), to_numpy(std::move(p.page_ids)), to_numpy(std::move(p.node_offset)),
                        to_numpy(std::move(p.node_length)), to_numpy(std::move(p.node_position)),
                        to_numpy(std::move(p.row_begin)), to_numpy(std::move(p.row_end)));
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "Node table and page allocator of the KV tree.";
  py::register_exception<rolltree::KvExhausted>(m, "KvExhaustedError", PyExc_RuntimeError);
  py::class_<KvTree>(m, "KvTree")
      .def(py::init<int, int>(), py::arg("num_pages"), py::arg("page_size"))
      .def("insert", [](KvTree& tree, int64_t key, const Tokens& tokens) { return tree.insert(key, tokens.data(), tokens.size()); },
           py::arg("key"), py::arg("tokens"))
      .def("extend",
           [](KvTree& tree, const Ids& nodes, const Tokens& tokens) {  // one token each
             if (nodes.size() != tokens.size()) throw std::invalid_argument("nodes and tokens must be of one length.");
             for (py::ssize_t i = 0; i < nodes.size(); ++i) tree.extend(static_cast<int>(nodes.at(i)), &tokens.at(i), 1);
           },
           py::arg("nodes"), py::arg("tokens"))
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
}
