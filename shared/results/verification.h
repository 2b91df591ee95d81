// Checks that every backend makes before it stores or returns bytes.
#pragma once

#include <string_view>

#include "shared/results/store.h"

namespace ditfleet::results {

// kDataCorrupt when size or SHA-256 differ from the manifest's. Takes about 3 ms a MiB.
Result<void> verify(const Manifest& manifest, std::string_view bytes);

// A manifest with media type, nonce, and size and SHA-256 of `bytes`.
Manifest describe(const ResultKey& result, std::string_view bytes, std::string media_type);

// kInvalidArgument unless job and nonce are valid in a key and a file name (letters, digits, '.', '_', '-') and the
// unit is not negative.
Result<void> check_names(const ResultKey& result);

}  // namespace ditfleet::results
