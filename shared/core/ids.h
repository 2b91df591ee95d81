// Names that must not collide. All functions are thread safe.
#pragma once

#include <string>
#include <string_view>

namespace ditfleet {

// A ULID (26 characters of Crockford base 32, 48 bit milliseconds then 80 random bits): sorts by time, and those of one
// process in the order in which they were asked for.
std::string new_id();

// 128 random bits as 32 hexadecimal digits: an attempt's nonce, a worker's boot id.
std::string new_nonce();

// A job id that a client may choose: 1–64 characters of [A-Za-z0-9._-].
bool is_valid_id(std::string_view id);

}  // namespace ditfleet
