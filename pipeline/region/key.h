// The key of a region's compiled program, in this process and in the fleet.
#pragma once

#include <string>
#include <vector>

#include "pipeline/region/compile/compiler.h"
#include "shared/kernel_cache/key.h"

namespace ditfleet::region {

// Everything that determines the program's bytes and its kernel table, and nothing else. Two blocks whose
// kernels have the same source share a program, whether or not they have adapters. Block,
// weights, pointers, symbolic sizes, adapter ranks, device index, host and paths must not be part of the key.
struct ProgramIdentity {
  std::int64_t schema = 3;
  std::string generator;             // kGeneratorId
  std::string source;                // the whole text
  std::vector<std::string> kernels;  // kernel table: name and words of the argument
  std::string compiler;              // name, version and build
  std::vector<std::string> options;  // in order
  std::string target;                // the exact architecture; on the host the processor's features
  std::string output_kind;
};

ProgramIdentity identify(const Source& source, const Compiler& compiler, const std::string& arch);
kernel_cache::Key key_of(const ProgramIdentity& identity);

}  // namespace ditfleet::region
