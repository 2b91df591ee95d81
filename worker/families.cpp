#include "worker/families.h"

#include "pipeline/families/flux/flux.h"
#include "pipeline/families/flux2/flux2.h"
#include "pipeline/families/qwen_image/qwen_image.h"
#include "pipeline/families/wan/wan.h"
#include "pipeline/families/z_image/z_image.h"
#include "shared/families/flux/flux.h"
#include "shared/families/flux2/flux2.h"
#include "shared/families/qwen_image/qwen_image.h"
#include "shared/families/served.h"
#include "shared/families/wan/wan.h"
#include "shared/families/z_image/z_image.h"

namespace ditfleet {

families::Families families::served() {
  static constexpr const Family* kFamilies[] = {&kFlux, &kFlux2, &kQwenImage, &kWan, &kZImage};
  return kFamilies;
}

const pipeline::Families& worker::families() {
  static const pipeline::Families list = {&pipeline::flux_family(), &pipeline::flux2_family(),
                                          &pipeline::qwen_image_family(), &pipeline::wan_family(),
                                          &pipeline::z_image_family()};
  return list;
}

}  // namespace ditfleet
