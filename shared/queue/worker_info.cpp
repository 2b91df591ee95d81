#include "shared/queue/records.h"

#include "shared/core/json.h"

namespace ditfleet::queue {
namespace {

json::array strings(const std::vector<std::string>& items) {
  json::array out;
  for (const std::string& item : items) out.emplace_back(item);
  return out;
}

}  // namespace

std::string worker_json(const WorkerInfo& info) {
  json::array units;
  for (const UnitRef& ref : info.units) units.push_back(json::value{ref.job, ref.unit});
  return json::serialize(json::object{{"name", info.name},
                                      {"boot", info.boot},
                                      {"host", info.host},
                                      {"pid", info.pid},
                                      {"state", info.state},
                                      {"device", info.device},
                                      {"device_name", info.device_name},
                                      {"precision", info.precision},
                                      {"models", strings(info.models)},
                                      {"warm_classes", strings(info.warm_classes)},
                                      {"adapters", strings(info.adapters)},
                                      {"adapter_slots", info.adapter_slots},
                                      {"host_adapters", strings(info.host_adapters)},
                                      {"host_adapter_bytes", info.host_adapter_bytes},
                                      {"adapter_load_bytes_per_s", info.adapter_load_bytes_per_s},
                                      {"adapter_swap_us", info.adapter_swap_us},
                                      {"capacity", info.capacity},
                                      {"started_ms", info.started_ms},
                                      {"version", info.version},
                                      {"units", units}});
}

Result<WorkerInfo> parse_worker(std::string_view json_text) {
  const auto value = parse_json(json_text);
  if (!value) return value.error();
  if (!value->is_object()) return data_corrupt("[queue] a worker's record is not a JSON object");
  const json::object& object = value->get_object();
  const auto text = [&](const char* name) {
    const json::value* found = object.if_contains(name);
    return found != nullptr && found->is_string() ? std::string(found->get_string()) : std::string();
  };
  const auto number = [&](const char* name) -> std::int64_t {
    const json::value* found = object.if_contains(name);
    return found != nullptr && found->is_int64() ? found->get_int64() : 0;
  };
  WorkerInfo info;
  info.name = text("name");
  info.boot = text("boot");
  info.host = text("host");
  info.pid = static_cast<int>(number("pid"));
  info.state = text("state");
  info.device = text("device");
  info.device_name = text("device_name");
  info.precision = text("precision");
  info.models = parse_strings(object.if_contains("models"));
  info.warm_classes = parse_strings(object.if_contains("warm_classes"));
  info.adapters = parse_strings(object.if_contains("adapters"));
  info.adapter_slots = static_cast<int>(number("adapter_slots"));
  info.host_adapters = parse_strings(object.if_contains("host_adapters"));
  info.host_adapter_bytes = number("host_adapter_bytes");
  info.adapter_load_bytes_per_s = number("adapter_load_bytes_per_s");
  info.adapter_swap_us = number("adapter_swap_us");
  info.capacity = static_cast<int>(number("capacity"));
  info.started_ms = number("started_ms");
  info.version = text("version");
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
