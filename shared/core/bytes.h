// Encodes bytes, and reads and writes whole files. All functions are thread-safe.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "shared/core/result.h"

namespace ditfleet {

std::string sha256_hex(std::string_view bytes);            // 64 lower-case digits
std::string to_hex(std::span<const unsigned char> bytes);  // lower-case digits
std::string base64(std::string_view bytes);                // RFC 4648 §4, padded
// The bytes of a URL's part. Nothing if a % has no two hexadecimal digits after it.
std::optional<std::string> percent_decoded(std::string_view text);
bool is_valid_utf8(std::string_view text);  // rejects overlong forms and surrogates

// Reads a whole file. Errors: kNotFound, kUnavailable (unreadable). Blocks.
Result<std::string> read_file(const std::string& path);
// Writes and syncs PATH.tmp-…, renames it to PATH and syncs the folder. A reader sees either the old or the new file.
// `keep_mode`: with the mode, owner and group of the old file, if there is one. Errors: kUnavailable. Blocks.
Result<void> write_file_atomically(const std::string& path, std::string_view bytes, bool keep_mode = false);

}  // namespace ditfleet
