// The features of the processor that decide which path of the CPU kernels runs; no other file asks the processor.
// kernels/machine.py is the same place for Python and names the environment variables that force a path.
#pragma once

#include <cstdint>

namespace rolltree {

enum class Tiles { none, emulated, amx };

// Returns how bf16 tiles are multiplied: by AMX, if the processor has it and the operating system lets this process use it;
// by its twin in plain C++ with ROLLTREE_AMX=emulate; not at all elsewhere and with ROLLTREE_AMX=off.
Tiles tiles();

enum class Pairs { widened, dots };

// Returns how pairs of bf16 are multiplied where there are no tiles: by AVX-512 BF16's dot products, if the processor and this
// library have them; by its twin of two fp32 products elsewhere, and with ROLLTREE_BF16=widen.
Pairs pairs();

// Returns whether the kernels' own products are faster than a library's for few rows only: on Intel's processors with
// AVX-512, whose library is faster, and with 16-byte vectors. ROLLTREE_FEW_ROWS=few or many decides instead.
bool library_is_fast();

// Returns how many numbers of the depth torch's library sums, one after the other, in its fp32 products of many rows before it
// adds their sum to that of the numbers before; 0 if its products have another order. Found by the bits of a product, once for
// each depth. The kernels' own products have the same order, so the number of rows does not show in the result.
int64_t library_block(int64_t depth);

}  // namespace rolltree
