// shared/families: what a model's folder says it takes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "shared/families/flux/flux.h"
#include "shared/families/flux2/flux2.h"
#include "shared/families/qwen_image/qwen_image.h"
#include "shared/families/wan/wan.h"
#include "shared/families/z_image/z_image.h"
#include "shared/job/shape_class.h"
#include "shared/job/validate.h"

namespace ditfleet::families {
namespace {

using testing::HasSubstr;

constexpr std::string_view kClipNames[] = {"ClipPipeline", "LongClipPipeline"};
// A family of videos that no program serves.
constexpr Family kClips = {.name = "clips", .class_names = kClipNames, .read = [](job::ModelEntry& entry) {
                             entry.media = job::MediaKind::kVideo;
                             entry.apply("frames") = {.low = 4, .high = 80, .multiple_of = 4};
                             entry.defaults.set("frames", 16);
                             entry.apply("fps");
                             return Result<void>();
                           }};
constexpr const Family* kFamilies[] = {&kFlux, &kClips};
constexpr const Family* kOfQwen3[] = {&kFlux2, &kZImage};

class ModelFolder : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = (std::filesystem::path(testing::TempDir()) /
            ("ditfleet-model-" + std::string(testing::UnitTest::GetInstance()->current_test_info()->name())))
               .string();
    std::filesystem::remove_all(dir_);
    write("model_index.json", R"({"_class_name":"FluxPipeline"})");
    write("vae/config.json", R"({"block_out_channels":[8,8,8,8]})");
    write("transformer/config.json", R"({"guidance_embeds":true})");
    write("scheduler/scheduler_config.json", R"({"use_dynamic_shifting":true})");
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  void write(const std::string& name, const std::string& text) {
    const auto path = std::filesystem::path(dir_) / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  Error refusal() {
    const auto entry = read_model_entry("m", dir_, kFamilies);
    EXPECT_FALSE(entry.ok());
    return entry.ok() ? Error{} : entry.error();
  }

  std::string dir_;
};

TEST_F(ModelFolder, DevAndSchnellGetDiffusersDefaults) {
  const auto dev = read_model_entry("m", dir_, kFamilies);
  ASSERT_TRUE(dev.ok()) << dev.error().message;
  EXPECT_EQ(dev->defaults.integer("num_inference_steps"), 28);
  EXPECT_DOUBLE_EQ(*dev->defaults.real("guidance_scale"), 3.5);
  EXPECT_EQ(dev->defaults.integer("width"), 1024);
  EXPECT_EQ(dev->defaults.integer("max_sequence_length"), 512);
  EXPECT_EQ(dev->fields.at("width").multiple_of, 16);
  EXPECT_FALSE(dev->defaults.has("negative_prompt"));
  EXPECT_TRUE(dev->applies("negative_prompt"));
  EXPECT_FALSE(dev->applies("frames"));

  write("transformer/config.json", R"({"guidance_embeds":false})");
  write("scheduler/scheduler_config.json", R"({})");
  write("vae/config.json", R"({"block_out_channels":[8,8]})");
  const auto schnell = read_model_entry("m", dir_, kFamilies);
  ASSERT_TRUE(schnell.ok()) << schnell.error().message;
  EXPECT_EQ(schnell->defaults.integer("num_inference_steps"), 4);
  EXPECT_EQ(schnell->defaults.integer("max_sequence_length"), 256);
  EXPECT_EQ(schnell->fields.at("width").multiple_of, 4);
  EXPECT_EQ(schnell->defaults.integer("width"), 256);
}

TEST_F(ModelFolder, ItsOwnFileSetsTheDefaults) {
  write("ditfleet.json", R"({"num_inference_steps":20,"guidance_scale":1,"true_cfg_scale":3.0,"negative_prompt":"",)"
                         R"("width":256,"height":128,"max_sequence_length":64})");
  const auto entry = read_model_entry("m", dir_, kFamilies);
  ASSERT_TRUE(entry.ok()) << entry.error().message;
  EXPECT_EQ(entry->defaults.integer("num_inference_steps"), 20);
  EXPECT_DOUBLE_EQ(*entry->defaults.real("true_cfg_scale"), 3.0);
  EXPECT_EQ(*entry->defaults.text("negative_prompt"), "");
  EXPECT_EQ(entry->defaults.integer("height"), 128);
  EXPECT_EQ(std::pair(entry->free_width, entry->free_height), std::pair(256, 128));  // the area for an image's size
  EXPECT_EQ(entry->defaults.integer("max_sequence_length"), 64);
}

TEST_F(ModelFolder, ItsOwnFileHasPresets) {
  write("ditfleet.json", R"({"num_inference_steps":20,"presets":{"fast":{"num_inference_steps":4,"guidance_scale":1,)"
                         R"("loras":[{"name":"ink","scale":0.5}]},"plain":{}}})");
  const auto entry = read_model_entry("m", dir_, kFamilies);
  ASSERT_TRUE(entry.ok()) << entry.error().message;
  ASSERT_EQ(entry->presets.size(), 2u);
  const job::Preset& fast = entry->presets.at("fast");
  EXPECT_EQ(fast.fields.integer("num_inference_steps"), 4);
  ASSERT_EQ(fast.loras.size(), 1u);
  EXPECT_DOUBLE_EQ(fast.loras[0].scale, 0.5);
  EXPECT_EQ(entry->defaults.integer("num_inference_steps"), 20);
  const auto problem = [&](const std::string& presets) {
    write("ditfleet.json", R"({"presets":)" + presets + "}");
    return refusal().message;
  };
  EXPECT_THAT(problem("[]"), HasSubstr("presets must be an object"));
  EXPECT_THAT(problem(R"({"":{}})"), HasSubstr("a name of 1 to 128 bytes"));
  EXPECT_THAT(problem(R"({"a":{"width":250}})"), HasSubstr("presets has 'a': width is 250"));
  EXPECT_THAT(problem(R"({"a":{"steps":3}})"), HasSubstr("unknown field 'steps'"));
  EXPECT_THAT(problem(R"({"a":{"loras":[{"name":"b","expert":"low"}]}})"), HasSubstr("the model has one transformer"));
  std::string many;
  for (int i = 0; i < 33; ++i) many += (i ? ",\"" : "{\"") + std::to_string(i) + "\":{}";
  EXPECT_THAT(problem(many + "}"), HasSubstr("at most 32 presets"));
}

TEST_F(ModelFolder, SaysWhichFileIsWrong) {
  write("ditfleet.json", R"({"width":250})");
  EXPECT_THAT(refusal().message, testing::AllOf(HasSubstr("ditfleet.json"), HasSubstr("multiple of 16")));
  write("ditfleet.json", R"({"steps":3})");
  EXPECT_THAT(refusal().message, HasSubstr("unknown field 'steps'"));
  write("vae/config.json", R"({"block_out_channels":[]})");
  EXPECT_EQ(refusal().code, Code::kDataCorrupt);
  write("vae/config.json", "{");
  EXPECT_THAT(refusal().message, HasSubstr("vae/config.json"));
  write("model_index.json", R"({"_class_name":"WanPipeline"})");
  EXPECT_THAT(refusal().message, testing::AllOf(HasSubstr("WanPipeline"), HasSubstr("FluxPipeline")));
  std::filesystem::remove(dir_ + "/model_index.json");
  EXPECT_EQ(refusal().code, Code::kNotFound);
  EXPECT_THAT(refusal().message, HasSubstr("diffusers"));
}

TEST_F(ModelFolder, IsReadByTheFamilyThatServesItsClass) {
  write("model_index.json", R"({"_class_name":"LongClipPipeline"})");
  write("ditfleet.json", R"({"frames":8,"fps":12})");
  const auto entry = read_model_entry("m", dir_, kFamilies);
  ASSERT_TRUE(entry.ok()) << entry.error().message;
  EXPECT_EQ(entry->kind, "clips");
  EXPECT_EQ(entry->media, job::MediaKind::kVideo);
  EXPECT_EQ(entry->defaults.integer("frames"), 8);
  EXPECT_EQ(entry->defaults.real("fps"), 12.0);
  EXPECT_FALSE(entry->applies("guidance_scale"));
  const job::Catalogue catalogue{{{"m", *entry}}, "m"};
  EXPECT_EQ(job::complete_spec({.prompt = "a"}, catalogue)->output_format, job::OutputFormat::kMp4);
  EXPECT_EQ(job::complete_spec({.output_format = job::OutputFormat::kPng}, catalogue).error().param, "output_format");
  write("ditfleet.json", R"({"num_inference_steps":8})");
  EXPECT_THAT(refusal().message, HasSubstr("unknown field 'num_inference_steps'"));
  write("ditfleet.json", R"({"frames":84})");
  EXPECT_THAT(refusal().message, HasSubstr("4 to 80"));
}

TEST_F(ModelFolder, ClassesOfWanHaveFourKPlusOneFrames) {
  write("model_index.json", R"({"_class_name":"WanPipeline"})");
  static constexpr const Family* kServed[] = {&kWan};
  const auto entry = read_model_entry("m", dir_, kServed);
  ASSERT_TRUE(entry.ok()) << entry.error().message;
  const job::Catalogue catalogue{{{"m", *entry}}, "m"};
  const auto with_frames = [&](std::int64_t frames) {
    job::JobSpec spec{.prompt = "a"};
    spec.fields.set("frames", frames);
    return job::complete_spec(std::move(spec), catalogue);
  };
  const auto shape = job::shape_class_of(*with_frames(82), *entry, "bf16");
  EXPECT_EQ(shape.key(), "m/832x480x81/true_cfg/512/bf16");
  EXPECT_EQ(job::tokens_of(shape, *entry), 21 * 30 * 52 + 512);
  for (const std::int64_t frames : {0, 258}) {
    const auto refused = with_frames(frames);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().param, "frames");
    EXPECT_THAT(refused.error().message, HasSubstr("frames is " + std::to_string(frames)));
    EXPECT_THAT(refused.error().message, HasSubstr("1 to 257"));
  }
}

TEST_F(ModelFolder, ModelsOfWanTakeImagesAsFrames) {
  static constexpr const Family* kServed[] = {&kWan};
  const auto entry_of = [&](const std::string& index) {
    write("model_index.json", index);
    auto entry = read_model_entry("m", dir_, kServed);
    EXPECT_TRUE(entry.ok()) << entry.error().message;
    return std::move(entry).value();
  };
  EXPECT_FALSE(entry_of(R"({"_class_name":"WanPipeline"})").applies("image"));
  const auto from_image = entry_of(R"({"_class_name":"WanImageToVideoPipeline"})");
  EXPECT_EQ(from_image.fields.at("image").high, 2);
  EXPECT_TRUE(from_image.fields.at("image").required);
  EXPECT_FALSE(from_image.defaults.has("width"));
  const char* with_clip =
      R"({"_class_name":"WanImageToVideoPipeline","image_encoder":["transformers","CLIPVisionModel"]})";
  for (const auto& [config, takes] :
       {std::pair(R"({"image_dim":1280})", 1), {R"({"image_dim":1280,"pos_embed_seq_len":514})", 2}}) {
    write("transformer/config.json", config);
    const auto entry = entry_of(with_clip);
    EXPECT_EQ(entry.fields.at("image").low, takes);
    EXPECT_EQ(entry.fields.at("image").high, takes);
    EXPECT_EQ(entry.fields.at("max_sequence_length").low, 512);
    EXPECT_FALSE(job::check_image_size(entry, 4000, 20));
    ASSERT_TRUE(job::check_image_size(entry, 4001, 20));
    EXPECT_THAT(job::check_image_size(entry, 4001, 20)->message, HasSubstr("at most 200 times"));
  }
  for (const std::string name : {"WanPipeline", "WanImageToVideoPipeline"}) {  // TI2V-5B
    const auto either = entry_of(R"({"_class_name":")" + name + R"(","expand_timesteps":true})");
    EXPECT_EQ(either.fields.at("image").high, 1);
    EXPECT_FALSE(either.fields.at("image").required);
    EXPECT_EQ(either.fields.at("width").multiple_of, 32);
    EXPECT_EQ(either.defaults.integer("width"), 1280);
    EXPECT_EQ(either.free_height, 704);
    EXPECT_EQ(either.pixels_per_token, 32 * 32);
  }
}

TEST_F(ModelFolder, ZImageIsTurboWithTheShiftOfThePublishedScheduler) {
  write("model_index.json", R"({"_class_name":"ZImagePipeline"})");
  const auto entry_with = [&](const std::string& scheduler) {
    write("scheduler/scheduler_config.json", scheduler);
    auto entry = read_model_entry("m", dir_, kOfQwen3);
    EXPECT_TRUE(entry.ok()) << entry.error().message;
    return std::move(entry).value();
  };
  const auto turbo = entry_with(R"({"shift":3.0,"use_dynamic_shifting":false})");
  EXPECT_EQ(turbo.kind, "z_image");
  EXPECT_EQ(turbo.defaults.integer("num_inference_steps"), 8);
  EXPECT_EQ(turbo.defaults.real("guidance_scale"), 0.0);
  for (const char* base : {R"({"shift":6.0})", R"({"shift":3.0,"use_dynamic_shifting":true})", "{}"}) {
    const auto entry = entry_with(base);
    EXPECT_EQ(entry.defaults.integer("num_inference_steps"), 50) << base;
    EXPECT_EQ(entry.defaults.real("guidance_scale"), 5.0) << base;
  }
  std::vector<std::string_view> fields;
  for (const auto& [field, limits] : turbo.fields) fields.push_back(field.name());
  EXPECT_THAT(fields, testing::UnorderedElementsAre("width", "height", "negative_prompt", "num_inference_steps",
                                                    "guidance_scale", "cfg_normalization", "cfg_truncation",
                                                    "max_sequence_length"));
  EXPECT_EQ(turbo.defaults.real("cfg_normalization"), 0.0);
  EXPECT_EQ(turbo.defaults.real("cfg_truncation"), 1.0);
  EXPECT_EQ(turbo.defaults.integer("max_sequence_length"), 512);
  EXPECT_EQ(turbo.fields.at("max_sequence_length").high, 1024);
}

TEST_F(ModelFolder, ZImageIsGuidedAboveZero) {
  write("model_index.json", R"({"_class_name":"ZImagePipeline"})");
  const auto entry = read_model_entry("m", dir_, kOfQwen3);
  ASSERT_TRUE(entry.ok()) << entry.error().message;
  job::FieldValues fields;
  EXPECT_EQ(entry->guidance(fields), job::GuidanceKind::kNone);
  for (const auto& [scale, kind] : {std::pair(0.0, job::GuidanceKind::kNone),
                                    {0.5, job::GuidanceKind::kTrueCfg},
                                    {1.0, job::GuidanceKind::kTrueCfg},
                                    {5.0, job::GuidanceKind::kTrueCfg}}) {
    fields.set("guidance_scale", scale);
    EXPECT_EQ(entry->guidance(fields), kind) << scale;
  }
}

TEST_F(ModelFolder, SidesOfZImageHaveAsManyTokensAsTheTransformerHasPositions) {
  write("model_index.json", R"({"_class_name":"ZImagePipeline"})");
  const auto entry_with = [&](const std::string& transformer) {
    write("transformer/config.json", transformer);
    auto entry = read_model_entry("m", dir_, kOfQwen3);
    EXPECT_TRUE(entry.ok()) << entry.error().message;
    return std::move(entry).value();
  };
  const auto published = entry_with(R"({"axes_lens":[1536,512,512]})");
  for (const job::Field side : {job::Field("width"), job::Field("height")}) {
    EXPECT_EQ(published.fields.at(side).low, 16);
    EXPECT_EQ(published.fields.at(side).high, 2048) << "not 8192";
    EXPECT_EQ(published.fields.at(side).multiple_of, 16);
    EXPECT_EQ(published.defaults.integer(side), 1024);
  }
  const auto tiny = entry_with(R"({"axes_lens":[96,12,100]})");  // of captions, rows and columns
  EXPECT_EQ(tiny.fields.at("height").high, 12 * 16);
  EXPECT_EQ(tiny.defaults.integer("height"), 12 * 16);
  EXPECT_EQ(tiny.fields.at("width").high, 100 * 16);
  EXPECT_EQ(tiny.defaults.integer("width"), 1024);
  EXPECT_EQ(entry_with("{}").fields.at("width").high, 2048);
}

TEST_F(ModelFolder, QwenImageIsGuidedWithANegativePromptAndNeedsTwoStepsWithATerminalShift) {
  constexpr const Family* kQwen[] = {&kQwenImage};
  write("model_index.json", R"({"_class_name":"QwenImagePipeline"})");
  write("vae/config.json", R"({"dim_mult":[1,2,4,4]})");
  write("scheduler/scheduler_config.json", R"({"shift_terminal":0.02})");
  const auto entry = read_model_entry("m", dir_, kQwen);
  ASSERT_TRUE(entry.ok()) << entry.error().message;
  EXPECT_EQ(entry->kind, "qwen_image");
  EXPECT_EQ(entry->defaults.integer("num_inference_steps"), 50);
  EXPECT_EQ(entry->defaults.real("true_cfg_scale"), 4.0);
  EXPECT_EQ(entry->defaults.integer("max_sequence_length"), 512);
  EXPECT_EQ(entry->defaults.integer("width"), 1024);
  EXPECT_EQ(entry->fields.at("width").multiple_of, 16);
  EXPECT_EQ(entry->fields.at("num_inference_steps").low, 2);
  job::FieldValues fields = entry->defaults;
  EXPECT_EQ(entry->guidance(fields), job::GuidanceKind::kNone);
  fields.set("negative_prompt", std::string());
  EXPECT_EQ(entry->guidance(fields), job::GuidanceKind::kTrueCfg);
  fields.set("true_cfg_scale", 1.0);
  EXPECT_EQ(entry->guidance(fields), job::GuidanceKind::kNone);
  write("scheduler/scheduler_config.json", R"({"shift_terminal":null})");
  EXPECT_EQ(read_model_entry("m", dir_, kQwen)->fields.at("num_inference_steps").low, 1);
}

TEST_F(ModelFolder, KleinIsDistilledIfItsIndexSaysSo) {
  const auto entry_with = [&](const std::string& more) {
    write("model_index.json",
          R"({"_class_name":"Flux2KleinPipeline","text_encoder":["transformers","Qwen3Model"])" + more + "}");
    auto entry = read_model_entry("m", dir_, kOfQwen3);
    EXPECT_TRUE(entry.ok()) << entry.error().message;
    return std::move(entry).value();
  };
  const auto distilled = entry_with(R"(,"is_distilled":true)");
  EXPECT_EQ(distilled.kind, "flux2");
  EXPECT_EQ(distilled.defaults.integer("num_inference_steps"), 4);
  EXPECT_EQ(distilled.defaults.real("guidance_scale"), 1.0);
  EXPECT_EQ(distilled.guidance, nullptr) << "whatever guidance_scale is";
  EXPECT_EQ(distilled.defaults.integer("width"), 1024);
  EXPECT_EQ(distilled.fields.at("width").multiple_of, 16);
  std::vector<std::string_view> fields;
  for (const auto& [field, limits] : distilled.fields) fields.push_back(field.name());
  EXPECT_THAT(fields, testing::UnorderedElementsAre("image", "width", "height", "num_inference_steps", "guidance_scale",
                                                    "max_sequence_length"));
  for (const char* more : {"", R"(,"is_distilled":false)", R"(,"is_distilled":null)"}) {
    const auto base = entry_with(more);
    EXPECT_EQ(base.defaults.integer("num_inference_steps"), 50) << more;
    EXPECT_EQ(base.defaults.real("guidance_scale"), 4.0) << more;
    EXPECT_EQ(base.defaults.integer("max_sequence_length"), 512) << more;
    EXPECT_EQ(base.guidance(base.defaults), job::GuidanceKind::kTrueCfg) << more;
    job::FieldValues unguided;
    unguided.set("guidance_scale", 1.0);
    EXPECT_EQ(base.guidance(unguided), job::GuidanceKind::kNone) << more;
  }
}

TEST_F(ModelFolder, Flux2ThatReadsPromptsWithMistralIsRefused) {
  for (const char* index :
       {R"({"_class_name":"Flux2Pipeline","text_encoder":["transformers","Mistral3ForConditionalGeneration"]})",
        R"({"_class_name":"Flux2KleinPipeline","text_encoder":["transformers","Mistral3ForConditionalGeneration"]})",
        R"({"_class_name":"Flux2Pipeline","text_encoder":["transformers","Qwen3ForCausalLM"]})",
        R"({"_class_name":"Flux2KleinPipeline"})"}) {
    write("model_index.json", index);
    const auto refused = read_model_entry("m", dir_, kOfQwen3);
    ASSERT_FALSE(refused.ok()) << index;
    EXPECT_EQ(refused.error().code, Code::kDataCorrupt);
    EXPECT_THAT(refused.error().message,
                testing::AllOf(HasSubstr("model_index.json"), HasSubstr("Mistral, is not supported"),
                               HasSubstr("Flux2KleinPipeline with Qwen3ForCausalLM")));
  }
}

TEST_F(ModelFolder, GuidanceOfItsRequestsIsTrueCfgOnlyWithBothFields) {
  const auto entry = read_model_entry("m", dir_, kFamilies);
  ASSERT_TRUE(entry.ok()) << entry.error().message;
  job::FieldValues fields;
  EXPECT_EQ(entry->guidance(fields), job::GuidanceKind::kNone);
  fields.set("guidance_scale", 0);
  fields.set("true_cfg_scale", 2);
  EXPECT_EQ(entry->guidance(fields), job::GuidanceKind::kEmbedded);
  fields.set("negative_prompt", "");
  EXPECT_EQ(entry->guidance(fields), job::GuidanceKind::kTrueCfg);
  fields.set("true_cfg_scale", 1);
  EXPECT_EQ(entry->guidance(fields), job::GuidanceKind::kEmbedded);
}

}  // namespace
}  // namespace ditfleet::families
