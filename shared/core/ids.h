// Unique ids and random numbers. All functions are thread-safe.
#pragma once

#include <string>
#include <string_view>

namespace ditfleet {

// A ULID: 48 bits of milliseconds and 80 random bits as 26 characters of Crockford base 32. ULIDs sort by time; those
// of one process sort in the order of the calls.
std::string new_id();

// 128 random bits as 32 hexadecimal digits: the nonce of an attempt, or the run id of a worker.
std::string new_nonce();

// A random number in [0, 1), for jitter. From libsodium, as ids are, so that a test can determine it.
double random_fraction();

// A job id that a client may choose: 1–64 characters of [A-Za-z0-9._-].
bool is_valid_id(std::string_view id);

}  // namespace ditfleet
