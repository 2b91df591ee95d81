// Errors inside pipeline/ are exceptions; the engine turns them into Result.
#pragma once

#include <exception>
#include <string>
#include <type_traits>
#include <utility>

#include "shared/core/result.h"

namespace ditfleet::pipeline {

// Carries an Error to the engine.
class Failure : public std::exception {
 public:
  explicit Failure(Error error) : error_(std::move(error)) {}
  const Error& error() const { return error_; }
  const char* what() const noexcept override { return error_.message.c_str(); }

 private:
  Error error_;
};

[[noreturn]] void fail(Code code, std::string message, std::string param = {});

// Returns the value, or throws the error as a Failure.
template <class T>
T unwrap(Result<T> result) {
  if (!result) throw Failure(result.error());
  return std::move(result).value();
}
inline void unwrap(const Result<void>& result) {
  if (!result) throw Failure(result.error());
}

// Converts the exception of the surrounding catch block into an Error. The message starts with `stage` ("denoise"). Out
// of memory, on a device or the host, is kOutOfMemory; other device errors are kDeviceFault; anything else is
// kInternal.
Error error_in_flight(const std::string& stage);

// Runs a function. Converts its exception as error_in_flight() does.
template <class Run>
auto result_of(const std::string& stage, const Run& run) -> Result<decltype(run())> {
  try {
    if constexpr (std::is_void_v<decltype(run())>) {
      run();
      return {};
    } else {
      return run();
    }
  } catch (...) {
    return error_in_flight(stage);
  }
}

}  // namespace ditfleet::pipeline
