#include "shared/queue/records.h"

#include <algorithm>

#include "shared/core/json.h"

namespace ditfleet::queue {
namespace {

constexpr std::size_t kMostModels = 64, kMostPlans = 8, kLongestPlan = 16;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 50, kMostPixels = std::int64_t{1} << 50;
constexpr std::int64_t kLongestLoadUs = 3'600'000'000;

bool is_plan(std::string_view name) {
  return !name.empty() && name.size() <= kLongestPlan &&
         std::all_of(name.begin(), name.end(), [](char c) { return (c >= 'a' && c <= 'z') || c == '_'; });
}

json::object memory_json(const std::map<std::string, ModelMemory>& memory) {
  json::object out;
  for (const auto& [model, one] : memory) {
    json::array limits;
    for (const auto& limit : one.limits)
      limits.push_back(json::object{{"plan", limit.plan}, {"max_pixels", limit.max_pixels}});
    out[model] = json::object{{"limits", std::move(limits)},
                              {"available_bytes", one.available_bytes},
                              {"bytes", one.bytes},
                              {"resident", one.resident},
                              {"load_us", one.load_us}};
  }
  return out;
}

ModelMemory parse_memory(const json::object& object) {
  ModelMemory out{.available_bytes = number_in(object, "available_bytes", kMostBytes),
                  .bytes = number_in(object, "bytes", kMostBytes),
                  .load_us = number_in(object, "load_us", kLongestLoadUs)};
  read_field(object, "resident", out.resident);
  const json::value* limits = object.if_contains("limits");
  if (limits == nullptr || !limits->is_array()) return out;
  for (const json::value& value : limits->get_array()) {
    const json::object* fields = value.if_object();
    if (fields == nullptr || out.limits.size() == kMostPlans) continue;
    ModelMemory::Limit limit{.max_pixels = number_in(*fields, "max_pixels", kMostPixels)};
    read_field(*fields, "plan", limit.plan);
    if (limit.max_pixels > 0 && is_plan(limit.plan)) out.limits.push_back(std::move(limit));
  }
  return out;
}

// Calls `visit` with the name and the member of each field of a worker's record, except for the memory and the units.
template <class Info, class Visit>
void each_field(Info& info, const Visit& visit) {
  visit("name", info.name);
  visit("boot", info.boot);
  visit("host", info.host);
  visit("pid", info.pid);
  visit("state", info.state);
  visit("device", info.device);
  visit("device_name", info.device_name);
  visit("precision", info.precision);
  visit("gpus", info.gpus);
  visit("models", info.models);
  visit("warm_classes", info.warm_classes);
  visit("quantized", info.quantized);
  visit("adapters", info.adapters);
  visit("adapter_slots", info.adapter_slots);
  visit("host_adapters", info.host_adapters);
  visit("host_adapter_bytes", info.host_adapter_bytes);
  visit("adapter_load_bytes_per_s", info.adapter_load_bytes_per_s);
  visit("adapter_swap_us", info.adapter_swap_us);
  visit("compiles", info.compiles);
  visit("adapter_swaps", info.adapter_swaps);
  visit("capacity", info.capacity);
  visit("started_ms", info.started_ms);
  visit("version", info.version);
}

}  // namespace

std::string worker_json(const WorkerInfo& info) {
  json::object out;
  each_field(info, [&](const char* name, const auto& value) { out[name] = json::value_from(value); });
  if (!info.memory.empty()) out["memory"] = memory_json(info.memory);
  json::array& units = out["units"].emplace_array();
  for (const UnitRef& ref : info.units) units.push_back(json::value{ref.job, ref.unit});
  return json::serialize(out);
}

Result<WorkerInfo> parse_worker(std::string_view json_text) {
  const auto value = parse_json(json_text);
  if (!value) return value.error();
  if (!value->is_object()) return data_corrupt("[queue] a worker's record is not a JSON object");
  const json::object& object = value->get_object();
  WorkerInfo info{.state = {}, .capacity = 0};
  each_field(info, [&](const char* name, auto& member) { read_field(object, name, member); });
  if (const json::value* memory = object.if_contains("memory"); memory != nullptr && memory->is_object()) {
    for (const auto& [model, one] : memory->get_object()) {
      if (one.is_object() && info.memory.size() < kMostModels)
        info.memory.emplace(model, parse_memory(one.get_object()));
    }
  }
  if (const json::value* units = object.if_contains("units"); units != nullptr && units->is_array()) {
    for (const json::value& unit : units->get_array()) {
      if (unit.is_array() && unit.get_array().size() == 2 && unit.get_array()[0].is_string() &&
          unit.get_array()[1].is_int64()) {
        info.units.push_back(
            {std::string(unit.get_array()[0].get_string()), static_cast<int>(unit.get_array()[1].get_int64())});
      }
    }
  }
  return info;
}

}  // namespace ditfleet::queue
