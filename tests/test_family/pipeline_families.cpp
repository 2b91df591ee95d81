#include "pipeline/families/flux/flux.h"
#include "pipeline/families/wan/wan.h"
#include "tests/test_family/families.h"
#include "worker/families.h"

namespace ditfleet::worker {

const pipeline::Families& families() {
  static const pipeline::Families list = {&pipeline::flux_family(), &pipeline::wan_family(),
                                          &tests::test_video_family()};
  return list;
}

}  // namespace ditfleet::worker
