// Adapters' files made by a test, for a made-up base of two double blocks and one single block, 8 wide, with an encoder
// layer of each kind.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "pipeline/families/flux/adapter_names.h"
#include "pipeline/lora/file.h"
#include "pipeline/weights/safetensors_writer.h"

namespace ditfleet::pipeline {

inline constexpr std::int64_t kWidth = 8;

inline LoraBase base() {
  std::vector<BaseLinear> transformer;
  std::size_t slot = 0;
  const auto add = [&](const std::string& name, std::int64_t in, std::int64_t out) {
    transformer.push_back({name, slot++, 0, in, out});
  };
  const auto add_qkv = [&](const std::string& q, const std::string& k, const std::string& v) {
    std::int64_t row = 0;
    for (const auto& name : {q, k, v}) transformer.push_back({name, slot, kWidth * row++, kWidth, kWidth});
    ++slot;
  };
  add("x_embedder", 4, kWidth);
  for (const char* block : {"0", "1"}) {
    const std::string at = std::string("transformer_blocks.") + block + ".";
    add_qkv(at + "attn.to_q", at + "attn.to_k", at + "attn.to_v");
    add_qkv(at + "attn.add_q_proj", at + "attn.add_k_proj", at + "attn.add_v_proj");
    add(at + "attn.to_out.0", kWidth, kWidth);
    add(at + "attn.to_add_out", kWidth, kWidth);
    add(at + "ff.net.0.proj", kWidth, 4 * kWidth);
    add(at + "ff.net.2", 4 * kWidth, kWidth);
    add(at + "norm1.linear", kWidth, 6 * kWidth);
  }
  const std::string single = "single_transformer_blocks.0.";
  add_qkv(single + "attn.to_q", single + "attn.to_k", single + "attn.to_v");
  add(single + "proj_mlp", kWidth, 4 * kWidth);
  add(single + "proj_out", 5 * kWidth, kWidth);
  add("norm_out.linear", kWidth, 2 * kWidth);
  add("proj_out", kWidth, 4);
  std::vector<BaseLinear> clip = {{"encoder.layers.0.self_attn.q_proj", 0, 0, 6, 6},
                                  {"encoder.layers.0.mlp.fc1", 1, 0, 6, 12}};
  std::vector<BaseLinear> t5 = {{"encoder.block.0.layer.0.SelfAttention.q", 0, 0, 5, 10},
                                {"encoder.block.0.layer.1.DenseReluDense.wi_0", 1, 0, 5, 15}};
  return flux_lora_base(std::move(transformer), std::move(clip), std::move(t5));
}

inline const LoraNames& names() {
  static const LoraNames all(base());
  return all;
}

struct FileTensor {
  std::vector<std::int64_t> shape;
  std::vector<float> values;
};
inline FileTensor filled(std::vector<std::int64_t> shape, float value = 0.5f) {
  std::int64_t count = 1;
  for (auto n : shape) count *= n;
  return {std::move(shape), std::vector<float>(static_cast<std::size_t>(count), value)};
}

class LoraFileTest : public ::testing::Test {
 protected:
  LoraFileTest()
      : path_((std::filesystem::temp_directory_path() /
               ("ditfleet_lora_file_" + std::to_string(::getpid()) + ".safetensors"))
                  .string()) {}
  ~LoraFileTest() override { std::filesystem::remove(path_); }

  void write(const std::map<std::string, FileTensor>& tensors,
             const std::map<std::string, std::string>& metadata = {}) const {
    std::vector<TensorToWrite> out;
    for (const auto& [name, t] : tensors)
      out.push_back({name, DType::kF32, t.shape, std::as_bytes(std::span(t.values))});
    ASSERT_TRUE(write_safetensors(path_, out, metadata));
  }
  void write_bytes(const std::string& bytes) const { std::ofstream(path_, std::ios::binary) << bytes; }
  Result<LoraFile> read(std::int64_t max_rank = 128) const { return read_lora_file(path_, names(), max_rank); }
  Result<LoraFile> read_these(const std::map<std::string, FileTensor>& tensors,
                              const std::map<std::string, std::string>& metadata = {}) const {
    write(tensors, metadata);
    return read();
  }
  // The terms of a file that must be accepted.
  std::vector<LoraTerm> terms(const std::map<std::string, FileTensor>& tensors,
                              const std::map<std::string, std::string>& metadata = {}) {
    auto file = read_these(tensors, metadata);
    EXPECT_TRUE(file) << file.error().message;
    if (!file) return {};
    kept_.push_back(std::move(*file));
    return kept_.back().terms;
  }
  // The message of a refusal.
  std::string refusal(const Result<LoraFile>& file, Code code = Code::kInvalidArgument) const {
    EXPECT_FALSE(file) << "accepted";
    if (file) return {};
    EXPECT_EQ(file.error().code, code) << file.error().message;
    EXPECT_EQ(file.error().param, "loras");
    EXPECT_NE(file.error().message.find(path_), std::string::npos) << file.error().message;
    return file.error().message;
  }

  const std::string path_;
  std::vector<LoraFile> kept_;
};

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

inline const std::string kQ = "transformer.transformer_blocks.0.attn.to_q";
inline std::map<std::string, FileTensor> pair_of(const std::string& module, std::int64_t in, std::int64_t out,
                                                 std::int64_t rank = 2, const std::string& down = ".lora_A.weight",
                                                 const std::string& up = ".lora_B.weight") {
  return {{module + down, filled({rank, in})}, {module + up, filled({out, rank})}};
}

}  // namespace ditfleet::pipeline
