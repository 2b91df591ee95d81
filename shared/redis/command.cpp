#include <charconv>

#include "shared/redis/connection.h"

namespace ditfleet::redis {
namespace {

// "<kind><value>\r\n"
void append_header(std::string& out, char kind, std::size_t value) {
  char text[24];
  text[0] = kind;
  char* end = std::to_chars(text + 1, text + sizeof text - 2, value).ptr;
  *end++ = '\r';
  *end++ = '\n';
  out.append(text, end);
}

}  // namespace

// Appends in place; redisFormatCommandArgv needs arrays of pointers to all arguments.
Command& Command::operator<<(std::string_view argument) {
  append_header(body_, '$', argument.size());
  body_.append(argument).append("\r\n");
  ++count_;
  return *this;
}

Command& Command::operator<<(std::int64_t argument) {
  char text[24];
  char* end = std::to_chars(text, text + sizeof text, argument).ptr;
  return *this << std::string_view(text, static_cast<std::size_t>(end - text));
}

void Command::append_to(std::string& wire) const {
  append_header(wire, '*', static_cast<std::size_t>(count_));
  wire += body_;
}

}  // namespace ditfleet::redis
