#include "worker/families.h"

#include "pipeline/families/flux/flux.h"

namespace ditfleet::worker {

const pipeline::Families& families() {
  static const pipeline::Families list = {&pipeline::flux_family()};
  return list;
}

}  // namespace ditfleet::worker
