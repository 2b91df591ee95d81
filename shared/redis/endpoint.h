// Where a Redis is, as a URL says it. A library of its own (ditfleet_redis_endpoint): who only checks a URL needs no
// connection.
#pragma once

#include <string>
#include <string_view>

#include "shared/core/result.h"

namespace ditfleet::redis {

// redis://[user:password@]host[:port][/db], rediss://… (TLS), unix:///path[?db=N].
struct Endpoint {
  bool tls = false;
  std::string unix_path;  // not empty: a unix socket
  std::string host = "127.0.0.1";
  int port = 6379;
  int db = 0;
  std::string user, password;
  std::string tls_ca_file;  // empty: the system's
  bool tls_verify = true;

  // kInvalidArgument says which part is wrong. The message never repeats a password.
  static Result<Endpoint> parse(std::string_view url);
  std::string display() const;  // without credentials
  std::string url() const;      // what parse() reads back, whatever path and password hold; TLS' files are not in it
};

}  // namespace ditfleet::redis
