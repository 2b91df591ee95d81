#include <algorithm>

#include "shared/core/json.h"
#include "shared/core/sha256.h"
#include "shared/results/checkpoint.h"
#include "shared/results/store.h"

namespace ditfleet::results {
namespace {

Error corrupt(const std::string& what) { return data_corrupt("a result's manifest " + what); }

Result<std::string> text_field(const json::object& object, const char* name) {
  const json::value* value = object.if_contains(name);
  if (!value || !value->is_string()) return corrupt(std::string("has no text field '") + name + "'");
  return std::string(value->get_string());
}

Result<std::int64_t> number_field(const json::object& object, const char* name) {
  const json::value* value = object.if_contains(name);
  if (!value || !value->is_int64()) return corrupt(std::string("has no integer field '") + name + "'");
  return value->get_int64();
}

// In JSON only above 0.
constexpr std::pair<const char*, std::int64_t Manifest::*> kCounts[] = {
    {"gpu_us", &Manifest::gpu_us}, {"first_step_us", &Manifest::first_step_us}, {"compiled", &Manifest::compiled}};

constexpr std::int64_t kMaxBytes = std::int64_t{4} << 30;

}  // namespace

std::string Manifest::to_json() const {
  json::object object{{"backend", backend}, {"key", key},       {"media_type", media_type},
                      {"bytes", bytes},     {"sha256", sha256}, {"width", width},
                      {"height", height},   {"seed", seed},     {"nonce", nonce}};
  if (skipped_steps > 0) object["skipped_steps"] = skipped_steps;
  for (const auto& [name, member] : kCounts)
    if (this->*member > 0) object[name] = this->*member;
  if (auto parsed = receipt.empty() ? Result<json::value>(nullptr) : parse_json(receipt); parsed && parsed->is_object())
    object["receipt"] = std::move(*parsed);
  return json::serialize(object);
}

Result<Manifest> Manifest::parse(std::string_view json_text) {
  auto parsed = parse_json(json_text);
  if (!parsed) return corrupt("is not JSON: " + parsed.error().message);
  if (!parsed->is_object()) return corrupt("is not a JSON object");
  const json::object& object = parsed->get_object();
  Manifest manifest;
  for (auto [name, member] : {std::pair{"backend", &Manifest::backend},
                              {"key", &Manifest::key},
                              {"media_type", &Manifest::media_type},
                              {"sha256", &Manifest::sha256},
                              {"nonce", &Manifest::nonce}}) {
    auto text = text_field(object, name);
    if (!text) return text.error();
    manifest.*member = std::move(*text);
  }
  for (auto [name, member] : {std::pair{"bytes", &Manifest::bytes}, {"seed", &Manifest::seed}}) {
    auto number = number_field(object, name);
    if (!number) return number.error();
    manifest.*member = *number;
  }
  for (auto [name, member] : {std::pair{"width", &Manifest::width},
                              {"height", &Manifest::height},
                              {"skipped_steps", &Manifest::skipped_steps}}) {
    if (member == &Manifest::skipped_steps && !object.contains(name)) continue;
    auto number = number_field(object, name);
    if (!number) return number.error();
    if (*number < 0 || *number > 1'000'000) return corrupt(std::string("has an impossible ") + name);
    manifest.*member = static_cast<int>(*number);
  }
  for (const auto& [name, member] : kCounts) {
    if (!object.contains(name)) continue;
    auto number = number_field(object, name);
    if (!number) return number.error();
    manifest.*member = std::max<std::int64_t>(0, *number);
  }
  if (const json::value* receipt = object.if_contains("receipt"); receipt && receipt->is_object())
    manifest.receipt = json::serialize(*receipt);
  if (manifest.bytes < 0 || manifest.bytes > kMaxBytes) return corrupt("has an impossible size");
  if (!is_sha256_hex(manifest.sha256)) return corrupt("has a sha256 that is not 64 hexadecimal digits");
  return manifest;
}

std::string Checkpoint::to_json() const {
  auto stored = parse_json(manifest.to_json()), made_by = parse_json(of);
  return json::serialize(json::object{{"step", step},
                                      {"manifest", stored ? std::move(*stored) : json::value(nullptr)},
                                      {"of", made_by ? std::move(*made_by) : json::value(nullptr)}});
}

Result<Checkpoint> Checkpoint::parse(std::string_view json_text) {
  const auto record = parse_json(json_text);
  const json::object* fields = record ? record->if_object() : nullptr;
  const json::value* step = fields ? fields->if_contains("step") : nullptr;
  if (!step || !step->is_int64() || !fields->contains("manifest") || !fields->contains("of"))
    return data_corrupt("a checkpoint's record has no step, manifest and of");
  auto manifest = Manifest::parse(json::serialize(fields->at("manifest")));
  if (!manifest) return manifest.error();
  return Checkpoint{static_cast<int>(step->get_int64()), std::move(*manifest), json::serialize(fields->at("of"))};
}

}  // namespace ditfleet::results
