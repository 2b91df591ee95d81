#include "shared/kernel_cache/secret.h"

#include <fcntl.h>
#include <sodium.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "shared/core/bytes.h"
#include "shared/core/fd_io.h"
#include "shared/core/ids.h"
#include "shared/core/little_endian.h"
#include "shared/core/secrets.h"
#include "shared/core/unique_fd.h"

namespace ditfleet::kernel_cache {
namespace {

std::array<unsigned char, 32> hmac(std::string_view key, std::string_view bytes) {
  crypto_auth_hmacsha256_state state;
  std::array<unsigned char, 32> out{};
  crypto_auth_hmacsha256_init(&state, reinterpret_cast<const unsigned char*>(key.data()), key.size());
  crypto_auth_hmacsha256_update(&state, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
  crypto_auth_hmacsha256_final(&state, out.data());
  sodium_memzero(&state, sizeof state);
  return out;
}

// Creates the file atomically: writes a temporary file and links it, which fails if the name exists.
Result<void> make_secret_file(const std::string& path) {
  unsigned char random[32];
  char text[sizeof random * 2 + 1];
  randombytes_buf(random, sizeof random);
  sodium_bin2hex(text, sizeof text, random, sizeof random);
  text[sizeof text - 1] = '\n';

  const std::string temporary = path + ".tmp-" + new_nonce();
  const auto failed = [&](const char* what) {
    const int e = errno;
    ::unlink(temporary.c_str());
    return unavailable(std::string("cannot ") + what + " the secret file '" + path + "': " + std::strerror(e));
  };
  const UniqueFd file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file.valid()) return failed("create");
  const bool written = write_all(file.get(), {text, sizeof text}) && ::fsync(file.get()) == 0;
  sodium_memzero(random, sizeof random);
  sodium_memzero(text, sizeof text);
  if (!written) return failed("write");
  if (::link(temporary.c_str(), path.c_str()) != 0 && errno != EEXIST) return failed("create");
  ::unlink(temporary.c_str());
  return {};
}

}  // namespace

Secret::Secret(std::string_view text) {
  key_ = hmac(text, "ditfleet kernel cache: signature, 1");
  const auto id = hmac(text, "ditfleet kernel cache: id, 1");
  id_ = from_little_endian<std::uint64_t>({reinterpret_cast<const char*>(id.data()), id.size()});
  if (id_ == 0) id_ = 1;
}

Secret::~Secret() { sodium_memzero(key_.data(), key_.size()); }

Result<std::shared_ptr<const Secret>> Secret::from_text(std::string_view text) {
  if (text.size() < kMinBytes) {
    return invalid_argument("the cache's secret has " + std::to_string(text.size()) +
                            " characters; it must have at least " + std::to_string(kMinBytes) +
                            "; run `openssl rand -hex 32` to create one");
  }
  return std::shared_ptr<const Secret>(new Secret(text));
}

Result<std::shared_ptr<const Secret>> Secret::from_file(const std::string& path) {
  auto text = read_secret_file(path);
  if (!text) return Error{text.error().code, "the cache's secret: " + text.error().message};
  std::string_view line = *text;
  while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) line.remove_suffix(1);
  auto secret = from_text(line);
  sodium_memzero(text->data(), text->size());
  if (!secret) return Error{secret.error().code, "'" + path + "': " + secret.error().message};
  return secret;
}

Result<std::shared_ptr<const Secret>> Secret::from_file_or_new(const std::string& path) {
  if (::access(path.c_str(), F_OK) != 0 && errno == ENOENT) {
    if (auto made = make_secret_file(path); !made) return made.error();
  }
  return from_file(path);
}

Secret::Signature Secret::sign(std::string_view bytes) const {
  return hmac({reinterpret_cast<const char*>(key_.data()), key_.size()}, bytes);
}

bool Secret::verify(std::string_view bytes, const Signature& signature) const {
  const Signature right = sign(bytes);
  return sodium_memcmp(right.data(), signature.data(), right.size()) == 0;
}

std::string Secret::id_text(std::uint64_t id) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(id));
  return text;
}

}  // namespace ditfleet::kernel_cache
