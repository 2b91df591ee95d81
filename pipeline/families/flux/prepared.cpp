#include "pipeline/families/flux/prepared.h"

#include <ATen/ops/from_blob.h>

#include "pipeline/device/failure.h"
#include "pipeline/weights/safetensors_writer.h"

namespace ditfleet::pipeline {
namespace {

DType stored_type(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float: return DType::kF32;
    case c10::ScalarType::BFloat16: return DType::kBF16;
    case c10::ScalarType::Long: return DType::kI64;
    default: fail(Code::kInternal, "[dump] a tensor of an unexpected type");
  }
}

// Gathers tensors on the host and keeps them until they are written.
class Dump {
 public:
  void add(const std::string& name, const at::Tensor& tensor) {
    if (tensor.defined()) tensors_.emplace_back(name, tensor.to(c10::DeviceType::CPU).contiguous());
  }
  void add(const std::string& name, const std::vector<float>& values) {
    const auto n = static_cast<std::int64_t>(values.size());
    add(name, at::from_blob(const_cast<float*>(values.data()), {n}).clone());
  }
  void add(const std::string& name, const std::vector<std::int32_t>& ids) {
    const auto n = static_cast<std::int64_t>(ids.size());
    const auto options = at::TensorOptions().dtype(c10::ScalarType::Int);
    add(name, at::from_blob(const_cast<std::int32_t*>(ids.data()), {1, n}, options).to(c10::ScalarType::Long));
  }
  Result<void> write(const std::string& path, const std::map<std::string, std::string>& metadata) const {
    std::vector<TensorToWrite> entries;
    for (const auto& [name, t] : tensors_)
      entries.push_back({name,
                         stored_type(t.scalar_type()),
                         {t.sizes().begin(), t.sizes().end()},
                         {static_cast<const std::byte*>(t.const_data_ptr()), t.nbytes()}});
    return write_safetensors(path, std::move(entries), metadata);
  }

 private:
  std::vector<std::pair<std::string, at::Tensor>> tensors_;
};

}  // namespace

void FluxPrepared::add_phase(const std::string& name, std::chrono::steady_clock::time_point start) {
  using std::chrono::duration_cast, std::chrono::microseconds;
  const std::int64_t us = duration_cast<microseconds>(std::chrono::steady_clock::now() - start).count();
  for (auto& [known, total] : phases_)
    if (known == name) {
      total += us;
      return;
    }
  phases_.emplace_back(name, us);
}

Result<void> FluxPrepared::dump(const std::string& path) const {
  try {
    Dump out;
    out.add("clip_ids", prompt.clip_ids);
    out.add("t5_ids", prompt.t5_ids);
    out.add("pooled_prompt_embeds", prompt.pooled);
    out.add("prompt_embeds", prompt.tokens);
    if (negative) {
      out.add("negative_clip_ids", negative->clip_ids);
      out.add("negative_t5_ids", negative->t5_ids);
      out.add("negative_pooled_prompt_embeds", negative->pooled);
      out.add("negative_prompt_embeds", negative->tokens);
    }
    out.add("noise", noise);
    out.add("sigmas", schedule.sigmas);
    out.add("timesteps", schedule.timesteps);
    out.add("latents", latents);
    out.add("image", image);
    return out.write(path, {{"noise", "as drawn, [1, channels, height, width]"},
                            {"latents", "after the last step, packed: [1, tokens, 4 channels]"},
                            {"image", "decoded, in 0…1: [1, 3, height, width]"}});
  } catch (...) {
    return error_in_flight("dump");
  }
}

}  // namespace ditfleet::pipeline
