// The JSON of adapters, and parsers for requests that register, change or list adapters. Pure functions, thread-safe.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/gateway/http/http.h"
#include "coordinator/gateway/routes/auth.h"
#include "shared/core/json.h"
#include "shared/core/result.h"
#include "shared/job/catalogue.h"
#include "shared/loras/adapter.h"
#include "shared/loras/content.h"

namespace ditfleet::gateway {

json::object lora_json(const loras::Adapter& adapter, const job::Catalogue& catalogue);

// An adapter's properties without its bytes: the fields of a JSON body, or the query parameters of an upload.
struct LoraRequest {
  std::string path;                 // of a JSON body: a file in an allowed folder
  std::string sha256;               // expected digest; empty: any
  std::vector<std::string> models;  // models that may use it; empty: any
  std::optional<bool> pinned;
};

// The record of a file that is registered now. `path`: of the file; empty: an upload. kInvalidArgument, with param: it
// is for another family than a model that the request names.
Result<loras::Adapter> adapter_of(const std::string& tenant, const std::string& name, const LoraRequest& asked,
                                  const loras::InspectedFile& file, const std::string& path,
                                  const job::Catalogue& catalogue);

// kInvalidArgument, with param, for an unknown or mistyped field, an unknown model or a malformed digest.
Result<LoraRequest> parse_lora_body(std::string_view body, const job::Catalogue& catalogue);
Result<LoraRequest> parse_lora_query(const Request& request, const job::Catalogue& catalogue);
// {"pinned": true|false}
Result<bool> parse_lora_patch(std::string_view body);

// The quoted ETag of the record. It changes whenever the record does; `fits` also depends on the configured models.
std::string lora_etag(const loras::Adapter& adapter);
// Whether an If-Match field matches the record: by its ETag, by its quoted digest alone, or by *.
bool matches_lora(std::string_view if_match, const loras::Adapter& adapter);

// A page of the list: at most `most` adapters whose names sort after `after`.
struct LoraPage {
  std::string after;
  std::size_t most = 0;  // 0: no limit
};
// kInvalidArgument, with param, for a limit outside 1 to 1000, a cursor that is not a name, or an unknown parameter.
Result<LoraPage> parse_lora_page(const Request& request);

// kInvalidArgument, with the name as param, for a query parameter other than "tenant" and those in `more`.
Result<void> check_lora_query(const Request& request, const std::vector<std::string>& more = {});
// The tenant whose adapters the request is about: the caller's, or the one in ?tenant=, which requires an admin key
// (kPermissionDenied).
Result<std::string> lora_tenant(const Request& request, const Caller& caller);

}  // namespace ditfleet::gateway
