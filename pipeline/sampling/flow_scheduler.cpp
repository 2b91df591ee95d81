#include "pipeline/sampling/flow_scheduler.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/scalar_tensor.h>

#include <cmath>
#include <utility>
#include <vector>

#include "pipeline/device/failure.h"

namespace ditfleet::pipeline {
namespace {

constexpr double kTrainTimesteps = 1000;

// UniPC of order 1 or 2 with B(h) = expm1(h), predicting x0 (Zhao et al. 2023, "bh2"). The factors are computed in
// float32, as diffusers does.
class UniPc final : public Sampler {
 public:
  UniPc(const FlowSchedulerConfig& config, std::vector<float> sigmas)
      : order_(config.solver_order), lower_order_final_(config.lower_order_final), sigmas_(std::move(sigmas)) {}

  at::Tensor step(const at::Tensor& latents, const at::Tensor& velocity, std::int64_t i) override {
    at::Tensor sample = latents;
    // The product is rounded to the velocity's type, the difference to the latents'.
    const at::Tensor sigma = at::scalar_tensor(sigmas_[static_cast<std::size_t>(i)]);
    const at::Tensor x0 = latents - sigma * velocity;
    if (i > 0) sample = corrected(x0, i);
    older_ = std::exchange(newest_, x0);
    const auto steps = static_cast<std::int64_t>(sigmas_.size()) - 1;
    const std::int64_t most = lower_order_final_ ? std::min<std::int64_t>(order_, steps - i) : order_;
    used_order_ = std::min(most, i + 1);
    last_ = sample;
    return predicted(sample, i);
  }

  at::Tensor estimate(const at::Tensor&, const at::Tensor&, std::int64_t) const override { return newest_; }
  bool derives_latents() const override { return true; }
  at::Tensor latents_after(std::int64_t i) const override {
    return last_.defined() && newest_.defined() && (used_order_ < 2 || older_.defined()) ? predicted(last_, i)
                                                                                         : at::Tensor();
  }
  void visit(RunState& state) override {
    state.tensor("sampler.newest", newest_);
    state.tensor("sampler.older", older_);
    state.tensor("sampler.last", last_);
    state.number("sampler.order", used_order_);
  }

 private:
  struct Factors {
    float keep, model, correct;  // of the last sample, of its x0, and of the differences
    float h, phi;                // hh = −h and expm1(hh)
  };
  float lambda(std::int64_t i) const {
    const float sigma = sigmas_[static_cast<std::size_t>(i)];
    return std::log(1 - sigma) - std::log(sigma);
  }
  // From the sample at `from` to the one at `to`.
  Factors factors(std::int64_t from, std::int64_t to) const {
    const float sigma_t = sigmas_[static_cast<std::size_t>(to)], alpha_t = 1 - sigma_t;
    const float h = lambda(to) - lambda(from), phi = std::expm1(-h);
    return {sigma_t / sigmas_[static_cast<std::size_t>(from)], alpha_t * phi, alpha_t * phi, h, phi};
  }

  at::Tensor predicted(const at::Tensor& sample, std::int64_t i) const {
    const Factors f = factors(i, i + 1);
    at::Tensor next = f.keep * sample - f.model * newest_;
    if (used_order_ < 2) return next;
    const float ratio = (lambda(i - 1) - lambda(i)) / f.h;
    return next - f.correct * (0.5F * ((older_ - newest_) / ratio));
  }

  // The sample of step i again, now that its x0 is known; `last_` is that of step i − 1.
  at::Tensor corrected(const at::Tensor& x0, std::int64_t i) const {
    const Factors f = factors(i - 1, i);
    const at::Tensor base = f.keep * last_ - f.model * newest_, change = x0 - newest_;
    if (used_order_ < 2) return base - f.correct * (0.5F * change);
    const float ratio = (lambda(i - 2) - lambda(i - 1)) / f.h, hh = -f.h;
    // rho solves [[1, 1], [ratio, 1]] · rho = [b1, b2].
    const float phi_1 = f.phi / hh - 1, b1 = phi_1 / f.phi, phi_2 = phi_1 / hh - 0.5F, b2 = phi_2 * 2 / f.phi;
    const float older = (b1 - b2) / (1 - ratio), now = b1 - older;
    return base - f.correct * (older * ((older_ - newest_) / ratio) + now * change);
  }

  const int order_;
  const bool lower_order_final_;
  const std::vector<float> sigmas_;
  at::Tensor newest_, older_;    // x0 of the last step and of the one before
  at::Tensor last_;              // the last step's sample, corrected
  std::int64_t used_order_ = 1;  // of the last step
};

void must_be(const ConfigFile& file, const char* field, const std::string& is, const std::string& right) {
  if (is != right) file.refuse(std::string(field) + " is \"" + is + "\"; it must be \"" + right + "\"");
}

void must_be(const ConfigFile& file, const char* field, bool is, bool right) {
  if (is != right)
    file.refuse(std::string(field) + " is " + (is ? "true" : "false") + ", which is not supported; set it to " +
                (right ? "true" : "false"));
}

}  // namespace

FlowSchedulerConfig read_flow_scheduler_config(const ConfigFile& file) {
  FlowSchedulerConfig c;
  const std::string kind = file.text("_class_name", "");
  if (kind == "FlowMatchEulerDiscreteScheduler") {
    c.unipc = false;
    c.euler = read_scheduler_config(file);
    must_be(file, "use_dynamic_shifting", c.euler.use_dynamic_shifting, false);
    c.euler.use_flow_sigmas = true;  // the pipeline passes no sigmas
    return c;
  }
  if (kind != "UniPCMultistepScheduler")
    file.refuse("_class_name is \"" + kind +
                "\"; it must be UniPCMultistepScheduler or FlowMatchEulerDiscreteScheduler");
  must_be(file, "prediction_type", file.text("prediction_type", "epsilon"), "flow_prediction");
  must_be(file, "solver_type", file.text("solver_type", "bh2"), "bh2");
  must_be(file, "final_sigmas_type", file.text("final_sigmas_type", "zero"), "zero");
  must_be(file, "use_flow_sigmas", file.boolean("use_flow_sigmas", false), true);
  must_be(file, "predict_x0", file.boolean("predict_x0", true), true);
  for (const char* field :
       {"thresholding", "use_dynamic_shifting", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"})
    must_be(file, field, file.boolean(field, false), false);
  if (file.has("shift_terminal")) file.refuse("shift_terminal is not supported; set it to null");
  if (!file.integers("disable_corrector", {}, 0, 1000).empty())
    file.refuse("disable_corrector is not supported; set it to []");
  if (const auto train = file.integer("num_train_timesteps", 1000, 1, 1 << 20); train != kTrainTimesteps)
    file.refuse("num_train_timesteps is " + std::to_string(train) + "; it must be 1000");
  c.solver_order = static_cast<int>(file.integer("solver_order", 2, 1, 2));
  c.lower_order_final = file.boolean("lower_order_final", true);
  c.flow_shift = file.number("flow_shift", 1.0);
  if (!(c.flow_shift > 0)) file.refuse("flow_shift must be above 0");
  return c;
}

double checked_flow_shift(double shift) {
  if (!(shift > 0)) fail(Code::kInvalidArgument, "flow_shift must be a number above 0", "flow_shift");
  return shift;
}

Schedule make_flow_schedule(const FlowSchedulerConfig& config, int steps, const std::vector<double>& sigmas) {
  if (!config.unipc) return make_schedule(config.euler, steps, /*image_tokens=*/0, sigmas);
  Schedule schedule;
  const double step = (1 / kTrainTimesteps - 1) / steps;
  for (int i = 0; i < steps; ++i) {
    double sigma = i * step + 1;
    sigma = config.flow_shift * sigma / (1 + (config.flow_shift - 1) * sigma);
    // Else the logarithm of alpha would be infinite in the first step.
    if (i == 0 && std::abs(sigma - 1) < 1e-6) sigma -= 1e-6;
    schedule.sigmas.push_back(static_cast<float>(sigma));
    schedule.timesteps.push_back(static_cast<float>(std::floor(sigma * kTrainTimesteps)));
  }
  schedule.sigmas.push_back(0);
  return schedule;
}

std::unique_ptr<Sampler> make_flow_sampler(const FlowSchedulerConfig& config, const Schedule& schedule,
                                           c10::Device device) {
  if (config.unipc) return std::make_unique<UniPc>(config, schedule.sigmas);
  return std::make_unique<FlowMatchEuler>(on_device(schedule.sigmas, device));
}

}  // namespace ditfleet::pipeline
