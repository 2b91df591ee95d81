// POST /v1/images/generations and /v1/images/edits: submit a job and wait for it. A client that disconnects does not
// cancel its job, because it may repeat the request with the same Idempotency-Key; DELETE /v1/jobs/{id} does.
#include <algorithm>
#include <chrono>
#include <map>
#include <set>

#include "coordinator/gateway/events/event_stream.h"
#include "coordinator/gateway/events/job_follower.h"
#include "coordinator/gateway/routes/api_context.h"
#include "coordinator/gateway/routes/errors.h"
#include "coordinator/gateway/routes/openai_images.h"
#include "shared/core/wall_clock.h"

namespace ditfleet::gateway {
namespace {

constexpr std::chrono::seconds kKeepAlive{15};

// OpenAI's client repeats 409, 429 and 5xx by itself, which would submit a job again that has run or still runs.
Response final_error(const Error& error, const std::string& job) {
  Response response = error_response(error);
  std::erase_if(response.headers, [](const auto& field) { return field.first == "Retry-After"; });
  return response.with("x-should-retry", "false").with("X-Job-Id", job);
}

Error error_of(const queue::JobRecord& record) {
  Error error = cause_of(record);
  error.message = "job " + record.id + " " + std::string(job::state_name(record.state)) + ": " + error.message;
  return error;
}

// 499 is a proxy's private status. For the client that waits, cancellation by someone else is a conflict.
Error as_response(Error error) {
  if (error.code == Code::kCanceled) error.code = Code::kConflict;
  return error;
}

std::string error_event(const Error& error) {
  const Response body = error_response(as_response(error));
  return format_event({}, "error", std::string_view(body.body).substr(0, body.body.size() - 1));
}

// must_exist: fails if the picture has expired.
asio::awaitable<Result<ImagePart>> image_part(const ApiContext& context, CallPtr call, const queue::JobRecord& record,
                                              int unit, bool must_exist) {
  const queue::UnitRecord* found = find_unit(record, unit);
  if (found == nullptr) co_return internal_error("job " + record.id + " has no unit " + std::to_string(unit));
  auto manifest = results::Manifest::parse(found->manifest);
  if (!manifest) co_return manifest.error();
  if (must_exist) {
    const auto first_byte = co_await context.service.result_piece(*manifest, 0, 1);
    if (!first_byte) co_return first_byte.error();
  }
  std::string link = context.links(*call).result(record.id, unit, *manifest);
  co_return ImagePart{unit, std::move(link), std::move(*manifest)};
}

// Writes JSON with a place for each picture, an empty "b64_json", and the pictures there.
asio::awaitable<bool> write_pictures(JobService& service, Sink& sink, std::string text, std::vector<ImagePart> parts) {
  constexpr std::string_view kPlace = "\"b64_json\":\"";
  std::size_t from = 0;
  for (const ImagePart& part : parts) {
    const std::size_t place = text.find(kPlace, from) + kPlace.size();
    if (!co_await sink.write(text.substr(from, place - from))) co_return false;
    from = place;
    if (!co_await write_result(service, part.manifest, {0, part.manifest.bytes}, true, sink)) co_return false;
  }
  co_return co_await sink.write(text.substr(from));
}

asio::awaitable<Response> wait_for_images(const ApiContext& context, CallPtr call,
                                          std::shared_ptr<const ImageCall> image, std::string job,
                                          std::shared_ptr<void> counted, Sink& client) {
  auto subscription = context.hub->subscribe(job);
  client.when_gone([waiter = subscription.get()] { waiter->interrupt(); });
  const auto patience = std::chrono::milliseconds(context.dependencies.settings.gateway.request_timeout_ms);
  auto record = co_await wait_for_end(context.service, *subscription, job, Deadline::after(patience));
  client.when_gone({});
  if (!record) co_return final_error(client.gone() ? record.error() : as_response(record.error()), job);
  if (record->state != job::State::kSucceeded) co_return final_error(as_response(error_of(*record)), job);
  std::vector<ImagePart> parts;
  for (int unit = 0; unit < record->units; ++unit) {
    // An expired picture is an error that must be known before the status is sent.
    auto part = co_await image_part(context, call, *record, unit, image->b64_json);
    if (!part) co_return final_error(part.error(), job);
    parts.push_back(std::move(*part));
  }
  Response response = json_response(200, images_json(*image, job, record->created_ms / 1000, parts));
  response.with("X-Job-Id", job);
  if (image->b64_json) {
    response.stream_bytes = response.body.size();
    for (const auto& part : parts)
      *response.stream_bytes += static_cast<std::uint64_t>(part.manifest.bytes + 2) / 3 * 4;
    response.stream = [&context, text = std::exchange(response.body, {}), parts,
                       counted](Sink& sink) -> asio::awaitable<void> {
      co_await write_pictures(context.service, sink, text, parts);
    };
  }
  co_return response;
}

asio::awaitable<bool> write_completed(const ApiContext& context, CallPtr call, std::shared_ptr<const ImageCall> image,
                                      std::string job, int unit, std::int64_t created_s, Sink& sink) {
  auto record = co_await context.service.job(job, "");
  if (!record) co_return co_await sink.write(error_event(record.error()));
  auto part = co_await image_part(context, call, *record, unit, true);
  if (!part) co_return co_await sink.write(error_event(part.error()));
  std::string text = format_event({}, completed_event(*image), completed_json(*image, created_s, *part));
  std::vector<ImagePart> parts{std::move(*part)};
  co_return co_await write_pictures(context.service, sink, std::move(text), std::move(parts));
}

asio::awaitable<void> stream_images(const ApiContext& context, CallPtr call, std::shared_ptr<const ImageCall> image,
                                    std::string job, Sink& sink) {
  JobFollower follower(context.service, context.hub, job, "0");
  sink.when_gone([&follower] { follower.interrupt(); });
  std::map<int, int> partials;  // sent so far, by unit
  std::set<int> completed;
  const Deadline patience =
      Deadline::after(std::chrono::milliseconds(context.dependencies.settings.gateway.request_timeout_ms));
  const std::int64_t created_s = unix_ms() / 1000;
  if (!co_await sink.write(format_comment("job " + job))) co_return;
  while (true) {
    auto batch = co_await follower.next(Deadline::after(kKeepAlive));
    if (batch.status == JobFollower::Status::kGone) co_return;
    if (batch.status == JobFollower::Status::kStopped) {
      co_await sink.write(
          error_event(unavailable("this gateway is stopping; job " + job + " continues, see /v1/jobs/" + job)));
      co_return;
    }
    if (batch.status == JobFollower::Status::kEnd) break;
    if (batch.status == JobFollower::Status::kIdle) {
      if (!co_await sink.write(format_comment("keep-alive"))) co_return;
    }
    for (const auto& event : batch.events) {
      const auto key = event.fields.find("key");
      if (event.type == "preview" && key != event.fields.end()) {
        // A preview that has expired or cannot be read is skipped; the image still follows.
        auto bytes = co_await context.service.preview(key->second);
        int& index = partials[event.unit];
        if (!bytes || index >= image->spec.partial_images) continue;
        const std::string data = partial_image_json(*image, created_s, index++, event.unit, *bytes);
        if (!co_await sink.write(format_event({}, partial_image_event(*image), data))) co_return;
      } else if (event.type == "succeeded" && event.unit >= 0) {
        completed.insert(event.unit);
        if (!co_await write_completed(context, call, image, job, event.unit, created_s, sink)) co_return;
      }
    }
    if (patience.passed()) {
      co_await sink.write(error_event(Error{
          Code::kDeadlineExceeded,
          "the image was not ready within gateway.request_timeout_ms; job " + job + " continues, see /v1/jobs/" + job,
          {}}));
      co_return;
    }
  }
  auto record = co_await context.service.job(job, "");
  if (!record || record->state != job::State::kSucceeded) {
    // Outside the co_await, because GCC 12 evaluates both branches of a conditional inside one.
    std::string text = error_event(record ? error_of(*record) : record.error());
    co_await sink.write(std::move(text));
    co_return;
  }
  for (int unit = 0; unit < record->units; ++unit) {
    if (completed.contains(unit)) continue;
    if (!co_await write_completed(context, call, image, job, unit, created_s, sink)) co_return;
  }
}

asio::awaitable<Result<Response>> make_images(const ApiContext& context, CallPtr call, bool edit) {
  auto received = co_await context.receive_images(call);
  if (!received) co_return unread_body(received.error());
  const std::size_t bytes = received->bytes.size();
  std::function<Result<ImageCall>()> work = [body = std::move(received->bytes), edit,
                                             type = std::string(call->request.header("Content-Type"))] {
    return parse_image_call(type, body, edit);
  };
  auto parsed = co_await context.off_loop<ImageCall>(call, bytes, std::move(work));
  if (!parsed) co_return parsed.error();
  const auto image = std::make_shared<ImageCall>(std::move(*parsed));

  const job::Catalogue& catalogue = context.dependencies.catalogue;
  const std::string& name = image->spec.model.empty() ? catalogue.default_model : image->spec.model;
  if (const auto model = catalogue.models.find(name); model != catalogue.models.end())
    image->complete_for(model->second);
  Response response;
  const auto counted = context.open_stream(*call, response);
  if (!counted) co_return response;
  auto outcome = co_await context.submit(call, image->spec, std::exchange(image->images, {}), image->edit);
  if (!outcome) {
    const Error error = as_image_error(outcome.error(), *image);
    if (error.code == Code::kNotFound && error.param == "model")
      co_return status_response(404, error.message, "model_not_found", "model");
    co_return error;
  }
  const std::string job = outcome->id;
  if (image->stream) {
    response.content_type = "text/event-stream";
    response.with("Cache-Control", "no-store").with("X-Accel-Buffering", "no").with("X-Job-Id", job);
    response.filler = format_comment("keep-alive");
    response.stream = [&context, call, image, job, counted](Sink& sink) {
      return stream_images(context, call, image, job, sink);
    };
  } else {
    response.later = [&context, call, image, job, counted](Sink& client) {
      return wait_for_images(context, call, image, job, counted, client);
    };
  }
  co_return response;
}

asio::awaitable<Result<Response>> generate(const ApiContext& context, CallPtr call) {
  if (auto refused = refuse_body_unless_json(call->request)) co_return std::move(*refused);
  co_return co_await make_images(context, call, false);
}

asio::awaitable<Result<Response>> edit(const ApiContext& context, CallPtr call) {
  if (auto refused = refuse_body_unless_json_or_form(call->request)) co_return std::move(*refused);
  co_return co_await make_images(context, call, true);
}

asio::awaitable<Result<Response>> vary(const ApiContext&, CallPtr) {
  co_return status_response(
      400,
      "variations of an image are not supported; use POST /v1/images/edits with the image, a prompt and "
      "strength, of models that take it: 0.5 runs half of the steps on the image",
      "unsupported_endpoint");
}

}  // namespace

void add_image_routes(Router& router) {
  router.add({.method = "POST", .pattern = "/v1/images/generations", .handler = generate, .takes_images = true});
  router.add(
      {.method = "POST", .pattern = "/v1/images/edits", .handler = edit, .streams_body = true, .takes_images = true});
  router.add({.method = "POST",
              .pattern = "/v1/images/variations",
              .handler = vary,
              .streams_body = true,
              .takes_images = true});
}

}  // namespace ditfleet::gateway
