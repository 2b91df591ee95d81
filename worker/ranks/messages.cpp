#include "worker/ranks/messages.h"

#include <sys/socket.h>

#include <cerrno>

#include "shared/core/fd_io.h"

namespace ditfleet::worker {
namespace {

struct Head {
  std::int64_t id, model, generation;
  std::uint64_t size;  // of the bytes that follow
  Call call;
};

// Unlike write(2), raises no signal if the other end is closed.
bool send_all(int socket, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno != EINTR) return false;
    if (sent > 0) bytes.remove_prefix(static_cast<std::size_t>(sent));
  }
  return true;
}

Error gone() { return unavailable("[ranks] the other process has ended"); }

}  // namespace

std::string_view name_of(Call call) {
  constexpr std::string_view kNames[] = {"create", "load", "encode", "denoise", "release", "prefetch", "pin", "forget"};
  return kNames[static_cast<std::size_t>(call)];
}

Result<void> send_message(int socket, const Message& message) {
  Head head{message.id, message.model, message.generation, message.bytes.size(), message.call};
  std::string start(sizeof head, '\0');
  std::memcpy(start.data(), &head, sizeof head);
  if (!send_all(socket, start) || !send_all(socket, message.bytes)) return gone();
  return {};
}

Result<Message> receive_message(int socket) {
  const auto read = [&](std::uint64_t size) -> std::optional<std::string> {
    auto got = read_up_to(socket, size);
    return got && got->size() == size ? std::move(got) : std::nullopt;
  };
  Head head;
  const auto start = read(sizeof head);
  if (!start) return gone();
  std::memcpy(&head, start->data(), sizeof head);
  auto bytes = read(head.size);
  if (!bytes) return gone();
  return Message{head.call, head.model, head.generation, std::move(*bytes), head.id};
}

}  // namespace ditfleet::worker
