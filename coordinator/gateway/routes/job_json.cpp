#include "coordinator/gateway/routes/job_json.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "coordinator/gateway/http/http.h"
#include "coordinator/gateway/routes/openapi.h"
#include "shared/job/spec_json.h"

namespace ditfleet::gateway {
namespace {

json::object memory_value(const std::map<std::string, queue::ModelMemory>& memory) {
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

json::value error_value(const std::optional<Error>& error) {
  if (!error) return nullptr;
  return json::object{
      {"code", code_name(error->code)}, {"message", error->message}, {"param", text_or_null(error->param)}};
}

json::value result_value(const queue::JobRecord& record, const queue::UnitRecord& unit, const JobLinks& links) {
  if (unit.state != job::State::kSucceeded) return nullptr;
  const auto manifest = results::Manifest::parse(unit.manifest);
  if (!manifest) return nullptr;
  auto receipt = parse_json(manifest->receipt);
  return json::object{{"url", links.result(record.id, unit.unit, *manifest)},
                      {"media_type", manifest->media_type},
                      {"bytes", manifest->bytes},
                      {"sha256", manifest->sha256},
                      {"width", manifest->width},
                      {"height", manifest->height},
                      {"seed", manifest->seed},
                      {"skipped_steps", manifest->skipped_steps},
                      {"gpu_seconds", static_cast<double>(manifest->gpu_us) / 1e6},
                      {"first_step_us", manifest->first_step_us},
                      {"compiled", manifest->compiled},
                      {"receipt", receipt ? std::move(*receipt) : json::value(nullptr)}};
}

// A unit's steps are known while it runs; of one that succeeded it made all that the job asked for.
std::pair<int, int> steps_of(const queue::UnitRecord& unit, const json::value& spec) {
  if (unit.state != job::State::kSucceeded || unit.total_steps > 0 || !spec.is_object()) {
    return {unit.step, unit.total_steps};
  }
  const json::value* asked = spec.as_object().if_contains("num_inference_steps");
  const int steps = asked && asked->is_int64() ? static_cast<int>(asked->as_int64()) : 0;
  return {steps, steps};
}

json::object unit_json(const queue::JobRecord& record, const queue::UnitRecord& unit, const json::value& spec,
                       const JobLinks& links, const WaitsFor& waits_for) {
  const bool waits = waits_for && (unit.state == job::State::kReady || unit.state == job::State::kAssigned);
  const std::string what = waits ? waits_for({record.id, unit.unit}) : std::string();
  const auto [step, total_steps] = steps_of(unit, spec);
  return {{"unit", unit.unit},
          {"state", job::state_name(unit.state)},
          {"attempt", unit.attempt},
          {"worker", queue::worker_name(unit.owner)},
          {"step", step},
          {"total_steps", total_steps},
          {"phase", text_or_null(phase_of(unit))},
          {"assigned_ms", unit.assigned_ms},
          {"started_ms", unit.started_ms},
          {"ended_ms", unit.ended_ms},
          {"phases_us", json::value_from(unit.phases_us)},
          {"waits_for", text_or_null(what)},
          {"error", error_value(unit.error)},
          {"result", result_value(record, unit, links)}};
}

std::string signed_url(const JobLinks& links, const std::string& path) {
  const std::string permission = links.signer == nullptr ? std::string() : links.signer->sign(path, links.expires_s);
  return links.base + path + (permission.empty() ? "" : "?" + permission);
}

}  // namespace

std::string JobLinks::job(std::string_view id) const { return base + "/v1/jobs/" + std::string(id); }

std::string JobLinks::result(std::string_view id, int unit, const results::Manifest& manifest) const {
  if (std::string link = stored ? stored(manifest) : std::string(); !link.empty()) return link;
  return signed_url(*this, "/v1/jobs/" + std::string(id) + "/results/" + std::to_string(unit));
}

std::string JobLinks::preview(std::string_view id, std::string_view event) const {
  return signed_url(*this, "/v1/jobs/" + std::string(id) + "/previews/" + std::string(event));
}

const queue::UnitRecord* find_unit(const queue::JobRecord& record, int unit) {
  for (const auto& candidate : record.unit_records) {
    if (candidate.unit == unit) return &candidate;
  }
  return nullptr;
}

double progress_of(const queue::JobRecord& record, const FleetHistory::Pace* pace, std::int64_t now_ms) {
  if (job::is_terminal(record.state)) return 1.0;
  if (record.units <= 0) return 0.0;
  double done = 0;
  for (const auto& unit : record.unit_records) {
    if (job::is_terminal(unit.state)) done += 1;
    if (job::is_terminal(unit.state) || unit.total_steps <= 0) continue;
    const double total = unit.total_steps, step = std::clamp<double>(unit.step, 0, total);
    const double rest = pace ? pace->rest_us / pace->step_us : 1;  // in steps, as what follows
    const double next = step < total ? step + 1 : total + rest;
    const double passed =
        pace && unit.started_ms > 0 ? static_cast<double>(now_ms - unit.started_ms) * 1000 / pace->step_us : 0;
    done += std::min(0.99, std::clamp(passed, step, next) / (total + rest));
  }
  return std::min(done / record.units, 1.0);
}

std::string_view phase_of(const queue::UnitRecord& unit) {
  if (unit.state < job::State::kRunning || job::is_terminal(unit.state)) return {};
  return unit.total_steps > 0 && unit.step >= unit.total_steps ? "decoding" : "denoising";
}

Error cause_of(const queue::JobRecord& record) {
  if (record.error) return *record.error;
  if (record.state == job::State::kCanceled) return {Code::kCanceled, "it was canceled", {}};
  if (record.state == job::State::kExpired) return {Code::kDeadlineExceeded, "its deadline passed", {}};
  Error error{Code::kInternal, "no reason was recorded", {}};
  for (const auto& unit : record.unit_records) {
    if (unit.error) error = *unit.error;
  }
  return error;
}

json::object job_json(const queue::JobRecord& record, const JobLinks& links, bool with_units,
                      const WaitsFor& waits_for) {
  auto spec = parse_json(record.spec);
  json::value spec_value = spec ? *spec : json::value(nullptr);
  const json::value* model = spec_value.is_object() ? spec_value.as_object().if_contains("model") : nullptr;
  std::int64_t started_ms = 0;
  for (const auto& unit : record.unit_records) {
    if (unit.started_ms > 0 && (started_ms == 0 || unit.started_ms < started_ms)) started_ms = unit.started_ms;
  }
  json::object object{{"id", record.id},
                      {"object", "job"},
                      {"state", job::state_name(record.state)},
                      {"tenant", record.tenant},
                      {"model", model == nullptr ? json::value(nullptr) : *model},
                      {"class", record.class_key},
                      {"units", record.units},
                      {"created_ms", record.created_ms},
                      {"ready_ms", record.ready_ms},
                      {"ended_ms", record.ended_ms},
                      {"deadline_ms", record.deadline_ms},
                      {"cost_us", record.cost_us},
                      {"warnings", json::value_from(record.warnings)},
                      {"error", error_value(record.error)},
                      {"traceparent", record.traceparent},
                      {"url", links.job(record.id)},
                      {"events_url", links.job(record.id) + "/events"}};
  if (with_units) {
    object["started_ms"] = started_ms;
    json::array units;
    double gpu_s = 0;
    for (const auto& unit : record.unit_records) {
      units.push_back(unit_json(record, unit, spec_value, links, waits_for));
      const json::value& result = units.back().as_object().at("result");
      if (result.is_object()) gpu_s += result.as_object().at("gpu_seconds").to_number<double>();
    }
    object["gpu_seconds"] = gpu_s;
    object["unit_records"] = std::move(units);
  }
  object["spec"] = std::move(spec_value);
  return object;
}

json::object worker_json(const queue::WorkerInfo& worker, const std::function<bool(const std::string&)>& visible,
                         const std::optional<queue::FleetForecast>& forecast) {
  json::value empty_in_ms;  // null
  if (forecast && worker.state != "silent") {
    const auto end = forecast->ends_ms.find(worker.owner());
    const std::int64_t now_ms = worker.heartbeat_ms + worker.unheard_ms;
    empty_in_ms = end == forecast->ends_ms.end() ? 0 : std::max<std::int64_t>(0, end->second - now_ms);
  }
  std::set<std::string> jobs;
  json::array units;
  for (const auto& unit : worker.units) {
    if (!visible(unit.job)) continue;
    jobs.insert(unit.job);
    units.push_back(json::object{{"job", unit.job}, {"unit", unit.unit}});
  }
  return {{"name", worker.name},
          {"boot", worker.boot},
          {"host", worker.host},
          {"pid", worker.pid},
          {"state", worker.state},
          {"device", worker.device},
          {"device_name", worker.device_name},
          {"precision", worker.precision},
          {"gpus", worker.gpus},
          {"models", json::value_from(worker.models)},
          {"adapters", json::value_from(worker.adapters)},
          {"adapter_slots", worker.adapter_slots},
          {"host_adapters", json::value_from(worker.host_adapters)},
          {"host_adapter_bytes", worker.host_adapter_bytes},
          {"adapter_load_bytes_per_s", worker.adapter_load_bytes_per_s},
          {"adapter_swap_us", worker.adapter_swap_us},
          {"compiles", worker.compiles},
          {"adapter_swaps", worker.adapter_swaps},
          {"warm_classes", json::value_from(worker.warm_classes)},
          {"quantized", json::value_from(worker.quantized)},
          {"memory", memory_value(worker.memory)},
          {"capacity", worker.capacity},
          {"busy_units", worker.units.size()},
          {"jobs", json::value_from(jobs)},
          {"units", std::move(units)},
          {"empty_in_ms", std::move(empty_in_ms)},
          {"heartbeat_ms", worker.heartbeat_ms},
          {"started_ms", worker.started_ms},
          {"version", worker.version}};
}

json::value speed_value(std::optional<double> speed) {
  return speed ? json::value(std::round(*speed * 1000) / 1000) : json::value(nullptr);
}

json::object model_json(const job::ModelEntry& model, std::int64_t created_s) {
  json::object fields, defaults;
  for (const auto& [field, limits] : model.fields) {
    json::object schema = schema_of(field.row());
    if (schema.contains("minimum")) {
      schema["minimum"] = limits.low;
      schema["maximum"] = limits.high;
    }
    if (limits.multiple_of > 1) schema[limits.remainder == 0 ? "multipleOf" : "x-step"] = limits.multiple_of;
    if (const auto* value = model.defaults.find(field)) {
      std::visit([&](const auto& v) { schema["default"] = v; }, *value);
      if (field.row().type == job::FieldType::kCache)
        schema["default"] = parse_json(job::cache_json(std::get<double>(*value))).value();
      defaults[field.name()] = schema["default"];
    }
    fields[field.name()] = std::move(schema);
    if (field == job::Field("image") && limits.high > 1) {
      json::object& several = fields["images"].emplace_object() = schema_of(job::Field("images").row());
      several["minItems"] = limits.low;
      several["maxItems"] = limits.high;
    }
  }
  json::array presets;
  for (const auto& [name, preset] : model.presets) presets.emplace_back(name);
  return {{"id", model.name},
          {"object", "model"},
          {"created", created_s},
          {"owned_by", "ditfleet"},
          {"kind", model.kind},
          {"media", model.media == job::MediaKind::kVideo ? "video" : "image"},
          {"fields", std::move(fields)},
          {"defaults", std::move(defaults)},
          {"presets", std::move(presets)},
          {"limits", json::object{{"max_pixels", model.max_pixels}}}};
}

}  // namespace ditfleet::gateway
