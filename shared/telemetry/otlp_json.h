// OTLP's JSON encoding of spans, and what a receiver answers. Pure functions.
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

// partialSuccess.rejectedSpans of an answer; 0 where it says nothing of that.
std::size_t rejected_spans(std::string_view answer);

}  // namespace ditfleet::telemetry
