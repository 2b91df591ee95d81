// Every route's handler: from a Request to a Response. No sockets here.
//
// Threads: everything from the gateway's executor. A handler never throws for what a client did.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/thread_pool.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/gateway/events/event_hub.h"
#include "coordinator/gateway/gateway.h"
#include "coordinator/gateway/http/http.h"
#include "coordinator/gateway/job_service.h"
#include "coordinator/gateway/routes/auth.h"
#include "coordinator/gateway/routes/job_json.h"
#include "coordinator/gateway/routes/openai_images.h"
#include "coordinator/gateway/routes/routes.h"
#include "shared/loras/content.h"
#include "shared/loras/directory.h"
#include "shared/loras/registry.h"

namespace ditfleet::loras {
class Upload;
}

namespace ditfleet::gateway {

struct ApiOptions {
  config::Settings settings;
  job::Catalogue catalogue;
  std::function<Readiness()> readiness;
  std::function<Advice(const job::JobSpec&, const std::string& tenant)> advise;  // may be empty
  WaitsFor waits_for = {};                                                       // so may this
  // The registry of adapters and a view of it; null: there is none.
  std::shared_ptr<loras::Registry> loras;
  std::shared_ptr<loras::Directory> lora_directory;
  std::string local_url;  // where a request without a usable Host header is told to go
};

class Api {
 public:
  // `service` outlives this.
  Api(ApiOptions options, JobService& service, std::shared_ptr<EventHub> hub);

  asio::awaitable<Response> handle(Request request);
  // The answer to bytes that never became a request; counted like one.
  Response refuse(int status, const std::string& message, const std::string& code);
  // Whether the handler of this request reads the body itself: uploads of adapters.
  static bool wants_stream(const Request& head);

 private:
  // One request on its way through; shared with a response that takes its time.
  struct Call {
    Request request;
    RouteMatch match;
    Caller caller;
    std::string request_id, traceparent;
    Deadline::Clock::time_point began = Deadline::Clock::now();
  };
  using CallPtr = std::shared_ptr<const Call>;

  asio::awaitable<Response> dispatch(CallPtr call);
  Result<Caller> authenticate(const Call& call) const;
  void finish(const Call& call, Response& response) const;
  void trace(const Call& call, int status, std::chrono::duration<double> took) const;
  JobLinks links(const Call& call) const;

  Response health() const;
  Response ready() const;
  Response list_models() const;
  Response get_model(const Call& call) const;

  // What every submission goes through; the spec is parsed, not completed.
  asio::awaitable<Result<queue::SubmitOutcome>> submit(CallPtr call, job::JobSpec spec, Response* refusal);
  asio::awaitable<Response> submit_job(CallPtr call);
  asio::awaitable<Response> list_jobs(CallPtr call);
  asio::awaitable<Response> get_job(CallPtr call);
  asio::awaitable<Response> cancel_job(CallPtr call);
  asio::awaitable<Response> get_result(CallPtr call);
  asio::awaitable<Response> get_preview(CallPtr call);
  asio::awaitable<Response> list_workers(CallPtr call);

  asio::awaitable<Response> list_loras(CallPtr call);
  asio::awaitable<Response> get_lora(CallPtr call);
  asio::awaitable<Response> put_lora(CallPtr call);
  asio::awaitable<Response> patch_lora(CallPtr call);
  asio::awaitable<Response> remove_lora(CallPtr call);
  struct LoraCondition {
    loras::Condition::Kind kind = loras::Condition::kAny;
    std::optional<loras::Adapter> record;  // as it was found
    bool any = false;                      // any record will do
    loras::Condition now() const { return {kind, record && !any ? &*record : nullptr}; }
  };
  // What If-Match and If-None-Match: * ask of the name. kConflict: it stands for something else than If-Match says even
  // now.
  asio::awaitable<Result<LoraCondition>> lora_condition(CallPtr call, std::string tenant);
  asio::awaitable<Response> put_lora_bytes(CallPtr call, std::string tenant, std::string name,
                                           loras::Condition condition);
  asio::awaitable<Result<loras::Content>> receive_lora(CallPtr call, loras::Upload& upload);
  asio::awaitable<Response> put_lora_file(CallPtr call, std::string tenant, std::string name,
                                          loras::Condition condition);
  asio::awaitable<Response> store_lora(CallPtr call, loras::Adapter adapter, std::string upload,
                                       loras::Condition condition);
  // The view holds what was acknowledged before.
  asio::awaitable<Result<void>> refresh_loras();
  Result<std::string> resolve_lora(const std::string& tenant, const job::LoraUse& use,
                                   const job::ModelEntry& model) const;

  asio::awaitable<Response> job_events(CallPtr call);
  asio::awaitable<void> write_events(CallPtr call, std::string job, std::string after, Sink& sink);

  asio::awaitable<Response> generate_images(CallPtr call);
  asio::awaitable<Response> wait_for_images(CallPtr call, std::shared_ptr<const ImageCall> image, std::string job,
                                            Peer& peer);
  asio::awaitable<void> stream_images(CallPtr call, std::shared_ptr<const ImageCall> image, std::string job,
                                      Sink& sink);
  asio::awaitable<std::string> completed_event(CallPtr call, std::shared_ptr<const ImageCall> image, std::string job,
                                               int unit, std::int64_t created_s);
  asio::awaitable<Result<ImagePart>> image_part(CallPtr call, const queue::JobRecord& record, int unit,
                                                bool with_bytes);

  ApiOptions options_;
  KeyRing keys_;
  JobService& service_;
  std::shared_ptr<EventHub> hub_;
  std::int64_t created_s_;
  int open_streams_ = 0;       // of GET /v1/jobs/{id}/events
  asio::thread_pool disk_{1};  // reads files that are registered by path
};

// What is wrong with the headers or the bytes of a JSON request, if anything: 415, or 400 for invalid UTF-8.
std::optional<Response> refuse_body(const Request& request);
// 400 for a second line of a header that has one (RFC 9110 §5.3): which of two keys is meant nobody can say.
std::optional<Response> refuse_repeated(const Request& request);
// 415 for a body that is compressed.
std::optional<Response> refuse_coding(const Request& request);

std::int64_t now_s();

}  // namespace ditfleet::gateway
