// Checks of all backends before they store or return bytes.
#pragma once

#include <string_view>

#include "shared/results/store.h"

namespace ditfleet::results {

// kDataCorrupt: the size or SHA-256 differs from the manifest's. Takes about 3 ms per MiB.
Result<void> verify(const Manifest& manifest, std::string_view bytes);

// kDataCorrupt: the bytes have another SHA-256.
Result<void> verify_input(const std::string& sha256, std::string_view bytes);
// kNotFound for an input that the store does not have.
Error input_gone(const std::string& sha256);

// Returns a manifest with the media type, the nonce, and the size and SHA-256 of `bytes`.
Manifest describe(const ResultKey& result, std::string_view bytes, std::string media_type);

// "png" for "image/png"; "bin": unknown.
std::string extension_of(const std::string& media_type);

// kInvalidArgument: the job or the nonce has a character other than letters, digits, '.', '_' and '-', or the unit is
// negative.
Result<void> check_names(const ResultKey& result);

}  // namespace ditfleet::results
