// The registry of LoRA adapters over HTTP: put (by upload or by path), list, show, pin, remove.
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "coordinator/gateway/api.h"
#include "coordinator/gateway/error_body.h"
#include "coordinator/gateway/lora_json.h"
#include "shared/core/excerpt.h"
#include "shared/loras/content.h"
#include "shared/loras/upload.h"

namespace ditfleet::gateway {
namespace {

using namespace std::chrono_literals;
using loras::Adapter;

constexpr auto kCall = 5s;  // of one command; a chunk of an upload among them

Deadline soon() { return Deadline::after(kCall); }

std::int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Errors of Redis in the words of the other routes.
Error told(const Error& error) {
  if (error.code == Code::kPermissionDenied) {
    return unavailable("the registry's Redis does not let this service in: redis.url needs a user and password with the rights for it [" + error.message + "]");
  }
  if (error.code != Code::kUnavailable && error.code != Code::kDeadlineExceeded) return error;
  return unavailable("the registry's Redis does not answer; nothing was changed, or all of it: try again shortly [" + error.message + "]");
}

Response no_registry() { return error_response(unavailable("this gateway has no registry of adapters")); }

Error no_such_lora(const std::string& name) {
  return {Code::kNotFound, "there is no adapter '" + excerpt(name, 128) + "'; GET /v1/loras lists those there are", {}};
}

bool is_bytes(std::string_view type) { return type.empty() || type == "application/octet-stream" || type == "application/x-safetensors"; }

Error digest_differs(const std::string& expected, const std::string& found) {
  return invalid_argument("the bytes have the digest " + found + ", not " + expected + "; were they damaged on their way?", "sha256");
}

Adapter adapter_of(const std::string& tenant, const std::string& name, const LoraRequest& asked, const loras::Content& content) {
  Adapter out;
  out.tenant = tenant;
  out.name = name;
  out.models = asked.models;
  out.pinned = asked.pinned.value_or(false);
  out.created_ms = now_ms();
  out.tensors = content.tensors;
  out.parameters = content.parameters;
  out.rank = content.rank;
  out.dtype = content.dtype;
  return out;
}

Result<std::pair<std::string, loras::InspectedFile>> look_at(const std::string& path, const std::string& folders) {
  auto real = loras::resolve_path(path, folders);
  if (!real) return real.error();
  auto file = loras::inspect_file(*real);
  if (!file) return file.error();
  return std::pair(std::move(*real), std::move(*file));
}

}  // namespace

bool Api::wants_stream(const Request& head) {
  const RouteMatch match = match_route(head);
  if (match.route == nullptr || match.route->id != RouteId::kPutLora) return false;
  const std::string type = media_type_of(head.header("Content-Type"));
  return type != "application/json" && !type.ends_with("+json");
}

asio::awaitable<Result<void>> Api::refresh_loras() {
  if (!options_.lora_directory) co_return Result<void>();
  auto fresh = co_await options_.lora_directory->refresh(soon());
  if (!fresh) co_return told(fresh.error());
  co_return Result<void>();
}

Result<std::string> Api::resolve_lora(const std::string& tenant, const job::LoraUse& use, const job::ModelEntry& model) const {
  if (options_.lora_directory) return options_.lora_directory->resolve(tenant, use.name, use.sha256, model.name);
  return invalid_argument("there is no LoRA adapter '" + use.name + "': this gateway has no registry of them", "name");
}

asio::awaitable<Response> Api::list_loras(CallPtr call) {
  if (!options_.lora_directory) co_return no_registry();
  for (const auto& [name, value] : call->request.query) {
    if (name != "tenant") co_return error_response(invalid_argument("'" + name + "' is not a parameter of this list; it takes tenant", name));
  }
  const auto tenant = lora_tenant(call->request, call->caller);
  if (!tenant) co_return error_response(tenant.error());
  auto fresh = co_await refresh_loras();
  if (!fresh) co_return error_response(fresh.error());
  json::array list;
  for (const Adapter& adapter : options_.lora_directory->list(*tenant)) list.push_back(lora_json(adapter));
  co_return json_response(200, json::serialize(json::object{{"object", "list"}, {"loras", std::move(list)}})).with("Cache-Control", "no-store");
}

asio::awaitable<Response> Api::get_lora(CallPtr call) {
  if (!options_.loras) co_return no_registry();
  const std::string& name = call->match.params[0];
  const auto tenant = lora_tenant(call->request, call->caller);
  if (!tenant) co_return error_response(tenant.error());
  if (!loras::check_name(name)) co_return error_response(no_such_lora(name));
  auto found = co_await options_.loras->find(*tenant, name, soon());
  if (!found) co_return error_response(told(found.error()));
  if (!*found) co_return error_response(no_such_lora(name));
  co_return json_response(200, json::serialize(lora_json(**found))).with("ETag", "\"" + (*found)->sha256 + "\"").with("Cache-Control", "no-store");
}

asio::awaitable<Response> Api::remove_lora(CallPtr call) {
  if (!options_.loras) co_return no_registry();
  const std::string& name = call->match.params[0];
  const auto tenant = lora_tenant(call->request, call->caller);
  if (!tenant) co_return error_response(tenant.error());
  if (!loras::check_name(name)) co_return error_response(no_such_lora(name));
  auto removed = co_await options_.loras->remove(*tenant, name, soon());
  if (!removed) co_return error_response(removed.error().code == Code::kNotFound ? no_such_lora(name) : told(removed.error()));
  json::object body = lora_json(*removed);
  body["deleted"] = true;
  co_return json_response(200, json::serialize(body));
}

asio::awaitable<Response> Api::patch_lora(CallPtr call) {
  if (!options_.loras) co_return no_registry();
  const std::string& name = call->match.params[0];
  if (auto refused = refuse_body(call->request)) co_return std::move(*refused);
  const auto tenant = lora_tenant(call->request, call->caller);
  if (!tenant) co_return error_response(tenant.error());
  const auto pinned = parse_lora_patch(call->request.body);
  if (!pinned) co_return error_response(pinned.error());
  if (!loras::check_name(name)) co_return error_response(no_such_lora(name));
  auto changed = co_await options_.loras->set_pinned(*tenant, name, *pinned, soon());
  if (!changed) co_return error_response(changed.error().code == Code::kNotFound ? no_such_lora(name) : told(changed.error()));
  co_return json_response(200, json::serialize(lora_json(*changed)));
}

asio::awaitable<Response> Api::put_lora(CallPtr call) {
  if (!options_.loras) co_return no_registry();
  const std::string& name = call->match.params[0];
  auto good = loras::check_name(name);
  if (!good) co_return error_response(good.error());
  const auto tenant = lora_tenant(call->request, call->caller);
  if (!tenant) co_return error_response(tenant.error());
  const std::string_view unless = call->request.header("If-None-Match");
  if (!unless.empty() && unless != "*") {
    co_return error_response(invalid_argument("If-None-Match takes * alone: put the adapter only if its name is not taken"));
  }
  const auto condition = unless.empty() ? loras::PutCondition::kAny : loras::PutCondition::kAbsent;
  if (condition == loras::PutCondition::kAbsent) {  // before gigabytes are sent; asked again at the end
    auto there = co_await options_.loras->find(*tenant, name, soon());
    if (!there) co_return error_response(told(there.error()));
    if (*there) co_return error_response({Code::kConflict, "there is an adapter '" + name + "' already; remove it first, or put without If-None-Match", {}});
  }
  if (call->request.stream) co_return co_await put_lora_bytes(call, *tenant, name, condition);
  if (auto refused = refuse_body(call->request)) co_return std::move(*refused);
  co_return co_await put_lora_file(call, *tenant, name, condition);
}

asio::awaitable<Response> Api::store_lora(loras::Adapter adapter, std::string upload, loras::PutCondition condition) {
  auto created = co_await options_.loras->put(adapter, upload, condition, soon());
  if (!created) co_return error_response(told(created.error()));
  auto fresh = co_await refresh_loras();  // else within a second
  (void)fresh;
  co_return json_response(*created ? 201 : 200, json::serialize(lora_json(adapter)))
      .with("Location", "/v1/loras/" + adapter.name)
      .with("ETag", "\"" + adapter.sha256 + "\"");
}

asio::awaitable<Response> Api::put_lora_file(CallPtr call, std::string tenant, std::string name, loras::PutCondition condition) {
  const auto asked = parse_lora_body(call->request.body, options_.catalogue);
  if (!asked) co_return error_response(asked.error());
  // Gigabytes may have to be read: on a thread of its own.
  using Found = Result<std::pair<std::string, loras::InspectedFile>>;
  const auto answer = std::make_shared<std::optional<Found>>();
  // Named, because GCC 12 destroys a temporary with captures in a co_await twice.
  const auto work = [answer, path = asked->path, folders = options_.settings.loras.folders]() -> asio::awaitable<void> {
    *answer = look_at(path, folders);
    co_return;
  };
  co_await asio::co_spawn(disk_, work, asio::use_awaitable);
  const Found& found = **answer;
  if (!found) co_return error_response(found.error());
  const auto& [path, file] = *found;
  if (!asked->sha256.empty() && asked->sha256 != file.sha256) co_return error_response(digest_differs(asked->sha256, file.sha256));
  Adapter adapter = adapter_of(tenant, name, *asked, file.content);
  adapter.path = path;
  adapter.sha256 = file.sha256;
  adapter.bytes = file.bytes;
  const std::string no_upload;
  co_return co_await store_lora(std::move(adapter), no_upload, condition);
}

asio::awaitable<Response> Api::put_lora_bytes(CallPtr call, std::string tenant, std::string name, loras::PutCondition condition) {
  const std::string type = media_type_of(call->request.header("Content-Type"));
  if (!is_bytes(type)) {
    co_return status_response(415, "the body is '" + excerpt(type, 100) + "'; send a safetensors file with 'Content-Type: application/octet-stream', or "
                              "{\"path\": …} with 'Content-Type: application/json'", "unsupported_media_type");
  }
  const auto asked = parse_lora_query(call->request, options_.catalogue);
  if (!asked) co_return error_response(asked.error());
  BodyReader& body = *call->request.stream;
  const auto most = static_cast<std::uint64_t>(options_.settings.loras.max_upload_bytes);
  const auto too_large = [&](std::uint64_t bytes, bool at_least) {
    return Error{Code::kPayloadTooLarge, "the upload has " + std::string(at_least ? "at least " : "") + std::to_string(bytes) + " bytes; at most " +
                                             std::to_string(most) + " are taken (loras.max_upload_bytes)", {}};
  };
  if (body.length() && *body.length() > most) co_return error_response(too_large(*body.length(), false));

  loras::Upload upload(*options_.loras);
  loras::ContentCheck check("the upload", body.length());
  std::optional<Error> wrong;
  bool late = false;
  for (;;) {
    auto piece = co_await body.read();
    late = !piece && piece.error().code == Code::kDeadlineExceeded;
    if (!piece) wrong = piece.error().code == Code::kUnavailable ? Error{Code::kCanceled, piece.error().message, {}} : piece.error();
    if (wrong || piece->empty()) break;
    if (static_cast<std::uint64_t>(upload.bytes()) + piece->size() > most) wrong = too_large(static_cast<std::uint64_t>(upload.bytes()) + piece->size(), true);
    if (!wrong) {
      if (auto looked = check.feed(*piece); !looked) wrong = looked.error();
    }
    if (!wrong) {
      auto written = co_await upload.write(*piece, soon());
      if (!written) wrong = told(written.error());
    }
    if (wrong) break;
  }
  std::optional<loras::Content> content;
  if (!wrong) {
    auto checked = check.finish();
    if (checked) content = std::move(*checked);
    else wrong = checked.error();
  }
  if (!wrong) {
    auto finished = co_await upload.finish(soon());
    if (!finished) wrong = told(finished.error());
  }
  if (!wrong && !asked->sha256.empty() && asked->sha256 != upload.sha256()) wrong = digest_differs(asked->sha256, upload.sha256());
  if (wrong) {
    co_await upload.discard(soon());
    if (late) co_return status_response(408, wrong->message, "request_timeout");
    co_return error_response(*wrong);
  }
  Adapter adapter = adapter_of(tenant, name, *asked, *content);
  adapter.sha256 = upload.sha256();
  adapter.bytes = upload.bytes();
  auto response = co_await store_lora(std::move(adapter), upload.id(), condition);
  if (response.status == 409) co_await upload.discard(soon());
  co_return response;
}

}  // namespace ditfleet::gateway
