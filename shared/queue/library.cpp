#include "shared/queue/library.h"

#include "shared/core/bytes.h"

namespace ditfleet::queue {

const std::string& library_version() {
  static const std::string version = std::to_string(library_build()) + " " + sha256_hex(library_text());
  return version;
}

std::string loadable_library() {
  return std::string(library_text()) + "\nredis.register_function{function_name = '" + std::string(kLibraryName) +
         "_version', callback = function() return '" + library_version() + "' end, flags = {'no-writes'}}\n";
}

}  // namespace ditfleet::queue
