#include "coordinator/gateway/routes/api_context.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "coordinator/gateway/backend/redis_error.h"
#include "coordinator/gateway/http/http_metrics.h"
#include "coordinator/gateway/routes/errors.h"
#include "coordinator/gateway/webhooks/address.h"
#include "shared/core/bytes.h"
#include "shared/core/ids.h"
#include "shared/core/sha256.h"
#include "shared/job/validate.h"
#include "shared/loras/registry_mirror.h"

namespace ditfleet::gateway {
namespace {

constexpr std::int64_t kMinimumLinkLifeS = 3600;
constexpr std::size_t kMaxIdempotencyKey = 255;
constexpr std::chrono::seconds kRegistryPatience{5}, kOutlookAge{1};
constexpr std::int64_t kMostReceiving = 256 << 20, kMostText = 1 << 20;  // of a form or of JSON beside its images

bool is_host(std::string_view host) {
  return !host.empty() && host.size() <= 255 &&
         host.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_:[]") ==
             std::string_view::npos;
}

bool is_idempotency_key(std::string_view key) {
  return !key.empty() && key.size() <= kMaxIdempotencyKey &&
         std::all_of(key.begin(), key.end(), [](char c) { return c >= 0x21 && c <= 0x7e; });
}

// What the client calls an image of a field.
std::string name_of(const SentImages& sent, job::Field field, std::size_t index) {
  const auto named = std::find_if(sent.begin(), sent.end(),
                                  [&](const SentImage& image) { return image.field == field && image.index == index; });
  return named != sent.end() ? named->param : std::string(field.name());
}

// Why events may not be sent to `url`, as far as it is known before its name is resolved.
std::optional<Error> refused_webhook(const std::string& url, const config::Webhooks& webhooks) {
  if (url.empty()) return std::nullopt;
  if (!is_listed_host(url, webhooks.hosts))
    return invalid_argument("webhook has the host '" + host_of(url) + "'; this service sends events to " +
                                webhooks.hosts + " (webhooks.hosts)",
                            "webhook");
  if (!webhooks.allow_private && names_private_address(url))
    return invalid_argument("webhook has the host '" + host_of(url) +
                                "', which is not on the public Internet; use a public one, or set "
                                "webhooks.allow_private",
                            "webhook");
  return std::nullopt;
}

Error no_checkpoint(const std::string& source) {
  return Error{Code::kConflict,
               "resume_from: job '" + source +
                   "' has no checkpoint: it was paused before its first step, or the "
                   "checkpoint was too large to be stored; resume it, and pause it when it runs",
               "resume_from"};
}

}  // namespace

JobLinks ApiContext::links(std::string_view host) const {
  JobLinks links;
  const auto& settings = dependencies.settings;
  if (!settings.gateway.public_url.empty()) {
    links.base = settings.gateway.public_url;
    while (links.base.ends_with('/')) links.base.pop_back();
  } else {
    const std::string scheme = settings.gateway.tls_cert_file.empty() ? "http://" : "https://";
    links.base = is_host(host) ? scheme + std::string(host) : local_url;
  }
  if (!keys.open()) links.signer = &signer;
  links.expires_s = unix_ms() / 1000 + link_life_s();
  if (settings.results.s3.links)
    links.stored = [this](const results::Manifest& manifest) { return service.result_link(manifest, link_life_s()); };
  return links;
}

std::shared_ptr<void> ApiContext::open_stream(const Call& call, Response& refused) const {
  const auto& settings = dependencies.settings;
  const std::string tenant = call.caller.tenant;
  // A quarter of the connections is reserved for other requests.
  const int most = std::max(1, settings.gateway.max_connections / 4 * 3);
  const auto quota = config::quotas_of(settings, tenant).streams;
  const auto own_most = keys.open() ? quota : std::min<std::int64_t>(quota, std::max(1, most / 2));
  const auto own = streams->by_tenant.find(tenant);
  if (own != streams->by_tenant.end() && own->second >= own_most) {
    refused = error_response(Error{
        .code = Code::kResourceExhausted,
        .message = "tenant '" + tenant + "' has " + std::to_string(own->second) +
                   " open event streams, waiting image requests and downloads of large results; " +
                   (own_most == quota ? "quotas.streams is " : "half of what gateway.max_connections permits is ") +
                   std::to_string(own_most) +
                   ", and uploads count too; poll jobs or try again when one of them has ended",
        .retry_after = std::chrono::seconds(5)});
    return nullptr;
  }
  if (streams->all >= most) {
    refused =
        status_response(503,
                        std::to_string(streams->all) +
                            " event streams, waiting image requests, uploads and downloads of large results are open, "
                            "which is the limit (three "
                            "quarters of gateway.max_connections); poll the job or try again shortly",
                        "too_many_streams")
            .with("Retry-After", "5");
    return nullptr;
  }
  ++streams->all;
  ++streams->by_tenant[tenant];
  count_event_streams(1);
  return {streams.get(), [streams = streams, tenant](OpenStreams*) {
            --streams->all;
            if (--streams->by_tenant[tenant] == 0) streams->by_tenant.erase(tenant);
            count_event_streams(-1);
          }};
}

std::int64_t ApiContext::link_life_s() const {
  return std::max(kMinimumLinkLifeS, dependencies.settings.queue.retention_ms / 1000);
}

asio::awaitable<Result<queue::JobRecord>> ApiContext::find_job(CallPtr call) const {
  const std::string& id = call->param(0);
  if (!is_valid_id(id)) co_return no_such_job(id);
  auto record = co_await service.job(id, call->caller.view());
  if (!record && record.error().code == Code::kNotFound) co_return no_such_job(id);
  co_return record;
}

double ApiContext::progress(const queue::JobRecord& record) const {
  FleetHistory& history = hub->history();
  return history.rising(record.id, progress_of(record, history.pace(record.class_key), unix_ms()));
}

asio::awaitable<void> ApiContext::add_outlook(const queue::JobRecord& record, json::object& out) const {
  out["position"] = nullptr;
  out["eta_ms"] = nullptr;
  if (record.state > job::State::kRunning || record.state == job::State::kPaused) co_return;
  KnownOutlook& known = *known_outlook;
  if (known.stale.passed()) {
    known.stale = Deadline::after(kOutlookAge);  // concurrent calls use the old one
    auto read = co_await service.outlook();
    known.jobs = read ? std::move(*read) : std::map<std::string, queue::JobOutlook>();
  }
  const auto found = known.jobs.find(record.id);
  if (found == known.jobs.end()) co_return;
  if (record.state < job::State::kRunning && found->second.position >= 0) out["position"] = found->second.position;
  if (found->second.eta_ms > 0) out["eta_ms"] = std::max(found->second.eta_ms, unix_ms());
}

asio::awaitable<json::object> ApiContext::describe(const queue::JobRecord& record, JobLinks links,
                                                   bool with_units) const {
  json::object out = job_json(record, links, with_units, dependencies.waits_for);
  if (with_units) out["progress"] = progress(record);
  co_await add_outlook(record, out);
  co_return out;
}

asio::awaitable<Result<void>> ApiContext::refresh_adapters() const {
  auto fresh = co_await dependencies.adapters->refresh(Deadline::after(kRegistryPatience));
  if (!fresh) co_return registry_error(fresh.error());
  co_return Result<void>();
}

Error registry_error(const Error& error) {
  return redis_error(error, "the adapter registry's Redis",
                     "the change was made completely or not at all, try again shortly",
                     "nothing was changed: raise its maxmemory, remove adapters, or register a file by path, which "
                     "keeps its bytes out of Redis");
}

asio::awaitable<Result<std::string>> ApiContext::read_piece(CallPtr call) const {
  auto piece = co_await call->request.stream->read();
  if (!keys.still_accepts(call->caller)) co_return Error{Code::kUnauthenticated, "the API key was revoked", {}};
  co_return piece;
}

asio::awaitable<Result<ReceivedBody>> ApiContext::receive(CallPtr call, std::int64_t most) const {
  BodyReader& body = *call->request.stream;
  const auto too_large = [&] {
    return Error{Code::kPayloadTooLarge,
                 "the body has more than " + std::to_string(most) +
                     " bytes, the limit for images of results.input_max_bytes (" +
                     std::to_string(dependencies.settings.results.input_max_bytes) + "); send smaller images",
                 {}};
  };
  if (body.length() && *body.length() > static_cast<std::uint64_t>(most)) co_return too_large();
  const std::string tenant = call->caller.tenant;
  const auto own = std::make_shared<std::int64_t>(0);
  ReceivedBody out{{}, {own.get(), [own, tenant, receiving = receiving](std::int64_t*) {
                          receiving->all -= *own;
                          if ((receiving->by_tenant[tenant] -= *own) == 0) receiving->by_tenant.erase(tenant);
                        }}};
  // Without keys there is one tenant. A single body may always go on.
  const std::int64_t share = keys.open() ? kMostReceiving : std::max(most, kMostReceiving / 4);
  if (body.length()) out.bytes.reserve(static_cast<std::size_t>(*body.length()));  // no turn copies all of it
  for (;;) {
    auto piece = co_await read_piece(call);
    if (!piece) co_return piece.error();
    if (piece->empty()) co_return out;
    const auto size = static_cast<std::int64_t>(piece->size());
    if (*own + size > most) co_return too_large();
    const bool over_share = receiving->by_tenant[tenant] + size > share;
    if (over_share || receiving->all + size > kMostReceiving) {
      co_return Error{.code = Code::kResourceExhausted,
                      .message = (over_share ? "tenant '" + tenant + "' is sending more than " + std::to_string(share) +
                                                   " bytes at once, its share of all uploads"
                                             : std::string("too many uploads at the moment")) +
                                 "; try again when others have ended",
                      .retry_after = std::chrono::seconds(2)};
    }
    *own += size;
    receiving->all += size;
    receiving->by_tenant[tenant] += size;
    out.bytes += *piece;
  }
}

asio::awaitable<Result<ReceivedBody>> ApiContext::receive_form(CallPtr call) const {
  co_return co_await receive(call, dependencies.settings.results.input_max_bytes + kMostText);
}

asio::awaitable<Result<ReceivedBody>> ApiContext::receive_images(CallPtr call) const {
  if (!call->request.stream) co_return ReceivedBody{call->request.body, nullptr};
  const bool form = !is_json_type(media_type_of(call->request.header("Content-Type")));
  const std::int64_t file = dependencies.settings.results.input_max_bytes, one = form ? file : file / 3 * 4;
  // All images of a job and its mask, but not all the memory that there is for bodies.
  const std::int64_t all = std::min((job::kMaxImages + 1) * one, kMostReceiving / 2);
  co_return co_await receive(call, std::max(one, all) + kMostText);
}

asio::awaitable<Result<void>> ApiContext::check_images(std::string tenant, const job::JobSpec& spec,
                                                       std::map<std::string, media::Info> known, const SentImages& sent,
                                                       bool alpha_mask) const {
  const job::ModelEntry& model = dependencies.catalogue.models.at(spec.model);
  const auto images = spec.fields.images("image"), masks = spec.fields.images("mask");
  const bool has_mask = alpha_mask && !masks.empty();
  const bool limited = model.least_image_side > 1 || model.most_image_ratio < std::numeric_limits<int>::max();
  if (images.empty() || (!has_mask && !limited)) co_return Result<void>();
  std::vector<std::string> all = images;
  if (has_mask) all.push_back(masks[0]);
  for (const std::string& sha256 : all) {
    if (known.contains(sha256)) continue;
    auto file = co_await service.input(tenant, sha256);
    if (!file) co_return Result<void>();  // store_images() says why
    if (const auto info = media::inspect(*file)) known.emplace(sha256, *info);
  }
  for (std::size_t i = 0; i < images.size(); ++i) {
    const auto info = known.find(images[i]);
    if (info == known.end()) continue;
    auto error = job::check_image_size(model, info->second.width, info->second.height);
    if (!error) continue;
    error->param = name_of(sent, job::Field("image"), i);
    co_return *error;
  }
  const auto mask = has_mask ? known.find(masks[0]) : known.end(), image = known.find(images[0]);
  if (mask == known.end() || image == known.end()) co_return Result<void>();
  const auto& [type, width, height, has_alpha] = mask->second;
  if (!has_alpha)
    co_return invalid_argument(
        "the mask has no alpha channel; send a PNG or WebP that is transparent where the image is to be replaced. A "
        "job of POST /v1/jobs takes a mask that is white there",
        "mask");
  if (width != image->second.width || height != image->second.height)
    co_return invalid_argument(fmt::format("the mask is {}x{} and the image {}x{}; send a mask of the image's size",
                                           width, height, image->second.width, image->second.height),
                               "mask");
  co_return Result<void>();
}

asio::awaitable<Result<void>> ApiContext::store_images(std::string tenant, const job::FieldValues& fields, Images files,
                                                       const SentImages& sent) const {
  for (const job::Field field : job::kFields) {
    if (field.row().type != job::FieldType::kImage) continue;
    const auto images = fields.images(field);
    for (std::size_t i = 0; i < images.size(); ++i) {
      const std::string& sha256 = images[i];
      auto file = files.extract(sha256);
      // Outside the co_await, because GCC 12 evaluates both branches of a conditional inside one.
      auto storing =
          file ? service.put_input(tenant, sha256, std::move(file.mapped())) : service.touch_input(tenant, sha256);
      auto stored = co_await std::move(storing);
      if (stored) continue;
      Error error = stored.error();
      if (error.code != Code::kNotFound) co_return error;
      co_return invalid_argument(error.message, name_of(sent, field, i));
    }
  }
  co_return Result<void>();
}

Result<job::JobSpec> ApiContext::complete(const std::string& tenant, job::JobSpec& spec) const {
  auto made =
      job::complete_spec(spec, dependencies.catalogue, [&](const job::LoraUse& use, const job::ModelEntry& model) {
        return dependencies.adapters->resolve(tenant, use.name, use.sha256, model.name);
      });
  if (!made) return made;
  const auto webhooks = config::webhooks_of(dependencies.settings, tenant);
  if (spec.webhook.url.empty()) spec.webhook.url = webhooks.url;
  if (auto refused = refused_webhook(spec.webhook.url, webhooks)) return *refused;
  return made;
}

asio::awaitable<Result<std::pair<queue::UnitRef, job::JobSpec>>> ApiContext::branch_from(
    std::string tenant, const job::JobSpec& spec) const {
  const auto slash = spec.resume_from.find('/');
  const std::string id = spec.resume_from.substr(0, slash);
  const auto refused = [&](const std::string& why) {
    return Error{Code::kConflict, "resume_from: job '" + id + "' " + why, "resume_from"};
  };
  const auto unit =
      slash == std::string::npos ? 0 : number_of<int>(std::string_view(spec.resume_from).substr(slash + 1), 0);
  const Error unknown{Code::kNotFound, "resume_from: there is no job '" + id + "'", "resume_from"};
  if (!is_valid_id(id)) co_return unknown;
  auto record = co_await service.job(id, tenant);
  if (!record && record.error().code == Code::kNotFound) co_return unknown;
  if (!record) co_return record.error();
  if (job::is_terminal(record->state))
    co_return refused("has ended, and its checkpoint with it; pause a job that runs");
  if (!unit || *unit >= record->units)
    co_return invalid_argument("resume_from is '" + spec.resume_from +
                                   "'; it must be a job's id, or ID/UNIT with a unit from 0 to " +
                                   std::to_string(record->units - 1),
                               "resume_from");
  const queue::UnitRecord* held = nullptr;
  for (const auto& one : record->unit_records)
    if (one.unit == *unit) held = &one;
  if (!held) co_return no_checkpoint(spec.resume_from);
  if (held->state != job::State::kPaused)
    co_return refused("is " + std::string(job::state_name(held->state)) + "; pause it first");
  auto from = job::parse_complete_spec(record->spec);
  if (!from) co_return from.error();
  if (!spec.model.empty() && spec.model != from->model)
    co_return invalid_argument("model is '" + spec.model + "', but job '" + id + "' is drawn by '" + from->model +
                                   "'; a job with resume_from cannot change the model",
                               "model");
  const queue::UnitRef ref{record->id, *unit};
  co_return std::pair(ref, std::move(*from));
}

asio::awaitable<Result<queue::SubmitOutcome>> ApiContext::submit(CallPtr call, job::JobSpec& spec, SentImages images,
                                                                 bool alpha_mask, std::string tenant) const {
  if (tenant.empty()) tenant = call->caller.tenant;
  const std::string_view key = call->request.header("Idempotency-Key");
  if (call->request.has_header("Idempotency-Key") && !is_idempotency_key(key))
    co_return invalid_argument("the Idempotency-Key header must be 1 to 255 visible ASCII characters, such as a UUID");
  queue::UnitRef branched;
  std::optional<job::JobSpec> from;
  if (!spec.resume_from.empty()) {
    auto source = co_await branch_from(tenant, spec);
    if (!source) co_return source.error();
    branched = source->first;
    from = std::move(source->second);
    job::inherit(spec, *from, branched.unit);
  }
  if (!spec.loras.empty() || !spec.preset.empty()) {
    auto fresh = co_await refresh_adapters();
    if (!fresh) co_return fresh.error();
  }
  auto complete = this->complete(tenant, spec);
  if (!complete) co_return complete.error();
  if (auto refused = from ? job::check_branch(*complete, *from) : std::nullopt) co_return *refused;
  if (dependencies.advise) {
    if (auto advice = dependencies.advise(*complete, tenant); !advice) co_return advice.error();
  }
  Images files;
  std::map<std::string, media::Info> known;
  for (SentImage& image : images) {
    if (image.form == SentImage::Form::kStored) continue;
    if (image.form == SentImage::Form::kText && image.contents.starts_with("s3://")) {
      auto fetched = co_await service.s3_input(tenant, image.contents, dependencies.settings.results.input_max_bytes);
      if (!fetched) {
        Error error = fetched.error();
        if (error.code == Code::kNotFound) error.code = Code::kInvalidArgument;
        error.param = image.param;
        co_return error;
      }
      image.contents = std::move(*fetched);
      image.form = SentImage::Form::kFile;
    }
    const auto& [field, index, param, contents, form] = image;
    const std::size_t bytes = contents.size();
    SentImage taken{field, index, param, std::exchange(image.contents, {}), form};
    std::function<Result<ImageFile>()> work = [image = std::move(taken),
                                               most = dependencies.settings.results.input_max_bytes]() mutable {
      return read_image(std::move(image), most);
    };
    auto file = co_await off_loop<ImageFile>(call, bytes, std::move(work));
    if (!file) co_return file.error();
    // The SHA-256 of all images have the same length.
    std::string all = *spec.fields.text(field);
    all.replace(index * (kUnknownSha256.size() + 1), kUnknownSha256.size(), file->sha256);
    spec.fields.set(field, all);
    complete->fields.set(field, all);
    known.emplace(file->sha256, file->info);
    files.emplace(std::move(file->sha256), std::move(file->bytes));
  }
  auto checked = co_await check_images(tenant, *complete, std::move(known), images, alpha_mask);
  if (!checked) co_return checked.error();
  if (auto stored = co_await store_images(tenant, complete->fields, std::move(files), images); !stored)
    co_return stored.error();
  queue::Submission submission;
  submission.tenant = tenant;
  // Not the completed spec: a retry with the same key must have the same body, and admission draws a missing seed
  // and resolves adapters only once.
  submission.spec = job::to_json(spec);
  submission.units = *complete->n;
  submission.idempotency_key = std::string(key);
  submission.traceparent = call->traceparent;
  submission.deadline_in_ms = spec.deadline_ms.value_or(0);
  if (!from) co_return co_await service.submit(submission);
  // The job finds the copy as if it were its own; what happens to the other job does not matter then.
  submission.id = new_id();
  auto copied = co_await service.copy_checkpoint(branched, submission);
  if (!copied && copied.error().code == Code::kNotFound) co_return no_checkpoint(spec.resume_from);
  if (!copied) co_return copied.error();
  auto outcome = co_await service.submit(submission);
  // Unless Redis did not answer: the job may exist then, and otherwise the copy expires.
  const bool unused = outcome ? outcome->existed : outcome.error().source == Source::kHere;
  if (unused) co_await service.drop_checkpoint(submission.id);
  co_return outcome;
}

asio::awaitable<bool> write_result(JobService& service, const results::Manifest& manifest, ByteRange part,
                                   bool as_base64, Sink& sink) {
  // A multiple of three, as base64 needs. Each is a request, which S3 takes longer for, and counts.
  const std::int64_t piece_bytes = manifest.backend == "s3" ? 3 << 20 : 96 << 10;
  const std::int64_t end = part.first + part.size;
  const bool whole = part.size == manifest.bytes;
  Sha256 hash;
  for (std::int64_t at = part.first; at < end; at += piece_bytes) {
    auto piece = co_await service.result_piece(manifest, at, std::min(piece_bytes, end - at));
    if (piece && whole) hash.update(*piece);
    if (!piece || (whole && at + piece_bytes >= end && hash.hex() != manifest.sha256)) {
      spdlog::error("gateway: cannot send the result '{}': {}", manifest.key,
                    piece ? "its SHA-256 differs from its manifest" : piece.error().message);
      sink.abort();
      co_return false;
    }
    // Not inside the co_await, because GCC 12 evaluates both branches of a conditional there.
    if (as_base64) *piece = base64(*piece);
    if (!co_await sink.write(std::move(*piece))) co_return false;
  }
  co_return true;
}

}  // namespace ditfleet::gateway
