// The registry's keys in Redis. All have the hash tag {lora}, which puts them into one slot of a cluster.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ditfleet::loras {

inline constexpr std::string_view kNamesKey = "df:{lora}:names";  // hash: <tenant>/<name> → record (JSON)
// string: incremented by every change; starts with the time in µs
inline constexpr std::string_view kVersionKey = "df:{lora}:version";
// sorted set: <tenant>/<name> → version of its last change; the most recent 1,000
inline constexpr std::string_view kChangesKey = "df:{lora}:changes";
inline constexpr std::string_view kGarbageKey = "df:{lora}:garbage";  // sorted set: digest → when to delete it (ms)

// hash: `bytes`; `upload` and `chunks` if Redis stores the file; for each record with this digest
// `r:<tenant>/<name>` → path ("": an upload), and `p:<tenant>/<name>` if it is pinned; without any record `until`
// (0: deleted) and `kept`, the path of the last record.
inline std::string blob_key(std::string_view sha256) { return "df:{lora}:blob:" + std::string(sha256); }
// string: 1 MiB of the file; the last chunk may be shorter.
inline std::string chunk_key(std::string_view upload, std::size_t index) {
  return "df:{lora}:chunk:" + std::string(upload) + ":" + std::to_string(index);
}
inline std::string field_of(std::string_view tenant, std::string_view name) {
  return std::string(tenant) + "/" + std::string(name);
}

}  // namespace ditfleet::loras
