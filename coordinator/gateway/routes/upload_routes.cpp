// Uploads: images for the fields of later jobs.
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
  const auto& settings = context.dependencies.settings.results;
  auto body = co_await context.receive(call, settings.input_max_bytes);
  if (!body && body.error().code == Code::kDeadlineExceeded)
    co_return status_response(408, body.error().message, "request_timeout");
  if (!body) co_return body.error();
  const auto info = check_image(body->bytes, settings.input_max_bytes);
  if (!info) co_return info.error();
  const std::string sha256 = sha256_hex(body->bytes);
  const std::size_t bytes = body->bytes.size();
  auto stored = co_await context.service.put_input(sha256, std::move(body->bytes));
  if (!stored) co_return stored.error();
  co_return json_response(201, {{"id", sha256},
                                {"object", "upload"},
                                {"bytes", bytes},
                                {"media_type", info->media_type},
                                {"width", info->width},
                                {"height", info->height},
                                {"expires_at", (unix_ms() + settings.input_ms) / 1000}});
}

}  // namespace

void add_upload_routes(Router& router) {
  router.add({.method = "POST", .pattern = "/v1/uploads", .handler = upload, .streams_body = true});
}

}  // namespace ditfleet::gateway
