#include "pipeline/device/failure.h"

#include <c10/util/Exception.h>

#include <new>
#include <string_view>

namespace ditfleet::pipeline {
namespace {

constexpr int kCudaErrorMemoryAllocation = 2;  // cudaError_t

bool contains_any(std::string_view text, std::initializer_list<std::string_view> needles) {
  for (auto needle : needles)
    if (text.find(needle) != text.npos) return true;
  return false;
}

std::string first_line(std::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

}  // namespace

void fail(Code code, std::string message, std::string param) {
  throw Failure(Error{code, std::move(message), std::move(param)});
}

Error error_in_flight(const std::string& stage) {
  const std::string where = "[" + stage + "] ";
  try {
    throw;
  } catch (const Failure& e) {
    return e.error();
  } catch (const c10::OutOfMemoryError& e) {
    return {Code::kOutOfMemory, where + "the device is out of memory: " + first_line(e.what_without_backtrace()) +
                                    "; use a smaller image or fewer concurrent jobs"};
  } catch (const c10::AcceleratorError& e) {
    const bool memory = e.get_error_code() == kCudaErrorMemoryAllocation;
    return {memory ? Code::kOutOfMemory : Code::kDeviceFault,
            where + (memory ? "the device is out of memory: " : "the device failed: ") +
                first_line(e.what_without_backtrace())};
  } catch (const c10::Error& e) {
    const std::string_view text = e.what_without_backtrace();
    // The host allocator and cuBLAS/cuDNN have no exception type for this.
    if (contains_any(text, {"DefaultCPUAllocator", "not enough memory", "out of memory", "ALLOC_FAILED"}))
      return {Code::kOutOfMemory,
              where + "out of memory: " + first_line(text) + "; use a smaller image or fewer concurrent jobs"};
    if (contains_any(text, {"CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "cuDNN error", "CUDA driver error"}))
      return {Code::kDeviceFault, where + "the device failed: " + first_line(text)};
    return {Code::kInternal, where + first_line(text)};
  } catch (const std::bad_alloc&) {
    return {Code::kOutOfMemory, where + "the host is out of memory; use a smaller image or fewer concurrent jobs"};
  } catch (const std::exception& e) {
    // oneDNN does not say why; what it has found an implementation for fails for want of memory.
    for (const std::string_view failed :
         {"could not create a primitive", "could not execute a primitive", "could not create a memory object"})
      if (failed == e.what())
        return {Code::kOutOfMemory,
                where + "out of memory: " + e.what() + "; use a smaller image or fewer concurrent jobs"};
    return {Code::kInternal, where + e.what()};
  } catch (...) {
    return {Code::kInternal, where + "an exception of unknown type"};
  }
}

}  // namespace ditfleet::pipeline
