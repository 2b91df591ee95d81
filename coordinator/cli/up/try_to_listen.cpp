#include "coordinator/cli/up/try_to_listen.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "shared/core/unique_fd.h"

namespace ditfleet::cli {

Result<ListenAddress> try_to_listen(ListenAddress address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int failed = ::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (failed != 0) return invalid_argument("cannot listen on '" + address.text() + "': " + ::gai_strerror(failed));
  const UniqueFd socket(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  const bool ok = socket.valid() && ::bind(socket.get(), found->ai_addr, found->ai_addrlen) == 0 &&
                  ::listen(socket.get(), 1) == 0 &&
                  ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound), &size) == 0;
  const int e = errno;
  ::freeaddrinfo(found);
  if (!ok) {
    const std::string hint = e == EADDRINUSE
                                 ? "the port is in use; give another with --listen, or port 0 for any free one"
                                 : std::strerror(e);
    return unavailable("cannot listen on " + address.text() + ": " + hint);
  }
  address.port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                                   : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
  return address;
}

}  // namespace ditfleet::cli
