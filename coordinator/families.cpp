#include "shared/families/flux/flux.h"
#include "shared/families/flux2/flux2.h"
#include "shared/families/qwen_image/qwen_image.h"
#include "shared/families/served.h"
#include "shared/families/wan/wan.h"
#include "shared/families/z_image/z_image.h"

namespace ditfleet::families {

Families served() {
  static constexpr const Family* kFamilies[] = {&kFlux, &kFlux2, &kQwenImage, &kWan, &kZImage};
  return kFamilies;
}

}  // namespace ditfleet::families
