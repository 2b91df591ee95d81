// Which addresses receivers of webhooks may have. Pure functions, thread-safe.
#pragma once

#include <sys/socket.h>

#include <string>
#include <string_view>

namespace ditfleet::gateway {

// Whether the address is on the public Internet: neither loopback, private, link-local, multicast, reserved nor for
// documentation (IANA's special-purpose registries), also inside an IPv6 address that contains an IPv4 address.
bool is_public_address(const sockaddr& address);

// Whether `url` (http_url_problem() finds nothing) has one of the hosts, separated by commas; *.example.com stands for
// all names below example.com. Empty: all hosts.
bool is_listed_host(std::string_view url, std::string_view hosts);

// The host of the URL, in lower case, without brackets and port.
std::string host_of(std::string_view url);

// Whether the URL names a private address, or localhost. Other names are resolved when an event is sent.
bool names_private_address(std::string_view url);

}  // namespace ditfleet::gateway
