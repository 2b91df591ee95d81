// Forwards connections to a Redis on a unix socket, except while it is paused: then no byte passes, as when a network
// drops packets. deafen() does that to single connections, as a firewall that forgets idle ones.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "shared/core/fd_io.h"
#include "shared/core/unique_fd.h"

namespace ditfleet::testing {

class RedisProxy {
 public:
  RedisProxy(std::string server, std::string path) : server_(std::move(server)), path_(std::move(path)) {
    ::unlink(path_.c_str());
    const sockaddr_un address = address_of(path_);
    if (::bind(listening_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
        ::listen(listening_.get(), 16) != 0)
      throw std::runtime_error("cannot listen on " + path_);
    thread_ = std::thread([this] { run(); });
  }
  ~RedisProxy() {
    ending_ = true;
    thread_.join();
    ::unlink(path_.c_str());
  }
  const std::string& path() const { return path_; }
  void pause() { paused_ = true; }
  void resume() { paused_ = false; }
  // Loses the connection at each request that contains the word; only the first such request arrives. Call it while
  // nothing passes.
  void lose_answers_to(std::string word) { word_ = std::move(word); }
  // Pauses at the first request that contains the word, which arrives. Call it while nothing passes.
  void pause_at(std::string word) { pause_word_ = std::move(word); }
  bool paused() const { return paused_; }
  // From now on no byte passes on the connections that have subscribed or have waited for an entry of a stream.
  void deafen() { deafening_ = true; }
  bool deaf() const { return !deafening_; }  // it has taken effect

 private:
  static sockaddr_un address_of(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
    return address;
  }
  void connect(UniqueFd client) {
    UniqueFd server(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_un address = address_of(server_);
    if (::connect(server.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0)
      pairs_.push_back({std::move(client), std::move(server)});
  }
  bool forward(const UniqueFd& from, const UniqueFd& to, bool request, bool* waits) {
    std::array<char, 1 << 16> bytes;
    const auto size = ::recv(from.get(), bytes.data(), bytes.size(), 0);
    if (size <= 0) return false;
    const std::string_view text(bytes.data(), static_cast<std::size_t>(size));
    if (request) *waits |= text.find("SUBSCRIBE") != text.npos || text.find("BLOCK") != text.npos;
    if (request && !pause_word_.empty() && text.find(pause_word_) != text.npos) {
      pause_word_.clear();
      paused_ = write_all(to.get(), text);
      return paused_;
    }
    if (!request || word_.empty() || text.find(word_) == text.npos) return write_all(to.get(), text);
    if (!std::exchange(lost_, true) && write_all(to.get(), text)) {
      // Until the server has run it.
      ::shutdown(to.get(), SHUT_WR);
      while (::recv(to.get(), bytes.data(), bytes.size(), 0) > 0) {
      }
    }
    return false;
  }
  void run() {
    while (!ending_) {
      if (paused_) {
        ::poll(nullptr, 0, 1);
        continue;
      }
      std::vector<pollfd> fds = {{listening_.get(), POLLIN, 0}};
      const bool deafening = deafening_.exchange(false);
      for (auto& pair : pairs_) {
        pair.deaf |= deafening && pair.waits;
        fds.push_back({pair.deaf ? -1 : pair.client.get(), POLLIN, 0});
        fds.push_back({pair.deaf ? -1 : pair.server.get(), POLLIN, 0});
      }
      ::poll(fds.data(), fds.size(), 10);
      for (std::size_t i = 0; i < pairs_.size() && !paused_; ++i) {
        auto& [client, server, waits, deaf] = pairs_[i];
        const bool good = (fds[2 * i + 1].revents == 0 || forward(client, server, true, &waits)) &&
                          (fds[2 * i + 2].revents == 0 || forward(server, client, false, &waits));
        if (!good) client.reset(), server.reset();
      }
      std::erase_if(pairs_, [](const auto& pair) { return !pair.client.valid(); });
      if (fds[0].revents != 0) connect(UniqueFd(::accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC)));
    }
  }

  const std::string server_, path_;
  UniqueFd listening_{::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  struct Pair {
    UniqueFd client, server;
    bool waits = false, deaf = false;
  };
  std::vector<Pair> pairs_;
  std::string word_, pause_word_;
  bool lost_ = false;
  std::atomic<bool> paused_{false}, deafening_{false}, ending_{false};
  std::thread thread_;
};

}  // namespace ditfleet::testing
