#include "shared/families/served.h"
#include "shared/families/flux/flux.h"
#include "shared/families/wan/wan.h"
#include "tests/test_family/families.h"

namespace ditfleet::families {

Families served() {
  static constexpr const Family* kFamilies[] = {&kFlux, &kWan, &tests::kTestVideo};
  return kFamilies;
}

}  // namespace ditfleet::families
