#include <cstdlib>

#include "pipeline/region/compile/compiler.h"
#include "shared/core/bytes.h"

namespace ditfleet::region {

std::string keep_source(const std::string& region, const std::string& extension, const std::string& text) {
  const char* folder = std::getenv("TMPDIR");
  const std::string path = std::string(folder && *folder ? folder : "/tmp") + "/ditfleet-" + region + "-" +
                           sha256_hex(text).substr(0, 12) + extension;
  return write_file_atomically(path, text) ? path : "";
}

}  // namespace ditfleet::region
