// Whether bytes are a LoRA adapter, as far as they tell without the model that it is for: a safetensors file with an
// honest header and names that look like LoRA's. What needs the model (layers, shapes, values) a worker checks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "shared/core/result.h"

namespace ditfleet::loras {

inline constexpr std::uint64_t kMaxHeaderBytes = 32u << 20;

struct Content {
  int tensors = 0;
  std::int64_t parameters = 0;
  int rank = 0;  // the largest; 0: no name tells
  std::string dtype;
};

// Takes a file from its beginning, in pieces of any size; keeps the header only. Not thread safe.
// Every error is kInvalidArgument and begins with what it was told to call the file.
class ContentCheck {
 public:
  // `file_bytes`: its size where that is known beforehand; a lie is then found with the header, else at the end.
  explicit ContentCheck(std::string what, std::optional<std::uint64_t> file_bytes = std::nullopt);

  Result<void> feed(std::string_view bytes);
  Result<Content> finish();  // once, after the last piece

 private:
  Result<void> begin();
  Result<void> inspect(std::uint64_t file_bytes);

  std::string what_, head_;
  std::optional<std::uint64_t> file_bytes_;
  std::uint64_t seen_ = 0, header_end_ = 0;  // 0: not known yet
  std::optional<Content> content_;
};

struct InspectedFile {
  std::string sha256;
  std::int64_t bytes = 0;
  Content content;
};

// Digest and check of a file in one reading. Errors as above (param "path"); kUnavailable: it cannot be read. Blocks.
Result<InspectedFile> inspect_file(const std::string& path);

// The file that `path` names, free of links, if it lies in one of the folders (with ':' between); a relative path is
// looked for in each. kInvalidArgument, param "path", says why not, and nothing of what lies outside. Blocks.
Result<std::string> resolve_path(const std::string& path, const std::string& folders);

}  // namespace ditfleet::loras
