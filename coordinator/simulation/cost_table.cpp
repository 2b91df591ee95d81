#include "coordinator/simulation/cost_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <variant>

#include "coordinator/simulation/range.h"
#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "shared/core/nearest_name.h"

namespace ditfleet::simulation {
namespace {

constexpr double kHourUs = 3.6e9;
constexpr double kLongestUs =
    10 * 24 * kHourUs;  // of one operation: the simulation has an event per 0.1 s while jobs wait

}  // namespace

std::int64_t CostTable::run_us(int width, int height, int steps, bool adapter) const {
  const double pixels = static_cast<double>(width) * height, tokens = pixels / 256.0 + text_tokens;
  const double step =
      (tokens * step_us_per_token + tokens * tokens * step_us_per_token2) * (adapter ? adapter_step_ratio : 1.0);
  return text_us + std::llround(steps * step + pixels * vae_us_per_pixel);
}

Result<CostTable> read_cost_table(const std::string& path) {
  auto text = read_file(path);
  if (!text) return text.error();
  const auto parsed = parse_json(*text);
  if (!parsed) return invalid_argument("the cost table " + path + " is " + parsed.error().message);
  if (!parsed->is_object()) return invalid_argument("the cost table " + path + " is not a JSON object");
  CostTable out;
  struct Field {
    std::variant<int*, std::int64_t*, double*> at;
    Range range;
  };
  std::map<std::string, Field> fields = {
      {"text_us", {&out.text_us, whole(0, kHourUs)}},
      {"step_us_per_token", {&out.step_us_per_token, real(0, 1e6)}},
      {"step_us_per_token2", {&out.step_us_per_token2, real(0, 1e3)}},
      {"text_tokens", {&out.text_tokens, whole(0, 100'000)}},
      {"vae_us_per_pixel", {&out.vae_us_per_pixel, real(0, 1e4)}},
      {"cold_class_us", {&out.cold_class_us, whole(0, kHourUs)}},
      {"run_spread", {&out.run_spread, real(0, 0.99)}},
      {"adapter_bytes", {&out.adapter_bytes, whole(1, 1e12)}},
      {"adapter_load_bytes_per_s", {&out.adapter_load_bytes_per_s, real(1, 1e15)}},
      {"adapter_swap_us", {&out.adapter_swap_us, whole(0, kHourUs)}},
      {"adapter_resident_us", {&out.adapter_resident_us, whole(0, kHourUs)}},
      {"adapter_step_ratio", {&out.adapter_step_ratio, real(0.01, 100)}},
      {"adapter_slots", {&out.adapter_slots, whole(1, 1024)}},
      {"host_adapter_bytes", {&out.host_adapter_bytes, whole(1, 1e15)}},
      {"lookahead", {&out.lookahead, whole(1, 64)}},
  };
  std::vector<std::string> names;
  for (const auto& [name, field] : fields) names.push_back(name);
  for (const auto& [key, value] : parsed->get_object()) {
    if (key == "about" || key == "measured") continue;  // documentation
    const auto field = fields.find(std::string(key));
    if (field == fields.end())
      return invalid_argument("the cost table " + path + " has an unknown field '" + std::string(key) + "'" +
                              suggestion(key, names));
    const double number = value.is_number() ? value.to_number<double>() : std::nan("");
    if (!field->second.range.has(number))
      return field->second.range.error("the cost table " + path + ": " + field->first, json::serialize(value));
    std::visit([number](auto* at) { *at = static_cast<std::remove_pointer_t<decltype(at)>>(number); },
               field->second.at);
    fields.erase(field);
  }
  if (!fields.empty())
    return invalid_argument("the cost table " + path + " has no field '" + fields.begin()->first + "'");
  if (out.host_adapter_bytes < out.adapter_bytes * out.lookahead) {
    return invalid_argument("the cost table " + path +
                            " has too small host_adapter_bytes; it must be at least adapter_bytes times lookahead");
  }
  const auto longest_us = std::max(static_cast<double>(out.run_us(2048, 2048, 200, true)),
                                   static_cast<double>(out.adapter_bytes) / out.adapter_load_bytes_per_s * 1e6);
  if (longest_us > kLongestUs) {
    return invalid_argument(fmt::format(
        "according to the cost table {}, 200 steps at 2048 x 2048 or the load of an adapter take {:.3g} days; it "
        "must be at most {:.0f}",
        path, longest_us / kHourUs / 24, kLongestUs / kHourUs / 24));
  }
  return out;
}

}  // namespace ditfleet::simulation
