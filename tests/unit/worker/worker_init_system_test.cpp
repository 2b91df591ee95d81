#include "worker/init_system.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>

#include "shared/core/unique_fd.h"

namespace ditfleet::worker {
namespace {

TEST(InitSystem, GetsTheStateAtAPathOrAnAbstractName) {
  const std::string name = "/tmp/ditfleet-notify-" + std::to_string(::getpid());
  for (const std::string& address : {name, "@" + name}) {
    sockaddr_un own{};
    own.sun_family = AF_UNIX;
    std::memcpy(own.sun_path, address.data(), address.size());
    if (address[0] == '@') own.sun_path[0] = '\0';
    const UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address.size());
    ASSERT_EQ(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&own), size), 0);
    ::setenv("NOTIFY_SOCKET", address.c_str(), 1);
    notify_init_system("READY=1");
    char got[64] = {};
    EXPECT_EQ(::recv(socket.get(), got, sizeof got, 0), 7) << address;
    EXPECT_STREQ(got, "READY=1");
    ::unsetenv("NOTIFY_SOCKET");
    notify_init_system("READY=1");
    EXPECT_EQ(::recv(socket.get(), got, sizeof got, 0), -1);
  }
  ::unlink(name.c_str());
}

}  // namespace
}  // namespace ditfleet::worker
