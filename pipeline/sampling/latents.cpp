#include "pipeline/sampling/latents.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/round.h>
#include <ATen/ops/stack.h>

#include <cmath>

#include "shared/media/resize.h"

namespace ditfleet::pipeline {

std::vector<at::Tensor> draw_noises(std::int64_t seed, at::IntArrayRef size, c10::ScalarType dtype, int count) {
  const at::Generator generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
  std::vector<at::Tensor> drawn;
  for (int i = 0; i < count; ++i) drawn.push_back(at::randn(size, generator, at::TensorOptions().dtype(dtype)));
  return drawn;
}

at::Tensor pack_latents(const at::Tensor& x) {
  const std::int64_t c = x.size(1), h = x.size(2), w = x.size(3);
  return x.view({1, c, h / 2, 2, w / 2, 2}).permute({0, 2, 4, 1, 3, 5}).reshape({1, h / 2 * (w / 2), c * 4});
}

at::Tensor unpack_latents(const at::Tensor& tokens, std::int64_t rows, std::int64_t columns) {
  const std::int64_t c = tokens.size(2) / 4;
  return tokens.view({1, rows, columns, c, 2, 2}).permute({0, 3, 1, 4, 2, 5}).reshape({1, c, rows * 2, columns * 2});
}

at::Tensor on_device(std::span<const float> values, c10::Device device) {
  return at::from_blob(const_cast<float*>(values.data()), {static_cast<std::int64_t>(values.size())})
      .clone()
      .to(device);
}

at::Tensor euler_step(const at::Tensor& tokens, const at::Tensor& velocity, const at::Tensor& now,
                      const at::Tensor& next) {
  return (tokens.to(c10::ScalarType::Float) + (next - now) * velocity).to(velocity.scalar_type());
}

at::Tensor add_noise(const at::Tensor& latents, const at::Tensor& noise, float sigma) {
  const at::Tensor level = at::full({1}, sigma, latents.options());
  return level * noise + (1.0 - level) * latents;
}

at::Tensor to_pixels(const Media& image, std::int64_t width, std::int64_t height, c10::Device device) {
  const auto fp32 = at::TensorOptions(c10::ScalarType::Float);
  if (device.is_meta()) return at::empty({1, 3, height, width}, fp32.device(device));
  const Media resized = media::resize_lanczos(image, static_cast<int>(width), static_cast<int>(height));
  const at::Tensor bytes = at::from_blob(const_cast<std::uint8_t*>(resized.rgb.data()), {1, height, width, 3},
                                         at::TensorOptions(c10::ScalarType::Byte));
  return bytes.permute({0, 3, 1, 2}).to(c10::ScalarType::Float) / 255 * 2 - 1;
}

std::vector<bool> are_finite(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> ends;  // the least and the greatest element; a NaN anywhere is both
  for (const at::Tensor& tensor : tensors) {
    const auto [least, greatest] = at::aminmax(tensor);
    ends.push_back(least.to(c10::ScalarType::Float));
    ends.push_back(greatest.to(c10::ScalarType::Float));
  }
  const at::Tensor host = at::stack(ends).to(c10::DeviceType::CPU);
  const auto* value = host.const_data_ptr<float>();
  std::vector<bool> finite;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    finite.push_back(std::isfinite(value[2 * i]) && std::isfinite(value[2 * i + 1]));
  return finite;
}

at::Tensor unit_range(const at::Tensor& decoded) { return at::clamp(decoded * 0.5 + 0.5, 0, 1); }

Media to_media(const at::Tensor& unit) {
  const at::Tensor frames = unit.dim() == 5 ? unit : unit.unsqueeze(2);
  const at::Tensor bytes = at::round(frames.to(c10::ScalarType::Float) * 255)
                               .to(c10::ScalarType::Byte)
                               .expand({1, 3, -1, -1, -1})
                               .movedim(1, -1)
                               .contiguous()
                               .to(c10::DeviceType::CPU);
  Media media;
  media.frames = static_cast<int>(bytes.size(1));
  media.height = static_cast<int>(bytes.size(2));
  media.width = static_cast<int>(bytes.size(3));
  const auto* data = bytes.const_data_ptr<std::uint8_t>();
  media.rgb.assign(data, data + bytes.numel());
  return media;
}

}  // namespace ditfleet::pipeline
