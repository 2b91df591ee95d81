// ditfleet-worker's commands without a service: what they take, what they refuse and what they leave behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include "shared/core/json.h"
#include "tests/paths.h"
#include "tests/system/program.h"
#include "tests/system/temporary_folder.h"

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

}  // namespace
}  // namespace ditfleet::testing
