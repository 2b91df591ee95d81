#include "shared/queue/records.h"

#include <algorithm>

#include "shared/core/excerpt.h"
#include "shared/core/json.h"
#include "shared/queue/reply_fields.h"

namespace ditfleet::queue {
namespace {

constexpr int kMaxUnits = 1024;                        // more than a job may have (field "n")
constexpr std::int64_t kMost = std::int64_t{1} << 50;  // so that numbers can be added and multiplied

std::string indexed(char kind, int unit) { return kind + std::to_string(unit); }

std::string value_text(const json::value& value) {
  return value.is_string() ? std::string(value.get_string()) : json::serialize(value);
}

}  // namespace

std::int64_t number_in(const json::object& record, std::string_view name, std::int64_t most) {
  std::int64_t out = 0;
  read_field(record, name, out);
  return std::clamp<std::int64_t>(out, 0, most);
}

std::map<std::string, std::int64_t> parse_phases(std::string_view text) {
  std::map<std::string, std::int64_t> phases;
  const auto value = text.empty() ? Result<json::value>(json::value()) : parse_json(text);
  if (!value || !value->is_object()) return phases;
  for (const auto& [name, us] : value->get_object()) {
    boost::system::error_code no_integer;  // any worker may have written it
    const auto number = us.to_number<std::int64_t>(no_integer);
    if (!no_integer) phases.emplace(name, number);
  }
  return phases;
}

Result<std::int64_t> parse_time_us(const redis::Reply& reply) {
  if (reply.elements.size() != 2) return internal_error("[queue] TIME did not reply with seconds and microseconds");
  return to_int(reply.elements[0].text) * 1'000'000 + to_int(reply.elements[1].text);
}

PackedUnit parse_packed_unit(std::string_view field) {
  const auto part = first_parts<13>(field, '|');
  PackedUnit unit;
  unit.state = part[0];
  unit.nonce = part[1];
  unit.started_ms = to_int(part[2]);
  unit.errors = static_cast<int>(to_int(part[3]));
  unit.owner = part[5];
  unit.assigned_ms = to_int(part[6]);
  unit.lapses = static_cast<int>(to_int(part[9]));
  unit.failed_on = part[11];
  unit.ended_ms = to_int(part[12]);
  return unit;
}

PackedJob parse_packed_job(std::string_view record) {
  const auto part = first_parts<13>(record, '|');  // part[9]: its share of the quotas
  PackedJob job;
  job.units = static_cast<int>(to_int(part[0]));
  job.ready_ms = to_int(part[1]);
  job.cost_us = to_int(part[2]);
  job.priority = static_cast<int>(to_int(part[3]));
  job.deadline_ms = to_int(part[4]);
  job.entry = part[5];
  job.tenant = part[6];
  job.trace = part[8];
  job.class_key = part[10];
  job.steps = static_cast<int>(to_int(part[11]));
  job.adapters = part[12];
  return job;
}

std::string packed_needs(int steps, const std::vector<std::string>& adapters) {
  std::string out = std::to_string(steps);
  char mark = '|';
  for (const std::string& name : adapters) {
    if (name.find_first_of("|,") != std::string::npos) continue;
    out += mark + name;
    mark = ',';
  }
  return out;
}

std::string packed_drops(const std::vector<std::string>& from_host, const std::vector<std::string>& from_slots) {
  if (from_host.empty() && from_slots.empty()) return {};
  std::string out;
  const auto add = [&out](const std::vector<std::string>& names) {
    const auto begin = out.size();
    for (const std::string& name : names) {
      if (name.empty() || name.find_first_of("|,") != std::string::npos) continue;
      if (out.size() > begin) out += ',';
      out += name;
    }
  };
  add(from_host);
  out += '|';
  add(from_slots);
  return out;
}

UnitRecord unit_record(int unit, const PackedUnit& packed) {
  UnitRecord record;
  record.unit = unit;
  record.state = packed.shown_state();
  record.attempt = packed.attempt();
  record.owner = packed.owner;
  record.nonce = packed.nonce;
  record.assigned_ms = packed.assigned_ms;
  record.started_ms = packed.started_ms;
  record.ended_ms = packed.ended_ms;
  return record;
}

job::State furthest(const std::vector<UnitRecord>& units) {
  job::State best = job::State::kQueued;  // of the open units
  bool ended = false;
  for (const UnitRecord& unit : units) {
    if (job::is_terminal(unit.state)) {
      ended = true;
    } else {
      best = std::max(best, unit.state);
    }
  }
  return ended && best != job::State::kPaused ? std::max(best, job::State::kRunning) : best;
}

job::State PackedUnit::shown_state() const {
  if (state == "delayed") return job::State::kReady;
  return job::state_from_name(state).value_or(job::State::kQueued);
}

int PackedUnit::attempt() const {
  const bool counted = state == "failed";  // `errors` includes the failed attempt
  return errors + lapses + (started_ms > 0 && !counted ? 1 : 0);
}

UnitRef parse_member(std::string_view member) {
  const auto colon = member.rfind(':');
  if (colon == std::string_view::npos) return {std::string(member), 0};
  return {std::string(member.substr(0, colon)), static_cast<int>(to_int(member.substr(colon + 1)))};
}

std::string error_json(const Error& error) {
  json::object out{{"code", code_name(error.code)}, {"message", error.message}};
  if (!error.param.empty()) out["param"] = error.param;
  return json::serialize(out);
}

Error parse_error(std::string_view json_text) {
  const auto value = parse_json(json_text);
  if (!value || !value->is_object()) return internal_error(std::string(json_text));
  const json::object& object = value->get_object();
  const auto text = [&](const char* name) {
    const json::value* found = object.if_contains(name);
    return found != nullptr ? value_text(*found) : std::string();
  };
  return Error{code_from_name(text("code")), text("message"), text("param")};
}

Event make_event(std::string id, std::string job, std::string_view text) {
  Event event;
  event.at_ms = to_int(id);
  event.id = std::move(id);
  event.job = std::move(job);
  const auto first = text.find(' ');
  const auto second = first == std::string_view::npos ? first : text.find(' ', first + 1);
  event.type = text.substr(0, first);
  if (second == std::string_view::npos) return event;
  event.unit = static_cast<int>(to_int(text.substr(first + 1)));
  const std::string_view data = text.substr(second + 1);
  if (data.size() > 2) {         // not "{}"
    unsigned char buffer[2048];  // avoids the heap for the few fields of a step
    json::monotonic_resource small(buffer);
    if (const auto value = parse_json(data, &small); value && value->is_object()) {
      for (const auto& [name, field] : value->get_object()) event.fields.emplace(name, value_text(field));
    }
  }
  return event;
}

void append_events(Event event, std::vector<Event>& out) {
  const auto ends = event.fields.find("job");
  if (ends == event.fields.end() || event.unit < 0) {
    out.push_back(std::move(event));
    return;
  }
  Event job;
  job.job = event.job;
  job.type = ends->second;
  job.at_ms = event.at_ms;
  const auto dash = event.id.find('-');
  job.id = event.id.substr(0, dash) + "-" + std::to_string(to_int(std::string_view(event.id).substr(dash + 1)) + 1);
  event.fields.erase(ends);
  if (const auto why = event.fields.find("job_error"); why != event.fields.end()) {
    if (const auto value = parse_json(why->second); value && value->is_object()) {
      for (const auto& [name, field] : value->get_object()) job.fields.emplace(name, value_text(field));
    }
    event.fields.erase(why);
  }
  out.push_back(std::move(event));
  out.push_back(std::move(job));
}

Result<Event> parse_feed_line(const std::string& id, std::string_view line) {
  const auto first = line.find(' ');
  const auto second = first == std::string_view::npos ? first : line.find(' ', first + 1);
  if (second == std::string_view::npos) {
    return data_corrupt("[queue] a feed line is not '<job> <id before> <type> <unit> <data>': " + excerpt(line, 80));
  }
  return make_event(id, std::string(line.substr(0, first)), line.substr(second + 1));
}

StoredJob parse_job(const std::string& id, const redis::Reply& reply) {
  StoredJob stored;
  if (reply.elements.size() != 5) return stored;
  const Fields fields = fields_of(reply.elements[0]), open = fields_of(reply.elements[2]),
               steps = fields_of(reply.elements[3]);
  const bool has_ended = reply.elements[1].text.empty();
  const std::string left = text_of(fields, "o");
  PackedJob packed = parse_packed_job(has_ended ? std::string_view(left) : std::string_view(reply.elements[1].text));
  stored.same_as = text_of(fields, "same_as");
  JobRecord& record = stored.record;
  record.id = id;
  record.tenant = stored.same_as.empty() ? std::string(packed.tenant) : text_of(fields, "tenant");
  record.spec = has_ended ? text_of(fields, "spec") : reply.elements[4].text;
  record.class_key = packed.class_key;
  record.traceparent = packed.trace;
  record.created_ms = to_int(packed.entry);
  record.ready_ms = packed.ready_ms;
  record.ended_ms = to_int(text_of(fields, "ended"));
  // A producer may have chosen an entry id that is not a time.
  for (const std::int64_t later : {record.ended_ms, record.ready_ms}) {
    if (later > 0 && (record.created_ms <= 0 || record.created_ms > later)) record.created_ms = later;
  }
  record.deadline_ms = packed.deadline_ms;
  record.cost_us = packed.cost_us;
  // Another client may have written any number.
  packed.units = std::min(packed.units, kMaxUnits);
  record.units = std::max(packed.units, 1);
  if (const auto it = fields.find("error"); it != fields.end()) record.error = parse_error(it->second);
  for (int i = 0; i < packed.units; ++i) {
    const std::string number = std::to_string(i);
    const auto still_open = open.find(number);
    const std::string ended = text_of(fields, indexed('u', i));
    UnitRecord unit =
        unit_record(i, parse_packed_unit(still_open != open.end() ? still_open->second : std::string_view(ended)));
    unit.manifest = text_of(fields, indexed('m', i));
    unit.phases_us = parse_phases(text_of(fields, indexed('p', i)));
    if (const auto it = fields.find(indexed('e', i)); it != fields.end()) unit.error = parse_error(it->second);
    if (const auto it = steps.find(number); it != steps.end()) {
      if (const auto data = parse_json(it->second); data && data->is_object()) {
        read_field(data->get_object(), "step", unit.step);
        read_field(data->get_object(), "total", unit.total_steps);
      }
    }
    record.ended_ms = std::max(record.ended_ms, unit.ended_ms);
    if (const auto it = fields.find(indexed('w', i)); it != fields.end()) {
      if (const auto value = parse_json(it->second)) {
        for (std::string& warning : strings_of(*value)) {
          if (std::find(record.warnings.begin(), record.warnings.end(), warning) == record.warnings.end()) {
            record.warnings.push_back(std::move(warning));
          }
        }
      }
    }
    record.unit_records.push_back(std::move(unit));
  }
  record.state = job::state_from_name(text_of(fields, "state")).value_or(furthest(record.unit_records));
  if (!job::is_terminal(record.state)) record.ended_ms = 0;
  return stored;
}

std::string forecast_json(const FleetForecast& forecast) {
  json::object models;
  for (const auto& [name, model] : forecast.models)
    models[name] = {{"backlog_us", model.backlog_us}, {"units", model.units}, {"ready_workers", model.ready_workers}};
  return json::serialize(json::object{{"models", std::move(models)},
                                      {"ready_workers", forecast.ready_workers},
                                      {"ends_ms", json::value_from(forecast.ends_ms)}});
}

Result<FleetForecast> parse_forecast(std::string_view json_text) {
  const auto value = parse_json(json_text);
  const auto* object = value ? value->if_object() : nullptr;
  const auto* models = object ? object->if_contains("models") : nullptr;
  const auto* ends = object ? object->if_contains("ends_ms") : nullptr;
  if (!models || !models->is_object() || !ends || !ends->is_object())
    return data_corrupt("[queue] the forecast must be a JSON object with the objects models and ends_ms");
  FleetForecast out{.ready_workers = number_in(*object, "ready_workers", kMost)};
  for (const auto& [name, one] : models->get_object()) {
    if (const auto* model = one.if_object())
      out.models[name] = {number_in(*model, "backlog_us", kMost), number_in(*model, "units", kMost),
                          number_in(*model, "ready_workers", kMost)};
  }
  for (const auto& [owner, unused] : ends->get_object())
    out.ends_ms[owner] = number_in(ends->get_object(), owner, kMost);
  return out;
}

}  // namespace ditfleet::queue
