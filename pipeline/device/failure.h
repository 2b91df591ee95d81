// How errors travel inside pipeline/: by exception up to the engine, which turns them into Result.
#pragma once

#include <exception>
#include <string>
#include <utility>

#include "shared/core/result.h"

namespace ditfleet::pipeline {

// An Error on its way to the engine.
class Failure : public std::exception {
 public:
  explicit Failure(Error error) : error_(std::move(error)) {}
  const Error& error() const { return error_; }
  const char* what() const noexcept override { return error_.message.c_str(); }

 private:
  Error error_;
};

[[noreturn]] void fail(Code code, std::string message, std::string param = {});

// The value, or the error thrown as a Failure.
template <class T>
T unwrap(Result<T> result) {
  if (!result) throw Failure(result.error());
  return std::move(result).value();
}
inline void unwrap(const Result<void>& result) {
  if (!result) throw Failure(result.error());
}

// Call it inside a catch block: what the exception in flight is to a caller of the engine. `stage` ("denoise")
// begins the message. Memory that ran out is kOutOfMemory, on a device or the host; what the device reports
// otherwise is kDeviceFault; anything unforeseen is kInternal. Never throws what it caught.
Error error_in_flight(const std::string& stage);

}  // namespace ditfleet::pipeline
