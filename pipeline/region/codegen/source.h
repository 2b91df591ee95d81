// Source text for the row kernels of a plan, and how they are called. Neither text includes a header: NVRTC would
// spend 50 to 1000 ms on one. The same plan gives the same bytes in every process.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pipeline/region/fusion/plan.h"

namespace ditfleet::region {

// How one kernel is launched. Sizes never change the text: they choose one of a GPU kernel's variants and a grid.
struct KernelLaunch {
  std::string name;                     // of the function
  bool variants = true;                 // GPU: there are NAME_i32_v, NAME_i64_v, NAME_i64_s; else NAME alone
  int threads = 0, rows_per_block = 0;  // GPU
  int vector = 1;  // GPU: elements that one access of the variants _v moves; they need aligned pointers and strides
  std::size_t argument_words = 0;  // int64 words of the kernel's one argument
};

// Of a GPU's kernel, in the order of GpuModule::Variant; one name for all where there are no variants.
std::vector<std::string> function_names(const KernelLaunch& launch);

struct Source {
  std::string text;
  std::vector<KernelLaunch> kernels;  // as Plan::kernels
};

// NVRTC's option with which the first variant of a kernel that has variants is given all the registers that a block may
// have.
std::string room_option(const KernelLaunch& launch);

// The id of the generators: part of every key, raised when they make other text that computes the same name.
inline constexpr std::string_view kGeneratorId = "rows-5";

// CUDA C++. The argument: row_end[instances], then the instances. An instance: extents[kOuterAxes], then for each
// operand its pointer and kOuterAxes strides in elements. Variants: v where pointers and strides allow whole vectors,
// i32 of them where every offset fits 31 bits; i64_s for all else. Fewer than 2^32 rows.
Source generate_cuda(const Plan& plan);

// C++ for the system's compiler: void NAME(const long long* instance, long long first_row, long long end_row), one
// instance a call. Thread safe for rows that differ.
Source generate_cpp(const Plan& plan);

std::size_t instance_words(const RowKernel& kernel);

}  // namespace ditfleet::region
