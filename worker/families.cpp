#include "worker/families.h"

#include "pipeline/families/flux/flux.h"
#include "pipeline/families/wan/wan.h"
#include "shared/families/flux/flux.h"
#include "shared/families/served.h"
#include "shared/families/wan/wan.h"

namespace ditfleet {

families::Families families::served() {
  static constexpr const Family* kFamilies[] = {&kFlux, &kWan};
  return kFamilies;
}

const pipeline::Families& worker::families() {
  static const pipeline::Families list = {&pipeline::flux_family(), &pipeline::wan_family()};
  return list;
}

}  // namespace ditfleet
