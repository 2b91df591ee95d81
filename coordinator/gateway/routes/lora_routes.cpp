// The registry of LoRA adapters over HTTP: put (by upload or by path), list, show, pin, remove.
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "coordinator/gateway/routes/api_context.h"
#include "coordinator/gateway/routes/errors.h"
#include "coordinator/gateway/routes/lora_json.h"
#include "shared/core/excerpt.h"
#include "shared/core/wall_clock.h"
#include "shared/loras/content.h"
#include "shared/loras/registry.h"
#include "shared/loras/registry_mirror.h"
#include "shared/loras/upload.h"

namespace ditfleet::gateway {
namespace {

using namespace std::chrono_literals;
using loras::Adapter;

// The deadline of one command, such as the upload of one chunk.
Deadline soon() { return Deadline::after(5s); }

Response no_registry() { return error_response(unavailable("this gateway has no adapter registry")); }

Error no_such_lora(const std::string& name) {
  return {Code::kNotFound, "adapter '" + excerpt(name, 128) + "' not found; see GET /v1/loras", {}};
}

// The response to a change that the registry did not make.
Response refused(const Request& request, const std::string& name, const Error& error) {
  if (error.code == Code::kNotFound) return error_response(no_such_lora(name));
  if (error.code == Code::kConflict && request.has_header("If-Match"))
    return status_response(412, error.message, "precondition_failed");
  return error_response(registry_error(error));
}

bool is_upload_type(std::string_view type) {
  return type.empty() || type == "application/octet-stream" || type == "application/x-safetensors";
}

Error digest_differs(const std::string& expected, const std::string& found) {
  return invalid_argument(
      "the file has the SHA-256 " + found + ", not " + expected + "; it may have been damaged in transfer", "sha256");
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

// Blocks.
Result<std::pair<std::string, loras::InspectedFile>> inspect(const std::string& path,
                                                             const config::Settings& settings) {
  auto real = loras::resolve_path(path, settings.loras.folders);
  if (!real) return real.error();
  auto file = loras::inspect_file(*real, settings.loras.max_upload_bytes);
  if (!file) return file.error();
  return std::pair(std::move(*real), std::move(*file));
}

Error pin_refused() {
  return {Code::kPermissionDenied,
          "'pinned' needs an administrator's key: pinned adapters stay in the memory that all tenants share", "pinned"};
}

// What it adds to a tenant's sum counts while it exists.
struct Reserved {
  ~Reserved() { sum -= own; }
  std::int64_t add(std::int64_t more) { return own += more, sum += more; }
  std::int64_t& sum;
  std::int64_t own = 0;
};

// The preconditions of a request (If-Match, If-None-Match: *).
struct Precondition {
  loras::Condition::Kind kind = loras::Condition::kAny;
  std::optional<Adapter> record;  // as found before the change
  bool any = false;               // any record satisfies If-Match
  // Points into this.
  loras::Condition now() const { return {kind, record && !any ? &*record : nullptr}; }
};

class LoraRoutes {
 public:
  explicit LoraRoutes(const ApiContext& context)
      : context_(context), dependencies_(context.dependencies), registry_(dependencies_.loras.get()) {}

  asio::awaitable<Response> list(CallPtr call) {
    if (!dependencies_.adapters) co_return no_registry();
    const auto page = parse_lora_page(call->request);
    if (!page) co_return error_response(page.error());
    const auto tenant = lora_tenant(call->request, call->caller);
    if (!tenant) co_return error_response(tenant.error());
    auto fresh = co_await context_.refresh_adapters();
    if (!fresh) co_return error_response(fresh.error());
    const auto found = dependencies_.adapters->list(*tenant, page->after, page->most);
    json::array list;
    for (const Adapter& adapter : found.adapters) list.push_back(lora_json(adapter));
    const std::string next = found.more ? found.adapters.back().name : std::string();
    co_return json_response(
        200, json::serialize(json::object{{"object", "list"}, {"loras", std::move(list)}, {"next_cursor", next}}))
        .with("Cache-Control", "no-store");
  }

  asio::awaitable<Response> get(CallPtr call) {
    if (!registry_) co_return no_registry();
    const std::string& name = call->param(0);
    const auto tenant = tenant_of(*call);
    if (!tenant) co_return error_response(tenant.error());
    if (!loras::check_name(name)) co_return error_response(no_such_lora(name));
    auto found = co_await registry_->find(*tenant, name, soon());
    if (!found) co_return error_response(registry_error(found.error()));
    if (!*found) co_return error_response(no_such_lora(name));
    const std::string etag = lora_etag(**found);
    Response response = json_response(200, json::serialize(lora_json(**found)));
    if (names_etag(call->request.header("If-None-Match"), etag)) {
      response = {};
      response.status = 304;
    }
    co_return response.with("ETag", etag).with("Cache-Control", "private, no-cache");
  }

  asio::awaitable<Response> remove(CallPtr call) {
    if (!registry_) co_return no_registry();
    const std::string& name = call->param(0);
    const auto tenant = tenant_of(*call);
    if (!tenant) co_return error_response(tenant.error());
    if (!loras::check_name(name)) co_return error_response(no_such_lora(name));
    const auto condition = co_await precondition(call, *tenant);
    if (!condition) co_return refused(call->request, name, condition.error());
    auto removed = co_await registry_->remove(*tenant, name, soon(), condition->now());
    if (!removed) co_return refused(call->request, name, removed.error());
    json::object body = lora_json(*removed);
    body["deleted"] = true;
    co_return json_response(200, json::serialize(body));
  }

  asio::awaitable<Response> patch(CallPtr call) {
    if (!registry_) co_return no_registry();
    const std::string& name = call->param(0);
    if (auto bad = refuse_body_unless_json(call->request)) co_return std::move(*bad);
    const auto tenant = tenant_of(*call);
    if (!tenant) co_return error_response(tenant.error());
    const auto pinned = parse_lora_patch(call->request.body);
    if (!pinned) co_return error_response(pinned.error());
    if (!call->caller.sees_all) co_return error_response(pin_refused());
    if (!loras::check_name(name)) co_return error_response(no_such_lora(name));
    const auto condition = co_await precondition(call, *tenant);
    if (!condition) co_return refused(call->request, name, condition.error());
    auto changed = co_await registry_->set_pinned(*tenant, name, *pinned, soon(), condition->now());
    if (!changed) co_return refused(call->request, name, changed.error());
    co_return json_response(200, json::serialize(lora_json(*changed))).with("ETag", lora_etag(*changed));
  }

  asio::awaitable<Response> put(CallPtr call) {
    if (!registry_) co_return no_registry();
    const Request& request = call->request;
    const std::string& name = call->param(0);
    if (auto good = loras::check_name(name); !good) co_return error_response(good.error());
    if (auto bad = request.stream ? refuse_compressed_body(request) : refuse_body_unless_json(request))
      co_return std::move(*bad);
    if (request.has_header("Content-Range")) {
      co_return error_response(
          invalid_argument("Content-Range is not supported; send the whole adapter without that header"));
    }
    const auto tenant = lora_tenant(request, call->caller);
    if (!tenant) co_return error_response(tenant.error());
    const auto condition = co_await precondition(call, *tenant);
    if (!condition) co_return refused(request, name, condition.error());
    // Checked before gigabytes are sent, and again by the registry.
    if (auto holds = condition->now().check(name, condition->record ? &*condition->record : nullptr); !holds)
      co_return refused(request, name, holds.error());
    if (request.stream) co_return co_await put_upload(call, *tenant, name, condition->now());
    co_return co_await put_file(call, *tenant, name, condition->now());
  }

 private:
  // Whose adapters the request is about, if the request has no other parameter.
  static Result<std::string> tenant_of(const Call& call) {
    if (auto known = check_lora_query(call.request); !known) return known.error();
    return lora_tenant(call.request, call.caller);
  }

  // Evaluates If-Match and If-None-Match. Errors: kConflict if the name's record does not match If-Match,
  // kInvalidArgument for an unsupported If-None-Match, and those of Registry::find.
  asio::awaitable<Result<Precondition>> precondition(CallPtr call, std::string tenant) {
    const std::string& name = call->param(0);
    const std::string_view match = call->request.header("If-Match"), none = call->request.header("If-None-Match");
    Precondition out;
    if (match.empty() && none.empty()) co_return out;
    if (!none.empty() && (none != "*" || !match.empty())) {
      co_return invalid_argument(
          "If-None-Match must be * and cannot be combined with If-Match; it makes the request fail if the name exists");
    }
    auto found = co_await registry_->find(tenant, name, soon());
    if (!found) co_return found.error();
    out.record = std::move(*found);
    out.kind = match.empty() ? loras::Condition::kAbsent : loras::Condition::kPresent;
    out.any = match == "*";
    if (out.record && !match.empty() && !matches_lora(match, *out.record)) {
      co_return Error{
          Code::kConflict, "adapter '" + name + "' does not match If-Match; its ETag is " + lora_etag(*out.record), {}};
    }
    co_return out;
  }

  // Whether the tenant may have another adapter of this size. `coming`: bytes of its uploads that are not registered.
  Result<void> check_quota(const std::string& tenant, const std::string& name, std::int64_t coming) const {
    const auto quota = config::quotas_of(dependencies_.settings, tenant);
    const auto used = dependencies_.adapters ? dependencies_.adapters->use(tenant, name) : loras::RegistryMirror::Use();
    const std::string of = "tenant '" + tenant + "' has ";
    if (used.adapters >= quota.adapters) {
      return Error{Code::kResourceExhausted,
                   of + std::to_string(used.adapters) + " adapters; quotas.adapters is " +
                       std::to_string(quota.adapters) + ", so remove adapters first",
                   {}};
    }
    if (used.bytes + coming <= quota.adapter_bytes) return {};
    return Error{Code::kPayloadTooLarge,
                 of + std::to_string(used.bytes) + " bytes of uploaded adapters and uploads at least " +
                     std::to_string(coming) + "; quotas.adapter_bytes is " + std::to_string(quota.adapter_bytes) +
                     ", so remove adapters first or register a file by path",
                 {}};
  }

  asio::awaitable<Response> store(CallPtr call, Adapter adapter, std::string upload, loras::Condition condition) {
    if (auto good = co_await context_.refresh_adapters(); !good) co_return error_response(good.error());
    const auto coming = upload.empty() ? 0 : uploading_[adapter.tenant];
    if (auto good = check_quota(adapter.tenant, adapter.name, coming); !good) co_return error_response(good.error());
    auto created = co_await registry_->put(adapter, upload, condition, soon());
    if (!created && created.error().code == Code::kConflict)
      co_return refused(call->request, adapter.name, created.error());
    if (!created) co_return error_response(registry_error(created.error()));
    auto fresh = co_await context_.refresh_adapters();  // if it fails, follow() refreshes within a second
    (void)fresh;
    co_return json_response(*created ? 201 : 200, json::serialize(lora_json(adapter)))
        .with("Location", "/v1/loras/" + adapter.name)
        .with("ETag", lora_etag(adapter));
  }

  asio::awaitable<Response> put_file(CallPtr call, std::string tenant, std::string name, loras::Condition condition) {
    if (auto known = check_lora_query(call->request); !known) co_return error_response(known.error());
    const auto asked = parse_lora_body(call->request.body, dependencies_.catalogue);
    if (!asked) co_return error_response(asked.error());
    if (asked->pinned.value_or(false) && !call->caller.sees_all) co_return error_response(pin_refused());
    if (auto good = check_quota(tenant, name, 0); !good) co_return error_response(good.error());
    Reserved reading{reading_[tenant]};
    if (reading.add(1) > kReadsOfTenant) {
      co_return error_response(Error{.code = Code::kResourceExhausted,
                                     .message = "tenant '" + tenant + "' registers " + std::to_string(kReadsOfTenant) +
                                                " files at the moment, the maximum; try again when one is done",
                                     .retry_after = 1s});
    }
    // On another thread, because it may read gigabytes.
    using Found = Result<std::pair<std::string, loras::InspectedFile>>;
    const auto answer = std::make_shared<std::optional<Found>>();
    // Named, because GCC 12 destroys a temporary with captures in a co_await twice.
    const auto work = [answer, path = asked->path, this]() -> asio::awaitable<void> {
      *answer = inspect(path, dependencies_.settings);
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
    co_return co_await store(call, std::move(adapter), no_upload, condition);
  }

  asio::awaitable<Response> put_upload(CallPtr call, std::string tenant, std::string name, loras::Condition condition) {
    const std::string type = media_type_of(call->request.header("Content-Type"));
    if (!is_upload_type(type)) {
      co_return status_response(415,
                                "the body is '" + excerpt(type, 100) +
                                    "'; send a safetensors file with 'Content-Type: application/octet-stream', or "
                                    "{\"path\": …} with 'Content-Type: application/json'",
                                "unsupported_media_type");
    }
    const auto asked = parse_lora_query(call->request, dependencies_.catalogue);
    if (!asked) co_return error_response(asked.error());
    if (asked->pinned.value_or(false) && !call->caller.sees_all) co_return error_response(pin_refused());
    loras::Upload upload(*registry_);
    Reserved coming{uploading_[tenant]};
    auto content = co_await receive(call, upload, tenant, coming);
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
    auto response = co_await store(call, std::move(adapter), upload.id(), condition);
    if (response.status >= 400 && response.status < 500) co_await upload.discard(soon());
    co_return response;
  }

  // Stores the body in Redis and checks it piece by piece, so that a bad one is refused early.
  // kDeadlineExceeded: the client was too slow.
  asio::awaitable<Result<loras::Content>> receive(CallPtr call, loras::Upload& upload, std::string tenant,
                                                  Reserved& coming) {
    BodyReader& body = *call->request.stream;
    const auto most = static_cast<std::uint64_t>(dependencies_.settings.loras.max_upload_bytes);
    const auto too_large = [&](std::uint64_t bytes, const char* at_least) {
      return Error{Code::kPayloadTooLarge,
                   std::string("the upload has ") + at_least + std::to_string(bytes) +
                       " bytes; loras.max_upload_bytes is " + std::to_string(most),
                   {}};
    };
    if (body.length() && *body.length() > most) co_return too_large(*body.length(), "");
    const auto sized = static_cast<std::int64_t>(body.length().value_or(0));
    if (auto good = check_quota(tenant, call->param(0), coming.add(sized)); !good) co_return good.error();
    loras::ContentCheck check("the upload", body.length());
    for (;;) {
      auto piece = co_await body.read();
      if (!piece)
        co_return piece.error().code == Code::kUnavailable ? Error{Code::kCanceled, piece.error().message, {}}
                                                           : piece.error();
      if (piece->empty()) break;
      const std::uint64_t bytes = static_cast<std::uint64_t>(upload.bytes()) + piece->size();
      if (bytes > most) co_return too_large(bytes, "at least ");
      if (sized == 0) {
        const auto sum = coming.add(static_cast<std::int64_t>(piece->size()));
        if (auto good = check_quota(tenant, call->param(0), sum); !good) co_return good.error();
      }
      if (auto good = check.feed(*piece); !good) co_return good.error();
      auto written = co_await upload.write(*piece, soon());
      if (!written) co_return registry_error(written.error());
    }
    auto content = check.finish();
    if (!content) co_return content.error();
    auto finished = co_await upload.finish(soon());
    if (!finished) co_return registry_error(finished.error());
    co_return std::move(*content);
  }

  const ApiContext& context_;
  const GatewayDependencies& dependencies_;
  loras::Registry* registry_;  // null: none
  // Of each tenant: bytes of its unfinished uploads; files that are being registered by path.
  std::map<std::string, std::int64_t> uploading_, reading_;
  static constexpr std::int64_t kReadsOfTenant = 2;
  asio::thread_pool disk_{4};  // reads the files that are registered by path
};

}  // namespace

void add_lora_routes(Router& router, const ApiContext& context) {
  const auto routes = std::make_shared<LoraRoutes>(context);
  router.add({"GET", "/v1/loras", std::bind_front(&LoraRoutes::list, routes)});
  router.add({"GET", "/v1/loras/{name}", std::bind_front(&LoraRoutes::get, routes)});
  router.add({.method = "PUT",
              .pattern = "/v1/loras/{name}",
              .handler = std::bind_front(&LoraRoutes::put, routes),
              .streams_body = true});
  router.add({"PATCH", "/v1/loras/{name}", std::bind_front(&LoraRoutes::patch, routes)});
  router.add({"DELETE", "/v1/loras/{name}", std::bind_front(&LoraRoutes::remove, routes)});
}

}  // namespace ditfleet::gateway
