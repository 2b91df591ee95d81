// The registry's record of a LoRA adapter.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shared/core/result.h"

namespace ditfleet::loras {

// The digest identifies the adapter. Records with the same digest share the stored file, even across tenants.
struct Adapter {
  std::string tenant, name;
  std::string sha256;               // of the safetensors file, 64 lower-case hexadecimal digits
  std::int64_t bytes = 0;           // of the file
  std::string path;                 // a file on a shared disk; empty: the file is stored in Redis
  std::vector<std::string> models;  // models that may use it; empty: any
  bool pinned = false;              // workers do not evict it from host memory
  std::int64_t created_ms = 0;      // since 1970
  // From the file's header.
  int tensors = 0;
  std::int64_t parameters = 0;        // elements of all tensors
  int rank = 0;                       // the largest; 0: unknown
  std::string dtype;                  // the most frequent element type, such as "BF16"
  int layers = 0;                     // that it changes; 0: unknown
  std::vector<std::string> families;  // that have layers of these names; empty: unknown

  bool operator==(const Adapter&) const = default;
  bool serves(std::string_view model) const;
  // The stored form. parse() returns kDataCorrupt for invalid text.
  std::string to_json() const;
  static Result<Adapter> parse(std::string_view json_text);
};

// A valid name has 1–128 characters of [A-Za-z0-9._-] and starts with a letter or digit. kInvalidArgument (param
// "name") for other names.
Result<void> check_name(std::string_view name);

}  // namespace ditfleet::loras
