#include "shared/queue/records.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <unordered_map>

#include "shared/core/excerpt.h"
#include "shared/core/ids.h"
#include "shared/core/json.h"

namespace ditfleet::queue {
namespace {

using Fields = std::unordered_map<std::string_view, std::string_view>;

// [field, value, field, value, …]; views into the reply.
Fields fields_of(const redis::Reply& flat) {
  Fields fields;
  for (std::size_t i = 0; i + 1 < flat.elements.size(); i += 2) {
    fields.emplace(flat.elements[i].text, flat.elements[i + 1].text);
  }
  return fields;
}

std::string text_of(const Fields& fields, std::string_view name) {
  const auto it = fields.find(name);
  return it == fields.end() ? std::string() : std::string(it->second);
}

std::string indexed(char kind, int unit) { return kind + std::to_string(unit); }

std::string value_text(const json::value& value) {
  return value.is_string() ? std::string(value.get_string()) : json::serialize(value);
}

std::map<std::string, std::int64_t> parse_phases(std::string_view text) {
  std::map<std::string, std::int64_t> phases;
  const auto value = text.empty() ? Result<json::value>(json::value()) : parse_json(text);
  if (!value || !value->is_object()) return phases;
  for (const auto& [name, us] : value->get_object()) {
    if (us.is_number()) phases.emplace(name, us.to_number<std::int64_t>());
  }
  return phases;
}

// A JSON array of strings, or none.
std::vector<std::string> parse_strings(const json::value* value) {
  std::vector<std::string> out;
  if (value == nullptr || !value->is_array()) return out;
  for (const json::value& item : value->get_array()) {
    if (item.is_string()) out.emplace_back(item.get_string());
  }
  return out;
}

json::array strings(const std::vector<std::string>& items) {
  json::array out;
  for (const std::string& item : items) out.emplace_back(item);
  return out;
}

}  // namespace

std::int64_t to_int(std::string_view text) {
  std::int64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

PackedUnit parse_packed_unit(std::string_view field) {
  std::array<std::string_view, 10> part{};
  std::size_t count = 0;
  while (count < part.size()) {
    const auto bar = field.find('|');
    part[count++] = field.substr(0, bar);
    if (bar == std::string_view::npos) break;
    field.remove_prefix(bar + 1);
  }
  PackedUnit unit;
  unit.state = part[0];
  if (count < 9) return unit;  // queued: its second part is the intake entry
  unit.nonce = part[1];
  unit.started_ms = to_int(part[2]);
  unit.errors = static_cast<int>(to_int(part[3]));
  unit.crashes = static_cast<int>(to_int(part[4]));
  unit.owner = part[5];
  unit.assigned_ms = to_int(part[6]);
  unit.ended_ms = to_int(part[9]);
  return unit;
}

Plan parse_plan(std::string_view text) {
  std::array<std::int64_t, 5> part{};
  for (std::int64_t& value : part) {
    const auto bar = text.find('|');
    value = to_int(text.substr(0, bar));
    if (bar == std::string_view::npos) break;
    text.remove_prefix(bar + 1);
  }
  return {static_cast<int>(part[0]), part[1], part[2], static_cast<int>(part[3]), part[4]};
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
  job::State best = job::State::kQueued;
  for (const UnitRecord& unit : units) {
    best = std::max(best, job::is_terminal(unit.state) ? job::State::kRunning : unit.state);
  }
  return best;
}

job::State PackedUnit::shown_state() const {
  if (state == "delayed") return job::State::kReady;
  if (state == "canceling") return job::State::kRunning;
  return job::state_from_name(state).value_or(job::State::kQueued);
}

int PackedUnit::attempt() const {
  const bool counted = state == "failed";  // the failed try is among the errors already
  return errors + crashes + (started_ms > 0 && !counted ? 1 : 0);
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
  if (data.size() > 2) {  // "{}" is the usual
    if (const auto value = parse_json(data); value && value->is_object()) {
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

Result<Event> parse_feed_line(std::string_view line) {
  const auto first = line.find(' ');
  const auto second = first == std::string_view::npos ? first : line.find(' ', first + 1);
  if (second == std::string_view::npos) {
    return Error{Code::kDataCorrupt, "[queue] a feed line is not '<id> <job> <type> <unit> <data>': " + excerpt(line, 80)};
  }
  return make_event(std::string(line.substr(0, first)), std::string(line.substr(first + 1, second - first - 1)), line.substr(second + 1));
}

Result<Event> parse_event_entry(const std::string& job, const redis::Reply& entry) {
  if (entry.elements.size() != 2 || entry.elements[1].elements.size() != 2) {
    return Error{Code::kDataCorrupt, "[queue] an event of job " + job + " is not [id, [e, text]]"};
  }
  return make_event(entry.elements[0].text, job, entry.elements[1].elements[1].text);
}

StoredJob parse_job(const std::string& id, const redis::Reply& reply) {
  StoredJob stored;
  if (reply.elements.size() != 5) return stored;
  const Fields fields = fields_of(reply.elements[0]), open = fields_of(reply.elements[1]), steps = fields_of(reply.elements[2]);
  const Plan plan = parse_plan(text_of(fields, "plan"));
  stored.same_as = text_of(fields, "same_as");
  JobRecord& record = stored.record;
  record.id = id;
  record.tenant = text_of(fields, "tenant");
  record.spec = fields.count("spec") ? text_of(fields, "spec") : reply.elements[3].text;
  record.class_key = text_of(fields, "class");
  record.traceparent = text_of(fields, "trace");
  record.created_ms = to_int(text_of(fields, "in"));
  record.ready_ms = plan.ready_ms;
  record.ended_ms = to_int(text_of(fields, "ended"));
  record.deadline_ms = plan.units > 0 ? plan.deadline_ms : to_int(reply.elements[4].text);
  record.cost_us = plan.cost_us;
  record.units = std::max(plan.units, 1);
  if (const auto it = fields.find("error"); it != fields.end()) record.error = parse_error(it->second);
  for (int i = 0; i < plan.units; ++i) {
    const std::string number = std::to_string(i);
    const auto still_open = open.find(number);
    const std::string left = text_of(fields, indexed('u', i));
    UnitRecord unit = unit_record(i, parse_packed_unit(still_open != open.end() ? still_open->second : std::string_view(left)));
    unit.manifest = text_of(fields, indexed('m', i));
    unit.phases_us = parse_phases(text_of(fields, indexed('p', i)));
    if (const auto it = fields.find(indexed('e', i)); it != fields.end()) unit.error = parse_error(it->second);
    if (const auto it = steps.find(number); it != steps.end()) {
      const Event step = make_event("0-0", id, "step 0 " + std::string(it->second));
      if (const auto f = step.fields.find("step"); f != step.fields.end()) unit.step = static_cast<int>(to_int(f->second));
      if (const auto f = step.fields.find("total"); f != step.fields.end()) unit.total_steps = static_cast<int>(to_int(f->second));
    }
    record.ended_ms = std::max(record.ended_ms, unit.ended_ms);
    if (const auto it = fields.find(indexed('w', i)); it != fields.end()) {
      if (const auto value = parse_json(it->second)) {
        for (std::string& warning : parse_strings(&*value)) {
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

namespace {

// W3C trace context, version 00: what is not one is ignored, as that specification wants.
bool is_traceparent(std::string_view text) {
  if (text.size() != 55) return false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool dash = i == 2 || i == 35 || i == 52;
    if (dash ? c != '-' : !((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'))) return false;
  }
  return true;
}

// Why a plain XADD cannot be taken; empty: it can.
std::string problem_of(const redis::Reply& flat, const Fields& fields) {
  constexpr std::string_view kTakes = "it takes spec, id, tenant, idempotency_key, traceparent, deadline_ms";
  constexpr std::string_view kTaken[] = {"spec", "id", "tenant", "idempotency_key", "traceparent", "deadline_ms"};
  for (const auto& [name, value] : fields) {
    if (std::find(std::begin(kTaken), std::end(kTaken), name) == std::end(kTaken)) {
      return "[queue] the entry has the unknown field '" + excerpt(name, 64) + "'; " + std::string(kTakes);
    }
  }
  if (flat.elements.size() != 2 * fields.size()) return "[queue] the entry has a field twice; each may be there once";
  const auto spec = fields.find("spec");
  if (spec == fields.end()) return "[queue] the entry has no field 'spec' with the job's JSON; " + std::string(kTakes);
  if (spec->second.size() > kMostSpecBytes) {
    return "[queue] the entry's spec has " + std::to_string(spec->second.size()) + " bytes; at most " + std::to_string(kMostSpecBytes) + " are taken";
  }
  if (const auto tenant = fields.find("tenant"); tenant != fields.end() && !tenant->second.empty() && !is_valid_id(std::string(tenant->second))) {
    return "[queue] the entry's tenant '" + excerpt(tenant->second, 64) + "' is not 1 to 64 characters of A-Z a-z 0-9 . _ -";
  }
  if (const auto id = fields.find("id"); id != fields.end() && !is_valid_id(std::string(id->second))) {
    return "[queue] the entry's id '" + excerpt(id->second, 64) + "' is not 1 to 64 characters of A-Z a-z 0-9 . _ -";
  }
  if (const auto key = fields.find("idempotency_key"); key != fields.end() && key->second.size() > 255) {
    return "[queue] the entry's idempotency_key is longer than 255 bytes";
  }
  if (const auto at = fields.find("deadline_ms"); at != fields.end()) {
    const bool number = !at->second.empty() && at->second.size() <= 15 && at->second.find_first_not_of("0123456789") == std::string_view::npos;
    if (!number) return "[queue] the entry's deadline_ms '" + excerpt(at->second, 64) + "' is not a time in milliseconds since the epoch, such as 1800000000000 (0: none)";
  }
  return {};
}

}  // namespace

IntakeEntry parse_intake(const redis::Reply& entry) {
  IntakeEntry out;
  if (entry.elements.size() != 2) {
    out.problem = "[queue] an intake entry is not [id, fields]";
    return out;
  }
  out.entry_id = entry.elements[0].text;
  out.created_ms = to_int(out.entry_id);
  const Fields fields = fields_of(entry.elements[1]);
  out.spec = text_of(fields, "spec");
  out.traceparent = text_of(fields, "traceparent");
  if (!is_traceparent(out.traceparent)) out.traceparent.clear();
  if (fields.count("submitted")) {  // of ditfleet_v1_submit: "<id> <tenant> <deadline>"
    std::string_view rest = fields.at("submitted");
    std::array<std::string_view, 3> word{};
    for (std::string_view& w : word) {
      const auto space = rest.find(' ');
      w = rest.substr(0, space);
      rest.remove_prefix(space == std::string_view::npos ? rest.size() : space + 1);
    }
    if (is_valid_id(word[0]) && is_valid_id(word[1])) {  // else it is not, and the field is unknown
      out.id = word[0];
      out.tenant = word[1];
      out.deadline_ms = to_int(word[2]);
      return out;
    }
  }
  out.raw = true;
  out.problem = problem_of(entry.elements[1], fields);
  out.deadline_ms = to_int(text_of(fields, "deadline_ms"));
  out.idempotency_key = text_of(fields, "idempotency_key");
  const std::string id = text_of(fields, "id"), tenant = text_of(fields, "tenant");
  out.id = is_valid_id(id) ? id : "x-" + out.entry_id;
  if (is_valid_id(tenant)) out.tenant = tenant;
  if (out.spec.size() > kMostSpecBytes) out.spec.resize(1024);  // to be shown with the rejection
  return out;
}

Result<void> parse_mailbox(const redis::Reply& entry, std::vector<MailboxEntry>& out) {
  if (entry.elements.size() != 2) return Error{Code::kDataCorrupt, "[queue] a mailbox entry is not [id, fields]"};
  const std::string& entry_id = entry.elements[0].text;
  const auto& flat = entry.elements[1].elements;
  for (std::size_t i = 0; i + 1 < flat.size(); i += 2) {
    const std::string& value = flat[i + 1].text;
    const char field = flat[i].text.empty() ? ' ' : flat[i].text[0];
    if (field == 'm') {  // "<kind> <job> <unit> <nonce>", of an assignment also " <attempt> <deadline> <tenant>"
      std::array<std::string_view, 7> word{};
      std::string_view rest = value;
      for (std::string_view& w : word) {
        const auto space = rest.find(' ');
        w = rest.substr(0, space);
        rest.remove_prefix(space == std::string_view::npos ? rest.size() : space + 1);
      }
      if (word[1].empty()) return Error{Code::kDataCorrupt, "[queue] the mailbox entry " + entry_id + " names no job"};
      MailboxEntry& message = out.emplace_back();
      message.entry_id = entry_id;
      message.kind = word[0] == "assign"   ? MailboxEntry::Kind::kAssign
                     : word[0] == "revoke" ? MailboxEntry::Kind::kRevoke
                                           : MailboxEntry::Kind::kCancel;
      message.ref = {std::string(word[1]), static_cast<int>(to_int(word[2]))};
      message.nonce = word[3];
      message.attempt = static_cast<int>(to_int(word[4]));
      message.deadline_ms = to_int(word[5]);
      message.tenant = word[6];
      continue;
    }
    if (i == 0) return Error{Code::kDataCorrupt, "[queue] the mailbox entry " + entry_id + " does not begin with its field m"};
    switch (field) {  // of the message before
      case 's': out.back().spec = value; break;
      case 'c': out.back().class_key = value; break;
      case 'b': out.back().batch_key = value; break;
      case 'p': out.back().traceparent = value; break;
      default: break;
    }
  }
  return {};
}

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
                                      {"capacity", info.capacity},
                                      {"started_ms", info.started_ms},
                                      {"version", info.version},
                                      {"units", units}});
}

Result<WorkerInfo> parse_worker(std::string_view json_text) {
  const auto value = parse_json(json_text);
  if (!value) return value.error();
  if (!value->is_object()) return Error{Code::kDataCorrupt, "[queue] a worker's record is not a JSON object"};
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
  info.capacity = static_cast<int>(number("capacity"));
  info.started_ms = number("started_ms");
  info.version = text("version");
  if (const json::value* units = object.if_contains("units"); units != nullptr && units->is_array()) {
    for (const json::value& unit : units->get_array()) {
      if (unit.is_array() && unit.get_array().size() == 2 && unit.get_array()[0].is_string() && unit.get_array()[1].is_int64()) {
        info.units.push_back({std::string(unit.get_array()[0].get_string()), static_cast<int>(unit.get_array()[1].get_int64())});
      }
    }
  }
  return info;
}

}  // namespace ditfleet::queue
