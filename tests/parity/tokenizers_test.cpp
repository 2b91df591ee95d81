// Token ids against transformers' (tests/fixtures/tokenizers/make.py says how the goldens were made).
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <span>

#include "pipeline/device/failure.h"
#include "pipeline/engine/family.h"
#include "pipeline/engine/prompts.h"
#include "pipeline/families/flux/flux.h"
#include "pipeline/families/wan/wan.h"
#include "pipeline/tokenizers/qwen_text.h"
#include "pipeline/weights/safetensors_writer.h"
#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "tests/paths.h"

namespace ditfleet::pipeline {
namespace {

const std::filesystem::path kFixtures = source_path("tests/fixtures/tokenizers");
constexpr int kMaxSequenceLength = 512;

std::vector<std::int32_t> ids_of(const json::value& value) {
  std::vector<std::int32_t> ids;
  for (const json::value& id : value.as_array()) ids.push_back(id.to_number<std::int32_t>());
  return ids;
}

std::vector<std::string> models() {
  std::vector<std::string> names;
  for (const auto& folder : std::filesystem::directory_iterator(kFixtures / "models"))
    names.push_back(folder.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

struct TokenizerParity : testing::TestWithParam<std::string> {
  void SetUp() override {
    auto loaded = Engine::load_tokenizers({&flux_family()}, (kFixtures / "models" / GetParam()).string());
    ASSERT_TRUE(loaded) << loaded.error().message;
    tokenizers = std::move(*loaded);
  }
  std::unique_ptr<Tokenizers> tokenizers;
};

TEST_P(TokenizerParity, IdsAreThoseOfTransformers) {
  std::ifstream file(kFixtures / "goldens" / (GetParam() + ".jsonl"));
  std::string line;
  int count = 0;
  while (std::getline(file, line)) {
    ++count;
    const auto golden = parse_json(line);
    ASSERT_TRUE(golden) << "line " << count;
    const std::string prompt(golden->at("prompt").as_string());
    const auto ids = tokenizers->tokenize(prompt, kMaxSequenceLength);
    ASSERT_TRUE(ids) << ids.error().message;
    EXPECT_EQ((*ids)[0].second, ids_of(golden->at("clip"))) << "CLIP, line " << count << ": " << prompt;
    EXPECT_EQ((*ids)[1].second, ids_of(golden->at("t5"))) << "T5, line " << count << ": " << prompt;
  }
  EXPECT_GE(count, 300);
}

TEST_P(TokenizerParity, AShorterSequenceIsTheLongerOneCutWithItsEndMark) {
  const std::string prompt = "a photo of a small red circle above a large blue square";
  const auto whole = tokenizers->tokenize(prompt, kMaxSequenceLength), cut = tokenizers->tokenize(prompt, 6);
  ASSERT_TRUE(whole && cut);
  ASSERT_GT((*whole)[1].second.size(), 6u);
  ASSERT_EQ((*cut)[1].second.size(), 6u);
  EXPECT_EQ((*cut)[1].second.back(), (*whole)[1].second.back());
  EXPECT_EQ((*cut)[0].second, (*whole)[0].second);
}

TEST_P(TokenizerParity, TextThatIsNotUtf8IsRefused) {
  for (const std::string& bad :
       {std::string("\xff"), std::string("a\xc3"), std::string("\xed\xa0\x80"), std::string("\xf5\x80\x80\x80")}) {
    const auto ids = tokenizers->tokenize(bad, kMaxSequenceLength);
    ASSERT_FALSE(ids);
    EXPECT_EQ(ids.error().code, Code::kInvalidArgument);
    EXPECT_NE(ids.error().message.find("UTF-8"), std::string::npos) << ids.error().message;
  }
}

INSTANTIATE_TEST_SUITE_P(Folders, TokenizerParity, testing::ValuesIn(models()),
                         [](const auto& info) { return info.param; });

// Qwen's tokenizer has no family of its own; tests/fixtures/tokenizers/qwen.py made its goldens.
struct QwenParity : testing::TestWithParam<std::string> {
  Tokenizer load() const { return unwrap(Tokenizer::load_qwen((kFixtures / "qwen" / GetParam()).string())); }
  Prompts prompts(std::string (*clean)(const std::string&)) const {
    std::vector<Prompts::Encoder> encoders;
    encoders.push_back({"qwen", "Qwen3", "ids", load(), 0, /*pads=*/true, clean, "mask"});
    return Prompts(std::move(encoders));
  }
  std::vector<json::object> goldens(const std::string& ending) const {
    std::ifstream file(kFixtures / "qwen" / (GetParam() + ending));
    std::vector<json::object> all;
    for (std::string line; std::getline(file, line);) all.push_back(unwrap(parse_json(line)).as_object());
    return all;
  }
};

TEST_P(QwenParity, IdsAreThoseOfTransformers) {
  const Tokenizer tokenizer = load();
  const auto all = goldens(".jsonl");
  EXPECT_GE(all.size(), 600u);
  for (const json::object& golden : all) {
    const std::string prompt(golden.at("prompt").as_string());
    EXPECT_EQ(unwrap(tokenizer.encode(prompt, kMaxSequenceLength)).ids, ids_of(golden.at("ids"))) << prompt;
  }
}

TEST_P(QwenParity, PromptsAreWrappedThenCutOrPaddedWithAMask) {
  constexpr int kLength = 64;
  const Prompts with = prompts([](const std::string&prompt) { return qwen_chat(prompt, true); }),
                without = prompts([](const std::string&prompt) { return qwen_chat(prompt, false); });
  int cut = 0;
  for (const json::object& golden : goldens(".chat.jsonl")) {
    const std::string prompt(golden.at("prompt").as_string());
    const PromptIds made = (golden.at("thinking").as_bool() ? with : without).ids(prompt, kLength);
    EXPECT_EQ(made.ids.at("ids"), ids_of(golden.at("ids"))) << prompt;
    EXPECT_EQ(made.ids.at("mask"), ids_of(golden.at("mask"))) << prompt;
    const std::int64_t dropped = golden.at("dropped").as_int64();
    ASSERT_EQ(made.warnings.size(), dropped > 0 ? 1u : 0u) << prompt;
    if (dropped == 0) continue;
    ++cut;
    EXPECT_NE(made.warnings[0].find("the last " + std::to_string(dropped) + " were removed"), std::string::npos);
  }
  EXPECT_GE(cut, 2);
}

// ICU alone takes a minute for the marks.
TEST_P(QwenParity, LongPromptsTakeLinearTime) {
  const Tokenizer tokenizer = load();
  for (const char* part : {"\u0301\u0323", "\u0f73", "a", " ", " \n", "'", "<think"}) {
    std::string prompt;
    while (prompt.size() < 1'000'000) prompt += part;
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_EQ(unwrap(tokenizer.encode(prompt, kMaxSequenceLength)).ids.size(), std::size_t{kMaxSequenceLength});
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10)) << part;
  }
}

INSTANTIATE_TEST_SUITE_P(Folders, QwenParity, testing::Values("files", "json"),
                         [](const auto& info) { return info.param; });

// Folders that something is wrong with: each is refused with the file and what is wrong.
struct TokenizerFolderErrors : testing::Test {
  TokenizerFolderErrors() : dir(std::filesystem::temp_directory_path() / ("tokenizers-" + std::to_string(::getpid()))) {
    std::filesystem::remove_all(dir);
  }
  ~TokenizerFolderErrors() override { std::filesystem::remove_all(dir); }
  void copy(const std::string& model) {
    std::filesystem::remove_all(dir);
    std::filesystem::copy(kFixtures / "models" / model, dir, std::filesystem::copy_options::recursive);
  }
  void write(const std::string& file, const std::string& text) { std::ofstream(dir / file, std::ios::binary) << text; }
  void expect_error(Code code, const std::string& file, const std::string& words) {
    const auto loaded = Engine::load_tokenizers({&flux_family()}, dir.string());
    ASSERT_FALSE(loaded) << "expected an error about " << file;
    EXPECT_EQ(loaded.error().code, code) << loaded.error().message;
    EXPECT_NE(loaded.error().message.find(file), std::string::npos) << loaded.error().message;
    EXPECT_NE(loaded.error().message.find(words), std::string::npos) << loaded.error().message;
  }
  std::filesystem::path dir;
};

// ComfyUI's files of UMT5 have the tokenizer as a tensor.
TEST_F(TokenizerFolderErrors, AFileOfWeightsMayHaveTheTokenizer) {
  namespace fs = std::filesystem;
  const fs::path whole = dir / "whole/tokenizer", without = dir / "without/tokenizer";
  for (const fs::path& to : {whole, without}) {
    fs::create_directories(to);
    fs::copy(kFixtures / "models/plain/tokenizer_2", to, fs::copy_options::recursive);
  }
  fs::remove(without / "tokenizer.json");
  fs::remove(without / "spiece.model");
  const std::string model = pipeline::unwrap(read_file((whole / "spiece.model").string())),
                    file = (dir / "umt5.safetensors").string();
  pipeline::unwrap(pipeline::write_safetensors(file, {{"text_encoders.umt5xxl.spiece_model",
                                                       pipeline::DType::kU8,
                                                       {static_cast<std::int64_t>(model.size())},
                                                       std::as_bytes(std::span(model))}}));
  fs::remove(whole / "tokenizer.json");
  const auto of_folder = pipeline::wan_family().load_tokenizers({.name = {}, .dir = whole.parent_path().string()});
  const auto of_file = pipeline::wan_family().load_tokenizers(
      {.name = {}, .dir = without.parent_path().string(), .files = {{"text_encoder", file}}});
  for (const char* prompt : {"a red circle", "ünïcode  ﬀ <extra_id_0>"})
    EXPECT_EQ(pipeline::unwrap(of_file->tokenize(prompt, 64)), pipeline::unwrap(of_folder->tokenize(prompt, 64)));
  EXPECT_THROW(pipeline::wan_family().load_tokenizers({.name = {}, .dir = without.parent_path().string()}),
               pipeline::Failure);
}

TEST_F(TokenizerFolderErrors, QwenNeedsItsChatTemplate) {
  const auto copy_qwen = [&](const char* folder) {
    std::filesystem::remove_all(dir);
    std::filesystem::copy(kFixtures / "qwen" / folder, dir);
  };
  const auto expect = [&](Code code, const std::string& file, const std::string& words) {
    const auto loaded = Tokenizer::load_qwen(dir.string());
    ASSERT_FALSE(loaded) << "expected an error about " << file;
    EXPECT_EQ(loaded.error().code, code) << loaded.error().message;
    EXPECT_NE(loaded.error().message.find(file), std::string::npos) << loaded.error().message;
    EXPECT_NE(loaded.error().message.find(words), std::string::npos) << loaded.error().message;
  };
  copy_qwen("json");
  std::filesystem::remove(dir / "chat_template.jinja");
  expect(Code::kDataCorrupt, "tokenizer_config.json", "chat_template");
  EXPECT_TRUE(Tokenizer::load_qwen(dir.string(), /*qwen3=*/false));
  for (const char* other : {"<|im_start|>{{ messages }}", "{{ enable_thinking }}[INST]", ""}) {
    copy_qwen("files");
    write("chat_template.jinja", other);  // has precedence
    expect(Code::kDataCorrupt, "chat_template.jinja", "not Qwen3's");
  }
  copy_qwen("json");
  write("tokenizer_config.json", R"({"add_prefix_space": true})");
  expect(Code::kDataCorrupt, "tokenizer_config.json", "add_prefix_space");
  copy_qwen("files");
  std::filesystem::remove(dir / "merges.txt");
  expect(Code::kNotFound, "tokenizer", "merges.txt");
}

TEST_F(TokenizerFolderErrors, MissingFilesAreNamed) {
  copy("bare");
  std::filesystem::remove(dir / "tokenizer/merges.txt");
  expect_error(Code::kNotFound, "tokenizer", "merges.txt");
  copy("bare");
  std::filesystem::remove(dir / "tokenizer_2/spiece.model");
  expect_error(Code::kNotFound, "tokenizer_2", "spiece.model");
  copy("bare");
  std::filesystem::remove_all(dir / "tokenizer_2");
  expect_error(Code::kNotFound, "tokenizer_2", "no folder");
}

TEST_F(TokenizerFolderErrors, TruncatedFilesAreNamed) {
  copy("bare");
  std::filesystem::resize_file(dir / "tokenizer_2/spiece.model", 5000);
  expect_error(Code::kDataCorrupt, "spiece.model", "truncated");
  copy("bare");
  std::filesystem::resize_file(dir / "tokenizer/vocab.json", 500);
  expect_error(Code::kDataCorrupt, "vocab.json", "");
  copy("saved");
  std::filesystem::resize_file(dir / "tokenizer_2/tokenizer.json", 50'000);
  expect_error(Code::kDataCorrupt, "tokenizer_2/tokenizer.json", "");
}

TEST_F(TokenizerFolderErrors, LyingFilesAreNamed) {
  copy("bare");
  write("tokenizer/vocab.json", R"({"a": -1})");
  expect_error(Code::kDataCorrupt, "vocab.json", "\"a\"");
  copy("bare");
  write("tokenizer/merges.txt", "#version: 0.2\na b c\n");
  expect_error(Code::kDataCorrupt, "merges.txt", "line 2");
  copy("saved");
  write("tokenizer_2/tokenizer.json", R"({"model": {"vocab": {"a": 1}}})");
  expect_error(Code::kDataCorrupt, "tokenizer.json", "unigram");
  copy("bare");
  write("model_index.json", R"({"_class_name": "FluxPipeline", "tokenizer": ["transformers", "GPT2Tokenizer"]})");
  expect_error(Code::kDataCorrupt, "model_index.json", "CLIPTokenizer");
  copy("published");
  write("tokenizer/tokenizer_config.json", R"({"bos_token": null})");
  expect_error(Code::kDataCorrupt, "tokenizer_config.json", "bos_token");
}

}  // namespace
}  // namespace ditfleet::pipeline
