// Redis as the processes of a history reach it: a model of Redis behind connections that can be slow, cut or silent.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tests/history/redis_model.h"
#include "tests/history/world.h"

namespace ditfleet::history {

// One connection. The server's end outlives the client's.
struct Link {
  Process* process = nullptr;
  bool open = true;                           // neither side has closed it
  bool silent = false;                        // bytes vanish, for good
  std::string to_parse, to_read;              // what arrived at the server, at the client
  std::int64_t server_at = 0, client_at = 0;  // when the latest bytes arrive: they keep their order
  std::set<std::string> channels;
  std::vector<std::string> blocked;  // the XREAD that waits; the commands behind it wait too
  std::uint64_t block = 0;           // its number
  std::function<void()> arrived;     // wakes the client
};

struct Network {
  std::int64_t least_us = 50, most_us = 400;  // one way
  bool reachable = true;                      // connections can be made
  std::int64_t held_until = 0;                // what is sent arrives later
  std::int64_t replies_lost_until = 0;        // after some commands the connection is cut before the reply
};

class RedisServer {
 public:
  explicit RedisServer(World& world);
  RedisModel& model() { return *model_; }
  void operate(const Arguments& command) { note(command, model_->run(command)); }  // by an operator
  bool up() const { return up_; }
  std::int64_t clock_us() const { return world_.wall_us() + clock_shift_us; }

  // --- for transports
  std::shared_ptr<Link> connect(Process& process);
  void send(const std::shared_ptr<Link>& link, std::string bytes);
  void leave(const std::shared_ptr<Link>& link);  // the client closes; what it has sent still arrives
  Network& network(const Process& process) { return networks_[&process]; }
  std::int64_t delay(const Process& process);

  // --- faults
  void cut(const Process& process);      // its connections, with what is under way
  void end(const Process& process);      // as when it is killed: half of the times what it has sent still arrives
  void silence(const Process& process);  // its connections carry nothing any more, and nobody tells
  void crash();                          // nothing that was executed is lost
  void start();
  void fail_over();  // to a replica that has what keep() kept
  void keep();       // what a replica, or the disk, has
  void stop_until(std::int64_t time_us) { stopped_until_ = std::max(stopped_until_, time_us); }
  std::int64_t clock_shift_us = 0;
  // The commands that were executed, for redis_model_test: the clock in microseconds and a line feed, the command, the
  // reply. Null: none.
  std::FILE* record = nullptr;
  // Called after each command of a client that may have changed something.
  std::function<void()> after_command;
  std::function<void()> rolled_back;  // what was executed after kept_at is lost
  std::int64_t kept_at = 0;

 private:
  void receive(const std::shared_ptr<Link>& link);
  void execute(const std::shared_ptr<Link>& link, const Arguments& command);
  void note(const Arguments& command, const Reply& answer);
  void reply(const std::shared_ptr<Link>& link, const Reply& reply);
  void wake_blocked();
  void close(const std::shared_ptr<Link>& link);
  void cut_all();

  World& world_;
  std::unique_ptr<RedisModel> model_;
  std::optional<RedisModel> kept_;
  std::vector<std::shared_ptr<Link>> links_;
  std::map<const Process*, Network> networks_;
  bool up_ = true;
  std::int64_t stopped_until_ = 0;
  std::uint64_t blocks_ = 0;
};

// The server that transports reach.
RedisServer*& the_server();

}  // namespace ditfleet::history
