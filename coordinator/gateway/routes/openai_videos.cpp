#include "coordinator/gateway/routes/openai_videos.h"

#include <fmt/format.h>

#include <cmath>

#include "coordinator/gateway/http/http.h"
#include "coordinator/gateway/routes/job_json.h"
#include "coordinator/gateway/routes/openai_body.h"
#include "shared/core/excerpt.h"
#include "shared/core/text.h"
#include "shared/job/object_reader.h"
#include "shared/job/spec_json.h"
#include "shared/results/store.h"

namespace ditfleet::gateway {
namespace {

using job::Field;

std::string video_models(const job::Catalogue& catalogue) {
  std::vector<std::string> names;
  for (const auto& [name, entry] : catalogue.models) {
    if (entry.media == job::MediaKind::kVideo) names.push_back(name);
  }
  if (names.empty()) return "no model that generates videos is configured";
  return fmt::format("use {}", fmt::join(names, " or "));
}

Result<const job::ModelEntry*> find_video_model(std::string& name, const job::Catalogue& catalogue) {
  if (name.empty()) name = catalogue.default_model;
  if (name.empty() && catalogue.models.size() == 1) name = catalogue.models.begin()->first;
  if (name.empty())
    return invalid_argument("'model' is missing and there is no default model; " + video_models(catalogue), "model");
  const auto found = catalogue.models.find(name);
  if (found == catalogue.models.end())
    return Error{Code::kNotFound, "there is no model '" + name + "'; " + video_models(catalogue), "model"};
  if (found->second.media == job::MediaKind::kVideo) return &found->second;
  return invalid_argument("model '" + name + "' generates images, not videos; " + video_models(catalogue), "model");
}

double frame_rate(const job::JobSpec& spec, const job::ModelEntry& model) {
  const auto asked = spec.fields.real("fps");
  return asked ? *asked : model.defaults.real("fps").value_or(1);
}

Result<void> take_seconds(const json::value& value, const job::ModelEntry& model, job::JobSpec& spec) {
  std::optional<double> seconds;
  if (value.is_string()) seconds = number_of(std::string_view(value.as_string()), 0.0);
  if (value.is_number()) seconds = value.to_number<double>();
  if (!seconds || !(*seconds > 0))
    return invalid_argument("'seconds' must be a number above 0 such as \"4\"", "seconds");
  if (spec.fields.has("frames"))
    return invalid_argument("'seconds' and 'frames' both set the length of the video; send one of them", "seconds");
  const auto limits = model.fields.find("frames");
  if (limits == model.fields.end())
    return invalid_argument("model '" + model.name + "' generates videos of a fixed length; leave 'seconds' out",
                            "seconds");
  const double fps = frame_rate(spec, model), frames = *seconds * fps;
  const auto [low, high] = std::pair(limits->second.low, limits->second.high);
  // Far outside the bounds, the number would not fit into an integer.
  const std::int64_t nearest = frames < 1e6 ? limits->second.nearest(frames) : 1'000'000;
  if (nearest < low || nearest > high) {
    return invalid_argument(
        fmt::format(
            "'seconds' is {}, which is {} frames at {} frames per second; model '{}' generates {} to {} frames, "
            "at most {:.1f} seconds",
            job::number_text(*seconds), nearest, job::number_text(fps), model.name, low, high,
            static_cast<double>(high) / fps),
        "seconds");
  }
  spec.fields.set("frames", nearest);
  return {};
}

// The seconds of a video, rounded as far as they still mean its number of frames: 65 frames at 16 per second are "4".
std::string seconds_text(std::int64_t frames, double fps, const job::ModelEntry& model) {
  const double seconds = static_cast<double>(frames) / fps;
  const auto limits = model.fields.find("frames");
  for (const double scale : {1.0, 10.0, 100.0}) {
    const double rounded = std::round(seconds * scale) / scale;
    if (limits != model.fields.end() && limits->second.nearest(rounded * fps) == frames)
      return job::number_text(rounded);
  }
  return job::number_text(seconds);
}

// WIDTHxHEIGHT; auto as long as the image that the video begins with decides it.
std::string size_of(const VideoJob& video) {
  auto width = video.spec.fields.integer("width"), height = video.spec.fields.integer("height");
  for (const auto& unit : video.record.unit_records) {
    const auto manifest = results::Manifest::parse(unit.manifest);
    if (manifest) width = manifest->width, height = manifest->height;
  }
  return width && height ? fmt::format("{}x{}", *width, *height) : "auto";
}

std::string_view status_of(job::State state) {
  if (state == job::State::kSucceeded) return "completed";
  if (job::is_terminal(state)) return "failed";
  return state >= job::State::kRunning ? "in_progress" : "queued";
}

}  // namespace

bool is_video_field(Field field) {
  return field != Field("width") && field != Field("height") && field != Field("n") &&
         field != Field("output_format") && field != Field("remixed_from");
}

Error as_video_error(Error error, bool has_reference) {
  if (error.param == "width" || error.param == "height") error.param = "size";
  if (error.param == "image" && has_reference) error.param = "input_reference";
  return error;
}

Result<VideoCall> parse_video_call(std::string_view content_type, std::string_view body,
                                   const job::Catalogue& catalogue) {
  static constexpr std::string_view kFiles[] = {"input_reference", "image", "images", "mask"};
  auto read = read_openai_body(content_type, body, kFiles);
  if (!read) return read.error();
  VideoCall call;
  call.images = std::move(read->files);
  json::object job;
  json::value seconds;  // null
  for (const auto& [key, value] : read->fields) {
    if (value.is_null()) continue;
    const std::string name(key);
    if (name == "seconds") {
      seconds = value;
    } else if (name == "input_reference") {
      call.has_reference = true;
      auto image = image_value(value, name);
      if (!image) return image.error();
      job["image"] = std::move(*image);
    } else if (const auto field = job::find_field(name); field && is_video_field(*field)) {
      job[name] = value;
    } else {
      return invalid_argument("'" + excerpt(name, 100) + "' is not a field of a video request; see /openapi.json",
                              excerpt(name, 100));
    }
  }
  if (call.has_reference && (read->fields.contains("image") || job.contains("images")))
    return invalid_argument("'input_reference' cannot be combined with 'image'; send one of them", "input_reference");
  if (!job.contains("prompt"))
    return invalid_argument("'prompt' is missing; send a description of the video", "prompt");
  for (SentImage& image : take_images(job)) call.images.push_back(std::move(image));
  auto spec = job::parse_spec(json::value(std::move(job)));
  if (!spec) return as_video_error(spec.error(), call.has_reference);
  call.spec = std::move(*spec);
  const auto model = find_video_model(call.spec.model, catalogue);
  if (!model) return model.error();
  if (!seconds.is_null()) {
    if (auto set = take_seconds(seconds, **model, call.spec); !set) return set.error();
  }
  return call;
}

Result<job::JobSpec> parse_remix(std::string_view body, const queue::JobRecord& former) {
  auto read = read_openai_body("application/json", body, {});
  if (!read) return read.error();
  job::ObjectReader reader(read->fields, "");
  reader.refuse_unknown({"prompt"});
  auto prompt = reader.text("prompt", job::kMaxTextBytes);
  if (!prompt) reader.fail("prompt", "is missing; send a description of the video");
  if (!reader.ok()) return *reader.error();
  if (former.state != job::State::kSucceeded) {
    return invalid_argument("video '" + former.id + "' is " + std::string(status_of(former.state)) +
                            "; only a completed video can be remixed");
  }
  auto spec = job::parse_spec(former.spec);
  if (!spec) return spec.error();
  spec->prompt = std::move(*prompt);
  spec->remixed_from = former.id;
  spec->n = 1;
  spec->deadline_ms.reset();
  return spec;
}

std::optional<VideoJob> video_of(const queue::JobRecord& record, const job::Catalogue& catalogue) {
  auto spec = job::parse_spec(record.spec);
  if (!spec) return std::nullopt;
  const auto model = find_video_model(spec->model, catalogue);
  if (!model) return std::nullopt;
  for (const Field field : job::kFields) {
    const auto* otherwise = (*model)->defaults.find(field);
    if (otherwise && !spec->fields.has(field)) spec->fields.set(field, *otherwise);
  }
  return VideoJob{record, **model, std::move(*spec)};
}

json::object video_json(const VideoJob& video, std::int64_t retention_ms, double progress) {
  const queue::JobRecord& record = video.record;
  const job::FieldValues& fields = video.spec.fields;
  const std::string_view status = status_of(record.state);
  const bool ended = job::is_terminal(record.state);
  const int percent = status == "failed" ? 0 : static_cast<int>(100 * progress);
  json::value error;  // null
  if (status == "failed") {
    const Error cause = cause_of(record);
    error = json::object{{"code", code_name(cause.code)}, {"message", cause.message}};
  }
  const auto second_or_null = [&](std::int64_t ms) { return ended ? json::value(ms / 1000) : json::value(nullptr); };
  return {
      {"id", record.id},
      {"object", "video"},
      {"model", video.model.name},
      {"status", status},
      {"progress", percent},
      {"created_at", record.created_ms / 1000},
      {"completed_at", second_or_null(record.ended_ms)},
      {"expires_at", second_or_null(record.ended_ms + retention_ms)},
      {"seconds", seconds_text(fields.integer("frames").value_or(1), frame_rate(video.spec, video.model), video.model)},
      {"size", size_of(video)},
      {"prompt", video.spec.prompt},
      {"error", std::move(error)},
      {"remixed_from_video_id", text_or_null(video.spec.remixed_from)}};
}

}  // namespace ditfleet::gateway
