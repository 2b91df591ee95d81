#include "shared/core/sha256.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "shared/core/bytes.h"
#include "shared/core/fd_io.h"
#include "shared/core/unique_fd.h"

namespace ditfleet {

namespace {

// Looked up once: EVP_sha256() is looked up by its name at every use. Never freed.
const EVP_MD* algorithm() {
  static const EVP_MD* found = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  return found;
}

}  // namespace

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  if (!context_ || EVP_DigestInit_ex(context_.get(), algorithm(), nullptr) != 1) throw std::bad_alloc();
}

void Sha256::Free::operator()(evp_md_ctx_st* context) const { EVP_MD_CTX_free(context); }

void Sha256::update(std::string_view bytes) { EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()); }

std::string Sha256::digest() {
  std::string digest(32, '\0');
  EVP_DigestFinal_ex(context_.get(), reinterpret_cast<unsigned char*>(digest.data()), nullptr);
  return digest;
}

std::string Sha256::hex() {
  const std::string bytes = digest();
  return to_hex({reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size()});
}

bool is_sha256_hex(std::string_view text) {
  return text.size() == 64 &&
         std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

Result<FileDigest> sha256_of_file(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // opening a FIFO must not block
  if (!file.valid()) return cannot_read(path);
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) return cannot_read(path);
  if (!S_ISREG(info.st_mode)) return unavailable("cannot read '" + path + "': it is not a regular file");
  Sha256 hash;
  FileDigest out;
  for (;;) {
    const auto piece = read_up_to(file.get(), 1 << 20);
    if (!piece) return cannot_read(path);
    if (piece->empty()) break;
    hash.update(*piece);
    out.bytes += static_cast<std::int64_t>(piece->size());
  }
  out.sha256 = hash.hex();
  return out;
}

}  // namespace ditfleet
