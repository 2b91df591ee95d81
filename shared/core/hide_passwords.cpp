#include "shared/core/hide_passwords.h"

#include <algorithm>
#include <cstring>

namespace ditfleet {

void hide_passwords(int argc, char** argv) {
  for (char** argument = argv; argument != argv + argc; ++argument) {
    char* const scheme = std::strstr(*argument, "://");
    char* const at = scheme ? std::strrchr(scheme, '@') : nullptr;
    char* const colon = at ? std::strchr(scheme + 3, ':') : nullptr;
    if (colon && colon < at) std::fill(colon + 1, at, '*');
  }
}

}  // namespace ditfleet
