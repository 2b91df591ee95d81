// The registry of LoRA adapters over HTTP: put (by upload or by path), list, show, pin, remove.
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "coordinator/gateway/routes/api_context.h"
#include "coordinator/gateway/routes/errors.h"
#include "coordinator/gateway/routes/lora_form.h"
#include "coordinator/gateway/routes/lora_json.h"
#include "shared/core/excerpt.h"
#include "shared/loras/content.h"
#include "shared/loras/registry.h"
#include "shared/loras/registry_mirror.h"
#include "shared/loras/upload.h"

namespace ditfleet::gateway {
namespace {

using namespace std::chrono_literals;
using loras::Adapter;

constexpr std::int64_t kReadsOfTenant = 2;  // files that a tenant registers by path at the same time

// The deadline of one command, such as the upload of one chunk.
Deadline soon() { return Deadline::after(5s); }

Error no_such_lora(const std::string& name) {
  return {Code::kNotFound, "adapter '" + excerpt(name, 128) + "' not found; see GET /v1/loras", {}};
}

// The response to a change that the registry did not make.
Result<Response> refused(const Request& request, const std::string& name, const Error& error) {
  if (error.code == Code::kNotFound) return no_such_lora(name);
  if (error.code == Code::kConflict && request.has_header("If-Match"))
    return status_response(412, error.message, "precondition_failed");
  return registry_error(error);
}

bool is_upload_type(std::string_view type) {
  return type.empty() || type == "application/octet-stream" || type == "application/x-safetensors" ||
         type == "multipart/form-data";
}

Error digest_differs(const std::string& expected, const std::string& found) {
  return invalid_argument(
      "the file has the SHA-256 " + found + ", not " + expected + "; it may have been damaged in transfer", "sha256");
}

using Found = std::pair<std::string, loras::InspectedFile>;  // the path and its file

// Blocks.
Result<Found> inspect(const std::string& path, const config::Settings& settings) {
  auto real = loras::resolve_path(path, settings.loras.folders);
  if (!real) return real.error();
  auto file = loras::inspect_file(*real, settings.loras.max_upload_bytes);
  if (!file) return file.error();
  return Found(std::move(*real), std::move(*file));
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

// Whose adapters the request is about, if the request has no other parameter.
Result<std::string> tenant_of(const Call& call) {
  if (auto known = check_lora_query(call.request); !known) return known.error();
  return lora_tenant(call.request, call.caller);
}

// Evaluates If-Match and If-None-Match. Errors: kConflict if the name's record does not match If-Match,
// kInvalidArgument for an unsupported If-None-Match, and those of Registry::find.
asio::awaitable<Result<Precondition>> precondition(const ApiContext& context, CallPtr call, std::string tenant) {
  const std::string& name = call->param(0);
  const std::string_view match = call->request.header("If-Match"), none = call->request.header("If-None-Match");
  Precondition out;
  if (match.empty() && none.empty()) co_return out;
  if (!none.empty() && (none != "*" || !match.empty())) {
    co_return invalid_argument(
        "If-None-Match must be * and cannot be combined with If-Match; it makes the request fail if the name exists");
  }
  auto found = co_await context.dependencies.loras->find(tenant, name, soon());
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

asio::awaitable<Result<Response>> list(const ApiContext& context, CallPtr call) {
  const auto page = parse_lora_page(call->request);
  if (!page) co_return page.error();
  const auto tenant = lora_tenant(call->request, call->caller);
  if (!tenant) co_return tenant.error();
  auto fresh = co_await context.refresh_adapters();
  if (!fresh) co_return fresh.error();
  const auto found = context.dependencies.adapters->list(*tenant, page->after, page->most);
  json::array list;
  for (const Adapter& adapter : found.adapters) list.push_back(lora_json(adapter, context.dependencies.catalogue));
  const std::string next = found.more ? found.adapters.back().name : std::string();
  co_return json_response(200, {{"object", "list"}, {"loras", std::move(list)}, {"next_cursor", next}})
      .with("Cache-Control", "no-store");
}

asio::awaitable<Result<Response>> get(const ApiContext& context, CallPtr call) {
  const std::string& name = call->param(0);
  const auto tenant = tenant_of(*call);
  if (!tenant) co_return tenant.error();
  if (!loras::check_name(name)) co_return no_such_lora(name);
  auto found = co_await context.dependencies.loras->find(*tenant, name, soon());
  if (!found) co_return registry_error(found.error());
  if (!*found) co_return no_such_lora(name);
  const std::string etag = lora_etag(**found);
  Response response = json_response(200, lora_json(**found, context.dependencies.catalogue));
  if (names_etag(call->request.header("If-None-Match"), etag)) {
    response = {};
    response.status = 304;
  }
  co_return response.with("ETag", etag).with("Cache-Control", "private, no-cache");
}

asio::awaitable<Result<Response>> remove(const ApiContext& context, CallPtr call) {
  const std::string& name = call->param(0);
  const auto tenant = tenant_of(*call);
  if (!tenant) co_return tenant.error();
  if (!loras::check_name(name)) co_return no_such_lora(name);
  const auto condition = co_await precondition(context, call, *tenant);
  if (!condition) co_return refused(call->request, name, condition.error());
  auto removed = co_await context.dependencies.loras->remove(*tenant, name, soon(), condition->now());
  if (!removed) co_return refused(call->request, name, removed.error());
  json::object body = lora_json(*removed, context.dependencies.catalogue);
  body["deleted"] = true;
  co_return json_response(200, body);
}

asio::awaitable<Result<Response>> patch(const ApiContext& context, CallPtr call) {
  const std::string& name = call->param(0);
  if (auto bad = refuse_body_unless_json(call->request)) co_return std::move(*bad);
  const auto tenant = tenant_of(*call);
  if (!tenant) co_return tenant.error();
  std::function<Result<bool>()> work = [body = call->request.body] { return parse_lora_patch(body); };
  const auto pinned = co_await context.off_loop<bool>(call, call->request.body.size(), std::move(work));
  if (!pinned) co_return pinned.error();
  if (!call->caller.sees_all) co_return pin_refused();
  if (!loras::check_name(name)) co_return no_such_lora(name);
  const auto condition = co_await precondition(context, call, *tenant);
  if (!condition) co_return refused(call->request, name, condition.error());
  auto changed = co_await context.dependencies.loras->set_pinned(*tenant, name, *pinned, soon(), condition->now());
  if (!changed) co_return refused(call->request, name, changed.error());
  co_return json_response(200, lora_json(*changed, context.dependencies.catalogue)).with("ETag", lora_etag(*changed));
}

// Of each tenant: bytes of its unfinished uploads; files that are being registered by path.
struct Puts {
  std::map<std::string, std::int64_t> uploading, reading;
  asio::thread_pool disk{4};  // reads the files that are registered by path
};

// Whether the tenant may have another adapter of this size. `coming`: bytes of its uploads that are not registered.
Result<void> check_quota(const ApiContext& context, const std::string& tenant, const std::string& name,
                         std::int64_t coming) {
  const auto quota = config::quotas_of(context.dependencies.settings, tenant);
  const auto used = context.dependencies.adapters->use(tenant, name);
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

asio::awaitable<Result<Response>> store(const ApiContext& context, Puts& puts, CallPtr call, Adapter adapter,
                                        std::string upload, loras::Condition condition) {
  if (auto good = co_await context.refresh_adapters(); !good) co_return good.error();
  const auto coming = upload.empty() ? 0 : puts.uploading[adapter.tenant];
  if (auto good = check_quota(context, adapter.tenant, adapter.name, coming); !good) co_return good.error();
  auto created = co_await context.dependencies.loras->put(adapter, upload, condition, soon());
  if (!created && created.error().code == Code::kConflict)
    co_return refused(call->request, adapter.name, created.error());
  if (!created) co_return registry_error(created.error());
  (void)co_await context.refresh_adapters();  // if it fails, follow() refreshes within a second
  co_return json_response(*created ? 201 : 200, lora_json(adapter, context.dependencies.catalogue))
      .with("Location", "/v1/loras/" + adapter.name)
      .with("ETag", lora_etag(adapter));
}

asio::awaitable<Result<Response>> put_file(const ApiContext& context, Puts& puts, CallPtr call, std::string tenant,
                                           std::string name, loras::Condition condition) {
  if (auto known = check_lora_query(call->request); !known) co_return known.error();
  std::function<Result<LoraRequest>()> parsing = [&context, body = call->request.body] {
    return parse_lora_body(body, context.dependencies.catalogue);
  };
  const auto asked = co_await context.off_loop<LoraRequest>(call, call->request.body.size(), std::move(parsing));
  if (!asked) co_return asked.error();
  if (asked->pinned.value_or(false) && !call->caller.sees_all) co_return pin_refused();
  if (auto good = check_quota(context, tenant, name, 0); !good) co_return good.error();
  Reserved reading{puts.reading[tenant]};
  if (reading.add(1) > kReadsOfTenant) {
    co_return Error{.code = Code::kResourceExhausted,
                    .message = "tenant '" + tenant + "' registers " + std::to_string(kReadsOfTenant) +
                               " files at the moment, the maximum; try again when one is done",
                    .retry_after = 1s};
  }
  // On another thread, because it may read gigabytes.
  // Named, because GCC 12 destroys a temporary with captures in a co_await twice.
  const auto work = [&context, path = asked->path]() -> asio::awaitable<std::optional<Result<Found>>> {
    co_return inspect(path, context.dependencies.settings);
  };
  const auto answer = co_await asio::co_spawn(puts.disk, work, asio::use_awaitable);
  const Result<Found>& found = *answer;
  if (!found) co_return found.error();
  const auto& [path, file] = *found;
  if (!asked->sha256.empty() && asked->sha256 != file.sha256) co_return digest_differs(asked->sha256, file.sha256);
  auto adapter = adapter_of(tenant, name, *asked, file, path, context.dependencies.catalogue);
  if (!adapter) co_return adapter.error();
  const std::string no_upload;
  co_return co_await store(context, puts, call, std::move(*adapter), no_upload, condition);
}

// Stores the body in Redis and checks it piece by piece, so that a bad one is refused early.
// kDeadlineExceeded: the client was too slow.
asio::awaitable<Result<loras::InspectedFile>> receive(const ApiContext& context, CallPtr call, loras::Upload& upload,
                                                      std::string tenant, Reserved& coming,
                                                      std::shared_ptr<LoraForm> form) {
  BodyReader& body = *call->request.stream;
  const auto most = static_cast<std::uint64_t>(context.dependencies.settings.loras.max_upload_bytes);
  const auto too_large = [&](std::uint64_t bytes, const char* at_least) {
    return Error{Code::kPayloadTooLarge,
                 std::string("the upload has ") + at_least + std::to_string(bytes) +
                     " bytes; loras.max_upload_bytes is " + std::to_string(most),
                 {}};
  };
  if (body.length() && *body.length() > most) co_return too_large(*body.length(), "");
  const auto sized = static_cast<std::int64_t>(body.length().value_or(0));
  if (auto good = check_quota(context, tenant, call->param(0), coming.add(sized)); !good) co_return good.error();
  const auto check = std::make_shared<loras::ContentCheck>("the upload", form ? std::nullopt : body.length());
  for (;;) {
    auto piece = co_await context.read_piece(call);
    if (!piece)
      co_return piece.error().code == Code::kUnavailable ? Error{Code::kCanceled, piece.error().message, {}}
                                                         : piece.error();
    if (piece->empty()) break;
    const std::size_t size = piece->size();
    const std::uint64_t bytes = static_cast<std::uint64_t>(upload.bytes()) + size;
    if (bytes > most) co_return too_large(bytes, "at least ");
    if (sized == 0) {
      const auto sum = coming.add(static_cast<std::int64_t>(size));
      if (auto good = check_quota(context, tenant, call->param(0), sum); !good) co_return good.error();
    }
    // The header has up to 32 MiB of JSON.
    std::function<Result<std::string>()> feed = [check, form, piece = std::move(*piece)]() -> Result<std::string> {
      auto bytes = form ? form->feed(piece) : piece;
      if (!bytes) return bytes;
      if (auto good = check->feed(*bytes); !good) return good.error();
      return bytes;
    };
    const auto fed = co_await context.off_loop<std::string>(call, check->knows_content() ? 0 : size, std::move(feed));
    if (!fed) co_return fed.error();
    if (auto room = co_await context.service.check_room(); !room) co_return registry_error(room.error());
    auto written = co_await upload.write(*fed, soon());
    if (!written) co_return registry_error(written.error());
  }
  std::function<Result<loras::Content>()> end = [check, form]() -> Result<loras::Content> {
    if (form)
      if (auto whole = form->finish(); !whole) return whole.error();
    return check->finish();
  };
  auto content =
      co_await context.off_loop<loras::Content>(call, static_cast<std::size_t>(upload.bytes()), std::move(end));
  if (!content) co_return content.error();
  auto finished = co_await upload.finish(soon());
  if (!finished) co_return registry_error(finished.error());
  co_return loras::InspectedFile{upload.sha256(), upload.bytes(), std::move(*content)};
}

asio::awaitable<Result<Response>> put_upload(const ApiContext& context, Puts& puts, CallPtr call, std::string tenant,
                                             std::string name, loras::Condition condition) {
  const std::string type = media_type_of(call->request.header("Content-Type"));
  if (!is_upload_type(type)) {
    co_return status_response(
        415,
        "the body is '" + excerpt(type, 100) +
            "'; send a safetensors file with 'Content-Type: application/octet-stream' or in a form, or "
            "{\"path\": …} with 'Content-Type: application/json'",
        "unsupported_media_type");
  }
  const auto asked = parse_lora_query(call->request, context.dependencies.catalogue);
  if (!asked) co_return asked.error();
  if (asked->pinned.value_or(false) && !call->caller.sees_all) co_return pin_refused();
  std::shared_ptr<LoraForm> form;
  if (type == "multipart/form-data") {
    auto reader = FormReader::open(call->request.header("Content-Type"));
    if (!reader) co_return reader.error();
    form = std::make_shared<LoraForm>(std::move(*reader));
  }
  loras::Upload upload(*context.dependencies.loras);
  Reserved coming{puts.uploading[tenant]};
  auto file = co_await receive(context, call, upload, tenant, coming, std::move(form));
  if (file && !asked->sha256.empty() && asked->sha256 != file->sha256)
    file = digest_differs(asked->sha256, file->sha256);
  if (!file) {
    co_await upload.discard(soon());
    if (file.error().code == Code::kDeadlineExceeded)
      co_return status_response(408, file.error().message, "request_timeout");
    co_return file.error();
  }
  auto adapter = adapter_of(tenant, name, *asked, *file, "", context.dependencies.catalogue);
  if (!adapter) {
    co_await upload.discard(soon());
    co_return adapter.error();
  }
  auto response = co_await store(context, puts, call, std::move(*adapter), upload.id(), condition);
  const int status = response ? response->status : http_status(response.error().code);
  if (status >= 400 && status < 500) co_await upload.discard(soon());
  co_return response;
}

asio::awaitable<Result<Response>> put(const ApiContext& context, Puts& puts, CallPtr call) {
  const Request& request = call->request;
  const std::string& name = call->param(0);
  if (auto good = loras::check_name(name); !good) co_return good.error();
  if (auto bad = request.stream ? refuse_compressed_body(request) : refuse_body_unless_json(request))
    co_return std::move(*bad);
  if (request.has_header("Content-Range")) {
    co_return invalid_argument("Content-Range is not supported; send the whole adapter without that header");
  }
  const auto tenant = lora_tenant(request, call->caller);
  if (!tenant) co_return tenant.error();
  const auto condition = co_await precondition(context, call, *tenant);
  if (!condition) co_return refused(request, name, condition.error());
  // Checked before gigabytes are sent, and again by the registry.
  if (auto holds = condition->now().check(name, condition->record ? &*condition->record : nullptr); !holds)
    co_return refused(request, name, holds.error());
  if (request.stream) co_return co_await put_upload(context, puts, call, *tenant, name, condition->now());
  co_return co_await put_file(context, puts, call, *tenant, name, condition->now());
}

}  // namespace

void add_lora_routes(Router& router) {
  router.add({"GET", "/v1/loras", list});
  router.add({"GET", "/v1/loras/{name}", get});
  const auto puts = std::make_shared<Puts>();
  router.add({.method = "PUT",
              .pattern = "/v1/loras/{name}",
              .handler = [puts](const ApiContext& context, CallPtr call) { return put(context, *puts, call); },
              .streams_body = true});
  router.add({"PATCH", "/v1/loras/{name}", patch});
  router.add({"DELETE", "/v1/loras/{name}", remove});
}

}  // namespace ditfleet::gateway
