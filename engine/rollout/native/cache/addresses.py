"""Memory of pages whose addresses outlive it: CUDA's driver keeps the addresses, and memory goes and comes.

A CUDA graph holds addresses. So the graphs of an engine stay valid while its pages have no memory, which PyTorch's
allocator cannot do: it gives addresses and memory back together. The calls are those of the driver's virtual memory
management (https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html).
"""

from __future__ import annotations

import ctypes
import math
import sys
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_void_p
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
PINNED = DEVICE = 1  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE
READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM


class Location(ctypes.Structure):
    """CUmemLocation: the device."""

    _fields_ = (("type", c_int), ("id", c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp: memory of a device that no other process sees."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32_metadata", c_void_p),
        ("flags", c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc: what a device may do with a mapping."""

    _fields_ = (("location", Location), ("flags", c_int))


CALLS: dict[str, tuple[Any, ...]] = {
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(Properties), c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(Properties), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(Access), c_size_t),
    "cuMemsetD8_v2": (c_uint64, c_ubyte, c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}
"""The arguments of each call; a result is a code, 0 for success."""


class Driver:
    """CUDA's driver for one device.

    Raises:
        AttributeError: the library is too old to have the calls.
    """

    def __init__(self, library: Any, device: torch.device) -> None:
        self.device = device
        self._library = library
        for name, arguments in CALLS.items():
            getattr(library, name).argtypes = arguments
        number = c_int()
        self.call("cuDeviceGet", byref(number), device.index or 0)
        location = Location(DEVICE, number.value)
        self.properties, self.access = Properties(PINNED, 0, location), Access(location, READ_AND_WRITE)
        supported, unit = c_int(), c_size_t()
        self.call("cuDeviceGetAttribute", byref(supported), SUPPORTED, number)
        self.supported = bool(supported.value)
        """The device can map memory to addresses."""
        if self.supported:
            self.call("cuMemGetAllocationGranularity", byref(unit), byref(self.properties), MINIMUM)
        self.unit = unit.value
        """Ranges are multiples of so many bytes."""

    def call(self, name: str, *arguments: Any) -> None:
        """Call the driver when the device has ended all work: it may still use what is unmapped.

        Raises:
            torch.OutOfMemoryError: the device has no memory for it, as where PyTorch's allocator finds none.
            RuntimeError: the call failed otherwise.
        """
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()  # makes the device's context this thread's, too
            code = getattr(self._library, name)(*arguments)
        if code:
            text = c_char_p()
            self._library.cuGetErrorName(code, byref(text))
            failed = f"{name} of CUDA's driver failed with {code} ({(text.value or b'an unknown error').decode()})"
            if code == OUT_OF_MEMORY:
                raise torch.OutOfMemoryError(f"{failed}: no memory for the pages of the KV cache; lower kv_tokens.")
            raise RuntimeError(f"{failed}; set keep_pages to true, which does without these calls.")


class Range:
    """A range of addresses, with memory or without. What is made of `__cuda_array_interface__` keeps the range."""

    def __init__(self, driver: Driver, size: int) -> None:
        self._driver = driver
        self._size = -(-size // driver.unit) * driver.unit
        self._address, self._handle = c_uint64(), c_uint64()
        self._held = self._mapped = False
        driver.call("cuMemAddressReserve", byref(self._address), self._size, 0, 0, 0)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = self._address.value, False  # not read-only
        return {"shape": (self._size,), "typestr": "|u1", "data": data, "version": 3}

    def map(self) -> None:
        """Give the addresses memory, which is zero."""
        self.unmap()  # goes on where it failed before
        try:
            self._driver.call("cuMemCreate", byref(self._handle), self._size, byref(self._driver.properties), 0)
            self._held = True
            self._driver.call("cuMemMap", self._address, self._size, 0, self._handle, 0)
            self._mapped = True
            self._driver.call("cuMemSetAccess", self._address, self._size, byref(self._driver.access), 1)
            self._driver.call("cuMemsetD8_v2", self._address, 0, self._size)
        except RuntimeError:
            self.unmap()
            raise

    def unmap(self) -> None:
        """Give the memory back, if there is any."""
        if self._mapped:
            self._driver.call("cuMemUnmap", self._address, self._size)
            self._mapped = False
        if self._held:
            self._driver.call("cuMemRelease", self._handle)
            self._held = False

    def close(self) -> None:
        """Give memory and addresses back."""
        self.unmap()
        if self._address:
            self._driver.call("cuMemAddressFree", self._address, self._size)
            self._address = c_uint64()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # else the driver may be gone, and the process's memory is freed anyway
            self.close()


class PageMemory:
    """Memory of tensors whose addresses stay as long as the tensors live."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._ranges = WeakSet[Range]()
        self.mapped = True
        """The tensors have memory; without, nothing may read or write them."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return zeros.

        Raises:
            torch.OutOfMemoryError: the device has not enough memory.
        """
        size = math.prod(shape) * dtype.itemsize
        part = Range(self._driver, size)
        self._map(part)
        self._ranges.add(part)
        return over(part, self._driver.device)[:size].view(dtype).view(shape)

    def unmap(self) -> None:
        """Give the memory of all tensors back."""
        self.mapped = False
        for part in self._ranges:
            part.unmap()

    def map(self) -> None:
        """Give all tensors memory again, which is zero; if there is not enough, none has any.

        Raises:
            torch.OutOfMemoryError: the device has not enough memory.
        """
        if self.mapped:
            return
        try:
            for part in self._ranges:
                self._map(part)
        except RuntimeError:
            self.unmap()
            raise
        self.mapped = True

    def _map(self, part: Range) -> None:
        try:
            part.map()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # PyTorch's allocator may hold what a trainer has freed
            part.map()
        torch.cuda.synchronize(self._driver.device)  # any stream may use it from now on


def over(part: Range, device: torch.device) -> Tensor:  # [bytes] uint8
    """Return a tensor over a range that has memory."""
    return torch.as_tensor(part, device=device)


def page_memory(device: torch.device) -> PageMemory | None:
    """Return memory from CUDA's driver; None where there is no such driver, or it cannot map memory to addresses."""
    if device.type != "cuda":
        return None
    try:
        driver = Driver(ctypes.CDLL("libcuda.so.1"), device)
    except (OSError, AttributeError):
        return None
    return PageMemory(driver) if driver.supported else None
