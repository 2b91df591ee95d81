#include "coordinator/gateway/webhooks/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <cstring>

#include "shared/core/http_url.h"
#include "shared/core/text.h"

namespace ditfleet::gateway {
namespace {

struct Block {
  std::uint32_t first;
  int bits;
};

constexpr std::uint32_t v4(unsigned a, unsigned b, unsigned c) { return a << 24 | b << 16 | c << 8; }

// IANA IPv4 Special-Purpose Address Registry, multicast and class E.
constexpr Block kSpecial[] = {
    {v4(0, 0, 0), 8},     {v4(10, 0, 0), 8},      {v4(100, 64, 0), 10},  {v4(127, 0, 0), 8},    {v4(169, 254, 0), 16},
    {v4(172, 16, 0), 12}, {v4(192, 0, 0), 24},    {v4(192, 0, 2), 24},   {v4(192, 88, 99), 24}, {v4(192, 168, 0), 16},
    {v4(198, 18, 0), 15}, {v4(198, 51, 100), 24}, {v4(203, 0, 113), 24}, {v4(224, 0, 0), 3}};

bool is_public_v4(std::uint32_t address) {
  return std::ranges::none_of(kSpecial,
                              [&](const Block& block) { return (address ^ block.first) >> (32 - block.bits) == 0; });
}

bool is_public_v6(const std::array<std::uint8_t, 16>& a) {
  const auto v4_at = [&](std::size_t i) {
    return std::uint32_t{a[i]} << 24 | std::uint32_t{a[i + 1]} << 16 | std::uint32_t{a[i + 2]} << 8 | a[i + 3];
  };
  constexpr std::uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};    // ::ffff:0:0/96
  constexpr std::uint8_t kNat64[12] = {0, 0x64, 0xff, 0x9b, 0, 0, 0, 0, 0, 0, 0, 0};  // 64:ff9b::/96
  if (std::memcmp(a.data(), kMapped, 12) == 0 || std::memcmp(a.data(), kNat64, 12) == 0) return is_public_v4(v4_at(12));
  if (a[0] == 0x20 && a[1] == 0x02) return is_public_v4(v4_at(2));  // 6to4
  if (a[0] >> 5 != 1) return false;                                 // not 2000::/3, the global unicast addresses
  if (a[0] == 0x20 && a[1] == 0x01 && a[2] < 2) return false;       // 2001::/23: Teredo, benchmarks, ORCHID
  return !(a[0] == 0x20 && a[1] == 0x01 && a[2] == 0x0d && a[3] == 0xb8) &&  // documentation
         !(a[0] == 0x3f && a[1] == 0xff);
}

}  // namespace

bool is_public_address(const sockaddr& address) {
  if (address.sa_family == AF_INET) {
    sockaddr_in in;
    std::memcpy(&in, &address, sizeof in);
    return is_public_v4(ntohl(in.sin_addr.s_addr));
  }
  if (address.sa_family != AF_INET6) return false;
  sockaddr_in6 in;
  std::memcpy(&in, &address, sizeof in);
  std::array<std::uint8_t, 16> bytes;
  std::memcpy(bytes.data(), &in.sin6_addr, bytes.size());
  return is_public_v6(bytes);
}

std::string host_of(std::string_view url) {
  std::string_view host = http_url_parts(url).host;
  if (host.ends_with('.')) host.remove_suffix(1);
  std::string out(host);
  std::ranges::transform(out, out.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

bool is_listed_host(std::string_view url, std::string_view hosts) {
  if (hosts.empty()) return true;
  const std::string host = host_of(url);
  for (std::string_view one : split(hosts, ',')) {
    one = trimmed(one, " ");
    if (one.starts_with("*.") ? host.size() > one.size() - 1 && host.ends_with(one.substr(1)) : host == one)
      return true;
  }
  return false;
}

bool names_private_address(std::string_view url) {
  const std::string host = host_of(url);
  if (host == "localhost" || host.ends_with(".localhost")) return true;
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  if (inet_pton(AF_INET6, host.c_str(), &v6.sin6_addr) == 1)
    return !is_public_address(reinterpret_cast<const sockaddr&>(v6));
  in_addr number{};  // also 127.1 and 0x7f000001, as resolvers read them
  if (inet_aton(host.c_str(), &number) == 0) return false;
  sockaddr_in v4_address{};
  v4_address.sin_family = AF_INET;
  v4_address.sin_addr = number;
  return !is_public_address(reinterpret_cast<const sockaddr&>(v4_address));
}

}  // namespace ditfleet::gateway
