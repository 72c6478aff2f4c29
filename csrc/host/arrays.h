// Arrays between numpy and C++.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

namespace py = pybind11;
using Ids = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;
using Tokens = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;
using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Flags = py::array_t<bool, py::array::c_style | py::array::forcecast>;

template <typename T>
py::array_t<T> to_numpy(std::vector<T>&& values) {
  auto owner = std::make_unique<std::vector<T>>(std::move(values));
  T* data = owner->data();
  const auto size = static_cast<py::ssize_t>(owner->size());
  py::capsule free(owner.release(), [](void* p) { delete static_cast<std::vector<T>*>(p); });
  return py::array_t<T>(size, data, free);
}

inline int64_t same_length(const py::array& nodes, const py::array& counts) {
  if (nodes.ndim() != 1 || counts.ndim() != 1 || nodes.size() != counts.size())
    throw std::invalid_argument("nodes and counts must be vectors of one length.");
  return nodes.size();
}
