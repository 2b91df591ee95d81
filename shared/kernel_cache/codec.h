// The signed encoding of an entry, as stored on disk, in Redis and in exports. Integers are little-endian.
//   offset     bytes
//   0          8   "DFKERNEL"
//   8          4   format version: 1
//   12         4   flags: 0
//   16         8   size of the encoding
//   24         8   id of the signing secret; 0: unsigned
//   32         32  the key
//   64             architecture and region: for each, the length (4 bytes) and the text
//              1   kind: 1 cubin, 2 shared object, 3 plan
//              8   size of the source
//              4   number of kernels; for each kernel, its name (length and text), shared memory, registers, spill,
//                  number of parameters, and the size of each parameter (4 bytes per number)
//              8   size of the code
//              8   size of the compressed code, then the code as one zstd frame
//   end - 64   32  SHA-256 of all bytes before, to distinguish damage from a foreign signature
//   end - 32   32  HMAC-SHA-256 of all bytes before
// The HMAC's key is HMAC-SHA-256(secret, "ditfleet kernel cache: signature, 1"). The id is the first 8 bytes of
// HMAC-SHA-256(secret, "ditfleet kernel cache: id, 1").
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "shared/core/result.h"
#include "shared/kernel_cache/entry.h"
#include "shared/kernel_cache/key.h"
#include "shared/kernel_cache/secret.h"

namespace ditfleet::kernel_cache {

// Why an encoded entry was rejected.
enum class Refusal {
  kCorrupt,         // truncated, changed, or not an encoded entry
  kUnsigned,        // undamaged, but not signed
  kForeignSecret,   // undamaged, with the id of another secret
  kWrongSignature,  // undamaged, with the id of this secret, but an invalid signature
  kWrongKey,        // correctly signed, but has another key
  kWrongArch,       // correctly signed, but has another architecture
  kUnusable,        // verified, but the caller cannot use the program; decode() never returns this
};
std::string_view refusal_name(Refusal refusal);  // "corrupt", "unsigned", "foreign_secret", "wrong_signature", …

struct Refused {
  Refusal why = Refusal::kCorrupt;
  std::string message;
};

// An entry, or the reason why it was rejected.
using Decoded = Result<Entry, Refused>;

// kInvalidArgument: the entry exceeds entry.h's limits. Thread-safe; takes about 10 ms per MiB of code.
Result<std::string> encode(const Entry& entry, const Key& key, const Secret& secret);

// Verifies the signature of all bytes before it decompresses any. An empty `arch` accepts any architecture. Never
// allocates more than the limits of entry.h. Thread-safe.
Decoded decode(std::string_view bytes, const Key& key, std::string_view arch, const Secret& secret);

// The maximum size of an encoded entry.
inline constexpr std::uint64_t kMaxValueBytes = kMaxCodeBytes + (16u << 20);

}  // namespace ditfleet::kernel_cache
