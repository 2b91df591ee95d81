// Adapters' files: each format, and each way to be wrong.
#include <sys/stat.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "shared/safetensors/adapter_keys.h"
#include "tests/unit/pipeline/lora/lora_file_fixture.h"

namespace ditfleet::pipeline {
namespace {

using Kind = safetensors::AdapterKind;

TEST(AdapterKey, KnowsEveryEnding) {
  for (const auto& [name, kind] :
       std::map<std::string, Kind>{{"a.b.lora_A.weight", Kind::kDown},
                                   {"a.b.lora_B.weight", Kind::kUp},
                                   {"a.b.lora_A.default.weight", Kind::kDown},
                                   {"a.b.lora_B.my_style.weight", Kind::kUp},
                                   {"a.b.lora_down.weight", Kind::kDown},
                                   {"a.b.lora_linear_layer.up.weight", Kind::kUp},
                                   {"a.b.down.weight", Kind::kDown},
                                   {"a.b.alpha", Kind::kAlpha},
                                   {"a.b.dora_scale", Kind::kRefused},
                                   {"a.b.lora_magnitude_vector", Kind::kRefused},
                                   {"a.b.lora_magnitude_vector.default.weight", Kind::kRefused},
                                   {"a.b.lora_mid.weight", Kind::kRefused},
                                   {"a.b.hada_w1_a", Kind::kHadamard},
                                   {"a.b.lokr_w2", Kind::kKronecker},
                                   {"a.b.diff", Kind::kDiff},
                                   {"a.b.diff_b", Kind::kDiffBias},
                                   {"a.b.lora_B.bias", Kind::kBias},
                                   {"a.b.lora_B.my_style.bias", Kind::kBias}}) {
    EXPECT_EQ(safetensors::parse_adapter_key(name).kind, kind) << name;
    EXPECT_EQ(safetensors::parse_adapter_key(name).module, "a.b") << name;
  }
  for (const char* name : {"a.b.bias", "a.b.diff_m", "a.b.hada_w3_a", ".lora_A.weight", "", "a.b.lora_A.x.y.weight"})
    EXPECT_EQ(safetensors::parse_adapter_key(name).kind, Kind::kUnknown) << name;
}

TEST_F(LoraFileTest, ReadsPeftsNames) {
  for (const std::string& module : {kQ, std::string("transformer_blocks.0.attn.to_q"), "base_model.model." + kQ}) {
    const auto t = terms(pair_of(module, kWidth, kWidth, 3));
    ASSERT_EQ(t.size(), 1u);
    EXPECT_EQ(t[0].rank, 3);
    EXPECT_EQ(t[0].scale, 1);
    EXPECT_EQ(t[0].target->component, 0u);
    ASSERT_EQ(t[0].target->pieces.size(), 1u);
    EXPECT_EQ(t[0].target->pieces[0].rows, kWidth);
  }
  EXPECT_EQ(terms(pair_of("transformer.transformer_blocks.1.attn.to_v", kWidth, kWidth))[0].target->pieces[0].first_row,
            2 * kWidth);
  EXPECT_EQ(terms(pair_of("text_encoder.text_model.encoder.layers.0.mlp.fc1", 6, 12))[0].target->component, 1u);
  EXPECT_EQ(terms(pair_of("text_encoder.encoder.layers.0.mlp.fc1", 6, 12))[0].target->component, 1u);
  EXPECT_EQ(terms(pair_of("text_encoder_2.encoder.block.0.layer.1.DenseReluDense.wi_0", 5, 15))[0].target->component,
            2u);
}

TEST_F(LoraFileTest, ReadsKohyasAndBflsNames) {
  const auto kohya = [&](const std::string& module, std::int64_t in, std::int64_t out) {
    return terms(pair_of(module, in, out, 2, ".lora_down.weight", ".lora_up.weight"));
  };
  // Fused: one piece of all the stacked rows; linear1 also reaches into the MLP.
  const auto qkv = kohya("lora_unet_double_blocks_0_img_attn_qkv", kWidth, 3 * kWidth);
  ASSERT_EQ(qkv.size(), 1u);
  ASSERT_EQ(qkv[0].target->pieces.size(), 1u);
  EXPECT_EQ(qkv[0].target->pieces[0].rows, 3 * kWidth);
  const auto linear1 = kohya("lora_unet_single_blocks_0_linear1", kWidth, 7 * kWidth);
  ASSERT_EQ(linear1[0].target->pieces.size(), 2u);
  EXPECT_EQ(linear1[0].target->pieces[0].rows, 3 * kWidth);
  EXPECT_EQ(linear1[0].target->pieces[1].rows, 4 * kWidth);
  EXPECT_NE(linear1[0].target->pieces[0].slot, linear1[0].target->pieces[1].slot);
  EXPECT_EQ(kohya("lora_transformer_single_transformer_blocks_0_proj_out", 5 * kWidth, kWidth)[0].target->name,
            "single_transformer_blocks.0.proj_out");
  EXPECT_EQ(kohya("lora_te1_text_model_encoder_layers_0_self_attn_q_proj", 6, 6)[0].target->component, 1u);
  for (const char* prefix : {"lora_te2_", "lora_te3_"})
    EXPECT_EQ(kohya(prefix + std::string("encoder_block_0_layer_0_SelfAttention_q"), 5, 10)[0].target->component, 2u);
  EXPECT_EQ(terms(pair_of("diffusion_model.double_blocks.1.txt_attn.proj", kWidth, kWidth))[0].target->pieces[0].rows,
            kWidth);
  const auto xlabs =
      terms(pair_of("double_blocks.0.processor.qkv_lora1", kWidth, 3 * kWidth, 2, ".down.weight", ".up.weight"));
  EXPECT_EQ(xlabs[0].target->pieces[0].slot, qkv[0].target->pieces[0].slot);
}

TEST_F(LoraFileTest, TurnsTheLastModulationAround) {
  const auto t = terms(pair_of("lora_unet_final_layer_adaLN_modulation_1", kWidth, 2 * kWidth, 2, ".lora_down.weight",
                               ".lora_up.weight"));
  ASSERT_EQ(t[0].target->pieces.size(), 2u);
  EXPECT_EQ(t[0].target->pieces[0].first_row, kWidth);  // BFL's shift is diffusers' second half
  EXPECT_EQ(t[0].target->pieces[1].first_row, 0);
}

TEST_F(LoraFileTest, RanksMayDiffer) {
  auto tensors = pair_of(kQ, kWidth, kWidth, 1);
  tensors.merge(pair_of("transformer.proj_out", kWidth, 4, 5));
  const auto t = terms(tensors);
  ASSERT_EQ(t.size(), 2u);
  EXPECT_EQ(t[0].rank + t[1].rank, 6);
}

TEST_F(LoraFileTest, ReadsEveryElementType) {
  for (const auto& [dtype, one] :
       {std::pair(DType::kBF16, std::uint16_t{0x3f80}), std::pair(DType::kF16, std::uint16_t{0x3c00})}) {
    const std::vector<std::uint16_t> values(2 * kWidth, one), alpha = {one};
    const auto bytes = std::as_bytes(std::span(values));
    ASSERT_TRUE(write_safetensors(path_, {{kQ + ".lora_A.weight", dtype, {2, kWidth}, bytes},
                                          {kQ + ".lora_B.weight", dtype, {kWidth, 2}, bytes},
                                          {kQ + ".alpha", dtype, {1}, std::as_bytes(std::span(alpha))}}));
    const auto file = read();
    ASSERT_TRUE(file) << file.error().message;
    EXPECT_DOUBLE_EQ(file->terms[0].scale, 0.5);
  }
  for (const auto& [dtype, one] :
       {std::pair(DType::kF8E4M3, std::uint8_t{0x38}), std::pair(DType::kF8E5M2, std::uint8_t{0x3c})}) {
    std::vector<std::uint8_t> values(2 * kWidth, one);
    const std::vector<std::uint8_t> alpha = {one};
    const auto write_it = [&] {
      const auto these = std::as_bytes(std::span(values));
      ASSERT_TRUE(write_safetensors(path_, {{kQ + ".lora_A.weight", dtype, {2, kWidth}, these},
                                            {kQ + ".lora_B.weight", dtype, {kWidth, 2}, these},
                                            {kQ + ".alpha", dtype, {1}, std::as_bytes(std::span(alpha))}}));
    };
    write_it();
    const auto file = read();
    ASSERT_TRUE(file) << file.error().message;
    EXPECT_DOUBLE_EQ(file->terms[0].scale, 0.5);
    values[3] = 0xff;  // NaN
    write_it();
    EXPECT_SAYS(refusal(read()), "NaN");
  }
  const std::vector<std::int8_t> bytes(2 * kWidth);
  ASSERT_TRUE(
      write_safetensors(path_, {{kQ + ".lora_A.weight", DType::kI8, {2, kWidth}, std::as_bytes(std::span(bytes))},
                                {kQ + ".lora_B.weight", DType::kI8, {kWidth, 2}, std::as_bytes(std::span(bytes))}}));
  EXPECT_SAYS(refusal(read()), "F32, BF16, F16, F64, F8_E4M3 or F8_E5M2");
}

TEST_F(LoraFileTest, RefusesWhatIsNoSafetensors) {
  write_bytes(std::string("PK\x03\x04", 4) + std::string(100, 'x'));
  EXPECT_SAYS(refusal(read()), "pickle");
  write_bytes(std::string("\x80\x02}q", 4) + std::string(100, 'x'));
  EXPECT_SAYS(refusal(read()), "pickle");
  write_bytes("GGUF and more than eight bytes");
  refusal(read(), Code::kDataCorrupt);
  write_bytes("");
  refusal(read(), Code::kDataCorrupt);
  std::filesystem::remove(path_);
  refusal(read(), Code::kNotFound);
}

// A header whose length begins as a pickle does is none.
TEST_F(LoraFileTest, AHeaderOf640BytesIsNoPickle) {
  write(pair_of(kQ, kWidth, kWidth));
  std::string bytes;
  {
    std::ifstream in(path_, std::ios::binary);
    bytes.assign(std::istreambuf_iterator<char>(in), {});
  }
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  ASSERT_LT(length, 0x280u);
  bytes.insert(8 + length, std::string(0x280 - length, ' '));
  length = 0x280;
  std::memcpy(bytes.data(), &length, 8);
  write_bytes(bytes);
  const auto file = read();
  EXPECT_TRUE(file) << file.error().message;
}

TEST_F(LoraFileTest, RefusesALyingOffsetTable) {
  const std::string header = "{\"" + kQ + R"(.lora_A.weight":{"dtype":"F32","shape":[2,8],"data_offsets":[0,4096]}})";
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(header.size());
  write_bytes(bytes + header + std::string(64, '\0'));
  EXPECT_SAYS(refusal(read(), Code::kDataCorrupt), "takes 64 bytes, but its range has 4096");
}

TEST_F(LoraFileTest, RefusesAPipeAtOnce) {
  std::filesystem::remove(path_);
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  EXPECT_SAYS(refusal(read(), Code::kDataCorrupt), "is not a file");
}

// Bytes changed at random: terms that fit the base, or an error.
TEST_F(LoraFileTest, SurvivesDamage) {
  auto tensors = pair_of(kQ, kWidth, kWidth, 2);
  tensors[kQ + ".alpha"] = {{}, {2.0f}};
  tensors.merge(
      pair_of("lora_te1_text_model_encoder_layers_0_mlp_fc1", 6, 12, 2, ".lora_down.weight", ".lora_up.weight"));
  write(tensors,
        {{"lora_adapter_metadata", R"({"text_encoder.lora_alpha":8,"text_encoder.alpha_pattern":{"fc1":3}})"}});
  std::string whole;
  {
    std::ifstream in(path_, std::ios::binary);
    whole.assign(std::istreambuf_iterator<char>(in), {});
  }
  std::mt19937 random(7);
  int accepted = 0, refused = 0;
  for (int round = 0; round < 2000; ++round) {
    std::string bytes = whole;
    for (unsigned i = 0; i <= random() % 3; ++i) bytes[random() % bytes.size()] = static_cast<char>(random());
    if (random() % 8 == 0) bytes.resize(random() % bytes.size());
    write_bytes(bytes);
    const auto file = read();
    if (!file) {
      EXPECT_EQ(file.error().param, "loras");
      ++refused;
      continue;
    }
    ++accepted;
    for (const LoraTerm& term : file->terms) {
      EXPECT_TRUE(std::isfinite(term.scale));
      EXPECT_EQ(term.down.shape[1], term.target->in);
      EXPECT_EQ(term.up.shape[0], term.target->out);
    }
  }
  EXPECT_GT(accepted, 100);
  EXPECT_GT(refused, 100);
}

TEST_F(LoraFileTest, RefusesARankAboveTheLimit) {
  write(pair_of(kQ, kWidth, kWidth, 9));
  EXPECT_TRUE(read(9));
  EXPECT_SAYS(refusal(read(8)), "has rank 9; it must be from 1 to 8");
  write(pair_of(kQ, kWidth, kWidth, 0));
  EXPECT_SAYS(refusal(read()), "has rank 0");
}

TEST_F(LoraFileTest, ABlockDiagonalMatrixIsOneForEachLinear) {
  const std::string module = "lora_unet_double_blocks_0_img_attn_qkv";
  auto tensors = pair_of(module, kWidth, 3 * kWidth, 12, ".lora_down.weight", ".lora_up.weight");
  auto& up = tensors[module + ".lora_up.weight"].values;
  for (std::size_t row = 0; row < 3 * kWidth; ++row)
    for (std::size_t column = 0; column < 12; ++column)
      if (row / kWidth != column / 4) up[row * 12 + column] = column % 2 == 0 ? 0.0F : -0.0F;
  tensors[module + ".alpha"] = {{}, {6}};
  const auto split = terms(tensors);
  ASSERT_EQ(split.size(), 1u);
  EXPECT_EQ(split[0].blocks, 3);
  EXPECT_EQ(split[0].rank, 4);
  EXPECT_EQ(split[0].scale, 0.5);  // of the file's own rank
  for (std::int64_t block = 0; block < 3; ++block) {
    ASSERT_EQ(split[0].pieces(block).size(), 1u);
    EXPECT_EQ(split[0].pieces(block)[0].first_row, block * kWidth);
    EXPECT_EQ(split[0].pieces(block)[0].rows, kWidth);
  }
  EXPECT_TRUE(read(4));
  EXPECT_SAYS(refusal(read(3)), "has rank 4; it must be from 1 to 3");
  for (const std::size_t beside : {4, 12 * 8, 12 * 23 + 7}) {
    auto other = tensors;
    other[module + ".lora_up.weight"].values[beside] = 1e-30F;
    const auto whole = terms(other);
    ASSERT_EQ(whole.size(), 1u);
    EXPECT_EQ(whole[0].blocks, 1) << beside;
    EXPECT_EQ(whole[0].rank, 12) << beside;
  }
  // No linears of its own, or not as much for each.
  EXPECT_EQ(terms(pair_of(kQ, kWidth, kWidth, 3))[0].blocks, 1);
  EXPECT_EQ(terms(pair_of(module, kWidth, 3 * kWidth, 4, ".lora_down.weight", ".lora_up.weight"))[0].blocks, 1);
}

TEST_F(LoraFileTest, ListsForeignKeysShortened) {
  std::map<std::string, FileTensor> tensors;
  for (int i = 0; i < 5; ++i) tensors.merge(pair_of("lora_unet_nothing_" + std::to_string(i), kWidth, kWidth));
  const std::string message = refusal(read_these(tensors));
  EXPECT_SAYS(message, "lora_unet_nothing_0.lora_A.weight, lora_unet_nothing_0.lora_B.weight");
  EXPECT_SAYS(message, "and 4 more");
  EXPECT_SAYS(refusal(read_these(pair_of(std::string(5000, 'x'), kWidth, kWidth))), "xxx");
  EXPECT_LT(refusal(read()).size(), 1000u);
}

// As PEFT and ComfyUI do: what the base does not have is left out and named, except zeros.
TEST_F(LoraFileTest, LeavesOutWhatTheBaseDoesNotHave) {
  auto tensors = pair_of(kQ, kWidth, kWidth);
  tensors.merge(pair_of("transformer.transformer_blocks.7.attn.to_q", kWidth, kWidth));
  tensors.merge(pair_of("lora_te1_text_model_embeddings_position_embedding", 6, 6));
  tensors[kQ + ".diff"] = filled({kWidth, kWidth});
  tensors[kQ + ".diff_b"] = filled({kWidth});
  tensors["diffusion_model.double_blocks.0.diff_m"] = filled({6, kWidth});
  tensors["diffusion_model.double_blocks.0.img_attn.norm.key_norm.scale.diff"] = filled({kWidth}, -0.0F);
  tensors["transformer.proj_out.diff_b"] = filled({4}, 0);
  const auto file = read_these(tensors);
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_EQ(file->terms.size(), 1u);
  EXPECT_TRUE(file->biases.empty());
  EXPECT_EQ(file->unused,
            (std::vector<std::string>{"diffusion_model.double_blocks.0.diff_m",
                                      "lora_te1_text_model_embeddings_position_embedding.lora_A.weight",
                                      "lora_te1_text_model_embeddings_position_embedding.lora_B.weight", kQ + ".diff",
                                      kQ + ".diff_b", "transformer.transformer_blocks.7.attn.to_q.lora_A.weight",
                                      "transformer.transformer_blocks.7.attn.to_q.lora_B.weight"}));
}

// Another model's adapter may share the text encoder with this one.
TEST_F(LoraFileTest, RefusesAnAdapterOfWhichNothingFitsTheTransformer) {
  auto tensors =
      pair_of("lora_te1_text_model_encoder_layers_0_mlp_fc1", 6, 12, 2, ".lora_down.weight", ".lora_up.weight");
  EXPECT_EQ(terms(tensors).size(), 1u);
  tensors.merge(
      pair_of("lora_unet_down_blocks_0_attentions_0_proj_in", 320, 320, 2, ".lora_down.weight", ".lora_up.weight"));
  EXPECT_SAYS(refusal(read_these(tensors)),
              "it is an adapter for Stable Diffusion 1.5, 2 or XL (lora_unet_down_blocks");
  EXPECT_SAYS(refusal(read_these({{kQ + ".diff", filled({kWidth, kWidth})}})), "nothing for a FLUX model: " + kQ);
  EXPECT_SAYS(refusal(read_these({{kQ + ".diff", filled({kWidth, kWidth}, 0)}})), "no LoRA weights");
}

TEST_F(LoraFileTest, NamesControlAdapters) {
  for (const char* module : {"transformer.x_embedder", "img_in"})
    EXPECT_SAYS(refusal(read_these(pair_of(module, 8, kWidth))), "it is a control, fill or inpainting adapter");
}

// PEFT scales the bias of B with B; .diff_b is none (see WanLora).
TEST_F(LoraFileTest, TheBiasOfBHasItsScale) {
  auto tensors = pair_of(kQ, kWidth, kWidth);
  tensors[kQ + ".lora_B.bias"] = filled({kWidth});
  tensors[kQ + ".alpha"] = {{}, {1.0f}};
  const auto file = read_these(tensors);
  ASSERT_TRUE(file) << file.error().message;
  ASSERT_EQ(file->biases.size(), 1u);
  EXPECT_EQ(file->biases[0].scale, 0.5);
}

TEST_F(LoraFileTest, ReadsLohaAndLokr) {
  const std::string module = "lora_unet_double_blocks_0_img_attn_qkv";
  std::map<std::string, FileTensor> loha = {{module + ".hada_w1_a", filled({3 * kWidth, 2})},
                                            {module + ".hada_w1_b", filled({2, kWidth})},
                                            {module + ".hada_w2_a", filled({3 * kWidth, 3})},
                                            {module + ".hada_w2_b", filled({3, kWidth})},
                                            {module + ".alpha", {{}, {1.0f}}}};
  auto t = terms(loha);
  ASSERT_EQ(t.size(), 1u);
  EXPECT_EQ(t[0].form, LoraTerm::Form::kHadamard);
  EXPECT_EQ(t[0].rank, 6);
  EXPECT_EQ(t[0].scale, 0.5);
  EXPECT_SAYS(refusal(read(5)), "it is a LoHa adapter, and that of " + module + " has rank 6; at most 5");
  auto bad = loha;
  bad.erase(module + ".hada_w2_b");
  EXPECT_SAYS(refusal(read_these(bad)), "lacks a part of w2");
  bad = loha;
  bad[module + ".hada_w2_b"] = filled({2, kWidth});
  EXPECT_SAYS(refusal(read_these(bad)), "the second side of _a");
  bad[module + ".hada_w2_b"] = filled({3, kWidth + 1});
  EXPECT_SAYS(refusal(read_these(bad)), "another base model");
  loha.merge(pair_of(module, kWidth, 3 * kWidth));
  EXPECT_SAYS(refusal(read_these(loha)), "change the same matrix");

  const std::string lycoris = "lycoris_transformer_blocks_0_attn_to_q";
  const std::map<std::string, FileTensor> whole = {{lycoris + ".lokr_w1", filled({2, 4})},
                                                   {lycoris + ".lokr_w2", filled({4, 2})},
                                                   {lycoris + ".alpha", {{}, {1.0f}}}};
  t = terms(whole);
  EXPECT_EQ(t[0].form, LoraTerm::Form::kKronecker);
  EXPECT_EQ(t[0].rank, 4);
  EXPECT_EQ(t[0].scale, 1) << "nothing that alpha could be divided by";
  std::map<std::string, FileTensor> halves = {{lycoris + ".lokr_w1", filled({2, 4})},
                                              {lycoris + ".lokr_w2_a", filled({4, 1})},
                                              {lycoris + ".lokr_w2_b", filled({1, 2})},
                                              {lycoris + ".alpha", {{}, {3.0f}}}};
  t = terms(halves);
  EXPECT_EQ(t[0].rank, 2);
  EXPECT_EQ(t[0].scale, 3);
  halves[lycoris + ".lokr_w2"] = filled({4, 2});
  EXPECT_SAYS(refusal(read_these(halves)), "both whole and as _a and _b");
}

TEST_F(LoraFileTest, NamesDriveNoTerminal) {
  EXPECT_SAYS(refusal(read_these({{"lora_\x1b[2J\n", filled({1})}})), R"(lora_\x1b[2J\n)");
  auto tensors = pair_of(kQ, kWidth, kWidth + 1, 2, ".lora_A.a\x1b[31m.weight", ".lora_B.a\x1b[31m.weight");
  tensors.begin()->second.values[0] = std::numeric_limits<float>::infinity();
  for (const std::int64_t width : {kWidth + 1, kWidth}) {  // another base's; not finite
    tensors.rbegin()->second = filled({width, 2});
    EXPECT_EQ(refusal(read_these(tensors)).find('\x1b'), std::string::npos);
  }
  EXPECT_SAYS(refusal(read()), R"(lora_A.a\x1b[31m.weight contains NaN)");
  const std::map<std::string, std::string> metadata = {
      {"lora_adapter_metadata", R"({"alpha_pattern":{"a\u001b[31m":"x"}})"}};
  EXPECT_SAYS(refusal(read_these(pair_of(kQ, kWidth, kWidth), metadata)), R"(alpha_pattern.a\x1b[31m is)");
}

TEST_F(LoraFileTest, RefusesBlocksAndLayersThatAreNotThere) {
  for (const char* module :
       {"transformer.transformer_blocks.2.attn.to_q", "lora_unet_double_blocks_17_img_attn_proj",
        "text_encoder.text_model.encoder.layers.9.mlp.fc1", "transformer.time_text_embed.guidance_embedder.linear_1",
        "lora_unet_guidance_in_out_layer", "single_blocks.99.linear2"})
    EXPECT_SAYS(refusal(read_these(pair_of(module, kWidth, kWidth))), "blocks or layers that this model lacks");
}

TEST_F(LoraFileTest, NamesKindsThatCannotBeApplied) {
  for (const auto& [ending, kind] :
       {std::pair(".oft_blocks", "OFT"), {".lora_mid.weight", "LoCon"}, {".a1.weight", "GLoRA"}}) {
    auto tensors = pair_of(kQ, kWidth, kWidth);
    tensors[kQ + ending] = filled({kWidth});
    EXPECT_SAYS(refusal(read_these(tensors)), std::string("it is a ") + kind);
  }
}

TEST_F(LoraFileTest, RefusesDora) {
  for (const char* ending : {".dora_scale", ".lora_magnitude_vector", ".lora_magnitude_vector.default.weight"}) {
    auto tensors = pair_of(kQ, kWidth, kWidth);
    tensors[kQ + ending] = filled({kWidth});
    EXPECT_SAYS(refusal(read_these(tensors)), "DoRA");
  }
  EXPECT_SAYS(
      refusal(read_these(pair_of(kQ, kWidth, kWidth), {{"lora_adapter_metadata", R"({"transformer.use_dora":true})"}})),
      "DoRA");
}

TEST_F(LoraFileTest, RefusesWeightsThatAreNotFinite) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    for (const char* which : {".lora_A.weight", ".lora_B.weight"}) {
      auto tensors = pair_of(kQ, kWidth, kWidth);
      tensors[kQ + which].values.back() = bad;
      EXPECT_SAYS(refusal(read_these(tensors)), which + std::string(" contains NaN or infinity"));
    }
    auto tensors = pair_of(kQ, kWidth, kWidth);
    tensors[kQ + ".alpha"] = {{}, {bad}};
    EXPECT_SAYS(refusal(read_these(tensors)), "one finite number");
  }
}

TEST_F(LoraFileTest, RefusesWrongShapes) {
  EXPECT_SAYS(
      refusal(read_these({{kQ + ".lora_A.weight", filled({2, kWidth})}, {kQ + ".lora_B.weight", filled({kWidth, 3})}})),
      "rank must be the same");
  EXPECT_SAYS(refusal(read_these(
                  {{kQ + ".lora_A.weight", filled({2, kWidth, 1, 1})}, {kQ + ".lora_B.weight", filled({kWidth, 2})}})),
              "[2, 8, 1, 1]");
  EXPECT_SAYS(refusal(read_these({{kQ + ".lora_A.weight", filled({2})}, {kQ + ".lora_B.weight", filled({kWidth, 2})}})),
              "A must be [rank, in]");
  auto tensors = pair_of(kQ, kWidth, kWidth);
  tensors[kQ + ".alpha"] = filled({2});
  EXPECT_SAYS(refusal(read_these(tensors)), "one finite number");
}

TEST_F(LoraFileTest, RefusesAnotherBasesWidths) {
  const std::string message = refusal(read_these(pair_of(kQ, 3072, 3072)));
  EXPECT_SAYS(message, "from 3072 to 3072 values, in this model from 8 to 8; the adapter is for another base model");
}

TEST_F(LoraFileTest, RefusesAMissingPartner) {
  for (const char* which : {".lora_A.weight", ".lora_B.weight"}) {
    auto tensors = pair_of(kQ, kWidth, kWidth);
    tensors.erase(kQ + which);
    EXPECT_SAYS(refusal(read_these(tensors)), "has no counterpart");
  }
  EXPECT_SAYS(refusal(read_these({{kQ + ".alpha", {{}, {1.0f}}}})), "nothing for a FLUX model");
}

TEST_F(LoraFileTest, RefusesTheSameWeightTwice) {
  auto tensors = pair_of(kQ, kWidth, kWidth);
  tensors.merge(pair_of("transformer_blocks.0.attn.to_q", kWidth, kWidth));
  EXPECT_SAYS(refusal(read_these(tensors)), "are the same weight");
}

// One matrix's rows under two names, one of which may be a fused linear's.
TEST_F(LoraFileTest, RefusesOverlappingSpellings) {
  const std::string fused = "double_blocks.0.img_attn.qkv", xlabs = "double_blocks.0.processor.qkv_lora1",
                    k = "transformer.transformer_blocks.0.attn.to_k";
  const std::string linear1 = "single_blocks.0.linear1", mlp = "transformer.single_transformer_blocks.0.proj_mlp";
  const auto both = [&](const std::map<std::string, FileTensor>& a, std::map<std::string, FileTensor> b,
                        const std::string& first, const std::string& second) {
    b.insert(a.begin(), a.end());
    const std::string message = refusal(read_these(b));
    EXPECT_SAYS(message, "change the same rows of one matrix");
    EXPECT_SAYS(message, first);
    EXPECT_SAYS(message, second);
  };
  const auto qkv = pair_of(fused, kWidth, 3 * kWidth);
  both(qkv, pair_of(k, kWidth, kWidth), fused + ".lora_A.weight", k + ".lora_A.weight");
  both(qkv, pair_of(xlabs, kWidth, 3 * kWidth, 2, ".down.weight", ".up.weight"), fused + ".lora_A.weight",
       xlabs + ".down.weight");
  both(pair_of(linear1, kWidth, 7 * kWidth, 2, ".lora_down.weight", ".lora_up.weight"),
       pair_of(mlp, kWidth, 4 * kWidth), linear1, mlp);
  both(pair_of("double_blocks.1.img_attn.proj", kWidth, kWidth),
       pair_of("transformer_blocks.1.attn.to_out.0", kWidth, kWidth), "img_attn.proj", "to_out.0");
  // Other rows of the matrix, and the same rows of another block's.
  auto apart = pair_of(k, kWidth, kWidth);
  apart.merge(pair_of(kQ, kWidth, kWidth));
  apart.merge(pair_of("double_blocks.1.img_attn.qkv", kWidth, 3 * kWidth));
  EXPECT_EQ(terms(apart).size(), 3u);
}

// As diffusers does, without comparing the two.
TEST_F(LoraFileTest, LeavesOutASecondCopyInKohyasNames) {
  for (const std::string prefix : {"transformer.", "lora_transformer_"}) {
    auto tensors = pair_of(prefix + "transformer_blocks.0.attn.to_q", kWidth, kWidth);
    tensors.merge(pair_of("lora_unet_double_blocks_0_img_attn_qkv", kWidth, 3 * kWidth, 2, ".lora_down.weight",
                          ".lora_up.weight"));
    write(tensors);
    const auto file = read_lora_file(path_, names(), 128);
    ASSERT_TRUE(file) << file.error().message;
    EXPECT_EQ(file->terms.size(), 1u);
    EXPECT_EQ(file->unused.size(), 2u);
  }
}

TEST_F(LoraFileTest, RefusesAnEmptyFileAndTwoOpinionsOnAlpha) {
  EXPECT_SAYS(refusal(read_these({})), "no LoRA weights");
  auto tensors = pair_of(kQ, kWidth, kWidth);
  tensors[kQ + ".alpha"] = {{}, {1.0f}};
  EXPECT_SAYS(refusal(read_these(tensors, {{"lora_adapter_metadata", R"({"transformer.lora_alpha":8})"}})),
              "is one number in a tensor and another in lora_adapter_metadata; remove one of them");
}

}  // namespace
}  // namespace ditfleet::pipeline
