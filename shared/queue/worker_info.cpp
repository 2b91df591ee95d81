#include "shared/queue/records.h"

#include "shared/core/json.h"

namespace ditfleet::queue {
namespace {

// Calls `visit` with the name and the member of each field of a worker's record, except for the units.
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
  visit("models", info.models);
  visit("warm_classes", info.warm_classes);
  visit("quantized", info.quantized);
  visit("adapters", info.adapters);
  visit("adapter_slots", info.adapter_slots);
  visit("host_adapters", info.host_adapters);
  visit("host_adapter_bytes", info.host_adapter_bytes);
  visit("adapter_load_bytes_per_s", info.adapter_load_bytes_per_s);
  visit("adapter_swap_us", info.adapter_swap_us);
  visit("capacity", info.capacity);
  visit("started_ms", info.started_ms);
  visit("version", info.version);
}

}  // namespace

std::string worker_json(const WorkerInfo& info) {
  json::object out;
  each_field(info, [&](const char* name, const auto& value) { out[name] = json::value_from(value); });
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
