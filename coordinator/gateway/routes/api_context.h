// State that the handlers of all resources share.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <map>
#include <memory>
#include <string>

#include "coordinator/gateway/backend/dependencies.h"
#include "coordinator/gateway/backend/job_service.h"
#include "coordinator/gateway/backend/link_signer.h"
#include "coordinator/gateway/events/event_hub.h"
#include "coordinator/gateway/routes/auth.h"
#include "coordinator/gateway/routes/job_images.h"
#include "coordinator/gateway/routes/job_json.h"
#include "coordinator/gateway/routes/key_store.h"
#include "coordinator/gateway/routes/off_loop.h"
#include "coordinator/gateway/routes/router.h"
#include "coordinator/gateway/webhooks/delivery_store.h"
#include "shared/core/wall_clock.h"

namespace ditfleet::gateway {

// Event streams, image requests that wait, uploads and downloads of large results, which hold a connection for long.
struct OpenStreams {
  int all = 0;
  std::map<std::string, int> by_tenant;
};

// Bytes of all ReceivedBody.
struct Receiving {
  std::int64_t all = 0;
  std::map<std::string, std::int64_t> by_tenant;
};

// A body that was read from Request::stream. Its memory counts until `counted` is destroyed.
struct ReceivedBody {
  std::string bytes;
  std::shared_ptr<void> counted;
};

// What the leader expects of jobs, as it was read last.
struct KnownOutlook {
  Deadline stale = Deadline::after(Deadline::Clock::duration::zero());
  std::map<std::string, queue::JobOutlook> jobs;
};

struct ApiContext {
  JobService& service;
  std::shared_ptr<EventHub> hub;
  std::string local_url;  // the base of links for requests without a usable Host header
  KeyRing keys;
  GatewayDependencies dependencies;
  std::unique_ptr<KeyStore> key_store = {};  // keeps `keys` up to date; null without Redis

  std::shared_ptr<OpenStreams> streams = std::make_shared<OpenStreams>();
  std::shared_ptr<Receiving> receiving = std::make_shared<Receiving>();

  std::shared_ptr<KnownOutlook> known_outlook = std::make_shared<KnownOutlook>();

  std::shared_ptr<DeliveryStore> deliveries = {};  // null without Redis

  LinkSigner signer = {};
  std::int64_t started_s = unix_ms() / 1000;  // reported as the models' creation time

  // `host`: of the request; empty: there is none.
  JobLinks links(std::string_view host) const;
  JobLinks links(const Call& call) const { return links(call.request.header("Host")); }
  std::int64_t link_life_s() const;  // how long a signed link is valid

  // Counts a stream of the caller until the result is destroyed, which the response's function must own. Null: there
  // are too many, as `refused` then says.
  std::shared_ptr<void> open_stream(const Call& call, Response& refused) const;

  // Reads a body of at most `most` bytes into memory, which a route with streams_body needs.
  // Errors: those of BodyReader::read (kDeadlineExceeded: answer 408), kPayloadTooLarge, kResourceExhausted (too many
  // such bodies at the moment, of all tenants or of this one).
  asio::awaitable<Result<ReceivedBody>> receive(CallPtr call, std::int64_t most) const;

  // The body of a route with takes_images, JSON or a form, and a form with one image.
  asio::awaitable<Result<ReceivedBody>> receive_images(CallPtr call) const;
  asio::awaitable<Result<ReceivedBody>> receive_form(CallPtr call) const;

  // The next piece of a body, as BodyReader::read. kUnauthenticated: the caller's key was revoked meanwhile.
  asio::awaitable<Result<std::string>> read_piece(CallPtr call) const;

  // Completes a tenant's spec, and gives it the tenant's webhook if it names none.
  // Errors: those of job::complete_spec; kInvalidArgument for a webhook that this service does not send to.
  Result<job::JobSpec> complete(const std::string& tenant, job::JobSpec& spec) const;

  // Submits a job for the caller; `spec` is parsed, not completed. Decodes and stores those of `images`, the images of
  // the spec, that came with the request, once the rest of the spec is known to be right, and sets their SHA-256 in
  // `spec`; the store must have the others. `alpha_mask`: a mask must have an alpha channel and the image's size, as in
  // OpenAI's API; else it is scaled to the image's size. `tenant`: whose job it is; empty: the caller's.
  // Errors: those of job::complete_spec, dependencies.advise, read_image and JobService::submit, kInvalidArgument for a
  // malformed Idempotency-Key and for an image that is not stored or that the model does not take, kPayloadTooLarge.
  asio::awaitable<Result<queue::SubmitOutcome>> submit(CallPtr call, job::JobSpec& spec, SentImages images = {},
                                                       bool alpha_mask = false, std::string tenant = {}) const;

  // The paused unit that spec.resume_from names, and its job's complete spec. kNotFound: the tenant has no such job.
  // kConflict: it is not paused. kInvalidArgument: it has no such unit.
  asio::awaitable<Result<std::pair<queue::UnitRef, job::JobSpec>>> branch_from(std::string tenant,
                                                                               const job::JobSpec& spec) const;

  // The job that the path names, as the caller may see it. Errors: no_such_job() and those of JobService::job.
  asio::awaitable<Result<queue::JobRecord>> find_job(CallPtr call) const;

  double progress(const queue::JobRecord& record) const;  // never falls while the job is open
  // Adds `position` and `eta_ms`, null while unknown.
  asio::awaitable<void> add_outlook(const queue::JobRecord& record, json::object& out) const;
  // job_json() with what is predicted.
  asio::awaitable<json::object> describe(const queue::JobRecord& record, JobLinks links, bool with_units) const;
  asio::awaitable<json::object> describe(const queue::JobRecord& record, CallPtr call, bool with_units) const {
    return describe(record, links(*call), with_units);
  }

  // Checks the images of a complete spec against its model, and its mask for `alpha_mask`. `known`: what the request
  // brought; others are looked up. `sent` names them in errors, here and below. kInvalidArgument.
  asio::awaitable<Result<void>> check_images(std::string tenant, const job::JobSpec& spec,
                                             std::map<std::string, media::Info> known, const SentImages& sent,
                                             bool alpha_mask) const;

  // Puts the images of a complete spec into the store, or extends their life there.
  // kInvalidArgument: the tenant has not stored it.
  asio::awaitable<Result<void>> store_images(std::string tenant, const job::FieldValues& fields, Images files,
                                             const SentImages& sent) const;

  // Updates the mirror with every change of an adapter that was acknowledged before the call.
  // Errors: as registry_error() returns them.
  asio::awaitable<Result<void>> refresh_adapters() const;

  // Runs work on `bytes` bytes of the caller's on another thread, if they are many. The work may refer to the context.
  // Errors: those of OffLoop::run.
  template <class T>
  asio::awaitable<Result<T>> off_loop(const CallPtr& call, std::size_t bytes, std::function<Result<T>()> work) const {
    return threads->run<T>(call->caller.tenant, bytes, std::move(work));
  }
  std::unique_ptr<OffLoop> threads = std::make_unique<OffLoop>();  // last, because its work refers to the others
};

// Writes a part of a result in pieces of 96 KiB, so that many slow clients together need little memory. Verifies a
// whole result. If the result cannot be read, the connection ends. False: the client is gone.
asio::awaitable<bool> write_result(JobService& service, const results::Manifest& manifest, ByteRange part,
                                   bool as_base64, Sink& sink);

// Sets the metric of the tenants' GPU-seconds in this month.
asio::awaitable<void> export_usage(const ApiContext& context);

// Serves the result of a unit, or a range of its bytes: 409 before it exists, 410 once it has expired.
asio::awaitable<Result<Response>> send_result(const ApiContext& context, CallPtr call, queue::JobRecord record,
                                              int index);

// redis_error() for the registry of adapters.
Error registry_error(const Error& error);

// Each function adds the routes of one resource.
void add_system_routes(Router& router);   // pages, metrics, probes, models
void add_image_routes(Router& router);    // OpenAI's images
void add_video_routes(Router& router);    // OpenAI's videos
void add_job_routes(Router& router);      // jobs, results, previews
void add_fleet_routes(Router& router);    // timelines, slow jobs, the fleet's last hour
void add_batch_routes(Router& router);    // many jobs in one call
void add_event_routes(Router& router);    // a job's server-sent events
void add_lora_routes(Router& router);     // the registry of adapters
void add_upload_routes(Router& router);   // images for jobs
void add_key_routes(Router& router);      // keys, tenants
void add_webhook_routes(Router& router);  // secrets, deliveries
void add_worker_routes(Router& router);   // workers, scaling

}  // namespace ditfleet::gateway
