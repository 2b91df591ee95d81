// The body of a multipart/form-data request (RFC 7578). Pure functions, thread-safe.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "shared/core/result.h"

namespace ditfleet::gateway {

struct FormPart {
  std::string name;
  bool is_file = false;       // the part has a file name
  std::string_view contents;  // points into the body
};

// The parts in order. kInvalidArgument: the Content-Type has no boundary, the body does not end with it, a part has no
// name, or there are more than 64 parts.
Result<std::vector<FormPart>> parse_form(std::string_view content_type, std::string_view body);

// Reads such a body as it arrives. Not thread-safe.
class FormReader {
 public:
  struct Part {
    std::string name, file_name;
  };
  // kInvalidArgument: no boundary.
  static Result<FormReader> open(std::string_view content_type);
  // Takes the next bytes. Calls `begin` for each part and `data` with its contents as they come; their errors end it.
  // kInvalidArgument: a part has no name, or more than 16 KiB of headers.
  Result<void> feed(std::string_view bytes, const std::function<Result<void>(const Part&)>& begin,
                    const std::function<Result<void>(std::string_view)>& data);
  bool is_complete() const { return state_ == State::kEnd; }

 private:
  enum class State { kPreamble, kData, kBoundary, kHead, kEnd };
  std::string delimiter_, rest_;  // what does not tell yet what it is
  State state_ = State::kPreamble;
};

}  // namespace ditfleet::gateway
