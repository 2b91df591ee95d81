// The registry of LoRA adapters over HTTP: put (by upload or by path), list, show, pin, remove.
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <memory>
#include <optional>
#include <utility>

#include "coordinator/gateway/routes/api.h"
#include "coordinator/gateway/routes/error_body.h"
#include "coordinator/gateway/routes/lora_json.h"
#include "shared/core/excerpt.h"
#include "shared/core/wall_clock.h"
#include "shared/loras/content.h"
#include "shared/loras/upload.h"

namespace ditfleet::gateway {
namespace {

using namespace std::chrono_literals;
using loras::Adapter;

constexpr auto kCall = 5s;  // of one command; a chunk of an upload among them

Deadline soon() { return Deadline::after(kCall); }

// Errors of Redis in the words of the other routes.
Error told(const Error& error) {
  if (error.code == Code::kPermissionDenied) {
    return unavailable(
        "the registry's Redis does not let this service in: redis.url needs a user and password with the rights for it "
        "[" +
        error.message + "]");
  }
  if (error.code == Code::kResourceExhausted && error.source == Source::kRedis) {
    return Error{error.code,
                 "the registry's Redis is at its memory limit, and nothing was changed: raise its maxmemory, remove "
                 "adapters, or register a file by its path, "
                 "whose bytes it does not keep [" +
                     error.message + "]",
                 {}};
  }
  if (error.code != Code::kUnavailable && error.code != Code::kDeadlineExceeded) return error;
  if (error.source == Source::kRedis) {
    return unavailable(
        "the registry's Redis answers, but refuses this just now: nothing was changed, try again shortly [" +
        error.message + "]");
  }
  return unavailable("the registry's Redis does not answer; nothing was changed, or all of it: try again shortly [" +
                     error.message + "]");
}

Response no_registry() { return error_response(unavailable("this gateway has no registry of adapters")); }

Error no_such_lora(const std::string& name) {
  return {Code::kNotFound, "there is no adapter '" + excerpt(name, 128) + "'; GET /v1/loras lists those there are", {}};
}

// A change that did not come about.
Response refused(const Request& request, const std::string& name, const Error& error) {
  if (error.code == Code::kNotFound) return error_response(no_such_lora(name));
  if (error.code == Code::kConflict && request.has_header("If-Match"))
    return status_response(412, error.message, "precondition_failed");
  return error_response(told(error));
}

bool is_bytes(std::string_view type) {
  return type.empty() || type == "application/octet-stream" || type == "application/x-safetensors";
}

Error digest_differs(const std::string& expected, const std::string& found) {
  return invalid_argument(
      "the bytes have the digest " + found + ", not " + expected + "; were they damaged on their way?", "sha256");
}

Adapter adapter_of(const std::string& tenant, const std::string& name, const LoraRequest& asked,
                   const loras::Content& content) {
  Adapter out;
  out.tenant = tenant;
  out.name = name;
  out.models = asked.models;
  out.pinned = asked.pinned.value_or(false);
  out.created_ms = unix_ms();
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

Result<std::string> Api::resolve_lora(const std::string& tenant, const job::LoraUse& use,
                                      const job::ModelEntry& model) const {
  if (options_.lora_directory) return options_.lora_directory->resolve(tenant, use.name, use.sha256, model.name);
  return invalid_argument("there is no LoRA adapter '" + use.name + "': this gateway has no registry of them", "name");
}

asio::awaitable<Response> Api::list_loras(CallPtr call) {
  if (!options_.lora_directory) co_return no_registry();
  const auto page = parse_lora_page(call->request);
  if (!page) co_return error_response(page.error());
  const auto tenant = lora_tenant(call->request, call->caller);
  if (!tenant) co_return error_response(tenant.error());
  auto fresh = co_await refresh_loras();
  if (!fresh) co_return error_response(fresh.error());
  const auto found = options_.lora_directory->list(*tenant, page->after, page->most);
  json::array list;
  for (const Adapter& adapter : found.adapters) list.push_back(lora_json(adapter));
  const std::string next = found.more ? found.adapters.back().name : std::string();
  co_return json_response(
      200, json::serialize(json::object{{"object", "list"}, {"loras", std::move(list)}, {"next_cursor", next}}))
      .with("Cache-Control", "no-store");
}

asio::awaitable<Response> Api::get_lora(CallPtr call) {
  if (!options_.loras) co_return no_registry();
  const std::string& name = call->match.params[0];
  if (auto known = check_lora_query(call->request); !known) co_return error_response(known.error());
  const auto tenant = lora_tenant(call->request, call->caller);
  if (!tenant) co_return error_response(tenant.error());
  if (!loras::check_name(name)) co_return error_response(no_such_lora(name));
  auto found = co_await options_.loras->find(*tenant, name, soon());
  if (!found) co_return error_response(told(found.error()));
  if (!*found) co_return error_response(no_such_lora(name));
  const std::string etag = lora_etag(**found);
  Response response = json_response(200, json::serialize(lora_json(**found)));
  if (names_etag(call->request.header("If-None-Match"), etag)) {
    response = {};
    response.status = 304;
  }
  co_return response.with("ETag", etag).with("Cache-Control", "private, no-cache");
}

asio::awaitable<Result<Api::LoraCondition>> Api::lora_condition(CallPtr call, std::string tenant) {
  const std::string& name = call->match.params[0];
  const std::string_view match = call->request.header("If-Match"), unless = call->request.header("If-None-Match");
  LoraCondition out;
  if (match.empty() && unless.empty()) co_return out;
  if (!unless.empty() && (unless != "*" || !match.empty())) {
    co_return invalid_argument(
        "If-None-Match takes * alone, and no If-Match beside it: change the adapter only if its name is not taken");
  }
  auto found = co_await options_.loras->find(tenant, name, soon());
  if (!found) co_return found.error();
  out.record = std::move(*found);
  out.kind = match.empty() ? loras::Condition::kAbsent : loras::Condition::kPresent;
  out.any = match == "*";
  if (out.record && !match.empty() && !matches_lora(match, *out.record)) {
    co_return Error{Code::kConflict,
                    "'" + name + "' is not what If-Match says; its ETag is " + lora_etag(*out.record) + " now",
                    {}};
  }
  co_return out;
}

asio::awaitable<Response> Api::remove_lora(CallPtr call) {
  if (!options_.loras) co_return no_registry();
  const std::string& name = call->match.params[0];
  if (auto known = check_lora_query(call->request); !known) co_return error_response(known.error());
  const auto tenant = lora_tenant(call->request, call->caller);
  if (!tenant) co_return error_response(tenant.error());
  if (!loras::check_name(name)) co_return error_response(no_such_lora(name));
  const auto condition = co_await lora_condition(call, *tenant);
  if (!condition) co_return refused(call->request, name, condition.error());
  auto removed = co_await options_.loras->remove(*tenant, name, soon(), condition->now());
  if (!removed) co_return refused(call->request, name, removed.error());
  json::object body = lora_json(*removed);
  body["deleted"] = true;
  co_return json_response(200, json::serialize(body));
}

asio::awaitable<Response> Api::patch_lora(CallPtr call) {
  if (!options_.loras) co_return no_registry();
  const std::string& name = call->match.params[0];
  if (auto bad = refuse_body(call->request)) co_return std::move(*bad);
  if (auto known = check_lora_query(call->request); !known) co_return error_response(known.error());
  const auto tenant = lora_tenant(call->request, call->caller);
  if (!tenant) co_return error_response(tenant.error());
  const auto pinned = parse_lora_patch(call->request.body);
  if (!pinned) co_return error_response(pinned.error());
  if (!loras::check_name(name)) co_return error_response(no_such_lora(name));
  const auto condition = co_await lora_condition(call, *tenant);
  if (!condition) co_return refused(call->request, name, condition.error());
  auto changed = co_await options_.loras->set_pinned(*tenant, name, *pinned, soon(), condition->now());
  if (!changed) co_return refused(call->request, name, changed.error());
  co_return json_response(200, json::serialize(lora_json(*changed))).with("ETag", lora_etag(*changed));
}

asio::awaitable<Response> Api::put_lora(CallPtr call) {
  if (!options_.loras) co_return no_registry();
  const std::string& name = call->match.params[0];
  auto good = loras::check_name(name);
  if (!good) co_return error_response(good.error());
  if (auto bad = call->request.stream ? refuse_coding(call->request) : refuse_body(call->request))
    co_return std::move(*bad);
  if (call->request.has_header("Content-Range")) {
    co_return error_response(
        invalid_argument("the body is a part of the adapter (Content-Range); send all of it, without that header"));
  }
  const auto tenant = lora_tenant(call->request, call->caller);
  if (!tenant) co_return error_response(tenant.error());
  const auto condition = co_await lora_condition(call, *tenant);
  if (!condition) co_return refused(call->request, name, condition.error());
  // Before gigabytes are sent; asked again at the end.
  if (auto holds = condition->now().check(name, condition->record ? &*condition->record : nullptr); !holds)
    co_return refused(call->request, name, holds.error());
  if (call->request.stream) co_return co_await put_lora_bytes(call, *tenant, name, condition->now());
  co_return co_await put_lora_file(call, *tenant, name, condition->now());
}

asio::awaitable<Response> Api::store_lora(CallPtr call, loras::Adapter adapter, std::string upload,
                                          loras::Condition condition) {
  auto created = co_await options_.loras->put(adapter, upload, condition, soon());
  if (!created && created.error().code == Code::kConflict)
    co_return refused(call->request, adapter.name, created.error());
  if (!created) co_return error_response(told(created.error()));
  auto fresh = co_await refresh_loras();  // else within a second
  (void)fresh;
  co_return json_response(*created ? 201 : 200, json::serialize(lora_json(adapter)))
      .with("Location", "/v1/loras/" + adapter.name)
      .with("ETag", lora_etag(adapter));
}

asio::awaitable<Response> Api::put_lora_file(CallPtr call, std::string tenant, std::string name,
                                             loras::Condition condition) {
  if (auto known = check_lora_query(call->request); !known) co_return error_response(known.error());
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
  if (!asked->sha256.empty() && asked->sha256 != file.sha256)
    co_return error_response(digest_differs(asked->sha256, file.sha256));
  Adapter adapter = adapter_of(tenant, name, *asked, file.content);
  adapter.path = path;
  adapter.sha256 = file.sha256;
  adapter.bytes = file.bytes;
  const std::string no_upload;
  co_return co_await store_lora(call, std::move(adapter), no_upload, condition);
}

asio::awaitable<Response> Api::put_lora_bytes(CallPtr call, std::string tenant, std::string name,
                                              loras::Condition condition) {
  const std::string type = media_type_of(call->request.header("Content-Type"));
  if (!is_bytes(type)) {
    co_return status_response(415,
                              "the body is '" + excerpt(type, 100) +
                                  "'; send a safetensors file with 'Content-Type: application/octet-stream', or "
                                  "{\"path\": …} with 'Content-Type: application/json'",
                              "unsupported_media_type");
  }
  const auto asked = parse_lora_query(call->request, options_.catalogue);
  if (!asked) co_return error_response(asked.error());
  loras::Upload upload(*options_.loras);
  auto content = co_await receive_lora(call, upload);
  if (content && !asked->sha256.empty() && asked->sha256 != upload.sha256())
    content = digest_differs(asked->sha256, upload.sha256());
  if (!content) {
    co_await upload.discard(soon());
    if (content.error().code == Code::kDeadlineExceeded)
      co_return status_response(408, content.error().message, "request_timeout");
    co_return error_response(content.error());
  }
  Adapter adapter = adapter_of(tenant, name, *asked, *content);
  adapter.sha256 = upload.sha256();
  adapter.bytes = upload.bytes();
  auto response = co_await store_lora(call, std::move(adapter), upload.id(), condition);
  if (response.status == 409 || response.status == 412) co_await upload.discard(soon());
  co_return response;
}

// All of the body, checked as it comes. kDeadlineExceeded: the client was too slow.
asio::awaitable<Result<loras::Content>> Api::receive_lora(CallPtr call, loras::Upload& upload) {
  BodyReader& body = *call->request.stream;
  const auto most = static_cast<std::uint64_t>(options_.settings.loras.max_upload_bytes);
  const auto too_large = [&](std::uint64_t bytes, const char* at_least) {
    return Error{Code::kPayloadTooLarge,
                 std::string("the upload has ") + at_least + std::to_string(bytes) + " bytes; at most " +
                     std::to_string(most) + " are taken (loras.max_upload_bytes)",
                 {}};
  };
  if (body.length() && *body.length() > most) co_return too_large(*body.length(), "");
  loras::ContentCheck check("the upload", body.length());
  for (;;) {
    auto piece = co_await body.read();
    if (!piece)
      co_return piece.error().code == Code::kUnavailable ? Error{Code::kCanceled, piece.error().message, {}}
                                                         : piece.error();
    if (piece->empty()) break;
    const std::uint64_t bytes = static_cast<std::uint64_t>(upload.bytes()) + piece->size();
    if (bytes > most) co_return too_large(bytes, "at least ");
    if (auto looked = check.feed(*piece); !looked) co_return looked.error();
    auto written = co_await upload.write(*piece, soon());
    if (!written) co_return told(written.error());
  }
  auto content = check.finish();
  if (!content) co_return content.error();
  auto finished = co_await upload.finish(soon());
  if (!finished) co_return told(finished.error());
  co_return std::move(*content);
}

}  // namespace ditfleet::gateway
