#include "pipeline/nn/text/qwen_vision.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kMost = 1 << 24;
constexpr double kEps = 1e-6;  // of all norms; no field changes it

bool takes_nf4(std::string_view) { return true; }

}  // namespace

QwenVisionConfig read_qwen_vision_config(const ConfigFile& file) {
  const auto vision = file.child("vision_config");
  if (!vision) file.refuse("vision_config is missing, which describes how the text encoder sees pictures");
  QwenVisionConfig c{};
  c.depth = vision->integer("depth", 32, 1, 1000);
  c.hidden_size = vision->integer("hidden_size", 3584, 1, kMost);
  c.intermediate_size = vision->integer("intermediate_size", 3420, 1, kMost);
  c.num_heads = vision->integer("num_heads", 16, 1, kMost);
  c.out_hidden_size = vision->integer("out_hidden_size", 3584, 1, kMost);
  c.patch_size = vision->integer("patch_size", 14, 1, 1024);
  c.temporal_patch_size = vision->integer("temporal_patch_size", 2, 1, 1024);
  c.merge_size = vision->integer("spatial_merge_size", 2, 1, 1024);
  c.window_size = vision->integer("window_size", 112, 1, kMost);
  c.whole = vision->integers("fullatt_block_indexes", {7, 15, 23, 31}, 0, 1000);
  c.activation = read_activation(*vision, "hidden_act", "silu");
  const auto rope = vision->child("rope_parameters");
  c.rope_theta = rope ? rope->number("rope_theta", 10000) : 10000;
  if (const auto channels = vision->integer("in_channels", 3, 1, kMost); channels != 3)
    file.refuse("in_channels is " + std::to_string(channels) + "; it must be 3");
  if (c.hidden_size % (4 * c.num_heads) != 0)
    file.refuse("vision_config's hidden_size is " + std::to_string(c.hidden_size) + ", which four times num_heads (" +
                std::to_string(c.num_heads) + ") must divide");
  if (c.window_tokens() < 1)
    file.refuse("window_size is " + std::to_string(c.window_size) + "; it must be at least " +
                std::to_string(c.patch_size * c.merge_size) + ", the pixels of a token's side");
  return c;
}

QwenVision QwenVision::load(const ComponentFiles& from, Placement placement,
                            std::shared_ptr<region::RegionHost> regions, const std::string& quantize) {
  QwenVision m;
  const QwenVisionConfig& c = m.config_ = read_qwen_vision_config(ConfigFile(from.dir + "/config.json"));
  m.placement_ = placement;
  auto p = Parameters::open(from, Library::kTransformers, placement);
  p.set_regions(std::move(regions));
  if (!quantize.empty()) p.quantize_on_load(quantize, takes_nf4);
  // As with QwenEncoder, some releases of transformers add "model.".
  const std::string at = p.contains("model.visual.patch_embed.proj.weight") ? "model.visual." : "visual.";
  const std::int64_t d = c.hidden_size, merged = d * c.merge_size * c.merge_size;
  m.parts_ = std::make_shared<PartSequence>(placement, "qwen_vision", /*repeats=*/false);
  m.patch_embed_ =
      p.tensor(at + "patch_embed.proj.weight", {d, 3, c.temporal_patch_size, c.patch_size, c.patch_size}).flatten(1);
  add_part(*m.parts_, {}, {m.patch_embed_});
  for (std::int64_t i = 0; i < c.depth; ++i) {
    const std::string in = at + "blocks." + std::to_string(i) + ".", mlp = in + "mlp.";
    Block b;
    b.norm1 = p.tensor(in + "norm1.weight", {d});
    b.qkv = p.linear(in + "attn.qkv", d, 3 * d);
    b.proj = p.linear(in + "attn.proj", d, d);
    b.norm2 = p.tensor(in + "norm2.weight", {d});
    b.gate_up = p.stacked_linear({mlp + "gate_proj", mlp + "up_proj"}, d, c.intermediate_size);
    b.down = p.linear(mlp + "down_proj", c.intermediate_size, d);
    add_part(*m.parts_, {&b.qkv, &b.proj, &b.gate_up, &b.down}, {b.norm1, b.norm2});
    m.blocks_.push_back(std::move(b));
  }
  m.merger_norm_ = p.tensor(at + "merger.ln_q.weight", {d});
  m.merger_first_ = p.linear(at + "merger.mlp.0", merged, merged);
  m.merger_second_ = p.linear(at + "merger.mlp.2", merged, c.out_hidden_size);
  add_part(*m.parts_, {&m.merger_first_, &m.merger_second_}, {m.merger_norm_});
  p.finish(at);
  m.bytes_ = p.bytes();
  m.linears_ = p.linears();
  return m;
}

std::vector<NamedLinear> QwenVision::named_linears() {
  std::vector<NamedLinear> all;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const std::string at = "blocks." + std::to_string(i) + ".";
    Block& b = blocks_[i];
    add_named(all, b.qkv, at + "attn.qkv");
    add_named(all, b.proj, at + "attn.proj");
    add_stacked(all, b.gate_up, {at + "mlp.gate_proj", at + "mlp.up_proj"});
    add_named(all, b.down, at + "mlp.down_proj");
  }
  add_named(all, merger_first_, "merger.mlp.0");
  add_named(all, merger_second_, "merger.mlp.2");
  return all;
}

at::Tensor QwenVision::block(const at::Tensor& hidden, const Block& s, const HalvesRope& rope,
                             const std::vector<Windows>& windows) const {
  const std::int64_t patches = hidden.size(0), heads = config_.num_heads, dim = config_.head_dim();
  at::Tensor x = qwen_norm(hidden, s.norm1, kEps);
  const at::Tensor qkv = apply_linear(s.qkv, x).view({patches, 3 * heads, dim});
  const at::Tensor qk = apply_rope(qkv.narrow(1, 0, 2 * heads), rope);
  std::vector<at::Tensor> attended;
  std::int64_t first = 0;
  for (const Windows& w : windows) {
    // [windows, heads, patches, head_dim]
    const auto of = [&](const at::Tensor& from, std::int64_t head) {
      return from.narrow(0, first, w.count * w.patches)
          .narrow(1, head, heads)
          .unflatten(0, {w.count, w.patches})
          .transpose(1, 2);
    };
    attended.push_back(at::scaled_dot_product_attention(of(qk, 0), of(qk, heads), of(qkv, 2 * heads), {}, 0.0, false,
                                                        1 / std::sqrt(static_cast<double>(dim)))
                           .transpose(1, 2)
                           .reshape({w.count * w.patches, heads * dim}));
    first += w.count * w.patches;
  }
  const at::Tensor after = hidden + apply_linear(s.proj, at::cat(attended));
  x = apply_linear(s.gate_up, qwen_norm(after, s.norm2, kEps));
  const std::int64_t inner = config_.intermediate_size;
  return after + apply_linear(s.down, config_.activation(x.narrow(-1, 0, inner)) * x.narrow(-1, inner, inner));
}

PictureTokens QwenVision::encode(const PictureTokens& patches) const {
  const std::int64_t merge = config_.merge_size, rows = patches.rows / merge, columns = patches.columns / merge,
                     side = config_.window_tokens();
  // Windows follow one another. At the right and the lower edge they are smaller. transformers has them row by row;
  // here those of the same size are together, because one product computes them.
  std::vector<std::int64_t> order;  // the tokens, each of merge × merge patches
  std::vector<float> y, x;          // of each patch
  std::vector<Windows> windows;
  const std::int64_t whole_rows = rows / side * side, whole_columns = columns / side * side;
  for (const auto& [top, bottom] : {std::pair(std::int64_t{0}, whole_rows), {whole_rows, rows}})
    for (const auto& [left, right] : {std::pair(std::int64_t{0}, whole_columns), {whole_columns, columns}}) {
      if (top == bottom || left == right) continue;
      const std::int64_t height = std::min(side, bottom - top), width = std::min(side, right - left);
      windows.push_back({(bottom - top) / height * ((right - left) / width), height * width * merge * merge});
      for (std::int64_t row = top; row < bottom; row += height)
        for (std::int64_t column = left; column < right; column += width)
          for (std::int64_t i = 0; i < height * width; ++i) {
            const std::int64_t token_y = row + i / width, token_x = column + i % width;
            order.push_back(token_y * columns + token_x);
            for (std::int64_t k = 0; k < merge * merge; ++k) {
              y.push_back(static_cast<float>(token_y * merge + k / merge));
              x.push_back(static_cast<float>(token_x * merge + k % merge));
            }
          }
    }
  const std::vector<Windows> whole{{1, patches.rows * patches.columns}};
  const c10::Device device = placement_.device;
  const at::Tensor index = at::tensor(order).to(device),
                   frequencies = rope_frequencies(config_.head_dim() / 2, config_.rope_theta, device);
  const auto angles = [&](const std::vector<float>& at) {
    return at::tensor(at).unsqueeze(1).to(device) * frequencies;
  };
  const HalvesRope rope = halves_rope(at::cat({angles(y), angles(x)}, 1), c10::ScalarType::Float);

  PartSequence::Pass pass(parts_.get());
  pass.begin(0);
  // The convolution's kernel does not overlap, so it is a product.
  at::Tensor hidden = at::linear(patches.tokens.to(device, placement_.dtype), patch_embed_);
  pass.end(0);
  hidden = hidden.unflatten(0, {rows * columns, merge * merge}).index_select(0, index).flatten(0, 1);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    pass.begin(i + 1);
    const bool is_whole = std::count(config_.whole.begin(), config_.whole.end(), static_cast<std::int64_t>(i)) > 0;
    hidden = block(hidden, blocks_[i], rope, is_whole ? whole : windows);
    pass.end(i + 1);
  }
  pass.begin(blocks_.size() + 1);
  hidden = qwen_norm(hidden, merger_norm_, kEps).reshape({rows * columns, merge * merge * config_.hidden_size});
  const at::Tensor tokens = apply_linear(merger_second_, at::gelu(apply_linear(merger_first_, hidden)));
  pass.end(blocks_.size() + 1);
  return {at::empty_like(tokens).index_copy_(0, index, tokens), rows, columns};
}

}  // namespace ditfleet::pipeline
