#include "shared/core/secrets.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "shared/core/bytes.h"

namespace ditfleet {

Result<std::string> read_secret_file(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return read_file(path);
  const bool own = info.st_uid == ::geteuid();
  if (!own && info.st_uid != 0) {
    return invalid_argument(
        fmt::format("'{}' belongs to user {}, who can change it; run `chown {} {}`, or use another file", path,
                    info.st_uid, ::geteuid(), path));
  }
  if ((info.st_mode & (own ? 077 : 037)) != 0) {
    return invalid_argument(fmt::format("'{}' has mode {:04o}, so other users can use it; run `chmod {} {}`", path,
                                        info.st_mode & 07777, own ? "600" : "640", path));
  }
  return read_file(path);
}

void hide_passwords(int argc, char** argv) {
  for (char** argument = argv; argument != argv + argc; ++argument) {
    char* const scheme = std::strstr(*argument, "://");
    char* const at = scheme ? std::strrchr(scheme, '@') : nullptr;
    char* const colon = at ? std::strchr(scheme + 3, ':') : nullptr;
    if (colon && colon < at) std::fill(colon + 1, at, '*');
  }
}

}  // namespace ditfleet
