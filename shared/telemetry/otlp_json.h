// The JSON encoding of OTLP requests and responses.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "shared/telemetry/spans.h"

namespace ditfleet::telemetry {

// An ExportTraceServiceRequest (opentelemetry-proto, "OTLP/HTTP JSON": ids in hexadecimal, 64-bit integers as strings).
// In text that is not valid UTF-8, bytes above 127 are replaced by '?'.
std::string otlp_json(std::span<const Span> spans, const Attributes& resource, const std::string& scope_version);

// Returns partialSuccess.rejectedSpans of a response, or 0.
std::size_t rejected_spans(std::string_view answer);

}  // namespace ditfleet::telemetry
