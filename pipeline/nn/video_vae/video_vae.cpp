#include "pipeline/nn/video_vae/video_vae.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/conv3d.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/tensor.h>

#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/nn/video_vae/chunks.h"
#include "pipeline/region/programs/channels_last.h"
#include "pipeline/region/run/region.h"

namespace ditfleet::pipeline {
namespace {

ConvSlot bind_conv(Parameters& p, const std::string& name, std::int64_t in, std::int64_t out, std::int64_t frames,
                   std::int64_t side) {
  return {p.tensor(name + ".weight", {out, in, frames, side, side}), p.tensor(name + ".bias", {out})};
}

at::Tensor bind_norm(Parameters& p, const std::string& name, std::int64_t channels) {
  return p.tensor(name + ".gamma", {channels, 1, 1, 1}).view({channels, 1, 1});
}

VideoVaeResnet bind_resnet(Parameters& p, const std::string& prefix, std::int64_t in, std::int64_t out) {
  VideoVaeResnet r{bind_norm(p, prefix + ".norm1", in),
                   bind_norm(p, prefix + ".norm2", out),
                   bind_conv(p, prefix + ".conv1", in, out, 3, 3),
                   bind_conv(p, prefix + ".conv2", out, out, 3, 3),
                   {}};
  if (in != out) r.shortcut = bind_conv(p, prefix + ".conv_shortcut", in, out, 1, 1);
  return r;
}

void bind_middle(Parameters& p, const std::string& prefix, std::int64_t channels, VideoVaeCoder& into) {
  into.mid_first = bind_resnet(p, prefix + ".resnets.0", channels, channels);
  into.mid_second = bind_resnet(p, prefix + ".resnets.1", channels, channels);
  const std::string attention = prefix + ".attentions.0";
  into.mid_attention = {p.tensor(attention + ".norm.gamma", {channels, 1, 1}),
                        p.conv(attention + ".to_qkv", channels, 3 * channels, 1),
                        p.conv(attention + ".proj", channels, channels, 1)};
}

VideoVaeCoder bind_encoder(Parameters& p, const VideoVaeConfig& c) {
  VideoVaeCoder m;
  std::int64_t channels = c.base_dim;
  m.residual = c.is_residual;
  m.in = bind_conv(p, "encoder.conv_in", c.patch_channels(), channels, 3, 3);
  int block = 0;  // without shortcuts, resnets and downsamplers are numbered together
  for (std::size_t i = 0; i < c.dim_mult.size(); ++i) {
    VideoVaeLevel& level = m.levels.emplace_back();
    const std::string list = "encoder.down_blocks.", within = list + std::to_string(i);
    const auto name = [&](const std::string& part) {
      return c.is_residual ? within + part : list + std::to_string(block++);
    };
    const std::int64_t out = c.base_dim * c.dim_mult[i];
    for (std::int64_t j = 0; j < c.num_res_blocks; ++j)
      level.resnets.push_back(bind_resnet(p, name(".resnets." + std::to_string(j)), std::exchange(channels, out), out));
    if (i + 1 == c.dim_mult.size()) break;
    const std::string at = name(".downsampler");
    level.resample = {p.conv(at + ".resample.1", channels, channels, 3), {}};
    if (c.temporal_downsample[i]) level.resample->time = bind_conv(p, at + ".time_conv", channels, channels, 3, 1);
  }
  bind_middle(p, "encoder.mid_block", channels, m);
  m.norm_out = bind_norm(p, "encoder.norm_out", channels);
  m.out = bind_conv(p, "encoder.conv_out", channels, 2 * c.z_dim, 3, 3);
  return m;
}

VideoVaeCoder bind_decoder(Parameters& p, const VideoVaeConfig& c) {
  VideoVaeCoder m;
  const std::size_t levels = c.dim_mult.size();
  std::int64_t channels = c.decoder_base_dim * c.dim_mult[levels - 1];
  m.residual = c.is_residual;
  m.in = bind_conv(p, "decoder.conv_in", c.z_dim, channels, 3, 3);
  bind_middle(p, "decoder.mid_block", channels, m);
  for (std::size_t i = 0; i < levels; ++i) {
    const std::string at = "decoder.up_blocks." + std::to_string(i),
                      sampler = at + (c.is_residual ? ".upsampler" : ".upsamplers.0");
    const std::int64_t out = c.decoder_base_dim * c.dim_mult[levels - 1 - i];
    VideoVaeLevel& level = m.levels.emplace_back();
    for (std::int64_t j = 0; j <= c.num_res_blocks; ++j)
      level.resnets.push_back(bind_resnet(p, at + ".resnets." + std::to_string(j), std::exchange(channels, out), out));
    if (i + 1 == levels) break;
    channels = c.is_residual ? out : out / 2;
    level.resample = {p.conv(sampler + ".resample.1", out, channels, 3), {}};
    if (c.temporal_downsample[levels - 2 - i])
      level.resample->time = bind_conv(p, sampler + ".time_conv", out, 2 * out, 3, 1);
  }
  m.norm_out = bind_norm(p, "decoder.norm_out", channels);
  m.out = bind_conv(p, "decoder.conv_out", channels, c.patch_channels(), 3, 3);
  return m;
}

// For a file in the names of the model's own code: where each parameter is. Source: diffusers' conversion script.
FileNames own_names(const VideoVaeConfig& c) {
  FileNames names;
  const auto resnet = [&](const std::string& name, const std::string& own) {
    names[name + ".norm1.gamma"] = {{own + ".residual.0.gamma"}};
    names[name + ".conv1"] = {{own + ".residual.2"}};
    names[name + ".norm2.gamma"] = {{own + ".residual.3.gamma"}};
    names[name + ".conv2"] = {{own + ".residual.6"}};
    names[name + ".conv_shortcut"] = {{own + ".shortcut"}};
  };
  const auto resample = [&](const std::string& name, const std::string& own) {
    for (const char* one : {".resample.1", ".time_conv"}) names[name + one] = {{own + one}};
  };
  for (const std::string coder : {"encoder", "decoder"}) {
    const std::string at = coder + ".mid_block.attentions.0", own = coder + ".middle.1";
    names[coder + ".conv_in"] = {{coder + ".conv1"}};
    resnet(coder + ".mid_block.resnets.0", coder + ".middle.0");
    for (const char* one : {".norm.gamma", ".to_qkv", ".proj"}) names[at + one] = {{own + one}};
    resnet(coder + ".mid_block.resnets.1", coder + ".middle.2");
    names[coder + ".norm_out.gamma"] = {{coder + ".head.0.gamma"}};
    names[coder + ".conv_out"] = {{coder + ".head.2"}};
  }
  const std::size_t levels = c.dim_mult.size();
  // Both number the encoder's resnets and downsamplers together; the model's own code does so in the decoder, too.
  int down = 0, up = 0;
  for (std::size_t i = 0; i < levels && c.is_residual; ++i) {
    // Levels have lists of their own in both; the resampling is the last of the model's own list.
    const std::string number = std::to_string(i), below = "encoder.down_blocks." + number,
                      above = "decoder.up_blocks." + number;
    const auto own = [&](const std::string& list, std::int64_t j) {
      return list + "samples." + number + "." + list.substr(list.find('.') + 1) + "samples." + std::to_string(j);
    };
    for (std::int64_t j = 0; j < c.num_res_blocks; ++j)
      resnet(below + ".resnets." + std::to_string(j), own("encoder.down", j));
    resample(below + ".downsampler", own("encoder.down", c.num_res_blocks));
    for (std::int64_t j = 0; j <= c.num_res_blocks; ++j)
      resnet(above + ".resnets." + std::to_string(j), own("decoder.up", j));
    resample(above + ".upsampler", own("decoder.up", c.num_res_blocks + 1));
  }
  for (std::size_t i = 0; i < levels && !c.is_residual; ++i) {
    const auto next = [&](const char* list) { return "encoder." + std::string(list) + std::to_string(down); };
    for (std::int64_t j = 0; j < c.num_res_blocks; ++j, ++down) resnet(next("down_blocks."), next("downsamples."));
    if (i + 1 < levels) resample(next("down_blocks."), next("downsamples.")), ++down;
    const std::string at = "decoder.up_blocks." + std::to_string(i);
    const auto own = [&] { return "decoder.upsamples." + std::to_string(up++); };
    for (std::int64_t j = 0; j <= c.num_res_blocks; ++j) resnet(at + ".resnets." + std::to_string(j), own());
    if (i + 1 < levels) resample(at + ".upsamplers.0", own());
  }
  names["quant_conv"] = {{"conv1"}};
  names["post_quant_conv"] = {{"conv2"}};
  return names;
}

// [frames, channels, height, width] to [1, channels, frames, height, width].
at::Tensor to_video(const at::Tensor& chunk) { return chunk.transpose(0, 1).unsqueeze(0); }

// Frames [n, 3, height, width] to patches and back. A patch's channels are in the order (3, column, row).
at::Tensor to_patches(const at::Tensor& frames, const VideoVaeConfig& c) {
  const std::int64_t p = c.patch_size, n = frames.size(0), h = frames.size(2) / p, w = frames.size(3) / p;
  if (p == 1) return frames;
  return frames.reshape({n, 3, h, p, w, p}).permute({0, 1, 5, 3, 2, 4}).reshape({n, c.patch_channels(), h, w});
}
at::Tensor to_pixels(const at::Tensor& patches, const VideoVaeConfig& c) {
  const std::int64_t p = c.patch_size, n = patches.size(0), h = patches.size(2), w = patches.size(3);
  if (p == 1) return patches;
  return patches.reshape({n, 3, p, p, h, w}).permute({0, 1, 4, 3, 5, 2}).reshape({n, 3, h * p, w * p});
}

[[noreturn]] void wrong_shape(const char* what, const at::Tensor& tensor, const std::string& right) {
  std::string shape;
  for (const std::int64_t size : tensor.sizes()) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
  fail(Code::kInvalidArgument, std::string("[vae] ") + what + " has shape [" + shape + "]; it must be " + right);
}

}  // namespace

VideoVae VideoVae::load(const ComponentFiles& from, Placement placement, bool with_encoder,
                        std::shared_ptr<region::RegionHost> regions) {
  VideoVae m;
  m.config_ = read_video_vae_config(ConfigFile(from.dir + "/config.json"));
  m.placement_ = placement;
  const std::int64_t z = m.config_.z_dim;
  auto parameters = Parameters::open(from, Library::kDiffusers, placement);
  if (parameters.contains("decoder.middle.0.residual.0.gamma")) parameters.set_file_names(own_names(m.config_));
  m.slots_.decoder = bind_decoder(parameters, m.config_);
  m.slots_.post_quant = bind_conv(parameters, "post_quant_conv", z, z, 1, 1);
  if (with_encoder) {
    m.slots_.encoder = bind_encoder(parameters, m.config_);
    m.slots_.quant = bind_conv(parameters, "quant_conv", 2 * z, 2 * z, 1, 1);
  }
  parameters.finish(with_encoder ? "" : "decoder.");
  m.bytes_ = parameters.bytes();
  if (regions) m.fused_ = region::make_channels_last(*regions);
  if (m.fused_) {
    to_channels_last(m.slots_.decoder);
    if (with_encoder) to_channels_last(*m.slots_.encoder);
  }
  const auto per_channel = [&](const std::vector<double>& values) {
    return at::tensor(values, c10::ScalarType::Float).to(placement.device).view({1, z, 1, 1, 1});
  };
  m.mean_ = per_channel(m.config_.latents_mean);
  m.std_ = per_channel(m.config_.latents_std);
  return m;
}

void VideoVae::decode(const at::Tensor& latents, const std::function<void(const at::Tensor& frames)>& on_frames) const {
  if (latents.dim() != 5 || latents.size(0) != 1 || latents.size(1) != config_.z_dim)
    wrong_shape("a latent", latents, "[1, " + std::to_string(config_.z_dim) + ", frames, height, width]");
  const c10::ScalarType type = placement_.dtype;
  // Mean and 1 / std are rounded to the type first, as diffusers' pipelines do.
  const at::Tensor z = latents.to(placement_.device, type) / at::reciprocal(std_.to(type)) + mean_.to(type);
  const at::Tensor x = at::conv3d(z, slots_.post_quant.weight, slots_.post_quant.bias);
  FrameCache cache;
  for (std::int64_t i = 0; i < x.size(2); ++i)
    on_frames(to_video(
        to_pixels(decode_chunk(slots_.decoder, x.select(2, i), {fused_.get(), cache}).clamp_(-1, 1), config_)));
}

at::Tensor VideoVae::encode(const at::Tensor& video) const {
  if (!slots_.encoder) fail(Code::kInternal, "[vae] the encoder is not loaded; load the VAE with its encoder");
  constexpr std::int64_t kChunk = VideoVaeConfig::kTemporalFactor;
  const std::int64_t factor = config_.spatial_factor();
  if (video.dim() != 5 || video.size(0) != 1 || video.size(1) != 3 || video.size(2) % kChunk != 1 ||
      video.size(3) % factor != 0 || video.size(4) % factor != 0)
    wrong_shape("a video", video,
                "[1, 3, 4 * k + 1, height, width], with sides that are multiples of " + std::to_string(factor));
  FrameCache cache;
  std::vector<at::Tensor> chunks;
  for (std::int64_t first = 0, n = 1; first < video.size(2); first += std::exchange(n, kChunk)) {
    const at::Tensor frames = video.narrow(2, first, n).to(placement_.device, placement_.dtype)[0].transpose(0, 1);
    chunks.push_back(to_video(encode_chunk(*slots_.encoder, to_patches(frames, config_), {fused_.get(), cache})));
  }
  const at::Tensor moments = at::conv3d(at::cat(chunks, 2), slots_.quant->weight, slots_.quant->bias);
  // In fp32, the type of the latents that it becomes a condition of, as diffusers' pipelines do.
  return (moments.narrow(1, 0, config_.z_dim).to(c10::ScalarType::Float) - mean_) * at::reciprocal(std_);
}

}  // namespace ditfleet::pipeline
