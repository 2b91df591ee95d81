// Unique ids. All functions are thread-safe.
#pragma once

#include <string>
#include <string_view>

namespace ditfleet {

// A ULID: 26 characters of Crockford base 32, 48 bits of milliseconds, then 80 random bits. It sorts by time; the ids
// of one process sort in the order of the calls.
std::string new_id();

// 128 random bits as 32 hexadecimal digits: the nonce of an attempt, the boot id of a worker.
std::string new_nonce();

// A job id that a client may choose: 1–64 characters of [A-Za-z0-9._-].
bool is_valid_id(std::string_view id);

}  // namespace ditfleet
