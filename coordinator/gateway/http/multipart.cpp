#include "coordinator/gateway/http/multipart.h"

#include <optional>

#include "coordinator/gateway/http/http.h"
#include "shared/core/text.h"

namespace ditfleet::gateway {
namespace {

constexpr std::size_t kMostParts = 64, kMostHead = 16 << 10;

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

// A parameter of a header such as `form-data; name="size"`; a quoted value may have escaped characters.
std::optional<std::string> parameter(std::string_view header, std::string_view name) {
  take_part(header, ';');
  while (!header.empty()) {
    const std::string_view key = trimmed(take_part(header, '='));
    header = header.substr(std::min(header.find_first_not_of(" \t"), header.size()));
    std::string value;
    if (header.starts_with('"')) {
      std::size_t at = 1;
      for (; at < header.size() && header[at] != '"'; ++at) {
        if (header[at] == '\\' && at + 1 < header.size()) ++at;
        value += header[at];
      }
      header.remove_prefix(std::min(at + 1, header.size()));
      take_part(header, ';');
    } else {
      value = trimmed(take_part(header, ';'));
    }
    if (same_name(key, name)) return value;
  }
  return std::nullopt;
}

std::string_view disposition_of(std::string_view head) {
  while (!head.empty()) {
    std::string_view line = take_part(head, '\n');
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (same_name(trimmed(take_part(line, ':')), "Content-Disposition")) return trimmed(line);
  }
  return {};
}

// What is before each part and after the last one.
Result<std::string> delimiter_of(std::string_view content_type) {
  const auto boundary = parameter(content_type, "boundary");
  if (!boundary || boundary->empty() || boundary->size() > 70)
    return invalid_argument("the Content-Type multipart/form-data needs a boundary of 1 to 70 characters");
  return "\r\n--" + *boundary;
}

Error unnamed_part() { return invalid_argument("a part of the form has no name in its Content-Disposition"); }

}  // namespace

Result<FormReader> FormReader::open(std::string_view content_type) {
  auto delimiter = delimiter_of(content_type);
  if (!delimiter) return delimiter.error();
  FormReader reader;
  reader.delimiter_ = std::move(*delimiter);
  reader.rest_ = "\r\n";  // the first delimiter may be at the very beginning
  return reader;
}

Result<void> FormReader::feed(std::string_view bytes, const std::function<Result<void>(const Part&)>& begin,
                              const std::function<Result<void>(std::string_view)>& data) {
  rest_ += bytes;
  while (state_ != State::kEnd) {
    if (state_ == State::kPreamble || state_ == State::kData) {
      const std::size_t found = rest_.find(delimiter_);
      const std::size_t known = found != rest_.npos ? found : rest_.size() - std::min(rest_.size(), delimiter_.size());
      if (state_ == State::kData && known > 0)
        if (auto taken = data(std::string_view(rest_).substr(0, known)); !taken) return taken;
      rest_.erase(0, found == rest_.npos ? known : found + delimiter_.size());
      if (found == rest_.npos) return {};
      state_ = State::kBoundary;
    } else if (state_ == State::kBoundary) {
      if (rest_.size() < 2) return {};
      state_ = rest_.starts_with("--") ? State::kEnd : State::kHead;
    } else {
      const std::size_t blank = rest_.find("\r\n\r\n");
      if (blank == rest_.npos && rest_.size() <= kMostHead) return {};
      if (blank == rest_.npos || blank > kMostHead)
        return invalid_argument("a part of the form has more than " + std::to_string(kMostHead) + " bytes of headers");
      const std::string disposition(disposition_of(std::string_view(rest_).substr(0, blank)));
      Part part{parameter(disposition, "name").value_or(""), parameter(disposition, "filename").value_or("")};
      if (part.name.empty()) return unnamed_part();
      if (auto begun = begin(part); !begun) return begun;
      rest_.erase(0, blank + 4);
      state_ = State::kData;
    }
  }
  rest_.clear();
  return {};
}

Result<std::vector<FormPart>> parse_form(std::string_view content_type, std::string_view body) {
  const auto of_form = delimiter_of(content_type);
  if (!of_form) return of_form.error();
  const std::string& delimiter = *of_form;
  std::vector<FormPart> parts;
  // The first delimiter may be at the very beginning, without the line break.
  std::size_t at =
      body.starts_with(std::string_view(delimiter).substr(2)) ? delimiter.size() - 2 : body.find(delimiter);
  if (at != body.npos && at != delimiter.size() - 2) at += delimiter.size();
  while (at != body.npos && body.substr(at, 2) != "--") {
    const std::size_t end = body.find(delimiter, at), blank = body.find("\r\n\r\n", at);
    if (end == body.npos || blank == body.npos || blank > end) break;
    const std::string_view disposition = disposition_of(body.substr(at, blank - at));
    auto name = parameter(disposition, "name");
    if (!name || name->empty()) return unnamed_part();
    if (parts.size() == kMostParts)
      return invalid_argument("the form has more than " + std::to_string(kMostParts) + " parts");
    const std::size_t first = std::min(blank + 4, end);
    parts.push_back(
        {std::move(*name), parameter(disposition, "filename").has_value(), body.substr(first, end - first)});
    at = end + delimiter.size();
  }
  if (at == body.npos || body.substr(at, 2) != "--")
    return invalid_argument("the form is incomplete: it must end with its boundary and two hyphens");
  return parts;
}

}  // namespace ditfleet::gateway
