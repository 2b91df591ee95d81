#include "tests/test_family/families.h"

namespace ditfleet::tests {
namespace {

constexpr std::string_view kClassNames[] = {"TestVideoPipeline"};

Result<void> read(job::ModelEntry& entry) {
  const auto config = families::read_json_object(entry.dir + "/transformer/config.json");
  if (!config) return config.error();
  entry.media = job::MediaKind::kVideo;
  for (const job::Field side : {job::Field("width"), job::Field("height")}) {
    entry.apply(side) = {.low = 8, .high = 256, .multiple_of = 8};
    entry.defaults.set(side, std::int64_t{32});
  }
  entry.apply("frames") = {.low = 1, .high = 9};
  entry.apply("fps");
  entry.apply("num_inference_steps").high = 50;
  entry.apply("guidance_scale");
  entry.apply("guidance_scale_2");
  entry.defaults.set("frames", std::int64_t{5});
  entry.defaults.set("fps", 8.0);
  entry.defaults.set("num_inference_steps", std::int64_t{4});
  entry.defaults.set("guidance_scale", 3.0);
  entry.defaults.set("guidance_scale_2", 2.0);
  entry.guidance = [](const job::FieldValues&) { return job::GuidanceKind::kTrueCfg; };
  return {};
}

}  // namespace

const families::Family kTestVideo = {.name = "test-video", .class_names = kClassNames, .read = read};

}  // namespace ditfleet::tests
