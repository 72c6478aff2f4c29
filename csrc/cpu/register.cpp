// Op schemas of the CPU library; each family registers its kernels in its own file.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(rolltree_cpu, m) {}
