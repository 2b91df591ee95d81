// The names of the registry's keys in Redis. All carry the hash tag {lora}, so that they lie in one slot of a cluster.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ditfleet::loras {

inline constexpr std::string_view kNamesKey = "df:{lora}:names";  // hash: <tenant>/<name> → record (JSON)
inline constexpr std::string_view kVersionKey =
    "df:{lora}:version";  // string: one more with every change; begins with the time in µs
inline constexpr std::string_view kChangesKey =
    "df:{lora}:changes";  // sorted set: <tenant>/<name> → version of its last change, the last 1,000
inline constexpr std::string_view kGarbageKey = "df:{lora}:garbage";  // sorted set: digest → when its bytes go (ms)

// hash: `bytes`; `upload` and `chunks` if Redis holds the bytes; `r:<tenant>/<name>` → path ("": an upload) of each
// record with this digest; of one without records `until` (0: deleted) and `kept`, the path that it had.
inline std::string blob_key(std::string_view sha256) { return "df:{lora}:blob:" + std::string(sha256); }
// string: 1 MiB of the bytes, the last one what is left.
inline std::string chunk_key(std::string_view upload, std::size_t index) {
  return "df:{lora}:chunk:" + std::string(upload) + ":" + std::to_string(index);
}
inline std::string field_of(std::string_view tenant, std::string_view name) {
  return std::string(tenant) + "/" + std::string(name);
}

}  // namespace ditfleet::loras
