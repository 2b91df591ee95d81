// ditfleet_http_requests_total{route,method,code}, ditfleet_http_request_duration_seconds{route},
// ditfleet_http_event_streams, ditfleet_http_connections, ditfleet_certificate_expiry_timestamp_seconds. Thread-safe.
#pragma once

#include <cstdint>
#include <string_view>

namespace ditfleet::gateway {

// `route` is a route's pattern, never a path, so that the label has few values.
void count_request(std::string_view route, std::string_view method, int status, double seconds);
void count_event_streams(int change);
void count_connections(int change);
void show_certificate_expiry(std::int64_t unix_s);

}  // namespace ditfleet::gateway
