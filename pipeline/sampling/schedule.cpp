#include "pipeline/sampling/schedule.h"

#include <boost/math/distributions/beta.hpp>
#include <cmath>

namespace ditfleet::pipeline {
namespace {

// numpy.linspace
std::vector<double> linspace(double first, double last, int n) {
  std::vector<double> out(static_cast<std::size_t>(n));
  const double step = n > 1 ? (last - first) / (n - 1) : 0.0;
  for (int i = 0; i < n; ++i) out[static_cast<std::size_t>(i)] = i * step + first;
  if (n > 1) out.back() = last;
  return out;
}

// calculate_shift of diffusers' pipelines: a line through (base_image_seq_len, base_shift) and (max_…, max_…).
double dynamic_mu(const SchedulerConfig& c, std::int64_t image_tokens) {
  const double slope = (c.max_shift - c.base_shift) / static_cast<double>(c.max_image_seq_len - c.base_image_seq_len);
  const double intercept = c.base_shift - slope * static_cast<double>(c.base_image_seq_len);
  return static_cast<double>(image_tokens) * slope + intercept;
}

// Shifting and stretching in the arithmetic of T: numpy computes in the type of the array (float32, or float64
// with use_flow_sigmas) and rounds the scalars to it first.
template <class T>
void shift_sigmas(const SchedulerConfig& c, double mu, std::vector<T>& sigmas) {
  if (c.use_dynamic_shifting) {
    const T k = static_cast<T>(c.linear_time_shift ? mu : std::exp(mu));
    for (T& s : sigmas) s = k / (k + (T(1) / s - T(1)));
  } else {
    const T shift = static_cast<T>(c.shift), less_one = static_cast<T>(c.shift - 1);
    for (T& s : sigmas) s = shift * s / (T(1) + less_one * s);
  }
  if (c.shift_terminal && *c.shift_terminal != 0) {
    const T scale = (T(1) - sigmas.back()) / static_cast<T>(1 - *c.shift_terminal);
    for (T& s : sigmas) s = T(1) - (T(1) - s) / scale;
  }
}

std::vector<double> respaced(const SchedulerConfig& c, std::vector<double> sigmas) {
  if (c.spacing == SchedulerConfig::Spacing::kLinear) return sigmas;
  const int n = static_cast<int>(sigmas.size());
  const double low = c.sigma_min.value_or(sigmas.back()), high = c.sigma_max.value_or(sigmas.front());
  if (c.spacing == SchedulerConfig::Spacing::kExponential) {
    sigmas = linspace(std::log(high), std::log(low), n);
    for (double& s : sigmas) s = std::exp(s);
    return sigmas;
  }
  sigmas = linspace(0, 1, n);
  if (c.spacing == SchedulerConfig::Spacing::kBeta) {
    const boost::math::beta_distribution<double> beta(0.6, 0.6);  // Lee et al. 2024, as diffusers fixes it
    for (double& s : sigmas) s = low + boost::math::quantile(beta, 1 - s) * (high - low);
    return sigmas;
  }
  constexpr double kRho = 7;  // Karras et al. 2022, as diffusers fixes it
  const double from = std::pow(high, 1 / kRho), to = std::pow(low, 1 / kRho);
  for (double& s : sigmas) s = std::pow(from + s * (to - from), kRho);
  return sigmas;
}

template <class T>
std::vector<double> spaced(const SchedulerConfig& c, const std::vector<double>& start, double mu) {
  std::vector<T> sigmas(start.begin(), start.end());
  shift_sigmas(c, mu, sigmas);
  return respaced(c, std::vector<double>(sigmas.begin(), sigmas.end()));
}

// use_flow_sigmas: from the scheduler's own largest to its own smallest sigma.
std::vector<double> flow_sigmas(const SchedulerConfig& c, int steps) {
  const auto train = static_cast<float>(c.num_train_timesteps);
  const auto shifted = [&](float s) {
    if (c.use_dynamic_shifting) return s;
    return static_cast<float>(c.shift) * s / (1.0f + static_cast<float>(c.shift - 1) * s);
  };
  const auto scale = static_cast<double>(c.num_train_timesteps);
  auto sigmas = linspace(shifted(train / train) * scale, shifted(1.0f / train) * scale, steps);
  for (double& s : sigmas) s /= scale;
  return sigmas;
}

}  // namespace

SchedulerConfig read_scheduler_config(const ConfigFile& file) {
  const std::string kind = file.text("_class_name", "FlowMatchEulerDiscreteScheduler");
  if (kind != "FlowMatchEulerDiscreteScheduler")
    file.refuse("_class_name is \"" + kind + "\"; it must be FlowMatchEulerDiscreteScheduler");
  SchedulerConfig c;
  c.num_train_timesteps = file.integer("num_train_timesteps", 1000, 1, 1 << 24);
  c.shift = file.number("shift", 1.0);
  c.use_dynamic_shifting = file.boolean("use_dynamic_shifting", false);
  c.base_shift = file.number("base_shift", 0.5);
  c.max_shift = file.number("max_shift", 1.15);
  c.base_image_seq_len = file.integer("base_image_seq_len", 256, 0, 1 << 30);
  c.max_image_seq_len = file.integer("max_image_seq_len", 4096, 0, 1 << 30);
  if (c.use_dynamic_shifting && c.base_image_seq_len == c.max_image_seq_len)
    file.refuse("base_image_seq_len and max_image_seq_len are both " + std::to_string(c.base_image_seq_len) +
                "; dynamic shifting needs two different lengths");
  const std::string shift_type = file.text("time_shift_type", "exponential");
  if (shift_type != "exponential" && shift_type != "linear")
    file.refuse("time_shift_type is \"" + shift_type + "\"; it must be exponential or linear");
  c.linear_time_shift = shift_type == "linear";
  c.shift_terminal = file.optional_number("shift_terminal");
  c.invert_sigmas = file.boolean("invert_sigmas", false);
  c.use_flow_sigmas = file.boolean("use_flow_sigmas", false);
  if (file.boolean("stochastic_sampling", false))
    file.refuse("stochastic_sampling is true, which is not supported; it must be false");
  const bool karras = file.boolean("use_karras_sigmas", false),
             exponential = file.boolean("use_exponential_sigmas", false), beta = file.boolean("use_beta_sigmas", false);
  if (karras + exponential + beta > 1)
    file.refuse(
        "more than one of use_karras_sigmas, use_exponential_sigmas and use_beta_sigmas is true; set at most one");
  if (karras) c.spacing = SchedulerConfig::Spacing::kKarras;
  if (exponential) c.spacing = SchedulerConfig::Spacing::kExponential;
  if (beta) c.spacing = SchedulerConfig::Spacing::kBeta;
  c.sigma_min = file.optional_number("sigma_min");
  c.sigma_max = file.optional_number("sigma_max");
  return c;
}

Schedule make_schedule(const SchedulerConfig& c, int steps, std::int64_t image_tokens, const std::vector<double>& given,
                       std::optional<double> own_mu) {
  const double mu = own_mu ? *own_mu : dynamic_mu(c, image_tokens);
  const auto sigmas = !given.empty()      ? spaced<float>(c, given, mu)
                      : c.use_flow_sigmas ? spaced<double>(c, flow_sigmas(c, steps), mu)
                                          : spaced<float>(c, linspace(1.0, 1.0 / steps, steps), mu);
  Schedule schedule;
  const auto scale = static_cast<float>(c.num_train_timesteps);
  for (double s : sigmas) {
    auto sigma = static_cast<float>(s);
    if (c.invert_sigmas) sigma = 1.0f - sigma;
    schedule.sigmas.push_back(sigma);
    schedule.timesteps.push_back(sigma * scale);
  }
  schedule.sigmas.push_back(c.invert_sigmas ? 1.0f : 0.0f);
  return schedule;
}

}  // namespace ditfleet::pipeline
