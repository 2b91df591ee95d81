// The registry's changes as Lua scripts, each of which is one atomic EVAL.
// Conventions: all keys are in KEYS. A script checks everything before it writes. string.format formats numbers.
#pragma once

#include <string_view>

namespace ditfleet::loras {

// KEYS: names version changes garbage blob old-blob chunks… old-chunks…
// ARGV: field expected-record record sha256 old-sha256 path bytes keep_ms pin upload chunks old-upload ("" for none)
// Replies: done, changed (the record or upload is not the expected one), expired (a chunk is missing).
std::string_view commit_script();
// KEYS: names version changes garbage blob. ARGV: field expected-record sha256. Replies: done, changed.
std::string_view remove_script();
// KEYS: garbage blob chunks…. ARGV: sha256 upload ("" for none). Replies: 1 = digest deleted, 0 = not deleted.
std::string_view collect_script();

}  // namespace ditfleet::loras
