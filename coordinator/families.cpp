#include "shared/families/flux/flux.h"
#include "shared/families/served.h"
#include "shared/families/wan/wan.h"

namespace ditfleet::families {

Families served() {
  static constexpr const Family* kFamilies[] = {&kFlux, &kWan};
  return kFamilies;
}

}  // namespace ditfleet::families
