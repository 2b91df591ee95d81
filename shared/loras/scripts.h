// The registry's changes, in Lua: each is one EVAL and so happens whole or not at all.
// Rules: keys come in KEYS only; a script checks everything, then writes; numbers are made strings by string.format.
#pragma once

#include <string_view>

namespace ditfleet::loras {

// KEYS names version changes garbage blob old-blob chunks…; ARGV field expected-record record sha256 old-sha256(""
// none) path bytes upload("" none) keep_ms. Replies done, changed (the record is not the expected one), expired (a
// chunk is gone).
std::string_view commit_script();
// KEYS names version changes garbage blob; ARGV field expected-record sha256. Replies done, changed.
std::string_view remove_script();
// KEYS garbage blob chunks…; ARGV sha256 upload("" none). Replies 1: its bytes went.
std::string_view collect_script();

}  // namespace ditfleet::loras
