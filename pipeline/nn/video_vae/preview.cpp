#include "pipeline/nn/video_vae/preview.h"

#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>

namespace ditfleet::pipeline {
namespace {

// Latents to RGB: a linear fit that ComfyUI publishes for this VAE's 16 channels (latent_formats.py, Wan21), with the
// bias in the last row.
constexpr std::array<std::array<float, 3>, kPreviewChannels + 1> kRgb{{{-0.1299F, -0.1692F, 0.2932F},
                                                                       {0.0671F, 0.0406F, 0.0442F},
                                                                       {0.3568F, 0.2548F, 0.1747F},
                                                                       {0.0372F, 0.2344F, 0.1420F},
                                                                       {0.0313F, 0.0189F, -0.0328F},
                                                                       {0.0296F, -0.0956F, -0.0665F},
                                                                       {-0.3477F, -0.4059F, -0.2925F},
                                                                       {0.0166F, 0.1902F, 0.1975F},
                                                                       {-0.0412F, 0.0267F, -0.1364F},
                                                                       {-0.1293F, 0.0740F, 0.1636F},
                                                                       {0.0680F, 0.3019F, 0.1128F},
                                                                       {0.0032F, 0.0581F, 0.0639F},
                                                                       {-0.1251F, 0.0927F, 0.1699F},
                                                                       {0.0060F, -0.0633F, 0.0005F},
                                                                       {0.3477F, 0.2275F, 0.2950F},
                                                                       {0.1984F, 0.0913F, 0.1861F},
                                                                       {-0.1835F, -0.0868F, -0.3360F}}};

}  // namespace

at::Tensor video_preview(const at::Tensor& latents) {
  const at::Tensor frame =
      latents.select(2, latents.size(2) / 2)[0].to(c10::kCPU, c10::ScalarType::Float);  // [C, h, w]
  const at::Tensor factors = at::from_blob(const_cast<float*>(kRgb[0].data()), {kRgb.size(), 3});
  const std::int64_t known = std::min(frame.size(0), kPreviewChannels);
  const at::Tensor rgb =
      at::addmm(factors[kPreviewChannels], frame.narrow(0, 0, known).flatten(1).t(), factors.narrow(0, 0, known));
  return rgb.t().reshape({1, 3, frame.size(1), frame.size(2)});
}

at::Tensor small_frame(const at::Tensor& latents) {
  constexpr std::int64_t kSide = 32;
  const at::Tensor frame = latents.select(2, latents.size(2) / 2).to(c10::ScalarType::Float);
  const std::int64_t h = frame.size(2), w = frame.size(3), longest = std::max({h, w, kSide});
  const auto side = [&](std::int64_t length) { return std::max<std::int64_t>(1, length * kSide / longest); };
  return at::adaptive_avg_pool2d(frame, {side(h), side(w)}).unsqueeze(2);
}

}  // namespace ditfleet::pipeline
