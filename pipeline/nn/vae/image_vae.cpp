#include "pipeline/nn/vae/image_vae.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/sqrt.h>

#include <algorithm>

#include "pipeline/device/failure.h"
#include "pipeline/nn/vae/channels_last.h"
#include "pipeline/nn/vae/eager.h"
#include "pipeline/region/run/region.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kPreviewSide = 32;  // latent pixels on a preview's long side

VaeResnet bind_resnet(Parameters& p, const std::string& prefix, std::int64_t in, std::int64_t out) {
  VaeResnet r{p.norm(prefix + ".norm1", in),
              p.norm(prefix + ".norm2", out),
              p.conv(prefix + ".conv1", in, out, 3),
              p.conv(prefix + ".conv2", out, out, 3),
              {}};
  if (in != out) r.shortcut = p.conv(prefix + ".conv_shortcut", in, out, 1);
  return r;
}

VaeAttention bind_attention(Parameters& p, const std::string& prefix, std::int64_t channels) {
  // Folders of before 2023 use the second names.
  const bool old = !p.contains(prefix + ".to_q.weight") && p.contains(prefix + ".query.weight");
  const auto bind = [&](const char* name, const char* before) {
    return p.linear(prefix + "." + (old ? before : name), channels, channels);
  };
  return {p.norm(prefix + ".group_norm", channels), bind("to_q", "query"), bind("to_k", "key"), bind("to_v", "value"),
          bind("to_out.0", "proj_attn")};
}

void bind_middle(Parameters& p, const VaeConfig& c, const std::string& half, std::int64_t deepest, VaeSlots& m) {
  m.mid_first = bind_resnet(p, half + ".mid_block.resnets.0", deepest, deepest);
  if (c.mid_block_attention) m.mid_attention = bind_attention(p, half + ".mid_block.attentions.0", deepest);
  m.mid_second = bind_resnet(p, half + ".mid_block.resnets.1", deepest, deepest);
}

VaeSlots bind_encoder(Parameters& p, const VaeConfig& c) {
  VaeSlots m;
  std::int64_t channels = c.down_channels.front();
  m.in = p.conv("encoder.conv_in", 3, channels, 3);
  const std::size_t blocks = c.down_channels.size();
  for (std::size_t i = 0; i < blocks; ++i) {
    const std::string at = "encoder.down_blocks." + std::to_string(i);
    const std::int64_t out = c.down_channels[i];
    VaeBlock block;
    for (std::int64_t j = 0; j < c.layers_per_block; ++j) {
      block.resnets.push_back(bind_resnet(p, at + ".resnets." + std::to_string(j), channels, out));
      if (c.down_block_attention[i])
        block.attentions.push_back(bind_attention(p, at + ".attentions." + std::to_string(j), out));
      channels = out;
    }
    if (i + 1 < blocks) block.resample = p.conv(at + ".downsamplers.0.conv", out, out, 3);
    m.blocks.push_back(std::move(block));
  }
  bind_middle(p, c, "encoder", channels, m);
  m.norm_out = p.norm("encoder.conv_norm_out", channels);
  m.out = p.conv("encoder.conv_out", channels, 2 * c.latent_channels, 3);
  if (c.quant_conv) m.quant = p.conv("quant_conv", 2 * c.latent_channels, 2 * c.latent_channels, 1);
  return m;
}

VaeSlots bind_decoder(Parameters& p, const VaeConfig& c) {
  VaeSlots m;
  const std::int64_t deepest = c.block_out_channels.back();
  if (c.post_quant_conv) m.quant = p.conv("post_quant_conv", c.latent_channels, c.latent_channels, 1);
  m.in = p.conv("decoder.conv_in", c.latent_channels, deepest, 3);
  bind_middle(p, c, "decoder", deepest, m);
  std::int64_t channels = deepest;
  const std::size_t blocks = c.block_out_channels.size();
  for (std::size_t i = 0; i < blocks; ++i) {
    const std::string at = "decoder.up_blocks." + std::to_string(i);
    const std::int64_t out = c.block_out_channels[blocks - 1 - i];
    VaeBlock block;
    for (std::int64_t j = 0; j <= c.layers_per_block; ++j) {
      block.resnets.push_back(bind_resnet(p, at + ".resnets." + std::to_string(j), channels, out));
      if (c.up_block_attention[i])
        block.attentions.push_back(bind_attention(p, at + ".attentions." + std::to_string(j), out));
      channels = out;
    }
    if (i + 1 < blocks) block.resample = p.conv(at + ".upsamplers.0.conv", out, out, 3);
    m.blocks.push_back(std::move(block));
  }
  m.norm_out = p.norm("decoder.conv_norm_out", channels);
  m.out = p.conv("decoder.conv_out", channels, c.out_channels, 3);
  return m;
}

// For a file in the names of BFL's and CompVis' own code ("ae.safetensors"): where each parameter is.
FileNames bfl_names(const VaeConfig& c) {
  FileNames names;
  const auto resnet = [&](const std::string& name, const std::string& own) {
    for (const char* one : {".norm1", ".norm2", ".conv1", ".conv2"}) names[name + one] = {{own + one}};
    names[name + ".conv_shortcut"] = {{own + ".nin_shortcut"}};
  };
  const auto attention = [&](const std::string& name, const std::string& own) {
    for (const auto& [one, other] : {std::pair(".group_norm", ".norm"),
                                     {".to_q", ".q"},
                                     {".to_k", ".k"},
                                     {".to_v", ".v"},
                                     {".to_out.0", ".proj_out"}})
      names[name + one] = {{own + other}};
  };
  for (const std::string half : {"decoder", "encoder"}) {
    resnet(half + ".mid_block.resnets.0", half + ".mid.block_1");
    attention(half + ".mid_block.attentions.0", half + ".mid.attn_1");
    resnet(half + ".mid_block.resnets.1", half + ".mid.block_2");
    names[half + ".conv_norm_out"] = {{half + ".norm_out"}};
  }
  const std::size_t blocks = c.block_out_channels.size();
  const auto layers = [&](const std::string& name, const std::string& own, std::int64_t count) {
    for (std::int64_t j = 0; j < count; ++j) {
      const std::string at = std::to_string(j);
      resnet(name + ".resnets." + at, own + ".block." + at);
      attention(name + ".attentions." + at, own + ".attn." + at);
    }
  };
  for (std::size_t i = 0; i < blocks; ++i) {  // numbered from the widest picture
    const std::string up = "decoder.up_blocks." + std::to_string(i),
                      own_up = "decoder.up." + std::to_string(blocks - 1 - i),
                      down = "encoder.down_blocks." + std::to_string(i), own_down = "encoder.down." + std::to_string(i);
    layers(up, own_up, c.layers_per_block + 1);
    names[up + ".upsamplers.0.conv"] = {{own_up + ".upsample.conv"}};
    layers(down, own_down, c.layers_per_block);
    names[down + ".downsamplers.0.conv"] = {{own_down + ".downsample.conv"}};
  }
  return names;
}

}  // namespace

ImageVae::ImageVae(const VaeConfig& config, VaeSlots slots, std::shared_ptr<region::RegionHost> regions)
    : config_(config), slots_(std::move(slots)) {
  if (regions) channels_last_ = region::make_channels_last(*regions);
  if (channels_last_) to_channels_last(slots_);
}

ImageVae ImageVae::load(const ComponentFiles& from, Placement placement, std::shared_ptr<region::RegionHost> regions) {
  const VaeConfig config = read_vae_config(ConfigFile(from.dir + "/config.json"));
  auto parameters = Parameters::open(from, Library::kDiffusers, for_convolutions(placement));
  const bool bfl = parameters.contains("decoder.mid.block_1.conv1.weight");
  if (bfl) parameters.set_file_names(bfl_names(config));
  VaeSlots slots = bind_decoder(parameters, config);
  if (config.batch_norm_eps) {
    const std::int64_t channels = 4 * config.latent_channels;
    slots.mean = parameters.tensor("bn.running_mean", {channels}, placement.dtype).view({1, -1, 1, 1});
    slots.deviation = at::sqrt(parameters.tensor("bn.running_var", {channels}, placement.dtype).view({1, -1, 1, 1}) +
                               *config.batch_norm_eps);
  }
  ImageVae made(config, std::move(slots), std::move(regions));
  const bool has_encoder =
      parameters.contains(bfl ? "encoder.mid.block_1.conv1.weight" : "encoder.mid_block.resnets.0.conv1.weight");
  if (has_encoder) {
    VaeSlots encoder = bind_encoder(parameters, config);
    if (made.channels_last_) to_channels_last(encoder);
    made.encoder_ = std::make_shared<const VaeSlots>(std::move(encoder));
    parameters.finish("encoder.");
  }
  parameters.finish("decoder.");
  made.bytes_ = parameters.bytes();
  return made;
}

at::Tensor ImageVae::denormalized(const at::Tensor& latents) const {
  const auto type = latents.scalar_type();
  return latents * slots_.deviation.to(type) + slots_.mean.to(type);
}

at::Tensor ImageVae::decode(const at::Tensor& latents) const {
  const at::Tensor x = latents.to(slots_.in.weight.scalar_type()) / config_.scaling_factor + config_.shift_factor;
  const at::Tensor pixels =
      channels_last_ ? decode_channels_last(config_, slots_, *channels_last_, x) : decode_eager(config_, slots_, x);
  return pixels.to(latents.scalar_type());
}

at::Tensor ImageVae::moments(const at::Tensor& pixels) const {
  if (!encoder_)
    fail(Code::kInvalidArgument, "image needs the VAE's encoder, whose weights the model's folder lacks", "image");
  const at::Tensor x = pixels.to(encoder_->in.weight.options());
  const at::Tensor made = channels_last_ ? encode_channels_last(config_, *encoder_, *channels_last_, x)
                                         : encode_eager(config_, *encoder_, x);
  return made.to(pixels.scalar_type());
}

at::Tensor ImageVae::latents(const at::Tensor& moments, const at::Tensor& noise) const {
  at::Tensor z = moments.slice(1, 0, config_.latent_channels);
  if (noise.defined()) {
    const at::Tensor deviation = at::exp(0.5 * at::clamp(moments.slice(1, config_.latent_channels), -30, 20));
    z = z + deviation * noise.to(z.options());
  }
  return (z - config_.shift_factor) * config_.scaling_factor;
}

at::Tensor ImageVae::normalized(const at::Tensor& latents) const {
  const auto type = latents.scalar_type();
  return (latents - slots_.mean.to(type)) / slots_.deviation.to(type);
}

at::Tensor ImageVae::preview(const at::Tensor& latents) const {
  const std::int64_t h = latents.size(2), w = latents.size(3), longest = std::max(h, w);
  if (longest <= kPreviewSide) return decode(latents);
  return decode(at::adaptive_avg_pool2d(latents, {std::max<std::int64_t>(1, h * kPreviewSide / longest),
                                                  std::max<std::int64_t>(1, w * kPreviewSide / longest)}));
}

}  // namespace ditfleet::pipeline
