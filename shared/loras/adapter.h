// A LoRA adapter as the registry knows it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shared/core/result.h"

namespace ditfleet::loras {

// The digest is the adapter's identity everywhere: two names, or two tenants, with one digest share its bytes.
struct Adapter {
  std::string tenant, name;
  std::string sha256;               // of the safetensors file, 64 lower-case hexadecimal digits
  std::int64_t bytes = 0;           // of the file
  std::string path;                 // a file on a disk that workers see, too; empty: an upload, in Redis
  std::vector<std::string> models;  // that requests may use it with; empty: any
  bool pinned = false;              // workers do not drop it from host memory to make room
  std::int64_t created_ms = 0;      // since 1970
  // As the file's header tells.
  int tensors = 0;
  std::int64_t parameters = 0;  // elements of all tensors
  int rank = 0;                 // the largest; 0: not told
  std::string dtype;            // of most elements: "BF16"

  bool operator==(const Adapter&) const = default;
  bool serves(std::string_view model) const;
  // The form in Redis; parse() is kDataCorrupt for anything else.
  std::string to_json() const;
  static Result<Adapter> parse(std::string_view json_text);
};

// 1–128 characters of [A-Za-z0-9._-] that begin with a letter or a digit. kInvalidArgument (param "name") says so.
Result<void> check_name(std::string_view name);

}  // namespace ditfleet::loras
