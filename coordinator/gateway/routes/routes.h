// The table of routes: what is answered, by which method. Pure, thread safe.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/gateway/http/http.h"

namespace ditfleet::gateway {

enum class RouteId {
  kConsole,
  kOpenApi,
  kHealth,
  kReady,
  kMetrics,
  kGenerateImages,
  kListModels,
  kGetModel,
  kSubmitJob,
  kListJobs,
  kGetJob,
  kCancelJob,
  kJobEvents,
  kGetResult,
  kGetPreview,
  kListLoras,
  kGetLora,
  kPutLora,
  kPatchLora,
  kRemoveLora,
  kListWorkers,
};

struct Route {
  RouteId id;
  std::string_view method;
  std::string_view pattern;  // "/v1/jobs/{id}", as in openapi.json
  bool open = false;         // answers without a key even where keys are configured
};

std::span<const Route> routes();

struct RouteMatch {
  const Route* route = nullptr;     // null: no such path, or not by this method
  std::vector<std::string> params;  // the {…} parts in order
  std::string allow;                // the methods of this path ("GET, HEAD, OPTIONS"); empty: no such path
  std::string_view pattern;         // of the path, for metrics; empty: no such path
};

// HEAD is answered by GET's route. OPTIONS never has a route: `allow` is its answer.
RouteMatch match_route(const Request& request);

}  // namespace ditfleet::gateway
