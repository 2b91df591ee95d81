#include "shared/queue/library.h"

#include "shared/core/bytes.h"

namespace ditfleet::queue {

const std::string& library_version() {
  static const std::string version = std::to_string(library_build()) + " " + sha256_hex(library_text());
  return version;
}

std::string loadable_library() { return loadable_library(library_text(), library_version()); }

std::string loadable_library(std::string_view text, const std::string& version) {
  return std::string(text) + "\nredis.register_function{function_name = '" + std::string(kLibraryName) +
         "_version', callback = function() return '" + version + "' end, flags = {'no-writes'}}\n";
}

}  // namespace ditfleet::queue
