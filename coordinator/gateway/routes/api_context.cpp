#include "coordinator/gateway/routes/api_context.h"

#include <algorithm>
#include <chrono>

#include "coordinator/gateway/routes/errors.h"
#include "shared/core/wall_clock.h"
#include "shared/job/validate.h"
#include "shared/loras/registry_mirror.h"

namespace ditfleet::gateway {
namespace {

constexpr std::int64_t kMinimumLinkLifeS = 3600;
constexpr std::size_t kMaxIdempotencyKey = 255;
constexpr std::chrono::seconds kRegistryPatience{5};

bool is_host(std::string_view host) {
  return !host.empty() && host.size() <= 255 &&
         host.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_:[]") ==
             std::string_view::npos;
}

bool is_idempotency_key(std::string_view key) {
  return !key.empty() && key.size() <= kMaxIdempotencyKey &&
         std::all_of(key.begin(), key.end(), [](char c) { return c >= 0x21 && c <= 0x7e; });
}

Result<std::string> resolve_adapter(const loras::RegistryMirror* adapters, const std::string& tenant,
                                    const job::LoraUse& use, const job::ModelEntry& model) {
  if (adapters) return adapters->resolve(tenant, use.name, use.sha256, model.name);
  return invalid_argument("LoRA adapter '" + use.name + "' not found: this gateway has no adapter registry", "name");
}

}  // namespace

JobLinks ApiContext::links(const Call& call) const {
  JobLinks links;
  const auto& settings = dependencies.settings;
  const std::string_view host = call.request.header("Host");
  if (!settings.gateway.public_url.empty()) {
    links.base = settings.gateway.public_url;
    while (links.base.ends_with('/')) links.base.pop_back();
  } else {
    const std::string scheme = settings.gateway.tls_cert_file.empty() ? "http://" : "https://";
    links.base = is_host(host) ? scheme + std::string(host) : local_url;
  }
  if (!keys.open()) links.signer = &signer;
  links.expires_s = unix_ms() / 1000 + link_life_s();
  return links;
}

std::int64_t ApiContext::link_life_s() const {
  return std::max(kMinimumLinkLifeS, dependencies.settings.queue.retention_ms / 1000);
}

asio::awaitable<Result<void>> ApiContext::refresh_adapters() const {
  if (!dependencies.adapters) co_return Result<void>();
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

asio::awaitable<Result<queue::SubmitOutcome>> ApiContext::submit(CallPtr call, job::JobSpec spec) const {
  const std::string_view key = call->request.header("Idempotency-Key");
  if (call->request.has_header("Idempotency-Key") && !is_idempotency_key(key))
    co_return invalid_argument("the Idempotency-Key header must be 1 to 255 visible ASCII characters, such as a UUID");
  if (!spec.loras.empty()) {
    auto fresh = co_await refresh_adapters();
    if (!fresh) co_return fresh.error();
  }
  auto complete =
      job::complete_spec(spec, dependencies.catalogue, [&](const job::LoraUse& use, const job::ModelEntry& model) {
        return resolve_adapter(dependencies.adapters.get(), call->caller.tenant, use, model);
      });
  if (!complete) co_return complete.error();
  if (dependencies.advise) {
    if (auto advice = dependencies.advise(*complete, call->caller.tenant); !advice) co_return advice.error();
  }
  queue::Submission submission;
  submission.tenant = call->caller.tenant;
  // Not the completed spec: a retry with the same key must have the same body, and admission draws a missing seed
  // and resolves adapters only once.
  submission.spec = job::to_json(spec);
  if (submission.spec.size() > job::kMaxSpecBytes) {
    co_return Error{Code::kPayloadTooLarge,
                    "the job has " + std::to_string(submission.spec.size()) + " bytes in its canonical form; at most " +
                        std::to_string(job::kMaxSpecBytes) + " are allowed",
                    {}};
  }
  submission.idempotency_key = std::string(key);
  submission.traceparent = call->traceparent;
  submission.deadline_in_ms = spec.deadline_ms.value_or(0);
  co_return co_await service.submit(submission);
}

}  // namespace ditfleet::gateway
