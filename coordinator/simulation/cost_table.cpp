#include "coordinator/simulation/cost_table.h"

#include <cmath>
#include <map>
#include <variant>

#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "shared/core/nearest_name.h"

namespace ditfleet::simulation {

std::int64_t CostTable::run_us(int width, int height, int steps, bool adapter) const {
  const double pixels = static_cast<double>(width) * height, tokens = pixels / 256.0 + text_tokens;
  const double step = (tokens * step_us_per_token + tokens * tokens * step_us_per_token2) * (adapter ? adapter_step_ratio : 1.0);
  return text_us + std::llround(steps * step + pixels * vae_us_per_pixel);
}

Result<CostTable> read_cost_table(const std::string& path) {
  auto text = read_file(path);
  if (!text) return text.error();
  const auto parsed = parse_json(*text);
  if (!parsed) return invalid_argument("the cost table " + path + " is " + parsed.error().message);
  if (!parsed->is_object()) return invalid_argument("the cost table " + path + " is no JSON object");
  CostTable out;
  std::map<std::string, std::variant<int*, std::int64_t*, double*>> places = {
      {"text_us", &out.text_us},
      {"step_us_per_token", &out.step_us_per_token},
      {"step_us_per_token2", &out.step_us_per_token2},
      {"text_tokens", &out.text_tokens},
      {"vae_us_per_pixel", &out.vae_us_per_pixel},
      {"cold_class_us", &out.cold_class_us},
      {"run_spread", &out.run_spread},
      {"adapter_bytes", &out.adapter_bytes},
      {"adapter_load_bytes_per_s", &out.adapter_load_bytes_per_s},
      {"adapter_swap_us", &out.adapter_swap_us},
      {"adapter_resident_us", &out.adapter_resident_us},
      {"adapter_step_ratio", &out.adapter_step_ratio},
      {"adapter_slots", &out.adapter_slots},
      {"host_adapter_bytes", &out.host_adapter_bytes},
      {"lookahead", &out.lookahead},
  };
  std::vector<std::string> names;
  for (const auto& [name, place] : places) names.push_back(name);
  for (const auto& [key, value] : parsed->get_object()) {
    if (key == "about" || key == "measured") continue;  // for people
    const auto place = places.find(std::string(key));
    if (place == places.end()) return invalid_argument("the cost table " + path + " has an unknown field '" + std::string(key) + "'" + suggestion(key, names));
    if (!value.is_number() || value.to_number<double>() < 0) {
      return invalid_argument("the cost table " + path + " has " + std::string(key) + " = " + json::serialize(value) + "; it must be a number of at least 0");
    }
    std::visit([&value](auto* at) { *at = static_cast<std::remove_pointer_t<decltype(at)>>(value.to_number<double>()); }, place->second);
    places.erase(place);
  }
  if (!places.empty()) return invalid_argument("the cost table " + path + " lacks " + places.begin()->first);
  if (out.adapter_load_bytes_per_s < 1 || out.lookahead < 1 || out.adapter_bytes < 1 || out.adapter_slots < 1 ||
      out.host_adapter_bytes < out.adapter_bytes * out.lookahead) {
    return invalid_argument("the cost table " + path + " needs positive rates, slots and look-ahead, and host memory for an adapter of each unit that a worker holds");
  }
  return out;
}

}  // namespace ditfleet::simulation
