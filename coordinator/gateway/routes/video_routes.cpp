// OpenAI's videos: create, remix, list, read, download, delete. A canceled job is a deleted video.
#include <algorithm>
#include <utility>

#include "coordinator/gateway/routes/api_context.h"
#include "coordinator/gateway/routes/errors.h"
#include "coordinator/gateway/routes/openai_videos.h"
#include "shared/core/excerpt.h"
#include "shared/core/ids.h"
#include "shared/job/shape_class.h"

namespace ditfleet::gateway {

// Not in the unnamed namespace, because coroutines of a header hold it.
struct ListedVideo {
  json::object video;
  std::string cursor;
};

namespace {

constexpr int kDefaultPage = 20, kMaxPage = 100;
constexpr int kMostReads = 2;  // of 10,000 jobs of any kind, for one page of videos

Error no_such_video(const std::string& id) {
  return {Code::kNotFound,
          "video '" + excerpt(id, 100) +
              "' not found: it never existed, was deleted, has expired or belongs to another tenant",
          {}};
}

// The job that the path names, which generates a video. Errors: no_such_video() and those of JobService::job.
asio::awaitable<Result<queue::JobRecord>> find_video(const ApiContext& context, CallPtr call) {
  const std::string& id = call->param(0);
  if (!is_valid_id(id)) co_return no_such_video(id);
  auto record = co_await context.service.job(id, call->caller.view());
  if (!record && record.error().code != Code::kNotFound) co_return record.error();
  if (!record || record->state == job::State::kCanceled || !video_of(*record, context.dependencies.catalogue))
    co_return no_such_video(id);
  co_return std::move(*record);
}

Response video_response(const ApiContext& context, const queue::JobRecord& record) {
  const auto& dependencies = context.dependencies;
  const auto video = video_of(record, dependencies.catalogue);
  return json_response(200, video_json(*video, dependencies.settings.queue.retention_ms, context.progress(record)))
      .with("Cache-Control", "no-store");
}

asio::awaitable<Result<Response>> created(const ApiContext& context, CallPtr call, queue::SubmitOutcome outcome) {
  auto record = co_await context.service.job(outcome.id, call->caller.view());
  if (!record) co_return record.error();
  Response response = video_response(context, *record);
  response.with("Location", "/v1/videos/" + record->id).with("X-Job-Id", record->id);
  if (outcome.existed) response.with("Idempotent-Replayed", "true");
  co_return response;
}

asio::awaitable<Result<Response>> create_video(const ApiContext& context, CallPtr call) {
  const Request& request = call->request;
  if (auto refused = refuse_body_unless_json_or_form(request)) co_return std::move(*refused);
  auto body = co_await context.receive_images(call);
  if (!body) co_return unread_body(body.error());
  const std::size_t bytes = body->bytes.size();
  std::function<Result<VideoCall>()> work = [&context, body = std::move(body->bytes),
                                             type = std::string(request.header("Content-Type"))] {
    return parse_video_call(type, body, context.dependencies.catalogue);
  };
  auto video = co_await context.off_loop<VideoCall>(call, bytes, std::move(work));
  if (!video && video.error().code == Code::kNotFound)
    co_return status_response(404, video.error().message, "model_not_found", "model");
  if (!video) co_return video.error();
  auto outcome = co_await context.submit(call, video->spec, std::move(video->images));
  if (!outcome) co_return as_video_error(outcome.error(), video->has_reference);
  co_return co_await created(context, call, *outcome);
}

asio::awaitable<Result<Response>> remix_video(const ApiContext& context, CallPtr call) {
  if (auto refused = refuse_body_unless_json(call->request)) co_return std::move(*refused);
  auto former = co_await find_video(context, call);
  if (!former) co_return former.error();
  auto spec = parse_remix(call->request.body, *former);
  if (!spec) co_return spec.error();
  auto outcome = co_await context.submit(call, *spec);
  if (!outcome) co_return outcome.error();
  co_return co_await created(context, call, *outcome);
}

asio::awaitable<Result<Response>> get_video(const ApiContext& context, CallPtr call) {
  auto record = co_await find_video(context, call);
  if (!record) co_return record.error();
  co_return video_response(context, *record);
}

struct VideoList {
  int limit = kDefaultPage;
  std::string after;
  bool oldest_first = false;
};

Result<VideoList> parse_list(const Request& request) {
  VideoList list;
  for (const auto& [name, value] : request.query) {
    if (name == "limit") {
      const auto asked = parse_limit(value, kMaxPage);
      if (!asked) return asked.error();
      list.limit = *asked;
    } else if (name == "after") {
      list.after = value;
    } else if (name == "order") {
      if (value != "asc" && value != "desc") return invalid_argument("'order' must be asc or desc", name);
      list.oldest_first = value == "asc";
    } else {
      return invalid_argument("unknown parameter '" + name + "'; supported are after, limit and order", name);
    }
  }
  return list;
}

// The queue's cursor behind a job.
std::string cursor_of(const queue::JobRecord& record) { return std::to_string(record.created_ms) + ":" + record.id; }

// `progress`: of each job.
Result<std::vector<ListedVideo>> read_videos(const std::vector<queue::JobRecord>& records,
                                             const std::vector<double>& progress, const job::Catalogue& catalogue,
                                             std::int64_t retention_ms) {
  std::vector<ListedVideo> videos;
  for (std::size_t i = 0; i < records.size(); ++i) {
    if (const auto video = video_of(records[i], catalogue))
      videos.push_back({video_json(*video, retention_ms, progress[i]), cursor_of(records[i])});
  }
  return videos;
}

// By its class; that of a job that is not admitted yet is unknown.
bool may_be_video(const queue::JobRecord& record, const job::Catalogue& catalogue) {
  const auto shape = job::parse_class_key(record.class_key);
  const auto model = catalogue.models.find(shape ? shape->model : std::string());
  return record.state != job::State::kCanceled &&
         (!shape || (model != catalogue.models.end() && model->second.media == job::MediaKind::kVideo));
}

asio::awaitable<Result<Response>> list_videos(const ApiContext& context, CallPtr call) {
  auto list = parse_list(call->request);
  if (!list) co_return list.error();
  std::string cursor = list->after;
  if (!cursor.empty() && cursor.find(':') == cursor.npos) {
    const auto record = co_await context.service.job(cursor, call->caller.view());
    if (!record && record.error().code != Code::kNotFound) co_return record.error();
    if (!record) {
      co_return invalid_argument("'after' is '" + excerpt(cursor, 100) +
                                     "', which is not a video; use the last_id of the previous page, which stays "
                                     "valid if the video is deleted",
                                 "after");
    }
    cursor = cursor_of(*record);
  }
  json::array videos;
  std::string last;
  std::size_t bytes = 0;
  bool more = false;
  for (int reads = 0; reads < kMostReads && !more; ++reads) {
    const int wanted = list->limit + 1 - static_cast<int>(videos.size());
    std::function<bool(const queue::JobRecord&)> keep =
        [&catalogue = context.dependencies.catalogue](const queue::JobRecord& record) {
          return may_be_video(record, catalogue);
        };
    auto page = co_await context.service.list(call->caller.view(), std::nullopt, wanted, cursor, list->oldest_first,
                                              std::move(keep));
    if (!page) {
      Error error = page.error();
      if (error.param == "cursor") error.param = "after";
      co_return error;
    }
    std::vector<double> progress;
    for (queue::JobRecord& record : page->jobs) {
      bytes += record.spec.size();
      // Lists have no units, which have the progress.
      if (record.state >= job::State::kRunning && !job::is_terminal(record.state)) {
        auto whole = co_await context.service.job(record.id, call->caller.view());
        if (whole) record = std::move(*whole);
      }
      progress.push_back(context.progress(record));
    }
    cursor = page->next_cursor;
    std::function<Result<std::vector<ListedVideo>>()> work = [&context, records = std::move(page->jobs),
                                                              progress = std::move(progress)] {
      const auto& [settings, catalogue] = std::tie(context.dependencies.settings, context.dependencies.catalogue);
      return read_videos(records, progress, catalogue, settings.queue.retention_ms);
    };
    auto found = co_await context.off_loop<std::vector<ListedVideo>>(call, bytes, std::move(work));
    if (!found) co_return found.error();
    for (auto& [video, next] : *found) {
      more = videos.size() == static_cast<std::size_t>(list->limit);
      if (more) break;
      videos.push_back(std::move(video));
      last = next;
    }
    if (cursor.empty()) break;
  }
  // The rest is on the next page, which begins where the reads ended.
  if (!more && !cursor.empty()) more = true, last = cursor;
  std::function<Result<Response>()> work = [videos = std::move(videos), last, more] {
    const json::value first = videos.empty() ? json::value(nullptr) : videos[0].at("id");
    return json_response(200, {{"object", "list"},
                               {"data", videos},
                               {"first_id", first},
                               {"last_id", text_or_null(last)},
                               {"has_more", more}})
        .with("Cache-Control", "no-store");
  };
  co_return co_await context.off_loop<Response>(call, bytes, std::move(work));
}

asio::awaitable<Result<Response>> get_content(const ApiContext& context, CallPtr call) {
  const auto variant = call->request.query_value("variant");
  if (variant && *variant != "video")
    co_return invalid_argument("'variant' is '" + excerpt(*variant, 100) + "'; only video is supported", "variant");
  auto record = co_await find_video(context, call);
  if (!record) co_return record.error();
  co_return co_await send_result(context, call, std::move(*record), 0);
}

asio::awaitable<Result<Response>> delete_video(const ApiContext& context, CallPtr call) {
  auto record = co_await find_video(context, call);
  if (!record) co_return record.error();
  if (!job::is_terminal(record->state)) {
    auto outcome = co_await context.service.cancel(record->id, call->caller.view());
    if (!outcome && outcome.error().code != Code::kNotFound) co_return outcome.error();
    if (outcome && *outcome == queue::CancelOutcome::kAlreadyEnded) record = co_await find_video(context, call);
    if (!record) co_return record.error();
  }
  if (job::is_terminal(record->state)) {
    auto gone = co_await context.service.forget(*record);
    if (!gone) co_return gone.error();
  }
  co_return json_response(200, {{"id", record->id}, {"object", "video.deleted"}, {"deleted", true}});
}

}  // namespace

void add_video_routes(Router& router) {
  router.add(
      {.method = "POST", .pattern = "/v1/videos", .handler = create_video, .streams_body = true, .takes_images = true});
  router.add({"GET", "/v1/videos", list_videos});
  router.add({"GET", "/v1/videos/{id}", get_video});
  router.add({"DELETE", "/v1/videos/{id}", delete_video});
  router.add({"POST", "/v1/videos/{id}/remix", remix_video});
  router.add({"GET", "/v1/videos/{id}/content", get_content});
}

}  // namespace ditfleet::gateway
