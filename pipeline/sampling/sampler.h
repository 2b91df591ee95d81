// Samplers compute the next latents from a velocity.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

#include "pipeline/nn/run_state.h"
#include "pipeline/sampling/latents.h"

namespace ditfleet::pipeline {

// The sampler of one image. It may keep the history of earlier steps, so call it for the steps in order.
class Sampler {
 public:
  virtual ~Sampler() = default;
  // The latents after step `i`, in the velocity's type.
  virtual at::Tensor step(const at::Tensor& latents, const at::Tensor& velocity, std::int64_t i) = 0;
  // The denoised latents that the velocity of step `i` predicts, from the latents after that step.
  virtual at::Tensor estimate(const at::Tensor& latents, const at::Tensor& velocity, std::int64_t i) const = 0;
  virtual void visit(RunState&) {}  // the history
  // Whether the history gives the latents after the last step, so that they need not be kept.
  virtual bool derives_latents() const { return false; }
  virtual at::Tensor latents_after(std::int64_t) const { return {}; }
};

// Follows diffusers' FlowMatchEulerDiscreteScheduler.step. `sigmas`: [steps + 1] fp32, on the latents' device.
class FlowMatchEuler final : public Sampler {
 public:
  explicit FlowMatchEuler(at::Tensor sigmas) : sigmas_(std::move(sigmas)) {}
  at::Tensor step(const at::Tensor& latents, const at::Tensor& velocity, std::int64_t i) override {
    return euler_step(latents, velocity, sigmas_[i], sigmas_[i + 1]);
  }
  at::Tensor estimate(const at::Tensor& latents, const at::Tensor& velocity, std::int64_t i) const override {
    return latents - sigmas_[i + 1] * velocity;
  }

 private:
  const at::Tensor sigmas_;
};

}  // namespace ditfleet::pipeline
