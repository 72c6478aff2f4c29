#include <pybind11/pybind11.h>
PYBIND11_MODULE(_host, m) { m.doc() = "Node table and page allocator of the KV tree."; }
