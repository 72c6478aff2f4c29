// Python face of drafts: their index, what they cost and bring, what of them stands. Columns are by slot, and may be strided.
#include <pybind11/stl.h>

#include <algorithm>
#include <numeric>

#include "arrays.h"
#include "draft_index.h"
#include "drafts.h"
#include "step_cost.h"

using rolltree::Acceptance;
using rolltree::DraftIndex;
using rolltree::Drafted;
using rolltree::Fit;
using rolltree::StepCost;

namespace {

template <typename T>
using Column = py::array_t<T, py::array::forcecast>;

// The slots' entries of a column.
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

std::vector<int64_t> to_vector(const Ids& ids) { return {ids.data(), ids.data() + ids.size()}; }

py::array_t<bool> to_mask(const std::vector<uint8_t>& flags) {
  py::array_t<bool> mask(static_cast<py::ssize_t>(flags.size()));
  std::copy(flags.begin(), flags.end(), mask.mutable_data());
  return mask;
}

template <typename T>
py::array_t<T> copied(const T* values, size_t n) {
  return py::array_t<T>(static_cast<py::ssize_t>(n), values);
}

Drafted drafted(const Ids& slot, const Ids& count, const Ids& token, const Ids& kind, const Floats& survival) {
  Drafted d{to_vector(slot), to_vector(count), to_vector(token), to_vector(kind), {survival.data(), survival.data() + survival.size()}};
  if (d.slot.size() != d.count.size() || d.token.size() != d.kind.size() || d.token.size() != d.survival.size() ||
      std::any_of(d.slot.begin(), d.slot.end(), [](int64_t slot) { return slot < 0; }) ||
      std::any_of(d.count.begin(), d.count.end(), [](int64_t count) { return count < 0; }) ||
      std::accumulate(d.count.begin(), d.count.end(), int64_t{0}) != static_cast<int64_t>(d.token.size()) ||
      std::any_of(d.kind.begin(), d.kind.end(), [](int64_t kind) { return kind < 0 || kind >= Acceptance::kKinds; }))
    throw std::invalid_argument("A draft is a slot and a count for each branch, and a token, a kind and a survival for each token.");
  return d;
}

Drafted propose(const DraftIndex& index, const Ids& slots, const Column<int64_t>& segment_end, const Column<int64_t>& length,
                const Column<int64_t>& forks, const Column<int64_t>& seed, const Column<float>& temperature, int64_t most,
                const Floats& rates, const Ids& limits, float least) {
  if (rates.size() != DraftIndex::kKinds || limits.size() != DraftIndex::kKinds)
    throw std::invalid_argument("propose needs a rate and a limit of each kind.");
  const auto ends = of(slots, segment_end), lengths = of(slots, length), forking = of(slots, forks), seeds = of(slots, seed);
  const auto temperatures = of(slots, temperature);
  return index.propose({slots.data(), ends.data(), lengths.data(), forking.data(), seeds.data(), temperatures.data()},
                       slots.size(), most, rates.data(), limits.data(), least);
}

// Of a slot's branch tokens[slot, : fill[slot]] are the last, unless it is to fork: then its node may be another one.
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

double choose(const Acceptance& acceptance, Drafted& draft, const Column<int64_t>& length, const Fit& fit, int64_t others,
              int64_t room, double look) {
  if (draft.slot.empty()) throw std::invalid_argument("A draft of no branch leaves nothing to choose from.");
  const Ids slots(static_cast<py::ssize_t>(draft.slot.size()), draft.slot.data());
  return acceptance.choose(draft, of(slots, length).data(), fit, others, room, look);
}

py::tuple cut(const Ids& counts, const Ids& tokens, const Flags& ends, const Ids& most, int64_t room) {
  same_length(counts, most), same_length(tokens, ends);
  auto count = to_vector(counts), token = to_vector(tokens);
  if (std::accumulate(count.begin(), count.end(), int64_t{0}) != tokens.size())
    throw std::invalid_argument("There must be as many tokens as the counts add up to.");
  rolltree::cut(count, token, ends.data(), most.data(), room);
  return py::make_tuple(to_numpy(std::move(count)), to_numpy(std::move(token)));
}

}  // namespace

void bind_drafts(py::module_& m) {
  py::class_<Drafted>(m, "Drafted")
      .def(py::init(&drafted), py::arg("slot"), py::arg("count"), py::arg("token"), py::arg("kind"), py::arg("survival"))
      .def("__len__", [](const Drafted& d) { return d.token.size(); })
      .def_property_readonly("slot", [](const Drafted& d) { return copied(d.slot.data(), d.slot.size()); })
      .def_property_readonly("count", [](const Drafted& d) { return copied(d.count.data(), d.count.size()); })
      .def_property_readonly("token", [](const Drafted& d) { return copied(d.token.data(), d.token.size()); })
      .def_property_readonly("kind", [](const Drafted& d) { return copied(d.kind.data(), d.kind.size()); })
      .def_property_readonly("survival", [](const Drafted& d) { return copied(d.survival.data(), d.survival.size()); });
  py::class_<DraftIndex>(m, "DraftIndex")
      .def(py::init<int64_t>(), py::arg("capacity"))
      .def("begin",
           [](DraftIndex& index, const Ids& slots, int64_t scope, int64_t group, const Ids& branch, int64_t version,
              int64_t position, const Tokens& before) {
             index.begin(slots.data(), same_length(slots, branch), scope, group, branch.data(), version, position, before.data(),
                         before.size());
           },
           py::arg("slots"), py::arg("scope"), py::arg("group"), py::arg("branch"), py::arg("version"), py::arg("position"),
           py::arg("before"))
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
  py::class_<Acceptance>(m, "Acceptance")
      .def(py::init())
      .def("count",
           [](Acceptance& acceptance, const Drafted& draft, const Ids& slots, const Ids& offset, const Ids& token) {
             const int64_t n = same_length(slots, offset);
             same_length(offset, token);
             acceptance.count(draft, slots.data(), offset.data(), token.data(), n);
           },
           py::arg("drafted"), py::arg("slots"), py::arg("offset"), py::arg("token"))
      .def("choose", &choose, py::arg("drafted"), py::arg("length"), py::arg("fit"), py::arg("others"), py::arg("room"), py::arg("look"))
      .def_property_readonly("rates", [](const Acceptance& a) { return copied(a.rates.data(), a.rates.size()); })
      .def_property_readonly("limits", [](const Acceptance& a) { return copied(a.limits.data(), a.limits.size()); })
      .def_property_readonly("drafted", [](const Acceptance& a) { return copied(a.drafted.data(), a.drafted.size()); })
      .def_property_readonly("right", [](const Acceptance& a) { return copied(a.right.data(), a.right.size()); });
  py::class_<Fit>(m, "Fit")
      .def(py::init([](double fixed, double branch, double row) { return Fit{fixed, branch, row}; }), py::arg("fixed"),
           py::arg("branch"), py::arg("row"))
      .def("seconds", &Fit::seconds, py::arg("branches"), py::arg("rows"))
      .def("share", &Fit::share, py::arg("branches"), py::arg("others"))
      .def_readonly("fixed", &Fit::fixed)
      .def_readonly("branch", &Fit::branch)
      .def_readonly("row", &Fit::row);
  py::class_<StepCost>(m, "StepCost")
      .def(py::init())
      .def("took", &StepCost::took, py::arg("branches"), py::arg("rows"), py::arg("seconds"))
      .def("fit", &StepCost::fit, py::arg("branches"));
  m.def("cut_drafts", &cut, py::arg("counts"), py::arg("tokens"), py::arg("ends"), py::arg("most"), py::arg("room"));
  m.def("on_path",
        [](const Ids& token, const Ids& behind, const Ids& offset) {
          const int64_t n = same_length(token, behind);
          same_length(behind, offset);
          return to_mask(rolltree::on_path(token.data(), behind.data(), offset.data(), n));
        },
        py::arg("token"), py::arg("behind"), py::arg("offset"));
  m.def("up_to_end",
        [](const Flags& ends, const Ids& offset) {
          return to_mask(rolltree::up_to_end(ends.data(), offset.data(), same_length(ends, offset)));
        },
        py::arg("ends"), py::arg("offset"));
}
