// Adapters for the demo model, made at random: files of PEFT's names that an adapter of any rank and targets may have.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace ditfleet::testing {

struct LoraTarget {
  std::string module;  // "transformer.single_transformer_blocks.0.attn.to_q"
  int in = 0, out = 0;
};

// The linears of deploy/demo-model: 2 double blocks, 6 single ones, 192 wide; CLIP 96 wide.
inline std::vector<LoraTarget> single_attention() {
  std::vector<LoraTarget> out;
  for (int block = 0; block < 6; ++block) {
    for (const char* which : {"to_q", "to_k", "to_v"})
      out.push_back({"transformer.single_transformer_blocks." + std::to_string(block) + ".attn." + which, 192, 192});
  }
  return out;
}
inline std::vector<LoraTarget> single_mlp() {
  std::vector<LoraTarget> out;
  for (int block = 0; block < 6; ++block) {
    const std::string at = "transformer.single_transformer_blocks." + std::to_string(block) + ".";
    out.push_back({at + "proj_mlp", 192, 768});
    out.push_back({at + "proj_out", 960, 192});
  }
  return out;
}
inline std::vector<LoraTarget> double_blocks() {
  std::vector<LoraTarget> out;
  for (int block = 0; block < 2; ++block) {
    const std::string at = "transformer.transformer_blocks." + std::to_string(block) + ".";
    for (const char* which : {"attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj",
                              "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"})
      out.push_back({at + which, 192, 192});
    for (const char* which : {"ff", "ff_context"}) {
      out.push_back({at + which + ".net.0.proj", 192, 768});
      out.push_back({at + which + ".net.2", 768, 192});
    }
  }
  return out;
}
inline std::vector<LoraTarget> clip_attention() {
  std::vector<LoraTarget> out;
  for (const char* layer : {"0", "1"}) {
    for (const char* which : {"q_proj", "k_proj", "v_proj", "out_proj"})
      out.push_back({"text_encoder.text_model.encoder.layers." + std::string(layer) + ".self_attn." + which, 96, 96});
  }
  return out;
}
inline std::vector<LoraTarget> operator+(std::vector<LoraTarget> a, const std::vector<LoraTarget>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// The delta of each linear moves its output by about `strength` times the input's size.
inline void write_lora(const std::string& path, const std::vector<LoraTarget>& targets, int rank, double strength,
                       unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::string header = "{", data;
  const auto add = [&](const std::string& name, int rows, int columns, double deviation) {
    const std::size_t begin = data.size();
    for (int i = 0; i < rows * columns; ++i) {
      const float value = static_cast<float>(deviation) * normal(random);
      data.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
    header += (header.size() > 1 ? ",\"" : "\"") + name + "\":{\"dtype\":\"F32\",\"shape\":[" + std::to_string(rows) +
              "," + std::to_string(columns) + "],\"data_offsets\":[" + std::to_string(begin) + "," +
              std::to_string(data.size()) + "]}";
  };
  for (const auto& target : targets) {
    add(target.module + ".lora_A.weight", rank, target.in, 1.0 / std::sqrt(target.in));
    add(target.module + ".lora_B.weight", target.out, rank, strength / std::sqrt(rank));
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const std::uint64_t length = header.size();
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(&length), sizeof length) << header << data;
}

}  // namespace ditfleet::testing
