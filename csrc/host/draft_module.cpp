// Python bindings of the index of drafts. Columns are indexed by slot, and may be strided.
#include <pybind11/stl.h>

#include <algorithm>

#include "arrays.h"
#include "draft_index.h"

using rolltree::DraftIndex;

namespace {

template <typename T>
using Column = py::array_t<T, py::array::forcecast>;

// Returns the slots' entries of a column.
template <typename T>
std::vector<T> of(const Ids& slots, const Column<T>& column) {
  if (slots.ndim() != 1 || column.ndim() != 1) throw std::invalid_argument("Slots and their columns must be vectors.");
  const auto all = column.template unchecked<1>();
  std::vector<T> own(slots.size());
  std::transform(slots.data(), slots.data() + slots.size(), own.begin(), [&](int64_t slot) {
    if (slot < 0 || slot >= all.shape(0)) throw std::invalid_argument("Every slot needs its columns.");
    return all(slot);
  });
  return own;
}

py::tuple propose(const DraftIndex& index, const Ids& slots, const Column<int64_t>& segment_end, const Column<int64_t>& length,
                  const Column<int64_t>& forks, const Column<int64_t>& seed, const Column<float>& temperature, int64_t most) {
  const auto ends = of(slots, segment_end), lengths = of(slots, length), forking = of(slots, forks), seeds = of(slots, seed);
  const auto temperatures = of(slots, temperature);
  auto drafted = index.propose({slots.data(), ends.data(), lengths.data(), forking.data(), seeds.data(), temperatures.data()},
                               slots.size(), most);
  return py::make_tuple(to_numpy(std::move(drafted.count)), to_numpy(std::move(drafted.token)));
}

// tokens[slot, : fill[slot]] are the last ones of a slot's branch, unless it is to fork: its node may then be another one.
std::vector<int64_t> follow(DraftIndex& index, const Ids& slots, const Column<int64_t>& branch, const Column<int64_t>& position,
                            const Column<int64_t>& forks, const Column<int64_t>& fill,
                            const py::array_t<int32_t, py::array::forcecast>& tokens) {
  const auto branches = of(slots, branch), positions = of(slots, position), forking = of(slots, forks);
  auto own = of(slots, fill);
  if (tokens.ndim() != 2) throw std::invalid_argument("Every slot needs a row of tokens.");
  std::vector<const int32_t*> last(slots.size());
  for (size_t i = 0; i < last.size(); ++i) {
    if (slots.data()[i] >= tokens.shape(0) || own[i] < 0 || own[i] > tokens.shape(1))
      throw std::invalid_argument("Every slot needs a row of tokens, as long as its branch has filled it.");
    if (forking[i] > 0) own[i] = 0;
    last[i] = own[i] ? tokens.data(slots.data()[i], own[i] - 1) : nullptr;
  }
  return index.follow(slots.data(), slots.size(), branches.data(), positions.data(), own.data(), last.data(), tokens.strides(1));
}

}  // namespace

void bind_drafts(py::module_& m) {
  py::class_<DraftIndex>(m, "DraftIndex")
      .def(py::init<int64_t>(), py::arg("capacity"))
      .def("begin",
           [](DraftIndex& index, const Ids& slots, int64_t scope, const Ids& branch, int64_t position, const Tokens& before) {
             index.begin(slots.data(), same_length(slots, branch), scope, branch.data(), position, before.data(), before.size());
           },
           py::arg("slots"), py::arg("scope"), py::arg("branch"), py::arg("position"), py::arg("before"))
      .def("append",
           [](DraftIndex& index, const Ids& slots, const Tokens& tokens) {
             if (slots.size() != tokens.size()) throw std::invalid_argument("slots and tokens must be of one length.");
             for (py::ssize_t i = 0; i < slots.size(); ++i) index.append(slots.data()[i], tokens.data()[i]);
           },
           py::arg("slots"), py::arg("tokens"))
      .def("follow", &follow, py::arg("slots"), py::arg("branch"), py::arg("position"), py::arg("forks"),
           py::arg("fill"), py::arg("tokens"))
      .def("position", &DraftIndex::position, py::arg("slot"), py::arg("branch"))
      .def("add",
           [](DraftIndex& index, int64_t scope, const Tokens& before, const Tokens& tokens) {
             index.add(scope, before.data(), before.size(), tokens.data(), tokens.size());
           },
           py::arg("scope"), py::arg("before"), py::arg("tokens"))
      .def("propose", &propose, py::arg("slots"), py::arg("segment_end"), py::arg("length"), py::arg("forks"), py::arg("seed"),
           py::arg("temperature"), py::arg("most"))
      .def("knows", &DraftIndex::knows, py::arg("slot"))
      .def("check", &DraftIndex::check)
      .def_property_readonly("tokens", &DraftIndex::tokens)
      .def_property_readonly("capacity", &DraftIndex::capacity)
      .def_readonly_static("CONTEXT", &DraftIndex::kContext)
      .def_readonly_static("WALK", &DraftIndex::kWalk)
      .def_readonly_static("BYTES_A_TOKEN", &DraftIndex::kBytesAToken);
}
