// Checks that a file is a safetensors file with a consistent header and names of LoRA tensors. Workers check layers,
// shapes and values, which requires the model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shared/core/result.h"

namespace ditfleet::loras {

inline constexpr std::uint64_t kMaxHeaderBytes = 32u << 20;

struct Content {
  int tensors = 0;
  std::int64_t parameters = 0;
  int rank = 0;                    // the largest; 0: unknown
  std::string dtype;               // the most frequent element type
  int layers = 0;                  // that it changes
  std::vector<std::string> names;  // of the tensors
};

// Checks a file that arrives in pieces of any size; keeps only the header in memory. Not thread-safe.
// Every error is kInvalidArgument, and its message begins with `what`.
class ContentCheck {
 public:
  // `what` is the name of the file in messages. If the file's size is known, pass it in `file_bytes`: an inconsistent
  // header is then detected immediately instead of in finish().
  explicit ContentCheck(std::string what, std::optional<std::uint64_t> file_bytes = std::nullopt);

  Result<void> feed(std::string_view bytes);
  bool knows_content() const { return content_.has_value(); }  // feed() only counts from now on
  Result<Content> finish();                                    // once, after the last piece

 private:
  Result<void> begin();
  Result<void> inspect(std::uint64_t file_bytes);

  std::string what_, head_;
  std::optional<std::uint64_t> file_bytes_;
  std::uint64_t seen_ = 0, header_end_ = 0;  // 0: unknown yet
  std::optional<Content> content_;
};

struct InspectedFile {
  std::string sha256;
  std::int64_t bytes = 0;
  Content content;
};

// Hashes and checks a file of at most `most` bytes, or PEFT's folder as one file (shared/safetensors/peft_folder.h), in
// one pass. Blocks.
// Errors: those of ContentCheck (param "path"), kPayloadTooLarge, kUnavailable (the file cannot be read).
Result<InspectedFile> inspect_file(const std::string& path, std::int64_t most);

std::vector<std::filesystem::path> folders_of(std::string_view list);  // separated by ':'; skips empty ones
// Whether an absolute, normalized path is in a folder. Compares only the texts of the paths.
bool is_inside(const std::filesystem::path& path, const std::filesystem::path& folder);

// Returns the path, without symbolic links, of a regular file or PEFT's folder in one of the folders (separated by
// ':'). Searches each folder for a relative path. Blocks. kInvalidArgument (param "path"): no such file. The message
// reveals nothing about files outside the folders.
Result<std::string> resolve_path(const std::string& path, const std::string& folders);

}  // namespace ditfleet::loras
