// What a region's compiled program is found by, in this process and in the fleet.
#pragma once

#include <string>
#include <vector>

#include "pipeline/region/backends/compiler.h"
#include "shared/kernel_cache/key.h"

namespace ditfleet::region {

// Everything that decides the program's bytes, or what they mean to their caller. Never in it: weights, pointers,
// symbolic sizes, adapter ranks, device index, host, paths.
struct ProgramIdentity {
  std::int64_t schema = 2;
  std::string ir;          // canonical bytes
  std::string generator;   // kGeneratorId
  std::string source;      // the whole text
  std::string compiler;    // its name, version and build
  std::vector<std::string> options;  // in order
  std::string target;      // the exact architecture; on the host also the processor's features
  std::string output_kind;
  std::vector<std::int64_t> widths;   // of each kernel's rows
  std::vector<std::int64_t> vectors;  // elements of one access, of each kernel
  std::string element_types;          // of each input, in order
  std::string layouts;                // what the program takes of its inputs' layouts
  std::string numerics;               // where it rounds
};

ProgramIdentity identify(const Plan& plan, const Source& source, const Compiler& compiler, const std::string& arch);
kernel_cache::Key key_of(const ProgramIdentity& identity);

}  // namespace ditfleet::region
