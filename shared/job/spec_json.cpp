#include "shared/job/spec_json.h"

#include <algorithm>
#include <type_traits>
#include <variant>
#include <vector>

#include "shared/core/http_url.h"
#include "shared/core/sha256.h"
#include "shared/core/text.h"
#include "shared/job/object_reader.h"

namespace ditfleet::job {
namespace {

using Value = FieldValues::Value;
using Member = std::variant<std::string JobSpec::*, int JobSpec::*, std::optional<int> JobSpec::*,
                            std::optional<std::int64_t> JobSpec::*>;

// The members of JobSpec that hold one text or number.
struct Binding {
  Field field;
  Member member;
};
constexpr Binding kBindings[] = {
    {"model", &JobSpec::model},
    {"preset", &JobSpec::preset},
    {"prompt", &JobSpec::prompt},
    {"n", &JobSpec::n},
    {"seed", &JobSpec::seed},
    {"priority", &JobSpec::priority},
    {"deadline_ms", &JobSpec::deadline_ms},
    {"output_compression", &JobSpec::output_compression},
    {"partial_images", &JobSpec::partial_images},
    {"pause_after_steps", &JobSpec::pause_after_steps},
    {"resume_from", &JobSpec::resume_from},
    {"user", &JobSpec::user},
    {"remixed_from", &JobSpec::remixed_from},
};

constexpr bool has_value_type(const FieldRow& row) {
  return row.type == FieldType::kText || row.type == FieldType::kInteger || row.type == FieldType::kReal ||
         row.type == FieldType::kImage || row.type == FieldType::kCache || row.type == FieldType::kFlag;
}

constexpr const Member* member_of(Field field) {
  for (const Binding& binding : kBindings) {
    if (binding.field == field) return &binding.member;
  }
  return nullptr;
}

constexpr bool every_field_has_a_place() {
  for (const Field field : kFields) {
    const bool bound = member_of(field) != nullptr;
    if (has_value_type(field.row()) && bound != (field.row().use == FieldUse::kJob)) return false;
  }
  return true;
}
static_assert(every_field_has_a_place(), "a job field of the table has no member in kBindings");

void store(JobSpec& spec, Field field, Value value) {
  const Member* member = member_of(field);
  if (!member) return spec.fields.set(field, std::move(value));
  std::visit(
      [&](auto at) {
        using T = std::remove_reference_t<decltype(spec.*at)>;
        if constexpr (std::is_same_v<T, std::string>)
          spec.*at = std::get<std::string>(std::move(value));
        else if constexpr (std::is_same_v<T, std::optional<std::int64_t>>)
          spec.*at = std::get<std::int64_t>(value);
        else
          spec.*at = static_cast<int>(std::get<std::int64_t>(value));
      },
      *member);
}

// Nothing: unset. An empty text counts as unset, but for the prompt.
std::optional<Value> load(const JobSpec& spec, Field field) {
  const Member* member = member_of(field);
  if (!member) {
    const Value* value = spec.fields.find(field);
    return value ? std::optional(*value) : std::nullopt;
  }
  return std::visit(
      [&](auto at) -> std::optional<Value> {
        const auto& value = spec.*at;
        using T = std::remove_cvref_t<decltype(value)>;
        if constexpr (std::is_same_v<T, std::string>)
          return value.empty() && field != Field("prompt") ? std::nullopt : std::optional<Value>(value);
        else if constexpr (std::is_same_v<T, int>)
          return std::int64_t{value};
        else
          return value ? std::optional<Value>(std::int64_t{*value}) : std::nullopt;
      },
      *member);
}

// "1024x768", or "1024*768" → width and height. Nothing if the text has another form or a
// side is not from 1 to kMaxSide.
std::optional<std::pair<std::int64_t, std::int64_t>> parse_size(std::string_view text) {
  const auto x = text.find_first_of("x*");
  if (x == std::string_view::npos) return std::nullopt;
  const auto width = number_of(text.substr(0, x), std::int64_t{1}, kMaxSide);
  const auto height = number_of(text.substr(x + 1), std::int64_t{1}, kMaxSide);
  return width && height ? std::optional(std::pair(*width, *height)) : std::nullopt;
}

void read_size(ObjectReader& reader, const FieldRow& row, JobSpec& spec) {
  const auto text = reader.text(row.name, static_cast<std::size_t>(row.high));
  if (!text || *text == "auto") return;
  if (spec.fields.has("width") || spec.fields.has("height"))
    return reader.fail(row.name, "cannot be combined with width or height; use one or the other");
  const auto size = parse_size(*text);
  if (!size) {
    return reader.fail(row.name, "is '" + *text +
                                     "'; it must be WIDTHxHEIGHT in pixels, as 1024x1024, each from 1 to " +
                                     std::to_string(kMaxSide));
  }
  spec.fields.set("width", size->first);
  spec.fields.set("height", size->second);
}

void read_images(ObjectReader& reader, Field field, JobSpec& spec) {
  auto images = reader.value(field);
  if (!images) return;
  if (spec.fields.has("image")) return reader.fail(field.name(), "cannot be combined with image; use one or the other");
  spec.fields.set("image", std::move(*images));
}

void read_format(ObjectReader& reader, const FieldRow& row, JobSpec& spec) {
  const auto name = reader.text(row.name, kMaxNameBytes);
  if (!name) return;
  spec.output_format = format_from_name(*name);
  if (!spec.output_format) reader.fail(row.name, "is '" + *name + "'; it must be png, jpeg, webp or mp4");
}

void read_webhook(ObjectReader& reader, const FieldRow& row, JobSpec& spec) {
  const std::string name(row.name);
  const json::value* v = reader.find(row.name);
  if (!v || !reader.ok()) return;
  if (v->is_object()) {
    ObjectReader object(v->get_object(), name + ".");
    object.refuse_unknown({"url", "events"});
    spec.webhook.url = object.text("url", kMaxUrlBytes).value_or("");
    const json::value* events = object.find("events");
    if (events && !events->is_array())
      object.fail("events", "is " + std::string(kind_name(*events)) + "; it must be an array of names");
    for (const json::value& event : events && events->is_array() ? events->get_array() : json::array()) {
      const auto* text = event.if_string();
      const std::string one = text ? std::string(*text) : std::string(kind_name(event));
      if (std::ranges::find(kWebhookEvents, one) == std::end(kWebhookEvents)) {
        object.fail("events", "has " + (text ? "'" + one + "'" : one) +
                                  "; an event is job.started, job.progress, job.succeeded, job.failed or job.canceled");
      } else if (!spec.webhook.wants(one) || spec.webhook.events.empty()) {
        spec.webhook.events.push_back(one);
      }
    }
    if (events && events->is_array() && events->get_array().empty())
      object.fail("events", "is empty; name at least one event, or leave it out for those of the job's end");
    if (!object.ok()) return reader.fail(*object.error());
  } else {
    spec.webhook.url = reader.text(row.name, kMaxUrlBytes).value_or("");
    if (!reader.ok()) return;
  }
  if (const auto problem = http_url_problem(spec.webhook.url))
    return reader.fail(name, *problem + "; it must be a URL such as https://app.example/hooks");
  if (!http_url_parts(spec.webhook.url).user.empty())
    return reader.fail(name, "has a user name; receivers check the signature instead");
  if (std::ranges::any_of(spec.webhook.url, [](unsigned char c) { return c <= 0x20 || c == 0x7f; }))
    reader.fail(name, "has a space or control character; encode it with %");
}

void read_field(ObjectReader& reader, Field field, JobSpec& spec) {
  const FieldRow& row = field.row();
  switch (row.type) {
    case FieldType::kSize: return read_size(reader, row, spec);
    case FieldType::kImages: return read_images(reader, field, spec);
    case FieldType::kAdapters: spec.loras = read_loras(reader); return;
    case FieldType::kFormat: return read_format(reader, row, spec);
    case FieldType::kWebhook: return read_webhook(reader, row, spec);
    default:
      if (auto value = reader.value(field)) store(spec, field, std::move(*value));
  }
}

std::string quoted(std::string_view text) { return json::serialize(json::string_view(text.data(), text.size())); }

std::string value_json(Field field, const Value& value) {
  if (field.row().type == FieldType::kFlag) return std::get<std::int64_t>(value) ? "true" : "false";
  if (const auto* text = std::get_if<std::string>(&value)) return quoted(*text);
  if (const auto* real = std::get_if<double>(&value)) {
    if (field.row().type != FieldType::kCache) return number_text(*real);
    return cache_json(*real);
  }
  return std::to_string(std::get<std::int64_t>(value));
}

std::string adapters_json(const std::vector<LoraUse>& loras) {
  std::string list;
  for (const LoraUse& use : loras) {
    list += (list.empty() ? "" : ",") + ("{\"name\":" + quoted(use.name) + ",\"scale\":" + number_text(use.scale) +
                                         (use.sha256.empty() ? "" : ",\"sha256\":" + quoted(use.sha256)));
    if (use.expert != Expert::kBoth) list += ",\"expert\":" + quoted(expert_name(use.expert));
    list += "}";
  }
  return "[" + list + "]";
}

std::string webhook_json(const Webhook& webhook) {
  if (webhook.events.empty()) return quoted(webhook.url);
  std::string events;
  for (const std::string& event : webhook.events) events += (events.empty() ? "" : ",") + quoted(event);
  return "{\"url\":" + quoted(webhook.url) + ",\"events\":[" + events + "]}";
}

// Several images are written as "images".
std::string images_json(const JobSpec& spec, Field field) {
  const auto images = spec.fields.images(field == Field("mask") ? field : "image");
  if (images.empty() || (images.size() > 1) != (field == Field("images"))) return {};
  if (images.size() == 1) return quoted(images[0]);
  std::string list;
  for (const std::string& sha256 : images) list += (list.empty() ? "" : ",") + quoted(sha256);
  return "[" + list + "]";
}

// Empty: the field is left out.
std::string field_json(const JobSpec& spec, Field field) {
  switch (field.row().type) {
    case FieldType::kSize: return {};
    case FieldType::kImage:
    case FieldType::kImages: return images_json(spec, field);
    case FieldType::kAdapters: return spec.loras.empty() ? "" : adapters_json(spec.loras);
    case FieldType::kWebhook: return spec.webhook.url.empty() ? "" : webhook_json(spec.webhook);
    case FieldType::kFormat: return spec.output_format ? quoted(row_of(*spec.output_format).name) : "";
    default: {
      const auto value = load(spec, field);
      return value ? value_json(field, *value) : "";
    }
  }
}

}  // namespace

bool Webhook::wants(std::string_view event) const {
  if (events.empty()) return event != "job.started" && event != "job.progress";
  return std::ranges::find(events, event) != events.end();
}

std::string cache_json(double threshold) {
  if (threshold <= 0) return R"({"mode":"off"})";
  return R"({"mode":"first_block","threshold":)" + number_text(threshold) + "}";
}

std::vector<LoraUse> read_loras(ObjectReader& reader) {
  const FieldRow& row = Field("loras").row();
  std::vector<LoraUse> loras;
  const auto refused = [&](std::string_view at, const std::string& message) {
    reader.fail(at, message);
    return std::vector<LoraUse>();
  };
  const json::value* v = reader.find(row.name);
  if (!v || !reader.ok()) return {};
  if (!v->is_array())
    return refused(row.name, "is " + std::string(kind_name(*v)) + "; it must be an array of {\"name\", \"scale\"}");
  const json::array& list = v->get_array();
  if (list.size() > static_cast<std::size_t>(row.high))
    return refused(row.name, "has " + std::to_string(list.size()) + " entries; at most " + std::to_string(row.high) +
                                 " are allowed");
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::string at = std::string(row.name) + "[" + std::to_string(i) + "]";
    if (!list[i].is_object())
      return refused(at, "is " + std::string(kind_name(list[i])) + "; it must be {\"name\", \"scale\"}");
    ObjectReader entry(list[i].get_object(), at + ".");
    LoraUse use;
    entry.refuse_unknown({"name", "scale", "sha256", "expert"});
    use.name = entry.text("name", kMaxNameBytes).value_or("");
    if (entry.ok() && use.name.empty()) entry.fail("name", "is missing; it must be the name of an adapter");
    use.scale = entry.real("scale", -kMaxLoraScale, kMaxLoraScale).value_or(1.0);
    use.sha256 = entry.text("sha256", kMaxNameBytes).value_or("");
    if (entry.ok() && !use.sha256.empty() && !is_sha256_hex(use.sha256)) {
      entry.fail("sha256", "is '" + use.sha256 + "'; it must be 64 lower-case hexadecimal digits or omitted");
    }
    const std::string expert = entry.text("expert", kMaxNameBytes).value_or("both");
    if (const auto known = find_expert(expert))
      use.expert = *known;
    else
      entry.fail("expert", "is '" + expert + "'; it must be high, low or both");
    if (!entry.ok()) {
      reader.fail(*entry.error());
      return {};
    }
    loras.push_back(std::move(use));
  }
  return loras;
}

Result<JobSpec> parse_spec(std::string_view json_text) {
  if (json_text.size() > kMaxSpecBytes) {
    return Error{Code::kPayloadTooLarge, "the job has " + std::to_string(json_text.size()) + " bytes; at most " +
                                             std::to_string(kMaxSpecBytes) + " are allowed"};
  }
  const Result<json::value> body = parse_json(json_text);
  if (!body) return body.error();
  return parse_spec(*body);
}

Result<JobSpec> parse_spec(const json::value& body) {
  static const std::vector<std::string> kNames = [] {
    std::vector<std::string> names;
    for (const FieldRow& row : kFieldRows) names.emplace_back(row.name);
    return names;
  }();
  if (!body.is_object()) {
    return invalid_argument("the job is " + std::string(kind_name(body)) +
                            "; it must be a JSON object such as {\"prompt\": \"a red circle\"}");
  }
  ObjectReader reader(body.get_object(), "");
  reader.refuse_unknown(kNames);
  if (!reader.find("prompt")) reader.fail("prompt", "is missing; it is required, but may be empty");
  JobSpec spec;
  for (const Field field : kFields) read_field(reader, field, spec);
  if (!reader.ok()) return *reader.error();
  return spec;
}

Result<JobSpec> parse_complete_spec(std::string_view json_text) {
  auto spec = parse_spec(json_text);
  if (!spec) return spec;
  for (const Field field :
       {Field("model"), Field("n"), Field("seed"), Field("output_format"), Field("output_compression")}) {
    if (!field_json(*spec, field).empty()) continue;
    const std::string name(field.name());
    return invalid_argument(name + " is missing; a complete spec must have it", name);
  }
  for (std::size_t i = 0; i < spec->loras.size(); ++i) {
    if (!spec->loras[i].sha256.empty()) continue;
    const std::string name = "loras[" + std::to_string(i) + "].sha256";
    return invalid_argument(name + " is missing; a complete spec must have the digest of each adapter", name);
  }
  return spec;
}

std::string to_json(const JobSpec& spec) {
  std::string out;
  for (const Field field : kFields) {
    const std::string value = field_json(spec, field);
    if (value.empty()) continue;
    out.append(out.empty() ? "{\"" : ",\"").append(field.name()).append("\":").append(value);
  }
  return out + "}";
}

}  // namespace ditfleet::job
