#include "shared/queue/records.h"

#include <algorithm>

#include "shared/core/excerpt.h"
#include "shared/core/ids.h"
#include "shared/job/validate.h"
#include "shared/queue/library.h"
#include "shared/queue/reply_fields.h"
#include "shared/telemetry/metrics.h"

namespace ditfleet::queue {
namespace {

constexpr std::string_view kTakes = "the fields are spec, id, tenant, idempotency_key, traceparent, deadline_ms";
// Redis adds no entry after it.
constexpr std::string_view kLastId = "18446744073709551615-18446744073709551615";

// Why a plain XADD cannot be accepted; empty: it can.
std::string problem_of(const redis::Reply& flat, const Fields& fields) {
  constexpr std::string_view kTaken[] = {"spec", "id", "tenant", "idempotency_key", "traceparent", "deadline_ms"};
  for (const auto& [name, value] : fields) {
    if (std::find(std::begin(kTaken), std::end(kTaken), name) == std::end(kTaken)) {
      return "[queue] the entry has the unknown field '" + excerpt(name, 64) + "'; " + std::string(kTakes);
    }
  }
  if (flat.elements.size() != 2 * fields.size())
    return "[queue] the entry has a duplicate field; each field may occur only once";
  const auto spec = fields.find("spec");
  if (spec == fields.end()) return "[queue] the entry has no field 'spec' with the job's JSON; " + std::string(kTakes);
  if (spec->second.size() > job::kMaxSpecBytes) {
    return "[queue] the entry's spec has " + std::to_string(spec->second.size()) + " bytes; at most " +
           std::to_string(job::kMaxSpecBytes) + " are taken";
  }
  if (const auto tenant = fields.find("tenant");
      tenant != fields.end() && !tenant->second.empty() && !is_valid_id(std::string(tenant->second))) {
    return "[queue] the entry's tenant '" + excerpt(tenant->second, 64) +
           "' is not 1 to 64 characters of A-Z a-z 0-9 . _ -";
  }
  if (const auto id = fields.find("id"); id != fields.end() && !is_valid_id(std::string(id->second))) {
    return "[queue] the entry's id '" + excerpt(id->second, 64) + "' is not 1 to 64 characters of A-Z a-z 0-9 . _ -";
  }
  if (const auto key = fields.find("idempotency_key"); key != fields.end() && key->second.size() > 255) {
    return "[queue] the entry's idempotency_key is longer than 255 bytes";
  }
  if (const auto at = fields.find("deadline_ms"); at != fields.end()) {
    const bool number = !at->second.empty() && at->second.size() <= 15 &&
                        at->second.find_first_not_of("0123456789") == std::string_view::npos;
    if (!number)
      return "[queue] the entry's deadline_ms '" + excerpt(at->second, 64) +
             "' is not a time in milliseconds since the epoch, such as 1800000000000 (0: none)";
  }
  return {};
}

// Reads "<id> <tenant> <deadline>", which `submit` writes. False: the text has another form.
bool read_submitted(std::string_view text, IntakeEntry& out) {
  const auto word = first_parts<3>(text, ' ');
  if (!is_valid_id(word[0]) || !is_valid_id(word[1])) return false;
  out.id = word[0];
  out.tenant = word[1];
  out.deadline_ms = to_int(word[2]);
  return true;
}

// An invalid one is ignored, as W3C's specification says. So is one of a later version, which may hold anything.
std::string checked_traceparent(std::string_view text) {
  return std::string(text.size() == 55 && telemetry::is_valid_traceparent(text) ? text : std::string_view());
}

}  // namespace

Error imitation_of_submit() {
  return invalid_argument("[queue] the entry has the field 'submitted', which only the Function " +
                          std::string(kLibraryName) + "_submit writes; " + std::string(kTakes));
}

bool is_last_entry(std::string_view entry_id) { return entry_id == kLastId; }

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
  out.traceparent = checked_traceparent(text_of(fields, "traceparent"));
  // Otherwise it is a plain entry with an unknown field.
  if (const auto submitted = fields.find("submitted");
      submitted != fields.end() && read_submitted(submitted->second, out))
    return out;
  out.raw = true;
  out.problem = out.entry_id == kLastId ? "[queue] the entry has the largest possible id; use * as the id"
                                        : problem_of(entry.elements[1], fields);
  out.deadline_ms = to_int(text_of(fields, "deadline_ms"));
  out.idempotency_key = text_of(fields, "idempotency_key");
  const std::string id = text_of(fields, "id"), tenant = text_of(fields, "tenant");
  out.id = is_valid_id(id) ? id : "x-" + out.entry_id;
  if (is_valid_id(tenant)) out.tenant = tenant;
  if (out.spec.size() > job::kMaxSpecBytes) out.spec.resize(1024);  // shown with the rejection
  return out;
}

Result<void> parse_mailbox(const redis::Reply& entry, std::vector<MailboxEntry>& out) {
  if (entry.elements.size() != 2) return data_corrupt("[queue] a mailbox entry is not [id, fields]");
  const std::string& entry_id = entry.elements[0].text;
  const auto& flat = entry.elements[1].elements;
  for (std::size_t i = 0; i + 1 < flat.size(); i += 2) {
    const std::string& value = flat[i + 1].text;
    const char field = flat[i].text.empty() ? ' ' : flat[i].text[0];
    if (field == 'p') {  // "<job> <unit> <nonce>": pause; not a kind of m, because older workers cancel at unknown ones
      const auto word = first_parts<3>(value, ' ');
      out.push_back({.entry_id = entry_id,
                     .kind = MailboxEntry::Kind::kPause,
                     .ref = {std::string(word[0]), static_cast<int>(to_int(word[1]))},
                     .nonce = std::string(word[2])});
      continue;
    }
    if (field == 'm') {  // "<kind> <job> <unit> <nonce>", of an assignment also " <attempt>"; or "desired"
      const auto word = first_parts<5>(value, ' ');
      if (word[0] == "desired") {
        out.push_back({.entry_id = entry_id, .kind = MailboxEntry::Kind::kDesired});
        continue;
      }
      if (word[1].empty()) return data_corrupt("[queue] the mailbox entry " + entry_id + " contains no job");
      MailboxEntry& message = out.emplace_back();
      message.entry_id = entry_id;
      message.kind = word[0] == "assign"   ? MailboxEntry::Kind::kAssign
                     : word[0] == "revoke" ? MailboxEntry::Kind::kRevoke
                                           : MailboxEntry::Kind::kCancel;
      message.ref = {std::string(word[1]), static_cast<int>(to_int(word[2]))};
      message.nonce = word[3];
      message.attempt = static_cast<int>(to_int(word[4]));
      continue;
    }
    if (i == 0)
      return data_corrupt("[queue] the mailbox entry " + entry_id + " does not start with the field m or pause");
    if (field == 's') out.back().spec = value;  // of the message before
    if (field == 'r') {                         // the data of the event `assigned`
      const auto data = parse_json(value);
      const json::value* reason = data && data->is_object() ? data->as_object().if_contains("reason") : nullptr;
      if (reason && reason->is_string()) out.back().reason = reason->as_string();
    }
    if (field == 'd') {
      std::string_view drops = value;
      out.back().drop_from_host = split_list(take_part(drops, '|'));
      out.back().drop_from_slots = split_list(drops);
    }
    if (field == 'o') {
      const PackedJob job = parse_packed_job(value);
      out.back().tenant = job.tenant;
      out.back().traceparent = job.trace;
      out.back().class_key = job.class_key;
      out.back().deadline_ms = job.deadline_ms;
      // Entry ids begin with Redis' milliseconds.
      out.back().created_ms = to_int(job.entry.substr(0, job.entry.find('-')));
      out.back().assigned_ms = to_int(std::string_view(entry_id).substr(0, entry_id.find('-')));
    }
  }
  return {};
}

}  // namespace ditfleet::queue
