// Where the scale of an adapter's product comes from: alpha tensors, metadata, or nobody.
#include "tests/unit/pipeline/lora/lora_file_fixture.h"

namespace ditfleet::pipeline {
namespace {

TEST_F(LoraFileTest, ScalesByAlpha) {
  auto tensors = pair_of(kQ, kWidth, kWidth, 4);
  tensors[kQ + ".alpha"] = {{}, {2.0f}};
  EXPECT_DOUBLE_EQ(terms(tensors)[0].scale, 0.5);
  EXPECT_DOUBLE_EQ(terms(tensors, {{"lora_adapter_metadata", R"({"transformer.use_rslora":true})"}})[0].scale, 1.0);
  EXPECT_DOUBLE_EQ(terms(tensors, {{"lora_adapter_metadata", R"({"lora_alpha":2,"use_rslora":true})"}})[0].scale, 1.0);
  tensors.erase(kQ + ".alpha");
  const auto with = [&](const std::string& json) { return terms(tensors, {{"lora_adapter_metadata", json}})[0].scale; };
  EXPECT_DOUBLE_EQ(with(R"({"transformer.lora_alpha":8})"), 2.0);
  EXPECT_DOUBLE_EQ(with(R"({"lora_alpha":8,"use_rslora":true})"), 4.0);
  EXPECT_DOUBLE_EQ(with(R"({"text_encoder.lora_alpha":8})"), 1.0);
  EXPECT_DOUBLE_EQ(with(R"({"transformer.lora_alpha":8,"transformer.alpha_pattern":{"attn.to_q":1}})"), 0.25);
  EXPECT_DOUBLE_EQ(
      with(R"({"transformer.lora_alpha":8,"transformer.alpha_pattern":{"to_k":1,"ttn.to_q":1,"^attn.to_q":1}})"), 2.0);
  // Keys are regular expressions of the name or of its end; the first that matches counts.
  for (const char* pattern : {R"(.*\\.to_q)", R"(attn\\.to_[qk])", R"(transformer_blocks\\.\\d+\\..*)",
                              R"(^transformer_blocks\\.0\\.attn\\.to_q)", "to_k|to_q"})
    EXPECT_DOUBLE_EQ(with(R"({"transformer.lora_alpha":8,"transformer.alpha_pattern":{"to_v":3,")" +
                          std::string(pattern) + R"(":1,".*":2}})"),
                     0.25)
        << pattern;
  for (const char* pattern : {R"(to_[kv])", R"(^to_q)", R"(attn\\.to)", R"(single_transformer_blocks\\..*)"})
    EXPECT_DOUBLE_EQ(
        with(R"({"transformer.lora_alpha":8,"transformer.alpha_pattern":{")" + std::string(pattern) + R"(":1}})"), 2.0)
        << pattern;
}

// diffusers makes PEFT's LoraConfig of what the metadata says of a part, and that has an alpha of 8 where it is told
// none.
TEST_F(LoraFileTest, MetadataWithoutAnAlphaMeansPeftsOwn) {
  auto tensors = pair_of(kQ, kWidth, kWidth, 4);
  const auto with = [&](const std::string& json) { return terms(tensors, {{"lora_adapter_metadata", json}})[0].scale; };
  EXPECT_DOUBLE_EQ(with(R"({"transformer.r":4})"), 2.0);
  EXPECT_DOUBLE_EQ(with(R"({"r":4,"use_rslora":true})"), 4.0);
  EXPECT_DOUBLE_EQ(with(R"({"transformer.alpha_pattern":{"to_k":1}})"), 2.0);
  EXPECT_DOUBLE_EQ(with(R"({"transformer.alpha_pattern":{"to_q":1}})"), 0.25);
  EXPECT_DOUBLE_EQ(with(R"({"text_encoder.r":4,"text_encoder_2.r":4})"), 1.0) << "nothing is said of the transformer";
  EXPECT_DOUBLE_EQ(with("{}"), 1.0);
  tensors[kQ + ".alpha"] = {{}, {2.0f}};
  EXPECT_DOUBLE_EQ(with(R"({"transformer.r":4})"), 0.5);
  EXPECT_SAYS(refusal(read_these(tensors, {{"lora_adapter_metadata", R"({"transformer.alpha_pattern":{"to_q":1}})"}})),
              "remove one of them");
}

// kohya's files and PEFT's alike.
TEST_F(LoraFileTest, AModuleWithoutAlphaHasScaleOne) {
  const std::string k = "transformer.transformer_blocks.0.attn.to_k";
  for (const auto& [down, up] :
       std::map<std::string, std::string>{{".lora_A.weight", ".lora_B.weight"},
                                          {".lora.down.weight", ".lora.up.weight"},
                                          {".lora_A.default.weight", ".lora_B.default.weight"}}) {
    auto tensors = pair_of(kQ, kWidth, kWidth, 2, down, up);
    tensors.merge(pair_of(k, kWidth, kWidth, 2, down, up));
    tensors[kQ + ".alpha"] = {{}, {4.0f}};
    const auto both = terms(tensors);
    ASSERT_EQ(both.size(), 2u) << down;
    EXPECT_DOUBLE_EQ(both[0].scale + both[1].scale, 3) << down;
  }
}

TEST_F(LoraFileTest, AKohyaModuleWithoutAlphaHasScaleOne) {
  auto tensors =
      pair_of("lora_unet_double_blocks_0_img_attn_qkv", kWidth, 3 * kWidth, 4, ".lora_down.weight", ".lora_up.weight");
  tensors.merge(
      pair_of("lora_unet_double_blocks_0_img_attn_proj", kWidth, kWidth, 4, ".lora_down.weight", ".lora_up.weight"));
  tensors["lora_unet_double_blocks_0_img_attn_qkv.alpha"] = {{}, {2.0f}};
  const auto both = terms(tensors);
  ASSERT_EQ(both.size(), 2u);
  EXPECT_DOUBLE_EQ(both[0].scale + both[1].scale, 1.5);
}

TEST_F(LoraFileTest, RefusesAScaleThatFp32DoesNotHold) {
  const auto with = [&](const std::string& alpha) {
    return read_these(pair_of(kQ, kWidth, kWidth),
                      {{"lora_adapter_metadata", R"({"transformer.lora_alpha":)" + alpha + "}"}});
  };
  EXPECT_SAYS(refusal(with("1e300")), "alpha");
  EXPECT_SAYS(refusal(with("-1e300")), "overflows fp32");
  EXPECT_TRUE(with("1e30"));
}

TEST_F(LoraFileTest, RefusesMetadataThatIsWrong) {
  const auto with = [&](const std::string& json) {
    return refusal(read_these(pair_of(kQ, kWidth, kWidth), {{"lora_adapter_metadata", json}}));
  };
  EXPECT_SAYS(with("{"), "not JSON");
  EXPECT_SAYS(with("[]"), "JSON object");
  EXPECT_SAYS(with(R"({"transformer.lora_alpha":"8"})"), "a finite number");
  EXPECT_SAYS(with(R"({"transformer.use_rslora":1})"), "true or false");
  EXPECT_SAYS(with(R"({"transformer.alpha_pattern":[1]})"), "an object of numbers");
  EXPECT_SAYS(with(R"({"transformer.alpha_pattern":{"to_(q":1}})"), "\"to_(q\" is not a regular expression");
  EXPECT_SAYS(with(R"({"transformer.alpha_pattern":{"((([a-z_.0-9]+)*)*)*!":1}})"), "takes too long to match");
}

TEST_F(LoraFileTest, AFolderOfPeftScalesByItsConfiguration) {
  namespace fs = std::filesystem;
  const fs::path folder = path_ + "-folder";
  fs::create_directory(folder);
  write(pair_of(kQ, kWidth, kWidth, 4));
  fs::copy_file(path_, folder / "adapter_model.safetensors");
  const auto scale = [&](const std::string& config) {
    std::ofstream(folder / "adapter_config.json") << config;
    const auto file = read_lora_file(folder.string(), names(), 128);
    EXPECT_TRUE(file) << file.error().message;
    return file ? file->terms.at(0).scale : 0;
  };
  EXPECT_DOUBLE_EQ(scale(R"({"peft_type":"LORA","r":4,"lora_alpha":8,"bias":"none"})"), 2.0);
  EXPECT_DOUBLE_EQ(scale(R"({"r":4,"lora_alpha":8,"use_rslora":true})"), 4.0);
  EXPECT_DOUBLE_EQ(scale(R"({"lora_alpha":8,"alpha_pattern":{"attn.to_q":1}})"), 0.25);
  const auto refused = [&](const std::string& config, const char* says) {
    std::ofstream(folder / "adapter_config.json") << config;
    const auto file = read_lora_file(folder.string(), names(), 128);
    ASSERT_FALSE(file) << config;
    EXPECT_NE(file.error().message.find(says), std::string::npos) << file.error().message;
  };
  refused(R"({"peft_type":"LOKR"})", "peft_type is \"LOKR\"");
  refused(R"({"peft_type":"LORA","use_dora":true})", "DoRA");
  refused("{", "is not JSON");
  refused("[]", "must be a JSON object");
  refused(std::string(1 << 21, ' '), "more than 1 MiB");
  fs::remove(folder / "adapter_config.json");
  refused("", "is not JSON");
  fs::remove(folder / "adapter_model.safetensors");
  refused("{}", "has no adapter_model.safetensors");
  fs::remove_all(folder);
}

}  // namespace
}  // namespace ditfleet::pipeline
