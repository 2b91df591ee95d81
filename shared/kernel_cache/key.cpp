#include "shared/kernel_cache/key.h"

#include <sodium.h>

#include <cstring>
#include <utility>

#include "shared/core/bytes.h"
#include "shared/core/little_endian.h"

namespace ditfleet::kernel_cache {

std::string Key::hex() const { return to_hex(bytes); }

Result<Key> Key::from_hex(std::string_view text) {
  Key key;
  std::size_t size = 0;
  const char* end = nullptr;
  if (text.size() != key.bytes.size() * 2 ||
      sodium_hex2bin(key.bytes.data(), key.bytes.size(), text.data(), text.size(), nullptr, &size, &end) != 0 ||
      size != key.bytes.size() || end != text.data() + text.size()) {
    return invalid_argument("a key must have 64 hexadecimal digits, not " + std::to_string(text.size()) +
                            " characters");
  }
  return key;
}

void KeyBuilder::part(char type, std::string_view bytes) {
  hash_.update(type + little_endian(static_cast<std::int64_t>(bytes.size())));
  hash_.update(bytes);
}

KeyBuilder& KeyBuilder::add(std::string_view name, std::string_view value) {
  part('n', name);
  part('s', value);
  ++pairs_;
  return *this;
}

KeyBuilder& KeyBuilder::add(std::string_view name, std::int64_t value) {
  part('n', name);
  part('i', little_endian(value));
  ++pairs_;
  return *this;
}

Key KeyBuilder::finish() {
  part('e', little_endian(pairs_));
  pairs_ = 0;
  Key key;
  std::memcpy(key.bytes.data(), std::exchange(hash_, Sha256()).digest().data(), key.bytes.size());
  return key;
}

}  // namespace ditfleet::kernel_cache
