// libnvrtc.so.13 as an object: found, opened, its functions bound.
#pragma once

#include <string>

#include "shared/core/result.h"

namespace ditfleet::region {

// The part of NVRTC's C interface that is used, as its documentation declares it.
struct NvrtcLibrary {
  using Program = void*;
  int (*version)(int* major, int* minor);
  const char* (*error_text)(int result);
  int (*create)(Program*, const char* source, const char* name, int headers, const char* const* header_texts,
                const char* const* header_names);
  int (*destroy)(Program*);
  int (*compile)(Program, int options, const char* const* option_texts);
  int (*log_size)(Program, std::size_t*);
  int (*log)(Program, char*);
  int (*cubin_size)(Program, std::size_t*);
  int (*cubin)(Program, char*);

  std::string path;
  std::string build_id;  // of the file, from its ELF note; the wheel's and the toolkit's may differ
};

// Opened once a process and never closed: of several files that are given the first that opens stays. kUnavailable: see
// open_nvrtc().
Result<const NvrtcLibrary*> load_nvrtc(const std::string& given);

}  // namespace ditfleet::region
