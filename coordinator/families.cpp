#include "shared/families/flux/flux.h"
#include "shared/families/served.h"

namespace ditfleet::families {

Families served() {
  static constexpr const Family* kFamilies[] = {&kFlux};
  return kFamilies;
}

}  // namespace ditfleet::families
