// The model of Redis against redis-server: random commands, and the commands of histories, whose replies must be equal.
#include "tests/history/redis_model.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <hiredis.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "shared/redis/reply_reader.h"
#include "tests/paths.h"
#include "tests/system/redis_server.h"
#include "tests/system/temporary_folder.h"

namespace ditfleet::testing {
namespace {

using history::Arguments;
using history::RedisModel;
using history::Reply;

Reply reply_of(const redisReply& from) {
  Reply out;
  switch (from.type) {
    case REDIS_REPLY_NIL: return out;
    case REDIS_REPLY_INTEGER: out.type = Reply::Type::kInteger; break;
    case REDIS_REPLY_STATUS: out.type = Reply::Type::kStatus; break;
    case REDIS_REPLY_ERROR: out.type = Reply::Type::kError; break;
    case REDIS_REPLY_ARRAY: out.type = Reply::Type::kArray; break;
    default: out.type = Reply::Type::kString;
  }
  out.integer = from.type == REDIS_REPLY_INTEGER ? from.integer : 0;
  if (from.str) out.text.assign(from.str, from.len);
  for (std::size_t i = 0; i < from.elements; ++i) out.elements.push_back(reply_of(*from.element[i]));
  return out;
}

// Of an error only the first word: Redis adds where in a script it happened. A wrong type is as good as another error
// that the command has too. Without order: sets have none.
void show(const Reply& reply, std::vector<std::string>& out) {
  switch (reply.type) {
    case Reply::Type::kNil: out.emplace_back("nil"); return;
    case Reply::Type::kInteger: out.push_back(":" + std::to_string(reply.integer)); return;
    case Reply::Type::kError: {
      const std::string word = reply.text.substr(0, reply.text.find(' '));
      out.push_back(word == "WRONGTYPE" ? "-ERR" : "-" + word);
      return;
    }
    case Reply::Type::kStatus: out.push_back("+" + reply.text); return;
    case Reply::Type::kString: out.push_back(reply.text); return;
    case Reply::Type::kArray:
      out.push_back("*" + std::to_string(reply.elements.size()));
      for (const auto& element : reply.elements) show(element, out);
  }
}
std::string shown(const Reply& reply, bool ordered) {
  std::vector<std::string> parts;
  show(reply, parts);
  if (!ordered) std::sort(parts.begin(), parts.end());
  std::string out;
  for (const auto& part : parts) out += part + "\n";
  return out;
}

bool ordered(const Arguments& command) { return command[0] != "SMEMBERS" && command[0] != "KEYS"; }

// redis-server with a clock that stands still.
class RedisModelTest : public ::testing::Test {
 protected:
  RedisModelTest() {
    std::ofstream(clock_file_) << std::string(16, '\0');
    const int fd = ::open(clock_file_.c_str(), O_RDWR | O_CLOEXEC);
    clock_ = static_cast<std::atomic<std::int64_t>*>(::mmap(nullptr, 16, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    ::close(fd);
    set_clock(1'790'000'000'000'000);
    ::setenv("CLOCK_SHIFT_FILE", clock_file_.c_str(), 1);
    ::setenv("LD_PRELOAD", test_library("clock_shift").c_str(), 1);
    server_.emplace(RedisServer::Options{.appendfsync = "no"});
    ::unsetenv("LD_PRELOAD");
    ::unsetenv("CLOCK_SHIFT_FILE");
    context_ = redisConnectUnix(server_->endpoint().unix_path.c_str());
  }
  ~RedisModelTest() override { redisFree(context_); }

  void set_clock(std::int64_t us) {
    now_us_ = us;
    clock_[1].store(us);
  }
  Reply ask(const Arguments& command) {
    std::vector<const char*> words;
    std::vector<std::size_t> sizes;
    for (const auto word : command) {
      words.push_back(word.data());
      sizes.push_back(word.size());
    }
    auto* reply = static_cast<redisReply*>(
        redisCommandArgv(context_, static_cast<int>(words.size()), words.data(), sizes.data()));
    if (!reply) throw std::runtime_error(context_->errstr);
    Reply out = reply_of(*reply);
    freeReplyObject(reply);
    return out;
  }

  TemporaryFolder folder_;
  std::string clock_file_ = folder_.path() + "/clock";
  std::atomic<std::int64_t>* clock_ = nullptr;
  std::int64_t now_us_ = 0;
  std::optional<RedisServer> server_;
  redisContext* context_ = nullptr;
};

// A word for each letter: k a key, of one of five types as a rule; f a field; v a value; i a number; s a score; b a
// bound of scores; e the id of an entry; others stand for themselves.
constexpr const char* kCommands[] = {"GET k",
                                     "SET k v",
                                     "SET k v NX",
                                     "SET k v PX i",
                                     "SET k v NX GET PX i",
                                     "SET k v EX i",
                                     "SET k v XX",
                                     "DEL k k",
                                     "UNLINK k",
                                     "EXISTS k k",
                                     "INCR k",
                                     "STRLEN k",
                                     "GETRANGE k i i",
                                     "GETEX k EX 100",
                                     "PTTL k",
                                     "PEXPIRE k i",
                                     "PERSIST k",
                                     "HGET k f",
                                     "HSET k f v",
                                     "HSET k f v f v",
                                     "HSET k f",
                                     "HSETNX k f v",
                                     "HDEL k f f",
                                     "HEXISTS k f",
                                     "HGETALL k",
                                     "HINCRBY k f i",
                                     "HKEYS k",
                                     "HLEN k",
                                     "HMGET k f f f",
                                     "HSCAN k 0 COUNT 10",
                                     "SADD k v v",
                                     "SREM k v",
                                     "SMEMBERS k",
                                     "SISMEMBER k v",
                                     "SMISMEMBER k v v",
                                     "ZADD k s v",
                                     "ZADD k s v s v",
                                     "ZADD k GT s v",
                                     "ZADD k XX LT s v s v",
                                     "ZADD k s",
                                     "ZREM k v v",
                                     "ZCARD k",
                                     "ZSCORE k v",
                                     "ZMSCORE k v v",
                                     "ZRANGE k i i",
                                     "ZRANGE k 0 -1 WITHSCORES",
                                     "ZRANGEBYSCORE k b b",
                                     "ZRANGEBYSCORE k b b LIMIT i i",
                                     "ZRANGEBYSCORE k -inf b WITHSCORES LIMIT 0 2",
                                     "ZREVRANGEBYSCORE k b b WITHSCORES",
                                     "ZREMRANGEBYSCORE k b b",
                                     "ZREMRANGEBYRANK k i i",
                                     "XADD k * f v",
                                     "XADD k e f v",
                                     "XADD k MAXLEN i * f v",
                                     "XADD k MAXLEN ~ 1000 * f v f v",
                                     "XADD k * f",
                                     "XDEL k e e",
                                     "XLEN k",
                                     "XRANGE k - +",
                                     "XRANGE k e e",
                                     "XRANGE k (e + COUNT i",
                                     "XREVRANGE k + - COUNT i",
                                     "XREVRANGE k e e",
                                     "XTRIM k MAXLEN i",
                                     "XTRIM k MINID e",
                                     "XSETID k e",
                                     "XREAD COUNT 2 STREAMS k k e e",
                                     "TIME",
                                     "NOSUCH k",
                                     "GET",
                                     "ZADD k",
                                     "KEYS k*"};

TEST_F(RedisModelTest, RepliesAsRedisToRandomCommands) {
  RedisModel model([this] { return now_us_; });
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto below = [&](int bound) { return static_cast<int>(random() % static_cast<unsigned>(bound)); };
  std::set<std::string> compared;
  for (int i = 0; i < 60'000; ++i) {
    set_clock(now_us_ + below(20'000));
    std::istringstream form(kCommands[below(std::size(kCommands))]);
    std::vector<std::string> words;
    std::string type;  // of keys: commands of one letter in common mostly have their own
    for (std::string word; form >> word;) {
      if (words.empty()) type = word.substr(0, 1);
      if (word == "k" || word == "k*") {
        const std::string other(1, "GHSZX"[below(5)]);
        word = (below(12) == 0 ? other : type) + std::to_string(below(4)) + word.substr(1);
      } else if (word == "f") {
        word = "f" + std::to_string(below(5));
      } else if (word == "v") {
        word = below(3) == 0 ? std::to_string(below(10)) : "v" + std::to_string(below(6));
      } else if (word == "i") {
        word = below(20) == 0 ? "x" : std::to_string(below(30) - 6);
      } else if (word == "s") {
        word = below(20) == 0 ? "x" : below(4) == 0 ? std::to_string(below(9)) + ".25" : std::to_string(below(9) - 2);
      } else if (word == "b") {
        word = below(9) == 0 ? "+inf" : (below(3) == 0 ? "(" : "") + std::to_string(below(9) - 2);
      } else if (word == "e" || word == "(e") {
        const auto ms = now_us_ / 1000 - below(100);
        word = std::string(word == "e" ? "" : "(") + (below(20) == 0 ? "x-1"
                                                      : below(4) == 0
                                                          ? std::to_string(ms)
                                                          : std::to_string(ms) + "-" + std::to_string(below(3)));
      }
      words.push_back(word);
    }
    const Arguments command(words.begin(), words.end());
    const bool read = words[0] == "XREAD";
    const std::string expected = shown(ask(command), ordered(command));
    const std::string got = shown(read ? model.read_streams(command) : model.run(command), ordered(command));
    std::string text;
    for (const auto& word : words) text += word + " ";
    ASSERT_EQ(got, expected) << text << "(command " << i << ")";
    if (expected[0] != '-') compared.insert(words[0]);
  }
  EXPECT_GE(compared.size(), 44u);  // that did not always fail
}

// Functions and all: what the coordinators and workers of histories have sent.
TEST_F(RedisModelTest, RepliesAsRedisToTheCommandsOfHistories) {
  const std::string file = folder_.path() + "/commands";
  int commands = 0, histories = 0;
  for (int seed = 1; histories < 40; ++seed) {
    const std::string run =
        test_program("histories") + " --seed " + std::to_string(seed) + " --record " + file + " > /dev/null";
    if (WEXITSTATUS(std::system(run.c_str())) == 3) continue;
    ++histories;
    ask({"FLUSHALL"});
    ask({"FUNCTION", "FLUSH"});
    std::ifstream in(file);
    const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    std::size_t at = 0;
    while (at < text.size()) {
      const auto end = text.find('\n', at);
      set_clock(std::stoll(text.substr(at, end - at)));
      at = end + 1;
      // The next record begins where both are complete: RESP tells its length.
      Reply pair[2];
      for (Reply& one : pair) {
        redis::ReplyReader reader;
        for (std::size_t size = 0;; ++size) {
          // Up to the end of a line at a time.
          const auto line = text.find("\r\n", at + size);
          ASSERT_NE(line, std::string::npos);
          reader.feed(std::string_view(text).substr(at + size, line + 2 - at - size));
          size = line + 1 - at;
          auto next = reader.next();
          ASSERT_TRUE(next.ok()) << next.error().message;
          if (!*next) continue;
          one = std::move(**next);
          at += size + 1;
          break;
        }
      }
      Arguments command;
      for (const auto& word : pair[0].elements) command.push_back(word.text);
      ASSERT_FALSE(command.empty());
      const std::string got = shown(pair[1], ordered(command)), expected = shown(ask(command), ordered(command));
      std::string what;
      for (const auto word : command) what += std::string(word.substr(0, 200)) + " ";
      ASSERT_EQ(got, expected) << "seed " << seed << ": " << what;
      ++commands;
    }
  }
  EXPECT_GT(commands, 10'000);
}

}  // namespace
}  // namespace ditfleet::testing
