#include "pipeline/region/compile/compiler.h"

#include <cstdlib>

#include "shared/core/bytes.h"
#include "shared/core/excerpt.h"

namespace ditfleet::region {

constexpr std::size_t kMostOfALine = 500;  // bytes; the line goes into messages and logs

std::string first_error(std::string_view output) {
  const std::string_view first = output.substr(0, output.find('\n'));
  while (!output.empty()) {
    const auto end = output.find('\n');
    const std::string_view line = output.substr(0, end);
    for (const char* word : {"error", "Error"})  // compilers; assemblers
      if (line.find(word) != std::string_view::npos) return excerpt(line, kMostOfALine);
    output = end == std::string_view::npos ? std::string_view() : output.substr(end + 1);
  }
  return excerpt(first, kMostOfALine);
}

std::string keep_source(const std::string& region, const std::string& extension, const std::string& text) {
  const char* folder = std::getenv("TMPDIR");
  const std::string path = std::string(folder && *folder ? folder : "/tmp") + "/ditfleet-" + region + "-" +
                           sha256_hex(text).substr(0, 12) + extension;
  return write_file_atomically(path, text) ? path : "";
}

}  // namespace ditfleet::region
