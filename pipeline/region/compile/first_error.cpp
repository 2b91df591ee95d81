#include "pipeline/region/compile/compiler.h"
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

}  // namespace ditfleet::region
