// ditfleet_http_requests_total{route,method,code}, ditfleet_http_request_duration_seconds{route},
// ditfleet_http_event_streams, ditfleet_http_connections. Thread-safe.
#pragma once

#include <string_view>

namespace ditfleet::gateway {

// `route` is a route's pattern, never a path, so that the label has few values.
void count_request(std::string_view route, std::string_view method, int status, double seconds);
void count_event_streams(int change);
void count_connections(int change);

}  // namespace ditfleet::gateway
