// OTLP's JSON encoding of spans, and the receiver's response.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "shared/telemetry/spans.h"

namespace ditfleet::telemetry {

// An ExportTraceServiceRequest (opentelemetry-proto, "OTLP/HTTP JSON": ids in hexadecimal, 64-bit integers as strings).
// Text that is not valid UTF-8 has its bytes above 127 replaced by '?'.
std::string otlp_json(std::span<const Span> spans, const Attributes& resource, const std::string& scope_version);

// partialSuccess.rejectedSpans of a response, or 0.
std::size_t rejected_spans(std::string_view answer);

}  // namespace ditfleet::telemetry
