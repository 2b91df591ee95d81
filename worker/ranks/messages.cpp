#include "worker/ranks/messages.h"

#include <sys/socket.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <optional>
#include <variant>

#include "shared/core/fd_io.h"

namespace ditfleet::worker {
namespace {

struct Lengths {
  std::uint64_t head = 0, bytes = 0;
};

// Unlike write(2), raises no signal if the other end is closed.
bool send_all(int socket, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno != EINTR) return false;
    if (sent > 0) bytes.remove_prefix(static_cast<std::size_t>(sent));
  }
  return true;
}

Error gone() { return unavailable("[ranks] the other process has ended"); }

// Boost.JSON rounds decimal numbers, so they are sent as their bits.
std::int64_t bits_of(double number) { return std::bit_cast<std::int64_t>(number); }
double number_of(const json::object& object, std::string_view name) {
  std::int64_t bits = 0;
  read_field(object, name, bits);
  return std::bit_cast<double>(bits);
}

json::array json_of(const std::vector<pipeline::LoraRequest>& loras) {
  json::array made;
  for (const auto& lora : loras)
    made.push_back({{"path", lora.path},
                    {"scale", bits_of(lora.scale)},
                    {"id", lora.id},
                    {"expert", job::expert_name(lora.expert)},
                    {"name", lora.name}});
  return made;
}

std::string text_of(const json::object& object, std::string_view name) {
  std::string text;
  read_field(object, name, text);
  return text;
}

}  // namespace

Result<void> send_message(int socket, const Message& message) {
  const std::string head = json::serialize(message.head);
  const Lengths lengths{head.size(), message.bytes.size()};
  std::string start(sizeof lengths, '\0');
  std::memcpy(start.data(), &lengths, sizeof lengths);
  if (!send_all(socket, start + head) || !send_all(socket, message.bytes)) return gone();
  return {};
}

Result<Message> receive_message(int socket) {
  const auto read = [&](std::uint64_t size) -> std::optional<std::string> {
    auto got = read_up_to(socket, size);
    return got && got->size() == size ? std::move(got) : std::nullopt;
  };
  Lengths lengths;
  const auto start = read(sizeof lengths);
  if (!start) return gone();
  std::memcpy(&lengths, start->data(), sizeof lengths);
  const auto head = read(lengths.head);
  auto bytes = read(lengths.bytes);
  if (!head || !bytes) return gone();
  auto parsed = parse_json(*head);
  if (!parsed) return parsed.error();
  return Message{std::move(parsed->as_object()), std::move(*bytes)};
}

Message message_of(const pipeline::GenerationRequest& request) {
  json::object fields;
  for (const job::Field field : job::kFields) {
    if (field.row().use != job::FieldUse::kGeneration) continue;
    if (const auto* value = request.fields.find(field))
      fields.emplace(field.name(),
                     json::array{value->index(), std::visit(
                                                     [](const auto& one) -> json::value {
                                                       if constexpr (std::is_same_v<decltype(one), const double&>)
                                                         return bits_of(one);
                                                       else
                                                         return json::value_from(one);
                                                     },
                                                     *value)});
  }
  Message made{{{"fields", std::move(fields)},
                {"seed", request.seed},
                {"loras", json_of(request.loras)},
                {"prompt_bytes", request.prompt.size()}},
               request.prompt};
  if (const auto& image = request.image) {
    made.head["image"] = {{"width", image->width},
                          {"height", image->height},
                          {"frames", image->frames},
                          {"frame_rate", bits_of(image->frame_rate)}};
    made.bytes.append(reinterpret_cast<const char*>(image->rgb.data()), image->rgb.size());
  }
  return made;
}

Result<pipeline::GenerationRequest> request_of(const Message& message) {
  pipeline::GenerationRequest request;
  std::size_t prompt_bytes = 0;
  read_field(message.head, "prompt_bytes", prompt_bytes);
  read_field(message.head, "seed", request.seed);
  request.prompt = message.bytes.substr(0, prompt_bytes);
  request.loras = loras_of(message);
  for (const auto& [name, value] : message.head.at("fields").as_object()) {
    const auto field = job::find_field(name);
    if (!field) return invalid_argument("[ranks] unknown field " + std::string(name));
    const json::value& given = value.as_array().at(1);
    switch (value.as_array().at(0).to_number<int>()) {
      case 0: request.fields.set(*field, given.to_number<std::int64_t>()); break;
      case 1: request.fields.set(*field, std::bit_cast<double>(given.to_number<std::int64_t>())); break;
      default: request.fields.set(*field, std::string(given.as_string()));
    }
  }
  if (const auto* image = message.head.if_contains("image")) {
    pipeline::Media media;
    read_field(image->as_object(), "width", media.width);
    read_field(image->as_object(), "height", media.height);
    read_field(image->as_object(), "frames", media.frames);
    media.frame_rate = number_of(image->as_object(), "frame_rate");
    media.rgb.assign(message.bytes.begin() + static_cast<std::ptrdiff_t>(prompt_bytes), message.bytes.end());
    request.image = std::make_shared<const pipeline::Media>(std::move(media));
  }
  return request;
}

Message message_of(const pipeline::ModelSource& source) {
  json::object quantize;
  for (const auto& [component, format] : source.quantize) quantize.emplace(component, format);
  return {{{"name", source.name},
           {"dir", source.dir},
           {"transformer", source.transformer},
           {"quantize", std::move(quantize)},
           {"vae_dtype", source.vae_dtype}},
          {}};
}

pipeline::ModelSource source_of(const Message& message) {
  pipeline::ModelSource source{text_of(message.head, "name"), text_of(message.head, "dir"),
                               text_of(message.head, "transformer")};
  source.vae_dtype = text_of(message.head, "vae_dtype");
  for (const auto& [component, format] : message.head.at("quantize").as_object())
    source.quantize.emplace(component, format.as_string());
  return source;
}

Message message_of(const std::vector<pipeline::LoraRequest>& loras, const pipeline::AdapterDrops& drops) {
  return {{{"loras", json_of(loras)},
           {"from_host", json::value_from(drops.from_host)},
           {"from_slots", json::value_from(drops.from_slots)}},
          {}};
}

std::vector<pipeline::LoraRequest> loras_of(const Message& message) {
  std::vector<pipeline::LoraRequest> loras;
  for (const json::value& one : message.head.at("loras").as_array()) {
    const json::object& lora = one.as_object();
    loras.push_back({text_of(lora, "path"), number_of(lora, "scale"), text_of(lora, "id"),
                     job::find_expert(text_of(lora, "expert")).value_or(job::Expert::kBoth), text_of(lora, "name")});
  }
  return loras;
}

pipeline::AdapterDrops drops_of(const Message& message) {
  pipeline::AdapterDrops drops;
  read_field(message.head, "from_host", drops.from_host);
  read_field(message.head, "from_slots", drops.from_slots);
  return drops;
}

void put_result(json::object& head, const Result<void>& result) {
  if (result) return;
  head["code"] = static_cast<int>(result.error().code);
  head["message"] = result.error().message;
  head["param"] = result.error().param;
  head["kind"] = result.error().kind;
}

Result<void> result_of(const json::object& head) {
  if (!head.contains("code")) return {};
  int code = 0;
  read_field(head, "code", code);
  return Error{static_cast<Code>(code), text_of(head, "message"), text_of(head, "param"), Source::kHere,
               text_of(head, "kind")};
}

}  // namespace ditfleet::worker
