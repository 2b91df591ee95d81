// libFuzzer: any bytes as a job. What parses must be written and read back as the same job.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "shared/core/bytes.h"
#include "shared/job/validate.h"
#include "tests/fixtures/image_model.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ditfleet;
  static const job::Catalogue catalogue = [] {
    job::Catalogue out{{{"demo", job::image_model("demo")}}, "demo"};
    job::ModelEntry& demo = out.models.at("demo");
    for (const job::Field field : {job::Field("mask"), job::Field("strength"), job::Field("auto_resize")})
      demo.apply(field);
    demo.apply("image").high = 3;
    demo.defaults.set("strength", 0.6);
    demo.free_width = demo.free_height = 1024;
    return out;
  }();
  const auto spec = job::parse_spec(std::string_view(reinterpret_cast<const char*>(data), size));
  if (!spec) {
    if (spec.error().message.empty() || !is_valid_utf8(spec.error().message)) std::abort();
    return 0;
  }
  const std::string text = job::to_json(*spec);
  const auto again = job::parse_spec(text);
  if (!again || job::to_json(*again) != text) std::abort();
  // A spec that is complete stays what it is when it is completed once more.
  const auto complete = job::complete_spec(*spec, catalogue);
  if (!complete) return 0;
  const auto twice = job::complete_spec(*complete, catalogue);
  if (!twice || job::to_json(*twice) != job::to_json(*complete)) std::abort();
  return 0;
}
