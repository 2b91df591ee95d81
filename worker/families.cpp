#include "worker/families.h"

#include "pipeline/families/flux/flux.h"
#include "shared/families/flux/flux.h"
#include "shared/families/served.h"

namespace ditfleet {

families::Families families::served() {
  static constexpr const Family* kFamilies[] = {&kFlux};
  return kFamilies;
}

const pipeline::Families& worker::families() {
  static const pipeline::Families list = {&pipeline::flux_family()};
  return list;
}

}  // namespace ditfleet
