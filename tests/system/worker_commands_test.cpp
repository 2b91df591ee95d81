// ditfleet-worker's commands without a service: what they take, what they refuse and what they leave behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include "shared/core/json.h"
#include "tests/paths.h"
#include "tests/system/program.h"
#include "tests/system/temporary_folder.h"
#include "tests/unit/pipeline/weights/gguf_file.h"

namespace ditfleet::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

const std::string kModel = source_path("tests/fixtures/flux/dev/model");
using Words = std::vector<std::string>;

class WorkerCommands : public FolderTest {
 protected:
  // A quick picture into dir_; `more` are flags with their values, which take the place of those given here.
  Words generate(const Words& more) const {
    std::map<std::string, std::string> flags = {
        {"--model", kModel}, {"--prompt", "a red circle"}, {"--out", dir_ + "/x.png"},
        {"--device", "cpu"}, {"--size", "64x64"},          {"--steps", "1"},
        {"--seed", "3"}};
    for (std::size_t i = 0; i + 1 < more.size(); i += 2) flags[more[i]] = more[i + 1];
    Words words = {"generate"};
    for (const auto& [flag, value] : flags) words.insert(words.end(), {flag, value});
    return words;
  }
  // A usage error whose message has all the words, before anything was drawn.
  void expect_refused(const Words& words, const std::vector<std::string>& said, int status = 2) {
    Program program("ditfleet-worker", words);
    EXPECT_EQ(program.wait(), status) << program.err();
    for (const auto& word : said) EXPECT_THAT(program.err(), HasSubstr(word));
    EXPECT_TRUE(files().empty()) << files();
  }
  std::string files() const {
    std::string names;
    for (const auto& file : std::filesystem::directory_iterator(dir_)) names += file.path().filename().string() + " ";
    return names;
  }
  bool has(const std::string& name) const { return std::filesystem::exists(dir_ + "/" + name); }
};

TEST_F(WorkerCommands, GenerateWritesThePictureAndSaysWhere) {
  Program program("ditfleet-worker", generate({}));
  ASSERT_EQ(program.wait(), 0) << program.err();
  EXPECT_EQ(program.out(), dir_ + "/x.png  seed 3\n");
  EXPECT_EQ(files(), "x.png ");
}

TEST_F(WorkerCommands, GenerateTakesEveryOption) {
  Program program("ditfleet-worker",
                  generate({"--negative", "", "--true-cfg", "2.5", "--guidance", "3.5", "--max-sequence-length", "32",
                            "--dtype", "bf16", "--dump", dir_ + "/x.safetensors"}));
  ASSERT_EQ(program.wait(), 0) << program.err();
  EXPECT_TRUE(has("x.png"));
  EXPECT_TRUE(has("x.safetensors")) << files();
}

TEST_F(WorkerCommands, SeveralPicturesAreNumberedAndTheirSeedsGoUp) {
  Program program("ditfleet-worker", generate({"-n", "3"}));
  ASSERT_EQ(program.wait(), 0) << program.err();
  EXPECT_TRUE(has("x-1.png") && has("x-2.png") && has("x-3.png") && !has("x.png")) << files();
  EXPECT_THAT(program.out(), AllOf(HasSubstr("x-1.png  seed 3\n"), HasSubstr("x-3.png  seed 5\n")));
}

TEST_F(WorkerCommands, BadValuesAreRefusedWithWhatWouldBeRight) {
  expect_refused(generate({"--size", "65x64"}), {"--size", "65"});
  expect_refused(generate({"--size", "64"}), {"--size", "WIDTHxHEIGHT"});
  expect_refused(generate({"--size", "64x64x64"}), {"--size", "WIDTHxHEIGHT"});
  expect_refused(generate({"--size", "-64x64"}), {"--size"});
  expect_refused(generate({"--size", "0x0"}), {"--size"});
  expect_refused(generate({"--size", "99999999999x64"}), {"--size"});
  expect_refused(generate({"--steps", "0"}), {"--steps", "1"});
  expect_refused(generate({"--steps", "-1"}), {"--steps"});
  expect_refused(generate({"--steps", "many"}), {"--steps"});
  expect_refused(generate({"--steps", "1e9"}), {"--steps"});
  expect_refused(generate({"--guidance", "-1"}), {"--guidance"});
  expect_refused(generate({"--guidance", "nan"}), {"--guidance"});
  expect_refused(generate({"--guidance", "inf"}), {"--guidance"});
  expect_refused(generate({"--true-cfg", "-3"}), {"--true-cfg"});
  expect_refused(generate({"--true-cfg", "big"}), {"--true-cfg"});
  expect_refused(generate({"--seed", "-1"}), {"--seed"});
  expect_refused(generate({"--seed", "99999999999999999999"}), {"--seed"});
  expect_refused(generate({"--max-sequence-length", "0"}), {"--max-sequence-length"});
  expect_refused(generate({"--max-sequence-length", "513"}), {"--max-sequence-length", "512"});
  expect_refused(generate({"-n", "0"}), {"-n"});
  expect_refused(generate({"-n", "100000"}), {"-n"});
  expect_refused(generate({"--dtype", "fp16"}), {"fp16", "bf16"});
  expect_refused(generate({"--device", "tpu"}), {"tpu", "cuda"});
  expect_refused(generate({"--colour", "red"}), {"--colour"});
  expect_refused(generate({"--prompt", "\xff\xfe"}), {"--prompt", "UTF-8"});
  expect_refused(generate({"--negative", "\xc3"}), {"--negative", "UTF-8"});
  expect_refused({"generate", "--model", kModel, "--out", dir_ + "/x.png"}, {"--prompt"});
  expect_refused({"generate", "--prompt", "a", "--out", dir_ + "/x.png"}, {"--model"});
  expect_refused({"paint"}, {"paint"});
  expect_refused({}, {"subcommand"});
}

TEST_F(WorkerCommands, AdaptersAreAppliedAndBadOnesRefused) {
  const std::string adapters = source_path("tests/fixtures/lora/adapters/");
  const auto picture = [&](Words loras) {
    Words words = generate({});
    for (auto& lora : loras) words.insert(words.end(), {"--lora", std::move(lora)});
    Program program("ditfleet-worker", words);
    EXPECT_EQ(program.wait(), 0) << program.err();
    std::ifstream file(dir_ + "/x.png", std::ios::binary);
    std::string bytes{std::istreambuf_iterator<char>(file), {}};
    std::filesystem::remove(dir_ + "/x.png");
    return bytes;
  };
  const std::string without = picture({}), attention = adapters + "attention.safetensors",
                    clip = adapters + "clip.safetensors";
  EXPECT_NE(picture({attention}), without);
  EXPECT_EQ(picture({attention}), picture({attention + ":1"}));
  EXPECT_NE(picture({attention}), picture({attention + ":-0.5"}));
  EXPECT_NE(picture({attention, clip + ":0.7"}), picture({attention}));
  EXPECT_EQ(picture({attention + ":0", clip + ":0.0"}), without);

  expect_refused(generate({"--lora", attention + ":much"}), {"--lora", "FILE:SCALE"});
  expect_refused(generate({"--lora", attention + ":1e300"}), {"--lora", "from -100 to 100"});
  expect_refused(generate({"--lora", attention + ":inf"}), {"--lora", "finite"});
  expect_refused(generate({"--lora", ":1"}), {"--lora", "must be FILE, FILE:SCALE or FILE:SCALE:EXPERT"});
  expect_refused(generate({"--lora", dir_ + "/none.safetensors"}),
                 {"--lora", "'" + dir_ + "/none.safetensors' does not exist"}, 1);
  expect_refused(generate({"--lora", dir_ + "/none:a/b.safetensors:0.5"}),
                 {"--lora", "'" + dir_ + "/none:a/b.safetensors' does not exist"}, 1);
  Words stray = generate({"--lora", attention});
  stray.push_back(clip);
  expect_refused(stray, {clip, "not expected"});
  expect_refused(generate({"--lora", kModel + "/vae/diffusion_pytorch_model.safetensors"}),
                 {"--lora", "contains nothing for a FLUX model", "more"});
  std::filesystem::copy_file(attention, dir_ + "/a:0.5");
  EXPECT_EQ(picture({dir_ + "/a:0.5"}), picture({attention}));
  EXPECT_EQ(picture({dir_ + "/a:0.5:-0.5"}), picture({attention + ":-0.5"}));
}

TEST_F(WorkerCommands, AnEmptyPromptIsFine) {
  Program program("ditfleet-worker", generate({"--prompt", ""}));
  EXPECT_EQ(program.wait(), 0) << program.err();
  EXPECT_TRUE(has("x.png"));
}

TEST_F(WorkerCommands, AnOverLongPromptIsDrawnWithAWarning) {
  std::string prompt;
  for (int i = 0; i < 600; ++i) prompt += "red circle ";
  Program program("ditfleet-worker", generate({"--prompt", prompt}));
  EXPECT_EQ(program.wait(), 0) << program.err();
  EXPECT_THAT(program.err(), AllOf(HasSubstr("warning: "), HasSubstr("77"), HasSubstr("512")));
}

TEST_F(WorkerCommands, WhatCannotBeWrittenIsKnownBeforeItIsDrawn) {
  expect_refused(generate({"--out", dir_ + "/none/x.png"}), {"--out", "none' does not exist"});
  expect_refused(generate({"--out", dir_}), {"--out", "folder"});
  expect_refused(generate({"--out", dir_ + "/x.gif"}), {"--out", "x.gif", ".png, .jpg, .webp or .mp4"});
  expect_refused(generate({"--dump", dir_ + "/none/x"}), {"--dump", "none' does not exist"});
  expect_refused(generate({"--out", "/proc/x.png"}), {"/proc"}, 1);
}

TEST_F(WorkerCommands, AModelIsFoundInTheHubsCache) {
  const std::string folder = dir_ + "/models--me--tiny/snapshots";
  std::filesystem::create_directories(folder);
  std::filesystem::create_directory_symlink(kModel, folder + "/main");
  ::setenv("HF_HUB_CACHE", dir_.c_str(), 1);
  Program drawn("ditfleet-worker", generate({"--model", "hf:me/tiny"}));
  EXPECT_EQ(drawn.wait(), 0) << drawn.err();
  Program missing("ditfleet-worker", generate({"--model", "hf:me/other"}));
  EXPECT_EQ(missing.wait(), 2) << missing.err();
  EXPECT_THAT(missing.err(), HasSubstr("`hf download me/other` fetches it"));
  ::unsetenv("HF_HUB_CACHE");
}

TEST_F(WorkerCommands, AMissingOrBrokenModelIsNamed) {
  expect_refused(generate({"--model", dir_ + "/none"}), {"none"}, 1);
  const std::string broken = dir_ + "-model";
  std::filesystem::copy(kModel, broken, std::filesystem::copy_options::recursive);
  std::filesystem::remove(broken + "/vae/config.json");
  expect_refused(generate({"--model", broken}), {"vae/config.json"}, 1);
  std::filesystem::remove_all(broken);
  std::filesystem::copy(kModel, broken, std::filesystem::copy_options::recursive);
  std::filesystem::resize_file(broken + "/transformer/diffusion_pytorch_model.safetensors", 1000);
  expect_refused(generate({"--model", broken}), {"diffusion_pytorch_model.safetensors"}, 1);
  std::filesystem::remove_all(broken);
}

TEST_F(WorkerCommands, ADeviceThatIsNotThereIsRefused) {
  Program program("ditfleet-worker", generate({"--device", "cuda:63"}));
  EXPECT_EQ(program.wait(), 1) << program.err();
  EXPECT_THAT(program.err(), HasSubstr("cuda"));
  EXPECT_EQ(files(), "");
}

TEST_F(WorkerCommands, AnEndWhileItDrawsLeavesNoPartialFile) {
  Program program("ditfleet-worker", generate({"--steps", "200", "--size", "512x512"}));
  std::this_thread::sleep_for(1500ms);
  program.send(SIGTERM);
  EXPECT_EQ(program.wait(10s), 128 + SIGTERM) << program.err();
  EXPECT_EQ(files(), "");
}

TEST_F(WorkerCommands, ConfigurationCountsForEveryCommand) {
  for (const Words& command : {generate({}), Words{"tokenize", "--model", kModel},
                               Words{"run", "--model", "a=" + kModel, "--redis", "redis://127.0.0.1:1"}}) {
    Words misspelt = command;
    misspelt.insert(misspelt.end(), {"--set", "worker.devise=cpu"});
    expect_refused(misspelt, {"worker.devise", "worker.device"});
    Words wrong = command;
    wrong.insert(wrong.end(), {"--set", "worker.threads=lots"});
    expect_refused(wrong, {"worker.threads", "lots"});
    Program program("ditfleet-worker", command,
                    {.environment = {"DITFLEET_WORKER__THREDS=1"}, .input = {}, .stdout_path = {}});
    EXPECT_EQ(program.wait(), 2) << command[0];
    EXPECT_THAT(program.err(), AllOf(HasSubstr("DITFLEET_WORKER__THREDS"), HasSubstr("DITFLEET_WORKER__THREADS")));
    EXPECT_EQ(files(), "");
  }
  Words from_environment = generate({});
  std::erase(from_environment, "--device");
  std::erase(from_environment, "cpu");
  Program program("ditfleet-worker", from_environment,
                  {.environment = {"DITFLEET_WORKER__DEVICE=cuda:63"}, .input = {}, .stdout_path = {}});
  EXPECT_EQ(program.wait(), 1);
  EXPECT_THAT(program.err(), HasSubstr("cuda"));
}

TEST_F(WorkerCommands, RunSaysWhatItMisses) {
  expect_refused({"run", "--model", "a=" + kModel}, {"--redis"});
  expect_refused({"run", "--redis", "redis://127.0.0.1:1"}, {"--model"});
  expect_refused({"run", "--redis", "http://127.0.0.1:1", "--model", "a=" + kModel}, {"redis.url", "redis://"});
  expect_refused({"run", "--redis", "redis://127.0.0.1:1", "--model", kModel}, {"NAME=DIR"});
  expect_refused({"run", "--redis", "redis://127.0.0.1:1", "--model", "a=/none", "--device", "cpu"}, {"/none"}, 1);
}

TEST_F(WorkerCommands, TokenizeAnswersEachLine) {
  Program program("ditfleet-worker", {"tokenize", "--model", kModel},
                  {.environment = {}, .input = "\"a red circle\"\n\"\"\n\"\\ud83d\\ude00\"", .stdout_path = {}});
  ASSERT_EQ(program.wait(), 0) << program.err();
  std::istringstream lines(program.out());
  std::string line;
  int count = 0;
  for (; std::getline(lines, line); ++count) {
    const auto ids = parse_json(line);
    ASSERT_TRUE(ids) << line;
    EXPECT_GE(ids->at("clip").as_array().size(), 2u);
    EXPECT_GE(ids->at("t5").as_array().size(), 1u);
  }
  EXPECT_EQ(count, 3);
}

TEST_F(WorkerCommands, TokenizeNamesTheBadLine) {
  const auto expect_bad = [&](const std::string& input, const std::string& line, const std::string& why) {
    Program program("ditfleet-worker", {"tokenize", "--model", kModel},
                    {.environment = {}, .input = input, .stdout_path = {}});
    EXPECT_EQ(program.wait(), 2);
    EXPECT_THAT(program.err(), AllOf(HasSubstr(line), HasSubstr(why)));
  };
  expect_bad("\"a\"\nfoo\n", "line 2", "not JSON");
  expect_bad("\"a\"\n\n", "line 2", "not JSON");
  expect_bad("\"a\"\n\"b\"\n3\n", "line 3", "not a JSON string");
  expect_bad("\"a\xff\"\n", "line 1", "UTF-8");
  expect_bad("\"\\ud800\"\n", "line 1", "surrogate");
  expect_bad("\"x\\udc00\"\n", "line 1", "surrogate");
  expect_bad("\"a\" \"b\"\n", "line 1", "extra data");
}

TEST_F(WorkerCommands, TokenizeFailsWhereItsOutputCannotBeWritten) {
  Program program("ditfleet-worker", {"tokenize", "--model", kModel},
                  {.environment = {}, .input = "\"a\"\n", .stdout_path = "/dev/full"});
  EXPECT_EQ(program.wait(), 1);
  EXPECT_THAT(program.err(), HasSubstr("standard output"));
}

// Tensors of zeros in F32.
using Shapes = std::map<std::string, std::vector<std::int64_t>>;
std::string safetensors_file(const Shapes& shapes) {
  json::object header;
  std::int64_t at = 0;
  for (const auto& [name, shape] : shapes) {
    std::int64_t bytes = 4;
    for (const std::int64_t side : shape) bytes *= side;
    header[name] = {
        {"dtype", "F32"}, {"shape", json::array(shape.begin(), shape.end())}, {"data_offsets", {at, at + bytes}}};
    at += bytes;
  }
  const std::string text = json::serialize(header);
  return pipeline::gguf_number(text.size(), 8) + text + std::string(static_cast<std::size_t>(at), '\0');
}

TEST_F(WorkerCommands, InspectSaysWhatAFileIs) {
  using pipeline::gguf_file;
  const auto flux = [](const std::string& prefix, std::int64_t inputs) {
    return Shapes{{prefix + "img_in.weight", {8, inputs}}, {prefix + "double_blocks.0.img_attn.qkv.weight", {24, 8}}};
  };
  const auto with = [](Shapes all, const Shapes& more) {
    all.insert(more.begin(), more.end());
    return all;
  };
  const Shapes dev = with(flux("", 64), {{"guidance_in.in_layer.weight", {8, 8}}}),
               clip = {{"text_model.embeddings.token_embedding.weight", {9, 768}}},
               t5 = {{"encoder.block.0.layer.0.SelfAttention.q.weight", {8, 8}},
                     {"encoder.block.1.layer.0.SelfAttention.q.weight", {8, 8}}},
               ae = {{"decoder.conv_in.weight", {8, 16, 3, 3}}, {"decoder.mid.block_1.conv1.weight", {8, 8, 3, 3}}};
  const auto wan = [](std::int64_t inputs) {
    return Shapes{{"patch_embedding.weight", {8, inputs, 1, 2, 2}},
                  {"blocks.0.self_attn.q.weight", {8, 8}},
                  {"blocks.1.self_attn.q.weight", {8, 8}},
                  {"blocks.2.self_attn.q.weight", {8, 8}}};
  };
  Shapes gap = wan(16);
  gap.erase("blocks.1.self_attn.q.weight");
  const Shapes qwen3 = {{"model.embed_tokens.weight", {9, 8}}, {"model.layers.0.self_attn.q_norm.weight", {8}}};
  const auto adapter = [](const std::string& module, const char* down, const char* up) {
    return Shapes{{module + down, {4, 8}}, {module + up, {8, 4}}};
  };
  Shapes whole = flux("model.diffusion_model.", 64);
  for (const auto& [name, shape] : clip) whole["text_encoders.clip_l.transformer." + name] = shape;
  for (const auto& [name, shape] : t5) whole["text_encoders.t5xxl.transformer." + name] = shape;
  for (const auto& [name, shape] : ae) whole["vae." + name] = shape;
  const std::string good = safetensors_file(dev);
  std::string lying = good;
  lying.replace(lying.find("[0,"), 3, "[4,");
  // File, content, what the line says. A line that does not begin with "!" is of a file that can be used.
  const std::vector<std::tuple<std::string, std::string, std::string>> files = {
      {"dev.safetensors", good, "FLUX.1 transformer, with guidance as dev (3 in F32), for models.NAME.transformer"},
      {"schnell.safetensors", safetensors_file(flux("model.diffusion_model.", 64)), "FLUX.1 transformer, as schnell"},
      {"whole.safetensors", safetensors_file(whole),
       "models.NAME.text_encoder_2; VAE of images (2 in F32), for models"},
      {"torchao.safetensors",
       safetensors_file({{"transformer_blocks.0.attn.add_q_proj._weight_qdata", {8, 8}},
                         {"transformer_blocks.0.attn.add_q_proj._weight_scale", {8, 1}}}),
       "FLUX.1 transformer, as schnell (2 in F32), for models.NAME.transformer"},
      {"clip_l.safetensors", safetensors_file(clip), "CLIP text encoder (1 in F32), for models.NAME.text_encoder"},
      {"t5xxl.safetensors", safetensors_file(t5), "T5 text encoder (2 in F32), for models.NAME.text_encoder_2"},
      {"umt5.safetensors",
       safetensors_file(with(t5, {{"encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight", {8, 8}}})),
       "UMT5 text encoder (3 in F32), for models.NAME.text_encoder"},
      {"ae.safetensors", safetensors_file(ae), "VAE of images (2 in F32), for models.NAME.vae"},
      {"wan.safetensors", safetensors_file(wan(16)), "Wan transformer, text to video, 8 wide"},
      {"i2v.safetensors", safetensors_file(wan(36)),
       "image to video, 8 wide (4 in F32), for models.NAME.transformer or"},
      {"clip_i2v.safetensors", safetensors_file(with(wan(36), {{"img_emb.proj.1.weight", {8, 8}}})),
       "Wan transformer, image to video with CLIP, 8 wide"},
      {"clip_vision_h.safetensors", safetensors_file({{"vision_model.embeddings.class_embedding", {1280}}}),
       "CLIP image encoder (1 in F32), for models.NAME.image_encoder"},
      {"wan_vae.safetensors",
       safetensors_file(
           {{"decoder.conv1.weight", {8, 16, 3, 3, 3}}, {"decoder.middle.0.residual.0.gamma", {8, 1, 1, 1}}}),
       "VAE of videos (2 in F32), for models.NAME.vae"},
      {"ti2v.safetensors", safetensors_file(wan(48)), "Wan transformer, text and image to video, 8 wide"},
      {"ti2v_vae.safetensors",
       safetensors_file(
           {{"decoder.conv1.weight", {8, 48, 3, 3, 3}}, {"decoder.middle.0.residual.0.gamma", {8, 1, 1, 1}}}),
       "VAE of videos, of TI2V-5B (2 in F32), for models.NAME.vae"},
      {"z_image.safetensors",
       safetensors_file({{"model.diffusion_model.x_embedder.weight", {8, 64}},
                         {"model.diffusion_model.x_pad_token", {1, 8}},
                         {"model.diffusion_model.noise_refiner.0.attention.q_norm.weight", {8}}}),
       "z_image.safetensors: Z-Image transformer (3 in F32), for models.NAME.transformer"},
      {"lumina2.safetensors",
       safetensors_file({{"model.diffusion_model.x_embedder.weight", {8, 64}},
                         {"model.diffusion_model.noise_refiner.0.attention.q_norm.weight", {8}}}),
       "!neither a component of a supported model"},
      {"flux2.safetensors",
       safetensors_file(with(flux("", 128), {{"double_stream_modulation_img.lin.weight", {48, 8}},
                                             {"single_stream_modulation.lin.weight", {24, 8}}})),
       "flux2.safetensors: FLUX.2 transformer (4 in F32), for models.NAME.transformer"},
      {"qwen3.safetensors", safetensors_file(qwen3), "Qwen3 text encoder (2 in F32), for models.NAME.text_encoder"},
      {"flux2_vae.safetensors", safetensors_file({{"bn.running_mean", {8}}, {"decoder.conv_in.weight", {8, 32, 3, 3}}}),
       "VAE of FLUX.2 (2 in F32), for models.NAME.vae"},
      {"t5.gguf", gguf_file({{"enc.blk.0.attn_q.weight", {1, 32}, 8, std::string(34, '\0')}}),
       "T5 text encoder (1 in Q8_0), for models.NAME.text_encoder_2"},
      {"wan.gguf",
       gguf_file({{"blocks.0.self_attn.q.weight", {1, 256}, 12, std::string(144, '\0')},
                  {"patch_embedding.weight", {1, 16, 1, 1, 1}, 0, std::string(64, '\0')}}),
       "(1 in F32, 1 in Q4_K), for models.NAME.transformer or transformer_2"},
      {"best-of-both.safetensors", good, "FLUX.1 transformer"},
      {"peft.safetensors",
       safetensors_file(
           adapter("transformer.single_transformer_blocks.0.proj_mlp", ".lora_A.weight", ".lora_B.weight")),
       "adapter for flux, rank 4, F32, 2 tensors, for ditfleet loras add"},
      {"kohya.safetensors",
       safetensors_file(adapter("lora_unet_double_blocks_0_img_attn_qkv", ".lora_down.weight", ".lora_up.weight")),
       "adapter for flux and flux2, rank 4"},  // of either, by its names
      {"klein.safetensors",
       safetensors_file(adapter("transformer.transformer_blocks.0.ff.linear_in", ".lora_A.weight", ".lora_B.weight")),
       "adapter for flux2, rank 4"},
      {"refiner.safetensors",
       safetensors_file(adapter("diffusion_model.noise_refiner.0.attention.to_q", ".lora_A.weight", ".lora_B.weight")),
       "adapter for z_image, rank 4"},
      {"lightx2v.safetensors",
       safetensors_file(adapter("diffusion_model.blocks.0.self_attn.q", ".lora_A.weight", ".lora_B.weight")),
       "adapter for wan"},
      {"fill.safetensors", safetensors_file(flux("", 384)), "!384 input channels, as Fill"},
      {"control.safetensors", safetensors_file(flux("", 128)), "!as Control"},
      {"clip_g.safetensors", safetensors_file({{"text_model.embeddings.token_embedding.weight", {9, 1280}}}),
       "!CLIP-L"},
      {"sd_vae.safetensors",
       safetensors_file({{"decoder.conv_in.weight", {8, 4, 3, 3}}, {"decoder.mid.block_1.conv1.weight", {8, 8, 3, 3}}}),
       "!4 latent channels"},
      {"gap.safetensors", safetensors_file(gap), "!blocks.1.self_attn.q.weight is missing"},
      {"sdxl.safetensors", safetensors_file({{"model.diffusion_model.input_blocks.0.0.weight", {8, 4}}}),
       "!weights of Stable Diffusion"},
      {"qwen.safetensors", safetensors_file({{"transformer_blocks.0.img_mod.1.weight", {8, 8}}}),
       "qwen.safetensors: Qwen-Image transformer (1 in F32), for models.NAME.transformer"},
      {"qwen_lora.safetensors",
       safetensors_file(adapter("transformer_blocks.0.txt_mlp.net.2", ".lora_A.weight", ".lora_B.weight")),
       "adapter for qwen_image, rank 4"},
      {"chroma.safetensors",
       safetensors_file(with(flux("", 64), {{"distilled_guidance_layer.in_proj.weight", {8, 8}}})),
       "!weights of Chroma"},
      {"sdxl_lora.safetensors",
       safetensors_file(adapter("lora_unet_input_blocks_4_1_proj_in", ".lora_down.weight", ".lora_up.weight")),
       "!Stable Diffusion"},
      {"dora.safetensors",
       safetensors_file(
           with(adapter("transformer.single_transformer_blocks.0.attn.to_q", ".lora_A.weight", ".lora_B.weight"),
                {{"transformer.single_transformer_blocks.0.attn.to_q.lora_magnitude_vector", {8}}})),
       "!DoRA"},
      {"other.safetensors", safetensors_file({{"a", {1}}}), "!neither a component of a supported model nor an adapter"},
      {"x-00001-of-00002.safetensors", good, "!one of several shards"},
      {"cut.safetensors", good.substr(0, good.size() - 9), "!cut.safetensors"},
      {"lying.safetensors", lying, "!lying.safetensors"},
      {"huge.safetensors", std::string(8, '\x7f') + "{}", "!header"},
      {"lfs.safetensors", "version https://git-lfs.github.com/spec/v1\n", "!git lfs pull"},
      {"pickle.safetensors", "PK\x03\x04 and so on", "!convert it to safetensors"},
      {"cut.gguf", gguf_file({{"a", {32}, 8, std::string(34, '\0')}}).substr(0, 60), "!cut.gguf"},
      {"type.gguf", gguf_file({{"a.weight", {32}, 77, std::string(34, '\0')}}), "!77"},
      {"count.gguf", "GGUF" + pipeline::gguf_number(3, 4) + std::string(16, '\x7f'), "!count.gguf"},
      {"empty.safetensors", "", "!too few"},
      {"text.safetensors", "Hello, this is no file of weights.", "!header"}};
  Words all = {"inspect"};
  for (const auto& [name, content, says] : files) {
    std::ofstream(dir_ + "/" + name, std::ios::binary) << content;
    all.push_back(dir_ + "/" + name);
  }
  Program program("ditfleet-worker", all);
  EXPECT_EQ(program.wait(), 1) << program.err();
  std::istringstream lines(program.out());
  for (const auto& [name, content, says] : files) {
    std::string line;
    std::getline(lines, line);
    const bool refused = says.front() == '!';
    EXPECT_TRUE(line.starts_with(dir_ + "/" + name + (refused ? ": cannot be used: " : ": "))) << line;
    EXPECT_EQ(line.find("cannot be used") != line.npos, refused) << line;
    EXPECT_THAT(line, HasSubstr(says.substr(refused))) << name;
    EXPECT_EQ(line.find("; Qwen3"), line.npos) << "what serves several families is said once: " << line;
  }
  Program one("ditfleet-worker", {"inspect", dir_ + "/dev.safetensors"});
  EXPECT_EQ(one.wait(), 0) << one.err();

  all.emplace_back("--json");
  Program objects("ditfleet-worker", all);
  EXPECT_EQ(objects.wait(), 1) << objects.err();
  std::istringstream json_lines(objects.out());
  std::map<std::string, json::value> by_name;
  for (const auto& [name, content, says] : files) {
    std::string line;
    std::getline(json_lines, line);
    const auto object = parse_json(line);
    ASSERT_TRUE(object) << line;
    EXPECT_EQ(object->at("file").as_string(), dir_ + "/" + name);
    EXPECT_EQ(object->at("problem").as_string().empty(), says.front() != '!') << line;
    by_name[name] = *object;
  }
  EXPECT_EQ(json::serialize(by_name["i2v.safetensors"].at("components")),
            R"j([{"family":"wan","text":"Wan transformer, image to video, 8 wide (4 in F32)",)j"
            R"j("keys":["transformer","transformer_2"],"known":[]}])j");
  EXPECT_EQ(by_name["whole.safetensors"].at("components").as_array().size(), 5u) << "the VAE serves two families";
  EXPECT_EQ(json::serialize(by_name["peft.safetensors"].at("adapter_of")), R"(["flux"])");
}

}  // namespace
}  // namespace ditfleet::testing
