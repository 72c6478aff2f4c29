// A stand-in for CUDA's driver: its calls for virtual memory by the host's, and every rule of theirs checked.
//
// Addresses are those of the process, without access until memory is mapped and access is set: what touches them then
// ends the process. Memory that is created is full of ones, as what another process left may be, and is gone with its
// last mapping once its handle is released. The header is NVIDIA's, so the compiler compares the signatures.

#include <cuda.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <string>

namespace {

constexpr size_t kUnit = 2 << 20;

struct Memory {
  int file;
  size_t size;
  bool released = false;
  int mappings = 0;
};

struct Reservation {
  size_t size;
  CUmemGenericAllocationHandle handle = 0;  // 0: not mapped
  bool accessible = false;
};

std::map<CUdeviceptr, Reservation> reservations;
std::map<CUmemGenericAllocationHandle, Memory> memories;
CUmemGenericAllocationHandle newest = 0;
size_t limit = 0;
int calls = 0, failing = 0, failure = 0, supported = 1;
bool working = false;  // work may be under way that uses what is mapped
std::string broken, failed;

CUresult Refuse(const char* call, const char* why) {
  if (broken.empty()) broken = std::string(call) + ": " + why;
  return CUDA_ERROR_INVALID_VALUE;
}

#define RULE(holds, why) \
  if (!(holds)) return Refuse(__func__, why)

// Counts a call; one that is to fail does nothing else.
#define CALLED()                     \
  if (++calls == failing) {          \
    failed = __func__;               \
    return CUresult(failure);        \
  }

void DropIfUnused(CUmemGenericAllocationHandle handle) {
  Memory& memory = memories.at(handle);
  if (!memory.released || memory.mappings) return;
  close(memory.file);
  memories.erase(handle);
}

bool OfDevice(const CUmemAllocationProp* prop) {
  CUmemAllocationProp expected{};
  expected.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  expected.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  return !memcmp(prop, &expected, sizeof expected);
}

void Cover(CUdeviceptr at, size_t size) {  // addresses without memory
  mmap(reinterpret_cast<void*>(at), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

}  // namespace

extern "C" {

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  CALLED();
  if (ordinal != 0) return CUDA_ERROR_INVALID_DEVICE;
  *device = 0;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  CALLED();
  RULE(attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "another attribute");
  RULE(device == 0, "another device");
  *value = supported;
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t* unit, const CUmemAllocationProp* prop,
                                       CUmemAllocationGranularity_flags option) {
  CALLED();
  RULE(OfDevice(prop), "properties");
  RULE(option == CU_MEM_ALLOC_GRANULARITY_MINIMUM, "another granularity");
  *unit = kUnit;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* at, size_t size, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
  CALLED();
  RULE(size && size % kUnit == 0, "size");
  RULE(!alignment && !hint && !flags, "alignment, address or flags");
  void* wide = mmap(nullptr, size + kUnit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (wide == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  auto begin = reinterpret_cast<CUdeviceptr>(wide), aligned = (begin + kUnit - 1) / kUnit * kUnit;
  if (aligned > begin) munmap(wide, aligned - begin);
  if (aligned < begin + kUnit) munmap(reinterpret_cast<void*>(aligned + size), begin + kUnit - aligned);
  reservations[aligned] = {size};
  *at = aligned;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr at, size_t size) {
  CALLED();
  auto found = reservations.find(at);
  RULE(found != reservations.end() && found->second.size == size, "no such range");
  RULE(!found->second.handle, "the range is mapped");
  munmap(reinterpret_cast<void*>(at), size);
  reservations.erase(found);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop,
                     unsigned long long flags) {
  CALLED();
  RULE(size && size % kUnit == 0, "size");
  RULE(OfDevice(prop) && !flags, "properties or flags");
  size_t used = size;
  for (auto& [number, memory] : memories) used += memory.size;
  if (used > limit) return CUDA_ERROR_OUT_OF_MEMORY;
  int file = memfd_create("memory", 0);
  if (ftruncate(file, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  void* whole = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  memset(whole, 0xff, size);
  munmap(whole, size);
  memories[*handle = ++newest] = {file, size};
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  CALLED();
  auto found = memories.find(handle);
  RULE(found != memories.end() && !found->second.released, "no such memory");
  found->second.released = true;
  DropIfUnused(handle);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  CALLED();
  auto range = reservations.find(at);
  auto memory = memories.find(handle);
  RULE(range != reservations.end() && range->second.size == size, "no such range");
  RULE(!range->second.handle, "the range is mapped");
  RULE(memory != memories.end() && !memory->second.released && memory->second.size == size, "no such memory");
  RULE(!offset && !flags, "offset or flags");
  mmap(reinterpret_cast<void*>(at), size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->second.file, 0);
  range->second.handle = handle;
  ++memory->second.mappings;
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc* access, size_t count) {
  CALLED();
  auto range = reservations.find(at);
  RULE(range != reservations.end() && range->second.size == size && range->second.handle, "the range is not mapped");
  RULE(count == 1 && access->location.type == CU_MEM_LOCATION_TYPE_DEVICE && access->location.id == 0, "location");
  RULE(access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE, "flags");
  mprotect(reinterpret_cast<void*>(at), size, PROT_READ | PROT_WRITE);
  range->second.accessible = true;
  return CUDA_SUCCESS;
}

CUresult cuMemsetD8(CUdeviceptr at, unsigned char value, size_t size) {
  CALLED();
  auto range = reservations.find(at);
  RULE(range != reservations.end() && range->second.size == size && range->second.accessible, "no access");
  memset(reinterpret_cast<void*>(at), value, size);
  working = true;
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
  CALLED();
  auto range = reservations.find(at);
  RULE(range != reservations.end() && range->second.size == size && range->second.handle, "the range is not mapped");
  RULE(!working, "the device may still use it");
  Cover(at, size);
  CUmemGenericAllocationHandle handle = range->second.handle;
  range->second = {size};
  --memories.at(handle).mappings;
  DropIfUnused(handle);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult code, const char** name) {
  *name = code == CUDA_ERROR_OUT_OF_MEMORY    ? "CUDA_ERROR_OUT_OF_MEMORY"
          : code == CUDA_ERROR_INVALID_VALUE  ? "CUDA_ERROR_INVALID_VALUE"
          : code == CUDA_ERROR_INVALID_DEVICE ? "CUDA_ERROR_INVALID_DEVICE"
          : code == CUDA_ERROR_UNKNOWN        ? "CUDA_ERROR_UNKNOWN"
                                              : nullptr;
  return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// -- what tests ask of the stand-in --

void begin(size_t bytes, int offered) {
  limit = bytes, supported = offered;
  calls = failing = 0, working = false;
  broken.clear(), failed.clear();
}
void set_limit(size_t bytes) { limit = bytes; }
void fail(int call, int code) { calls = 0, failing = call, failure = code, failed.clear(); }
void use() { working = true; }
void synchronize() { working = false; }
const char* first_broken() { return broken.c_str(); }
const char* failed_call() { return failed.c_str(); }
size_t ranges() { return reservations.size(); }
size_t bytes() {
  size_t sum = 0;
  for (auto& [number, memory] : memories) sum += memory.size;
  return sum;
}

}  // extern "C"
