#include "coordinator/gateway/routes/lora_json.h"

#include <algorithm>

#include "shared/core/bytes.h"
#include "shared/core/excerpt.h"
#include "shared/core/ids.h"
#include "shared/core/nearest_name.h"
#include "shared/core/sha256.h"
#include "shared/core/wall_clock.h"
#include "shared/safetensors/adapter_keys.h"

namespace ditfleet::gateway {
namespace {

constexpr std::size_t kMostModels = 64;
constexpr int kMostListed = 1000;

Result<json::object> object_of(std::string_view body) {
  auto value = parse_json(body);
  if (!value) return value.error();
  if (!value->is_object())
    return invalid_argument("the body must be a JSON object such as {\"path\": \"/adapters/style.safetensors\"}");
  return std::move(value->get_object());
}

Result<std::string> text_of(std::string_view name, const json::value& value) {
  if (value.is_string()) return std::string(value.get_string());
  return invalid_argument("'" + std::string(name) + "' must be a string", std::string(name));
}

Result<bool> flag_of(const json::value& value) {
  if (value.is_bool()) return value.get_bool();
  return invalid_argument("'pinned' must be true or false", "pinned");
}

Result<void> check(const LoraRequest& request, const job::Catalogue& catalogue) {
  if (!request.sha256.empty() && !is_sha256_hex(request.sha256)) {
    return invalid_argument(
        "'sha256' is '" + excerpt(request.sha256, 80) + "'; it must be 64 lower-case hexadecimal digits", "sha256");
  }
  if (request.models.size() > kMostModels)
    return invalid_argument("'models' must have at most " + std::to_string(kMostModels) + " entries", "model");
  for (const std::string& model : request.models) {
    if (catalogue.models.contains(model)) continue;
    std::vector<std::string> known;
    for (const auto& [name, unused] : catalogue.models) known.push_back(name);
    return invalid_argument("unknown model '" + excerpt(model, 128) + "'" + suggestion(model, known), "model");
  }
  return {};
}

// Whether its layers have names of the model's family, or that cannot be told.
bool fits_family(const loras::Adapter& adapter, const job::ModelEntry& model) {
  const auto& families = adapter.families;
  return families.empty() || std::find(families.begin(), families.end(), model.kind) != families.end();
}

}  // namespace

Result<loras::Adapter> adapter_of(const std::string& tenant, const std::string& name, const LoraRequest& asked,
                                  const loras::InspectedFile& file, const std::string& path,
                                  const job::Catalogue& catalogue) {
  loras::Adapter made{.tenant = tenant,
                      .name = name,
                      .sha256 = file.sha256,
                      .bytes = file.bytes,
                      .path = path,
                      .models = asked.models,
                      .pinned = asked.pinned.value_or(false),
                      .created_ms = unix_ms(),
                      .tensors = file.content.tensors,
                      .parameters = file.content.parameters,
                      .rank = file.content.rank,
                      .dtype = file.content.dtype,
                      .layers = file.content.layers,
                      .families = {}};
  for (const auto& [family, parts] : catalogue.adapter_parts)
    if (safetensors::have_part(file.content.names, parts)) made.families.push_back(family);
  for (const std::string& model : asked.models)
    if (const auto& entry = catalogue.models.at(model); !fits_family(made, entry))
      return invalid_argument("the adapter's layers have names of " + made.families.front() + ", but model '" + model +
                                  "' is " + entry.kind,
                              "model");
  return made;
}

json::object lora_json(const loras::Adapter& adapter, const job::Catalogue& catalogue) {
  json::array fits;
  for (const auto& [name, model] : catalogue.models)
    if (adapter.serves(name) && fits_family(adapter, model)) fits.emplace_back(name);
  return {{"name", adapter.name},
          {"object", "lora"},
          {"tenant", adapter.tenant},
          {"sha256", adapter.sha256},
          {"bytes", adapter.bytes},
          {"source", adapter.path.empty() ? "upload" : "file"},
          {"path", text_or_null(adapter.path)},
          {"models", json::value_from(adapter.models)},
          {"pinned", adapter.pinned},
          {"created_ms", adapter.created_ms},
          {"tensors", adapter.tensors},
          {"parameters", adapter.parameters},
          {"rank", adapter.rank > 0 ? json::value(adapter.rank) : json::value(nullptr)},
          {"dtype", adapter.dtype},
          {"layers", adapter.layers > 0 ? json::value(adapter.layers) : json::value(nullptr)},
          {"fits", adapter.families.empty() ? json::value(nullptr) : json::value(std::move(fits))}};
}

std::string lora_etag(const loras::Adapter& adapter) {
  return '"' + adapter.sha256 + '.' + sha256_hex(adapter.to_json()).substr(0, 16) + '"';
}

bool matches_lora(std::string_view if_match, const loras::Adapter& adapter) {
  return names_etag(if_match, lora_etag(adapter), true) || names_etag(if_match, '"' + adapter.sha256 + '"', true);
}

Result<LoraRequest> parse_lora_body(std::string_view body, const job::Catalogue& catalogue) {
  static const std::vector<std::string> kKnown = {"path", "sha256", "model", "models", "pinned"};
  const auto object = object_of(body);
  if (!object) return object.error();
  LoraRequest out;
  for (const auto& member : *object) {
    const std::string name(member.key());
    const json::value& value = member.value();
    if (value.is_null() && std::find(kKnown.begin(), kKnown.end(), name) != kKnown.end()) continue;
    if (name == "path" || name == "sha256" || name == "model") {
      auto text = text_of(name, value);
      if (!text) return text.error();
      if (name == "path")
        out.path = std::move(*text);
      else if (name == "sha256")
        out.sha256 = std::move(*text);
      else
        out.models.push_back(std::move(*text));
    } else if (name == "models") {
      if (!value.is_array()) return invalid_argument("'models' must be an array of strings", "models");
      for (const json::value& model : value.get_array()) {
        auto text = text_of(name, model);
        if (!text) return text.error();
        out.models.push_back(std::move(*text));
      }
    } else if (name == "pinned") {
      auto flag = flag_of(value);
      if (!flag) return flag.error();
      out.pinned = *flag;
    } else {
      return invalid_argument("unknown field '" + excerpt(name, 64) + "'" + suggestion(name, kKnown),
                              excerpt(name, 64));
    }
  }
  if (out.path.empty()) {
    return invalid_argument(
        "'path' is missing; it must be a file in one of loras.folders (to upload a file, send its bytes with "
        "'Content-Type: application/octet-stream')",
        "path");
  }
  if (auto good = check(out, catalogue); !good) return good.error();
  return out;
}

Result<LoraRequest> parse_lora_query(const Request& request, const job::Catalogue& catalogue) {
  if (auto known = check_lora_query(request, {"sha256", "model", "pinned"}); !known) return known.error();
  LoraRequest out;
  for (const auto& [name, value] : request.query) {
    if (name == "sha256") {
      out.sha256 = value;
    } else if (name == "model") {
      out.models.push_back(value);
    } else if (name == "pinned") {
      if (value != "true" && value != "false") return invalid_argument("'pinned' must be true or false", "pinned");
      out.pinned = value == "true";
    }
  }
  if (auto good = check(out, catalogue); !good) return good.error();
  return out;
}

Result<bool> parse_lora_patch(std::string_view body) {
  const auto object = object_of(body);
  if (!object) return object.error();
  for (const auto& member : *object) {
    if (member.key() != "pinned") {
      const std::string name = excerpt(std::string_view(member.key().data(), member.key().size()), 64);
      return invalid_argument(
          "'" + name + "' cannot be changed; only 'pinned' can; register the adapter again to change more", name);
    }
  }
  const json::value* pinned = object->if_contains("pinned");
  if (!pinned) return invalid_argument("'pinned' is missing; send {\"pinned\": true} or {\"pinned\": false}", "pinned");
  return flag_of(*pinned);
}

Result<LoraPage> parse_lora_page(const Request& request) {
  if (auto known = check_lora_query(request, {"limit", "cursor"}); !known) return known.error();
  LoraPage page;
  for (const auto& [name, value] : request.query) {
    if (name == "limit") {
      const auto asked = parse_limit(value, kMostListed, "; without limit the list is complete");
      if (!asked) return asked.error();
      page.most = static_cast<std::size_t>(*asked);
    } else if (name == "cursor" && !value.empty()) {
      if (!loras::check_name(value))
        return invalid_argument(
            "'" + excerpt(value, 64) + "' is not a cursor; it must be the next_cursor of the previous page", "cursor");
      page.after = value;
    }
  }
  return page;
}

Result<void> check_lora_query(const Request& request, const std::vector<std::string>& more) {
  std::vector<std::string> known = more;
  known.emplace_back("tenant");
  for (const auto& [name, unused] : request.query) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    return invalid_argument("unknown parameter '" + excerpt(name, 64) + "'" + suggestion(name, known),
                            excerpt(name, 64));
  }
  return {};
}

Result<std::string> lora_tenant(const Request& request, const Caller& caller) {
  const auto named = request.query_value("tenant");
  if (!named || *named == caller.tenant) return caller.tenant;
  if (!is_valid_id(*named))
    return invalid_argument("'" + excerpt(*named, 100) + "' is not a valid tenant name", "tenant");
  if (!caller.sees_all)
    return Error{Code::kPermissionDenied, "only an admin key gives access to another tenant's adapters", "tenant"};
  return *named;
}

}  // namespace ditfleet::gateway
