#include "shared/redis/endpoint.h"

#include <algorithm>
#include <utility>

#include "shared/core/bytes.h"
#include "shared/core/excerpt.h"
#include "shared/core/text.h"

namespace ditfleet::redis {
namespace {

Result<std::string> decoded_part(std::string_view text, const char* part) {
  auto out = percent_decoded(text);
  if (out) return std::move(*out);
  return invalid_argument(std::string("[redis] the URL's ") + part +
                          " has a % without two hexadecimal digits after it");
}

std::string percent_encoded(std::string_view text, std::string_view kept) {
  static constexpr char kHex[] = "0123456789ABCDEF";
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    const bool plain = (byte >= '0' && byte <= '9') || (byte >= 'A' && byte <= 'Z') || (byte >= 'a' && byte <= 'z') ||
                       kept.find(c) != std::string_view::npos;
    if (plain)
      out += c;
    else
      out += {'%', kHex[byte >> 4], kHex[byte & 15]};
  }
  return out;
}

Result<int> number(std::string_view text, int low, int high, const char* part) {
  if (const auto value = number_of(text, low, high)) return *value;
  return invalid_argument("[redis] the URL's " + std::string(part) + " is '" + excerpt(text, 64) +
                          "'; it must be from " + std::to_string(low) + " to " + std::to_string(high));
}

bool is_name(std::string_view text, std::string_view also) {
  return std::all_of(text.begin(), text.end(), [also](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           also.find(c) != std::string_view::npos;
  });
}

// host[:port] or [IPv6][:port].
Result<Endpoint::Node> node_of(std::string_view text, int default_port) {
  Endpoint::Node node{.host = {}, .port = default_port};
  const bool v6 = text.starts_with('[');
  std::string_view port;
  if (v6) {
    const auto close = text.find(']');
    if (close == std::string_view::npos) return invalid_argument("[redis] the URL's host has no closing ]");
    node.host = text.substr(1, close - 1);
    port = text.substr(close + 1);
  } else {
    const auto colon = text.find(':');
    node.host = text.substr(0, colon);
    if (colon != std::string_view::npos) port = text.substr(colon);
  }
  if (node.host.empty()) return invalid_argument("[redis] the URL has no host; write redis://host[:port][/db]");
  if (!is_name(node.host, v6 ? ".-:%" : ".-_") || v6 != (node.host.find(':') != std::string::npos)) {
    return invalid_argument("[redis] the URL's host '" + excerpt(node.host, 64) +
                            "' is neither a name of letters, digits, '.', '-' and '_' nor an IPv6 address in []");
  }
  if (!port.empty()) {
    auto value = port[0] == ':' ? number(port.substr(1), 1, 65535, "port")
                                : Result<int>(invalid_argument("[redis] the URL has '" + excerpt(port, 64) +
                                                               "' after the host; a port starts with :"));
    if (!value) return value.error();
    node.port = *value;
  }
  return node;
}

std::string text_of(const std::string& host, int port) {
  return (host.find(':') != std::string::npos ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

}  // namespace

Result<Endpoint> Endpoint::parse(std::string_view url) {
  Endpoint endpoint;
  bool local = false;
  const auto scheme_end = url.find("://");
  std::string_view scheme = scheme_end == std::string_view::npos ? std::string_view() : url.substr(0, scheme_end);
  const bool sentinel = scheme == "redis+sentinel" || scheme == "rediss+sentinel";
  if (sentinel) scheme = scheme.substr(0, scheme.find('+'));
  if (scheme == "rediss") {
    endpoint.tls = true;
  } else if (scheme == "unix") {
    local = true;
  } else if (scheme != "redis") {
    // The text before "://" may contain a password.
    return invalid_argument("[redis] the URL's scheme is " +
                            (is_name(scheme, "+") ? "'" + excerpt(scheme, 64) + "'" : std::string("unknown")) +
                            "; it must be redis://, rediss://, redis+sentinel://, rediss+sentinel:// or unix://");
  }
  std::string_view rest = url.substr(scheme_end + 3);
  // Otherwise the rest of a password would become the database and appear in a message.
  if (const auto cut = rest.find_first_of(local ? "?" : "/?");
      cut != std::string_view::npos && rest.find('@', cut) != std::string_view::npos) {
    return invalid_argument(
        "[redis] the URL has an @ after a / or ?; in a user or password, write / as %2F and ? as %3F");
  }

  if (const auto question = rest.find('?'); question != std::string_view::npos) {
    const std::string_view query = rest.substr(question + 1);
    rest = rest.substr(0, question);
    if (!query.starts_with("db=")) {
      return invalid_argument("[redis] the URL's query is '" + excerpt(query, 64) + "'; only db=N is supported");
    }
    auto db = number(query.substr(3), 0, 1'000'000, "db");
    if (!db) return db.error();
    endpoint.db = *db;
  }
  // The last @ before the path: a password may contain one.
  const auto at = rest.rfind('@', local ? std::string_view::npos : rest.find('/'));
  if (at != std::string_view::npos && (!local || !rest.starts_with('/'))) {
    const std::string_view login = rest.substr(0, at);
    rest = rest.substr(at + 1);
    const auto colon = login.find(':');
    auto user = decoded_part(login.substr(0, colon), "user");
    if (!user) return user.error();
    endpoint.user = *user;
    if (colon != std::string_view::npos) {
      auto password = decoded_part(login.substr(colon + 1), "password");
      if (!password) return password.error();
      endpoint.password = *password;
    }
    if (!endpoint.user.empty() && endpoint.password.empty()) {
      return invalid_argument("[redis] the URL has a user without a password; write user:password@");
    }
  }
  if (local) {
    auto path = decoded_part(rest, "path");
    if (!path) return path.error();
    if (!path->starts_with('/')) {
      return invalid_argument("[redis] the URL's socket path is '" + excerpt(*path, 128) +
                              "'; it must be absolute: unix:///run/redis.sock");
    }
    endpoint.unix_path = *path;
    endpoint.port = 0;
    return endpoint;
  }

  const auto slash = rest.find('/');
  std::string_view path = slash == std::string_view::npos ? std::string_view() : rest.substr(slash + 1);
  rest = rest.substr(0, slash);
  if (sentinel) {
    endpoint.service = take_part(path, '/');
    if (endpoint.service.empty() || !is_name(endpoint.service, ".-_:")) {
      return invalid_argument("[redis] the URL's service is '" + excerpt(endpoint.service, 64) +
                              "'; write the name that the sentinels monitor, of letters, digits, '.', '-', '_' and "
                              "':': redis+sentinel://host[:port][,host[:port]]/service[/db]");
    }
  }
  if (!path.empty()) {
    auto db = number(path, 0, 1'000'000, "database");
    if (!db) return db.error();
    endpoint.db = *db;
  }
  for (const std::string_view part : sentinel ? split(rest, ',') : std::vector<std::string_view>()) {
    auto node = node_of(part, Node().port);
    if (!node) return node.error();
    endpoint.sentinels.push_back(std::move(*node));
  }
  if (!endpoint.sentinels.empty()) return endpoint;
  auto node = node_of(rest, endpoint.port);
  if (!node) return node.error();
  endpoint.host = std::move(node->host);
  endpoint.port = node->port;
  return endpoint;
}

std::string Endpoint::url() const {
  const std::string login = user.empty() && password.empty()
                                ? std::string()
                                : percent_encoded(user, "-._~") + ":" + percent_encoded(password, "-._~") + "@";
  Endpoint anybody = *this;
  anybody.unix_path = percent_encoded(unix_path, "/-._~");
  const std::string rest = anybody.display();
  const auto at = rest.find("://") + 3;
  return rest.substr(0, at) + login + rest.substr(at);
}

std::string Endpoint::display() const {
  const std::string suffix = db != 0 ? (unix_path.empty() ? "/" : "?db=") + std::to_string(db) : std::string();
  if (!unix_path.empty()) return "unix://" + unix_path + suffix;
  std::string scheme = tls ? "rediss" : "redis";
  if (sentinels.empty()) return scheme + "://" + text_of(host, port) + suffix;
  std::string nodes;
  for (const Node& node : sentinels) nodes += (nodes.empty() ? "" : ",") + text_of(node.host, node.port);
  return scheme + "+sentinel://" + nodes + "/" + service + suffix;
}

}  // namespace ditfleet::redis
