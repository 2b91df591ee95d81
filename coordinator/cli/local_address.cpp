#include "coordinator/cli/local_address.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>

namespace ditfleet::cli {

Result<ListenAddress> ListenAddress::parse(const std::string& text) {
  const auto colon = text.rfind(':');
  ListenAddress address;
  const char* end = text.data() + text.size();
  const auto parsed = colon == std::string::npos
                          ? std::from_chars_result{end, std::errc::invalid_argument}
                          : std::from_chars(text.data() + colon + 1, end, address.port);
  if (parsed.ec != std::errc() || parsed.ptr != end || address.port < 0 || address.port > 65535 ||
      colon == 0) {
    return invalid_argument("the address is '" + text + "'; it must be HOST:PORT, as 127.0.0.1:8780");
  }
  address.host = text.substr(0, colon);
  if (address.host.starts_with('[') && address.host.ends_with(']'))
    address.host = address.host.substr(1, address.host.size() - 2);
  return address;
}

std::string ListenAddress::text() const {
  const bool v6 = host.find(':') != std::string::npos;
  return (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

std::string ListenAddress::local_url() const {
  ListenAddress local = *this;
  if (host == "0.0.0.0") local.host = "127.0.0.1";
  if (host == "::") local.host = "::1";
  return "http://" + local.text();
}

Result<ListenAddress> try_to_listen(ListenAddress address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int failed =
      ::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (failed != 0)
    return invalid_argument("cannot listen on '" + address.text() + "': " + ::gai_strerror(failed));
  const int fd = ::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  const bool ok = fd >= 0 && ::bind(fd, found->ai_addr, found->ai_addrlen) == 0 && ::listen(fd, 1) == 0 &&
                  ::getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size) == 0;
  const int e = errno;
  if (fd >= 0) ::close(fd);
  ::freeaddrinfo(found);
  if (!ok) {
    const std::string hint =
        e == EADDRINUSE ? "the port is in use; give another with --listen, or port 0 for any free one"
                        : std::strerror(e);
    return unavailable("cannot listen on " + address.text() + ": " + hint);
  }
  address.port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                                   : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
  return address;
}

}  // namespace ditfleet::cli
