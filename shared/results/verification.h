// The check every backend makes before it hands bytes out: they are what the manifest says was stored.
#pragma once

#include <string_view>

#include "shared/results/store.h"

namespace ditfleet::results {

// kDataCorrupt when size or SHA-256 differ from the manifest's. Takes about 3 ms a MiB.
Result<void> verify(const Manifest& manifest, std::string_view bytes);

// What a manifest says of `bytes` before anything else is known: size and SHA-256.
Manifest describe(const queue::Attempt& attempt, std::string_view bytes, std::string media_type);

// kInvalidArgument unless the attempt's job id and nonce are such that they may stand in a key or a file
// name (letters, digits, '.', '_', '-') and the unit is not negative.
Result<void> check_names(const queue::Attempt& attempt);

}  // namespace ditfleet::results
