// The registry's keys in Redis. They have the same hash tag, so that a Redis Cluster stores them on one server.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ditfleet::loras {

inline constexpr std::string_view kNamesKey = "df:{lora}:names";  // hash: <tenant>/<name> → record (JSON)
// string: incremented by every change; starts at the time in µs
inline constexpr std::string_view kVersionKey = "df:{lora}:version";
// sorted set: <tenant>/<name> → version of its last change; the most recent 1,000
inline constexpr std::string_view kChangesKey = "df:{lora}:changes";
inline constexpr std::string_view kGarbageKey = "df:{lora}:garbage";  // sorted set: digest → time of its deletion (ms)

// hash: the file with a digest. `bytes`: its size. `upload`, `chunks`: the chunks, if Redis stores the file.
// `r:<tenant>/<name>`: the path in a record with this digest ("" for a file in Redis). `p:<tenant>/<name>`: exists if
// the record is pinned. If there is no record: `until`, the time of deletion (0: deleted), and `kept`, the last
// record's path.
inline std::string blob_key(std::string_view sha256) { return "df:{lora}:blob:" + std::string(sha256); }
// string: 1 MiB of the file; the last chunk may be shorter.
inline std::string chunk_key(std::string_view upload, std::size_t index) {
  return "df:{lora}:chunk:" + std::string(upload) + ":" + std::to_string(index);
}
inline std::string field_of(std::string_view tenant, std::string_view name) {
  return std::string(tenant) + "/" + std::string(name);
}

}  // namespace ditfleet::loras
