// Uploads: images for the fields of later jobs. Each belongs to the tenant that sent it.
#include <utility>

#include "coordinator/gateway/http/multipart.h"
#include "coordinator/gateway/routes/api_context.h"
#include "coordinator/gateway/routes/errors.h"
#include "shared/core/bytes.h"
#include "shared/core/excerpt.h"
#include "shared/core/wall_clock.h"

namespace ditfleet::gateway {
namespace {

// The contents of a form's only file.
Result<std::string> only_file(std::string_view content_type, std::string_view body) {
  const auto parts = parse_form(content_type, body);
  if (!parts) return parts.error();
  const FormPart* file = nullptr;
  for (const FormPart& part : *parts) {
    if (part.is_file && std::exchange(file, &part))
      return invalid_argument("the form has more than one file; upload them one by one", excerpt(part.name, 64));
  }
  if (!file) return invalid_argument("the form has no file; send one, as curl -F file=@FILE does", "file");
  return std::string(file->contents);
}

asio::awaitable<Result<Response>> upload(const ApiContext& context, CallPtr call) {
  const Request& request = call->request;
  if (!request.stream) {
    co_return status_response(415, "the body is JSON; send the image's file itself, as application/octet-stream",
                              "unsupported_media_type");
  }
  if (auto bad = refuse_compressed_body(request)) co_return std::move(*bad);
  const std::string type = media_type_of(request.header("Content-Type"));
  if (type == "application/x-www-form-urlencoded") {
    co_return status_response(415,
                              "the body is '" + type +
                                  "'; send the file itself (curl --data-binary @FILE or -F file=@FILE), as "
                                  "application/octet-stream or in a form",
                              "unsupported_media_type");
  }
  const auto& settings = context.dependencies.settings.results;
  const std::string form = type == "multipart/form-data" ? std::string(request.header("Content-Type")) : "";
  auto receiving = form.empty() ? context.receive(call, settings.input_max_bytes) : context.receive_form(call);
  auto body = co_await std::move(receiving);
  if (!body) co_return unread_body(body.error());
  const std::size_t bytes = body->bytes.size();
  std::function<Result<ImageFile>()> work = [file = std::move(body->bytes), form,
                                             most = settings.input_max_bytes]() mutable -> Result<ImageFile> {
    if (form.empty()) return read_image({.field = "image", .param = "", .contents = std::move(file)}, most);
    auto of_form = only_file(form, file);
    if (!of_form) return of_form.error();
    return read_image({.field = "image", .param = "", .contents = std::move(*of_form)}, most);
  };
  auto file = co_await context.off_loop<ImageFile>(call, bytes, std::move(work));
  if (!file) co_return file.error();
  const std::size_t file_bytes = file->bytes.size();
  auto stored = co_await context.service.put_input(call->caller.tenant, file->sha256, std::move(file->bytes));
  if (!stored) co_return stored.error();
  co_return json_response(201, {{"id", file->sha256},
                                {"object", "upload"},
                                {"bytes", file_bytes},
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

asio::awaitable<Result<Response>> content(const ApiContext& context, CallPtr call) {
  auto file = co_await context.service.input(call->caller.tenant, call->param(0));
  if (!file) co_return file.error();
  const auto info = media::inspect(*file);
  if (!info) co_return info.error();
  co_return bytes_response(call->request, std::move(*file), std::string(info->media_type),
                           "\"" + call->param(0) + "\"");
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
  router.add({.method = "GET", .pattern = "/v1/uploads/{sha256}/content", .handler = content});
  router.add({.method = "DELETE", .pattern = "/v1/uploads/{sha256}", .handler = remove});
}

}  // namespace ditfleet::gateway
