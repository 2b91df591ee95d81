// Adapters on the wire: their JSON, and what a request to put or change one may say. Pure, thread safe.
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

namespace ditfleet::gateway {

json::object lora_json(const loras::Adapter& adapter);

// What is said of an adapter beside its bytes: the fields of a JSON body, or the parameters of an upload.
struct LoraRequest {
  std::string path;                 // a JSON body's: a file in an allowed folder
  std::string sha256;               // that the bytes must have; empty: any
  std::vector<std::string> models;  // empty: any
  std::optional<bool> pinned;
};

// kInvalidArgument with param for what is unknown, of the wrong type, no model or no digest.
Result<LoraRequest> parse_lora_body(std::string_view body, const job::Catalogue& catalogue);
Result<LoraRequest> parse_lora_query(const Request& request, const job::Catalogue& catalogue);
// {"pinned": true|false}
Result<bool> parse_lora_patch(std::string_view body);

// Of the record as lora_json() shows it, quoted: another after every change that can be seen.
std::string lora_etag(const loras::Adapter& adapter);
// Whether an If-Match field names the record: its tag, its digest alone (whatever else was changed), or *.
bool matches_lora(std::string_view if_match, const loras::Adapter& adapter);

// A page of the list: names after this one, so many at most. Without a limit it is all of them.
struct LoraPage {
  std::string after;
  std::size_t most = 0;  // 0: any number
};
// kInvalidArgument with param for a limit that is no number from 1 to 1000, a cursor that is no name, and what is no
// parameter of a list.
Result<LoraPage> parse_lora_page(const Request& request);

// kInvalidArgument, with the name as param, for a parameter that is neither "tenant" nor any of `more`.
Result<void> check_lora_query(const Request& request, const std::vector<std::string>& more = {});
// Whose adapters the request is about: the caller's, or those that ?tenant= names, which only an administrator may.
Result<std::string> lora_tenant(const Request& request, const Caller& caller);

}  // namespace ditfleet::gateway
