#include "machine.h"

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "vectors.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace rolltree {
namespace {

std::string_view asked(const char* variable) {
  const char* found = std::getenv(variable);
  return found == nullptr ? "" : found;
}

bool has_amx() {
#if defined(__x86_64__) && defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool has = (d >> 22 & 1) && (d >> 24 & 1) && (b >> 16 & 1) && (b >> 30 & 1);  // AMX-BF16, AMX-TILE, AVX-512 F, BW
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return has && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// AVX-512 BF16; the library of AVX-512 is loaded where the processor has the rest.
bool has_dots() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  return kVectorBytes == 64 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
#else
  return false;
#endif
}

bool is_intel() {
#ifdef __x86_64__
  return __builtin_cpu_is("intel");
#else
  return false;
#endif
}

int64_t vector_bytes() {
  return kVectorBytes;
}

int64_t tiles_number() {
  return static_cast<int64_t>(tiles());
}

int64_t pairs_number() {
  return static_cast<int64_t>(pairs());
}

}  // namespace

Tiles tiles() {
  static const Tiles found = [] {
    const std::string_view name = asked("ROLLTREE_AMX");
    if (name == "emulate") return Tiles::emulated;
    return name != "off" && has_amx() ? Tiles::amx : Tiles::none;
  }();
  return found;
}

Pairs pairs() {
  static const Pairs found = asked("ROLLTREE_BF16") != "widen" && has_dots() ? Pairs::dots : Pairs::widened;
  return found;
}

bool library_is_fast() {
  static const bool found = [] {
    const std::string_view name = asked("ROLLTREE_FEW_ROWS");
    if (!name.empty()) return name == "few";
    return kVectorBytes == 16 || (kVectorBytes == 64 && is_intel());
  }();
  return found;
}

}  // namespace rolltree

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cpu, m) {
  m.def("vector_bytes() -> int");  // 64: AVX-512, 32: AVX2, 16: neither
  m.def("tiles() -> int");         // 0: none, 1: emulated, 2: AMX
  m.def("pairs() -> int");         // 0: widened, 1: AVX-512 BF16's dot products
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CompositeExplicitAutograd, m) {
  m.impl("vector_bytes", TORCH_BOX(&rolltree::vector_bytes));
  m.impl("tiles", TORCH_BOX(&rolltree::tiles_number));
  m.impl("pairs", TORCH_BOX(&rolltree::pairs_number));
}
