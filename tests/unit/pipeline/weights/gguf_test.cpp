// GGUF: the values of every block format against those of the package gguf (tests/fixtures/gguf), and headers that lie.
#include "pipeline/weights/gguf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <random>

#include "pipeline/weights/checkpoint.h"
#include "pipeline/weights/stored_weights.h"
#include "tests/paths.h"
#include "tests/unit/pipeline/weights/gguf_file.h"

namespace ditfleet::pipeline {
namespace {

using ::testing::HasSubstr;

TEST(Gguf, ValuesAreThoseOfThePackage) {
  const auto file = SafetensorsFile::open(source_path("tests/fixtures/gguf/types.gguf"));
  const auto expected = SafetensorsFile::open(source_path("tests/fixtures/gguf/values.safetensors"));
  ASSERT_TRUE(file) << file.error().message;
  ASSERT_TRUE(expected);
  EXPECT_EQ(file->metadata().at("general.architecture"), "flux");
  for (std::uint8_t number = 1; number <= gguf_block_count(); ++number) {
    const GgufBlocks& blocks = gguf_blocks(number);
    SCOPED_TRACE(blocks.name);
    const auto view = file->tensor(std::string(blocks.name) + ".weight");
    const auto want = expected->tensor(blocks.name);
    ASSERT_TRUE(view) << view.error().message;
    ASSERT_TRUE(want);
    EXPECT_EQ(file->find(std::string(blocks.name) + ".weight")->blocks, number);
    EXPECT_EQ(std::vector<std::int64_t>(view->shape.begin(), view->shape.end()), (std::vector<std::int64_t>{6, 512}));
    std::vector<float> values(6 * 512);
    ASSERT_EQ(view->bytes.size(),
              values.size() / static_cast<std::size_t>(blocks.values) * static_cast<std::size_t>(blocks.bytes));
    gguf_values(number, view->bytes.data(), static_cast<std::int64_t>(values.size()) / blocks.values, values.data());
    EXPECT_EQ(std::memcmp(values.data(), want->bytes.data(), want->bytes.size()), 0);
  }
  EXPECT_EQ(file->find("plain.bias")->dtype, DType::kF32);
  EXPECT_EQ(file->find("half.weight")->dtype, DType::kF16);
  const auto checkpoint = Checkpoint::open_file(source_path("tests/fixtures/gguf/types.gguf"), {});
  ASSERT_TRUE(checkpoint);
  const auto stored = StoredWeights::find(*checkpoint, nullptr);
  ASSERT_TRUE(stored) << stored.error().message;
  EXPECT_TRUE(stored->all_gguf());
  EXPECT_EQ(gguf_blocks(stored->find("Q4_K")->blocks).name, "Q4_K");
  EXPECT_EQ(stored->find("half"), nullptr);
}

std::string refusal(const std::string& file) {
  const auto header = parse_gguf_header(file, file.size(), "a.gguf");
  if (header) return "accepted";
  EXPECT_EQ(header.error().code, Code::kDataCorrupt);
  EXPECT_THAT(header.error().message, HasSubstr("[gguf] a.gguf: "));
  return header.error().message;
}

TEST(Gguf, RefusesWhatCannotBeRight) {
  const GgufTensor good{"a.weight", {2, 32}, 8, std::string(68, 'x')};
  const std::string file = gguf_file({good});
  EXPECT_EQ(refusal(file), "accepted");
  EXPECT_THAT(refusal("GGUF"), HasSubstr("truncated"));
  EXPECT_THAT(refusal(file.substr(0, file.size() - 1)), HasSubstr("a.weight\" goes beyond the file"));
  EXPECT_THAT(refusal(std::string(file).replace(4, 1, "\1")), HasSubstr("of version 1"));
  EXPECT_THAT(refusal(std::string(file).replace(8, 8, std::string(8, '\x7f'))),
              HasSubstr("it claims 9187201950435737471 tensors"));
  EXPECT_THAT(refusal(gguf_file({good, good})), HasSubstr("two tensors \"a.weight\""));
  EXPECT_THAT(refusal(gguf_file({{"a.weight", {2, 48}, 8, ""}})),
              HasSubstr("has rows of 48 values, but Q8_0 has blocks of 32"));
  EXPECT_THAT(refusal(gguf_file({{"a", {2, 256}, 10, ""}})), HasSubstr("of the type Q2_K; supported are F32"));
  EXPECT_THAT(refusal(gguf_file({{"a", {2}, 77, ""}})), HasSubstr("of the type 77"));
  EXPECT_THAT(refusal(gguf_file({{"a", {1LL << 40, 1LL << 40}, 0, ""}})), HasSubstr("is too large"));
  EXPECT_THAT(refusal(gguf_file({{"a", {1, 1, 1, 1, 1, 1, 1, 1, 1}, 0, "1234"}})), HasSubstr("has 9 axes"));
  EXPECT_THAT(refusal(gguf_file({{"a", {8}, 0, std::string(32, 'x')}, {"b", {8}, 0, std::string(31, 'x')}})),
              HasSubstr("\"b\" goes beyond"));
  EXPECT_THAT(refusal(gguf_file({}, gguf_text("k") + gguf_number(13, 4), 1)), HasSubstr("unknown type 13"));
  EXPECT_THAT(
      refusal(gguf_file(
          {}, gguf_text("k") + gguf_number(9, 4) + gguf_number(9, 4) + gguf_number(1, 8) + gguf_number(0, 12), 1)),
      HasSubstr("array of arrays"));
  EXPECT_THAT(refusal(gguf_file({}, gguf_text("k") + gguf_number(9, 4) + gguf_number(5, 4) + gguf_number(~0ULL, 8), 1)),
              HasSubstr("truncated"));
  EXPECT_THAT(refusal(gguf_file({}, gguf_text("general.alignment") + gguf_number(4, 4) + gguf_number(7, 4), 1)),
              HasSubstr("power of two"));
  const std::string two = gguf_file({{"a", {8}, 0, std::string(32, 'x')}, {"b", {8}, 0, std::string(32, 'x')}});
  EXPECT_THAT(
      refusal(std::string(two).replace(two.find(std::string("\x20\0\0\0\0\0\0\0", 8)), 1, std::string(1, '\0'))),
      HasSubstr("overlap"));
  EXPECT_THAT(refusal(std::string(two).replace(two.find(std::string("\x20\0\0\0\0\0\0\0", 8)), 1, "\1")),
              HasSubstr("no multiple of 32"));
}

// Of a part of the file, the reader asks for more; of bytes changed at random it makes entries in the file, or refuses.
TEST(Gguf, SurvivesPartsAndDamage) {
  std::ifstream in(source_path("tests/fixtures/gguf/types.gguf"), std::ios::binary);
  const std::string file((std::istreambuf_iterator<char>(in)), {});
  for (std::size_t size = 0; size < 700; ++size) {
    const auto header = parse_gguf_header(std::string_view(file).substr(0, size), file.size(), "a.gguf");
    ASSERT_TRUE(header) << size << ": " << header.error().message;
    if (*header) break;
  }
  std::mt19937 random(3);
  int accepted = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string bytes = file;
    for (int i = 0; i < 3; ++i) bytes[random() % 900] = static_cast<char>(random());
    const auto header = parse_gguf_header(bytes, bytes.size(), "a.gguf");
    if (!header || !*header) continue;
    ++accepted;
    for (const TensorEntry& entry : (*header)->tensors) {
      ASSERT_LE(entry.begin, entry.end);
      ASSERT_LE(entry.end, bytes.size());
    }
  }
  EXPECT_GT(accepted, 100);
}

}  // namespace
}  // namespace ditfleet::pipeline
