#include "shared/core/bytes.h"

#include <fcntl.h>
#include <sodium.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

#include "shared/core/fd_io.h"
#include "shared/core/ids.h"
#include "shared/core/sha256.h"
#include "shared/core/unique_fd.h"

namespace ditfleet {

std::string sha256_hex(std::string_view bytes) {
  Sha256 hash;
  hash.update(bytes);
  return hash.hex();
}

std::string to_hex(std::span<const unsigned char> bytes) {
  std::string text(bytes.size() * 2 + 1, '\0');
  sodium_bin2hex(text.data(), text.size(), bytes.data(), bytes.size());
  text.pop_back();
  return text;
}

std::string base64(std::string_view bytes) {
  std::string text(sodium_base64_encoded_len(bytes.size(), sodium_base64_VARIANT_ORIGINAL), '\0');
  sodium_bin2base64(text.data(), text.size(), reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(),
                    sodium_base64_VARIANT_ORIGINAL);
  text.pop_back();
  return text;
}

std::optional<std::string> percent_decoded(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i];
      continue;
    }
    unsigned byte = 0;
    const char* first = text.data() + i + 1;
    if (i + 2 >= text.size() || std::from_chars(first, first + 2, byte, 16).ptr != first + 2) return std::nullopt;
    out += static_cast<char>(byte);
    i += 2;
  }
  return out;
}

bool is_valid_utf8(std::string_view text) {
  const auto* p = reinterpret_cast<const unsigned char*>(text.data());
  const auto* end = p + text.size();
  while (p < end) {
    if (*p < 0x80) {
      ++p;
      continue;
    }
    int more = 0;
    std::uint32_t c = 0, least = 0;
    if ((*p & 0xE0) == 0xC0)
      more = 1, c = *p & 0x1F, least = 0x80;
    else if ((*p & 0xF0) == 0xE0)
      more = 2, c = *p & 0x0F, least = 0x800;
    else if ((*p & 0xF8) == 0xF0)
      more = 3, c = *p & 0x07, least = 0x10000;
    else
      return false;
    if (end - p <= more) return false;
    for (int i = 1; i <= more; ++i) {
      if ((p[i] & 0xC0) != 0x80) return false;
      c = c << 6 | (p[i] & 0x3F);
    }
    if (c < least || c > 0x10FFFF || (c >= 0xD800 && c <= 0xDFFF)) return false;
    p += more + 1;
  }
  return true;
}

Result<std::string> read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return cannot_read(path);
  std::ostringstream out;
  if (in.peek() != std::ifstream::traits_type::eof()) out << in.rdbuf();
  if (in.bad() || out.fail()) return unavailable("cannot read '" + path + "': the read failed; is it a folder?");
  return std::move(out).str();
}

Result<void> write_file_atomically(const std::string& path, std::string_view bytes, bool keep_mode) {
  const std::string temporary = path + ".tmp-" + new_nonce();
  const auto failed = [&](const char* what) {
    const int e = errno;
    ::unlink(temporary.c_str());
    return unavailable(std::string("cannot ") + what + " '" + path + "': " + std::strerror(e));
  };
  const UniqueFd file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (!file.valid()) return failed("create");
  if (struct stat old = {};
      keep_mode && ::stat(path.c_str(), &old) == 0 &&
      (::fchown(file.get(), old.st_uid, old.st_gid) != 0 || ::fchmod(file.get(), old.st_mode & 07777) != 0))
    return failed("keep the owner and mode of");
  if (!write_all(file.get(), bytes)) return failed("write");
  if (::fsync(file.get()) != 0) return failed("sync");
  if (::rename(temporary.c_str(), path.c_str()) != 0) return failed("rename to");
  const auto slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const UniqueFd parent(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (parent.valid() && ::fsync(parent.get()) != 0 && errno != EINVAL) return failed("sync the folder of");
  return {};
}

}  // namespace ditfleet
