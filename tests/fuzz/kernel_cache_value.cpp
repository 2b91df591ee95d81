// libFuzzer: any bytes as a value of the kernel cache. Taken as they are, they must be refused: nobody without the
// secret can make a good one. Signed by us, so that what lies behind the signature is reached, they must be refused
// or be an entry that can be written again.
#include <sodium.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "shared/kernel_cache/codec.h"

using namespace ditfleet::kernel_cache;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const auto secret = *Secret::from_text("the secret of the fuzzer");
  std::string value(reinterpret_cast<const char*>(data), size);
  if (decode(value, Key{}, "", *secret)) std::abort();

  // A header that is right, the fuzzer's bytes as the body, checksum and signature.
  std::string head("DFKERNEL\1\0\0\0\0\0\0\0", 16);
  const std::uint64_t total = 64 + size + 64;
  for (const std::uint64_t number : {total, secret->id()}) {
    for (int i = 0; i < 8; ++i) head += static_cast<char>(number >> (8 * i));
  }
  value = head + std::string(32, '\0') + value;
  unsigned char digest[32];
  crypto_hash_sha256(digest, reinterpret_cast<const unsigned char*>(value.data()), value.size());
  value.append(reinterpret_cast<const char*>(digest), sizeof digest);
  const auto signature = secret->sign(value);
  value.append(reinterpret_cast<const char*>(signature.data()), signature.size());

  const auto entry = decode(value, Key{}, "", *secret);
  if (!entry) {
    // The signature is right: what is wrong is behind it.
    if (entry.error().why != Refusal::kCorrupt || entry.error().message.find("malformed") == std::string::npos)
      std::abort();
    return 0;
  }
  if (entry->code.size() > kMaxCodeBytes) std::abort();
  const auto again = encode(*entry, Key{}, *secret);
  if (!again) std::abort();
  const auto back = decode(*again, Key{}, entry->arch, *secret);
  if (!back || *back != *entry) std::abort();
  return 0;
}
