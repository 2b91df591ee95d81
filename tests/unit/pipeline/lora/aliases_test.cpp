// The names of linears in files that are not diffusers'.
#include "pipeline/lora/aliases.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pipeline/families/flux2/adapter_names.h"
#include "pipeline/families/z_image/adapter_names.h"

namespace ditfleet::pipeline {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;

using Rows = std::tuple<std::size_t, std::int64_t, std::int64_t>;  // slot, first row, number

std::vector<Rows> rows_of(const std::vector<LoraPiece>& pieces) {
  std::vector<Rows> rows;
  for (const LoraPiece& piece : pieces) rows.emplace_back(piece.slot, piece.first_row, piece.rows);
  return rows;
}

std::vector<std::string> names_in(const std::vector<LoraTarget>& targets) {
  std::vector<std::string> names;
  for (const LoraTarget& target : targets) names.push_back(target.name);
  return names;
}

const std::vector<AliasTable> kTables = {{"own.", "blocks.", {{"qkv", {"q", "k", "v"}}, {"proj", {"out"}}}},
                                         {"", "", {{"img_in", {"x_embedder"}}}}};

// q and k are rows of one matrix, v is a matrix of its own.
std::vector<BaseLinear> linears() {
  return {{"x_embedder", 0, 0, 4, 8},   {"blocks.0.q", 1, 0, 8, 8},   {"blocks.0.k", 1, 8, 8, 2},
          {"blocks.0.v", 2, 0, 8, 2},   {"blocks.0.out", 3, 0, 8, 8}, {"blocks.10.q", 4, 0, 8, 8},
          {"blocks.10.out", 5, 0, 8, 8}};
}

TEST(LinearAliases, HoldTheRowsOfTheirLinearsInTurn) {
  const auto found = find_aliases(linears(), kTables);
  // Block 10 lacks k and v.
  EXPECT_THAT(names_in(found), ElementsAre("own.0.qkv", "own.0.proj", "own.10.proj", "img_in"));
  const LoraTarget &qkv = found[0], &proj = found[1];
  EXPECT_EQ(qkv.in, 8);
  EXPECT_EQ(qkv.out, 12);
  EXPECT_THAT(rows_of(qkv.pieces), ElementsAre(Rows(1, 0, 10), Rows(2, 0, 2))) << "adjacent rows are one piece";
  EXPECT_THAT(rows_of(qkv.linears), ElementsAre(Rows(1, 0, 8), Rows(1, 8, 2), Rows(2, 0, 2)));
  EXPECT_EQ(proj.out, 8);
  EXPECT_THAT(rows_of(proj.pieces), ElementsAre(Rows(3, 0, 8)));
  EXPECT_THAT(rows_of(proj.linears), IsEmpty()) << "it is one linear";
  EXPECT_EQ(found[3].in, 4);
}

TEST(LinearAliases, NamesAreThoseOfBlockZeroOfBothSides) {
  EXPECT_THAT(names_of(kTables), ElementsAre("own.0.qkv", "blocks.0.q", "blocks.0.k", "blocks.0.v", "own.0.proj",
                                             "blocks.0.out", "img_in", "x_embedder"));
}

TEST(LinearAliases, OfZImageAreInAllThreeListsOfBlocks) {
  std::vector<BaseLinear> all;
  for (const char* list : {"layers.2.", "noise_refiner.0.", "context_refiner.1."})
    for (const char* name : {"attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"})
      all.push_back({std::string(list) + name, all.size(), 0, 8, 8});
  EXPECT_THAT(names_in(z_image_aliases(all)),
              ElementsAre("layers.2.attention.qkv", "layers.2.attention.out", "noise_refiner.0.attention.qkv",
                          "noise_refiner.0.attention.out", "context_refiner.1.attention.qkv",
                          "context_refiner.1.attention.out"));
}

// diffusers leaves modulations and the guidance's embedder out of files with kohya's prefix.
TEST(LinearAliases, OfFlux2ThatKohyasFilesDoNotChange) {
  std::vector<BaseLinear> all;
  for (const char* name : {"x_embedder", "double_stream_modulation_img.linear", "single_stream_modulation.linear",
                           "norm_out.linear", "time_guidance_embed.guidance_embedder.linear_1", "proj_out"})
    all.push_back({name, all.size(), 0, 8, 8});
  std::vector<std::string> left, kept;
  const LoraBase base = flux2_lora_base(all);
  for (const LoraTarget& alias : base.components[0].aliases) (alias.in_kohya ? kept : left).push_back(alias.name);
  EXPECT_THAT(kept, ElementsAre("img_in", "final_layer.linear"));
  EXPECT_THAT(left, ::testing::UnorderedElementsAre("guidance_in.in_layer", "double_stream_modulation_img.lin",
                                                    "single_stream_modulation.lin", "final_layer.adaLN_modulation.1"));
  EXPECT_THAT(base.components[0].elsewhere, IsSupersetOf({"double_blocks.0.img_attn.qkv", "guidance_in.out_layer",
                                                          "single_transformer_blocks.0.attn.to_qkv_mlp_proj"}));
}

}  // namespace
}  // namespace ditfleet::pipeline
