// Uploads: images for the fields of later jobs. Each belongs to the tenant that sent it.
#include "coordinator/gateway/routes/api_context.h"
#include "coordinator/gateway/routes/errors.h"
#include "shared/core/bytes.h"
#include "shared/core/wall_clock.h"

namespace ditfleet::gateway {
namespace {

asio::awaitable<Result<Response>> upload(const ApiContext& context, CallPtr call) {
  const Request& request = call->request;
  if (!request.stream) {
    co_return status_response(415, "the body is JSON; send the image's file itself, as application/octet-stream",
                              "unsupported_media_type");
  }
  if (auto bad = refuse_compressed_body(request)) co_return std::move(*bad);
  const std::string type = media_type_of(request.header("Content-Type"));
  if (type.starts_with("multipart/") || type == "application/x-www-form-urlencoded") {
    co_return status_response(415,
                              "the body is '" + type +
                                  "'; send the file itself (curl --data-binary @FILE), as "
                                  "application/octet-stream",
                              "unsupported_media_type");
  }
  const auto& settings = context.dependencies.settings.results;
  auto body = co_await context.receive(call, settings.input_max_bytes);
  if (!body && body.error().code == Code::kDeadlineExceeded)
    co_return status_response(408, body.error().message, "request_timeout");
  if (!body) co_return body.error();
  const std::size_t bytes = body->bytes.size();
  std::function<Result<ImageFile>()> work = [file = std::move(body->bytes), most = settings.input_max_bytes]() mutable {
    return read_image({std::move(file)}, most);
  };
  auto file = co_await context.off_loop<ImageFile>(call, bytes, std::move(work));
  if (!file) co_return file.error();
  auto stored = co_await context.service.put_input(call->caller.tenant, file->sha256, std::move(file->bytes));
  if (!stored) co_return stored.error();
  co_return json_response(201, {{"id", file->sha256},
                                {"object", "upload"},
                                {"bytes", bytes},
                                {"media_type", file->info.media_type},
                                {"width", file->info.width},
                                {"height", file->info.height},
                                {"expires_at", (unix_ms() + settings.input_ms) / 1000}});
}

asio::awaitable<Result<Response>> list(const ApiContext& context, CallPtr call) {
  const auto own = co_await context.service.inputs(call->caller.tenant);
  if (!own) co_return own.error();
  json::array uploads;
  for (const auto& [sha256, bytes] : *own) {
    uploads.push_back(json::object{{"id", sha256}, {"object", "upload"}, {"bytes", bytes}});
  }
  co_return json_response(200, {{"object", "list"}, {"data", std::move(uploads)}});
}

asio::awaitable<Result<Response>> remove(const ApiContext& context, CallPtr call) {
  const auto removed = co_await context.service.remove_input(call->caller.tenant, call->param(0));
  if (!removed) co_return removed.error();
  co_return json_response(200, {{"id", call->param(0)}, {"object", "upload"}, {"deleted", true}});
}

}  // namespace

void add_upload_routes(Router& router) {
  router.add({.method = "POST", .pattern = "/v1/uploads", .handler = upload, .streams_body = true});
  router.add({.method = "GET", .pattern = "/v1/uploads", .handler = list});
  router.add({.method = "DELETE", .pattern = "/v1/uploads/{sha256}", .handler = remove});
}

}  // namespace ditfleet::gateway
