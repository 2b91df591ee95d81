// Generates source for the row kernels of a plan and describes how to launch them. The source includes no headers,
// which would cost NVRTC 50 to 1000 ms. The same plan gives the same bytes in every process.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pipeline/region/fusion/plan.h"

namespace ditfleet::region {

// How to launch one kernel. Sizes do not change the source; on a GPU they select a variant and a grid.
struct KernelLaunch {
  std::string name;                     // of the function
  bool variants = true;                 // GPU: NAME_i32_v, NAME_i64_v, NAME_i64_s; false: only NAME
  int threads = 0, rows_per_block = 0;  // GPU
  int vector = 1;  // GPU: elements per access of the variants _v, which need aligned pointers and strides
  std::size_t argument_words = 0;  // int64 words of the kernel's one argument
};

// The functions of a GPU kernel, in the order of GpuModule::Variant; a single name without variants.
std::vector<std::string> function_names(const KernelLaunch& launch);

struct Source {
  std::string text;
  std::vector<KernelLaunch> kernels;  // in the order of Plan::kernels
};

// The NVRTC option that lets the first variant of a kernel use all registers that a block may have.
std::string all_registers_option(const KernelLaunch& launch);

// Version of the generators, part of every key. Raise it when the generated source changes for the same kernel names.
inline constexpr std::string_view kGeneratorId = "rows-6";

// CUDA C++. A kernel's argument is row_end[instances], then the instances. An instance is extents[kOuterAxes], then for
// each operand its pointer and kOuterAxes strides in elements. Variants: i32_v if pointers and strides allow vectors
// and every offset fits 31 bits, i64_v for longer offsets, i64_s for everything else. Fewer than 2^32 rows.
Source generate_cuda(const Plan& plan);

// C++ for the system's compiler: void NAME(const long long* instance, long long first_row, long long end_row), one
// instance per call. Calls for different rows may run concurrently.
Source generate_cpp(const Plan& plan);

std::size_t instance_words(const RowKernel& kernel);

}  // namespace ditfleet::region
