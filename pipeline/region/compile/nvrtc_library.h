// Finds and opens libnvrtc.so.13 and binds its functions.
#pragma once

#include <string>

#include "shared/core/result.h"

namespace ditfleet::region {

// The functions that nvrtc.cpp uses, declared as in NVRTC's documentation.
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
  std::string build_id;  // from the file's ELF note; differs between the wheel and the toolkit
};

// Opened once per process and never closed; the first file that opens stays. kUnavailable: see open_nvrtc().
Result<const NvrtcLibrary*> load_nvrtc(const std::string& given);

}  // namespace ditfleet::region
