// An entry as the bytes that disk, Redis and export files hold (README.md has the format), and back.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "shared/core/result.h"
#include "shared/kernel_cache/entry.h"
#include "shared/kernel_cache/key.h"
#include "shared/kernel_cache/secret.h"

namespace ditfleet::kernel_cache {

// Why bytes were not taken.
enum class Refusal {
  kCorrupt,         // truncated, changed, or no value of ours
  kUnsigned,        // whole, but carries no signature
  kForeignSecret,   // whole, and says that another secret has signed it
  kWrongSignature,  // whole, says that our secret has signed it, which is not so
  kWrongKey,        // signed by us, for another key
  kWrongArch,       // signed by us for this key, for another architecture
  kUnusable,        // right in all of this, but whoever asked cannot use it: it does not load (never decode()'s)
};
std::string_view refusal_name(Refusal refusal);  // "corrupt", "unsigned", "foreign_secret", "wrong_signature", …

struct Refused {
  Refusal why = Refusal::kCorrupt;
  std::string message;
};

// Either an entry or why not. (Result's codes do not tell the refusals apart.)
class Decoded {
 public:
  Decoded(Entry entry) : entry_(std::move(entry)), ok_(true) {}
  Decoded(Refused refused) : refused_(std::move(refused)) {}
  bool ok() const { return ok_; }
  explicit operator bool() const { return ok_; }
  Entry& operator*() { return entry_; }
  const Entry& operator*() const { return entry_; }
  Entry* operator->() { return &entry_; }
  const Entry* operator->() const { return &entry_; }
  const Refused& refused() const { return refused_; }  // only if !ok()

 private:
  Entry entry_;
  Refused refused_;
  bool ok_ = false;
};

// kInvalidArgument for an entry beyond entry.h's limits. Thread safe; takes about 10 ms a MiB of code.
Result<std::string> encode(const Entry& entry, const Key& key, const Secret& secret);

// The signature is verified over all bytes before any of them is used or decompressed. `arch` empty: any.
// Never allocates more than the limits of entry.h, whatever the bytes claim. Thread safe.
Decoded decode(std::string_view bytes, const Key& key, std::string_view arch, const Secret& secret);

// The key that a value says it is for, unverified: what to check it against when it comes from an export.
// kDataCorrupt where it is no value at all.
Result<Key> claimed_key(std::string_view bytes);

// No value is larger: above it bytes need not be read at all.
inline constexpr std::uint64_t kMaxValueBytes = kMaxCodeBytes + (16u << 20);

}  // namespace ditfleet::kernel_cache
