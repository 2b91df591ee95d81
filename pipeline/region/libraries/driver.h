// The functions of libcuda.so.1 that the compiler uses, declared as in the driver's documentation. The library is
// opened at run time, so building needs neither CUDA's headers nor a driver.
#pragma once

#include <string>

#include "shared/core/result.h"

namespace ditfleet::region {

struct Driver {
  int (*init)(unsigned);
  int (*version)(int*);
  int (*device)(int*, int);
  int (*device_name)(char*, int bytes, int device);
  int (*attribute)(int*, int attribute, int device);
  int (*current)(void** context);
  int (*retain)(void** context, int device);
  int (*set_current)(void* context);
  int (*load)(void** module, const void* image);
  int (*unload)(void* module);
  int (*function)(void** function, void* module, const char* name);
  int (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                unsigned block_z, unsigned shared_bytes, void* stream, void** parameters, void** extra);
  int (*event_create)(void** event, unsigned flags);
  int (*event_destroy)(void* event);
  int (*event_record)(void* event, void* stream);
  int (*event_synchronize)(void* event);
  int (*event_elapsed)(float* milliseconds, void* begin, void* end);
  int (*stream_wait)(void* stream, void* event, unsigned flags);
  int (*memory_info)(std::size_t* free, std::size_t* total);
  int (*capture_begin)(void* stream, int mode);
  int (*capture_end)(void* stream, void** graph);
  int (*graph_instantiate)(void** executable, void* graph, unsigned long long flags);
  int (*graph_launch)(void* executable, void* stream);
  int (*graph_executable_destroy)(void* executable);
  int (*graph_destroy)(void* graph);
  int (*error_name)(int, const char**);

  std::string name_of(int error) const;
};

// Opened and initialized once per process. kUnavailable: no driver, or it does not initialize.
Result<const Driver*> driver();

// Makes the device's primary context, which LibTorch uses, current on a thread that has none. kDeviceFault.
Result<void> enter_device(const Driver& cuda, int index);

// GPUs with equal identities run the same work equally fast. Part of the keys of timed choices.
struct GpuIdentity {
  std::string name;  // "NVIDIA H200"
  int multiprocessors = 0;
  int driver = 0;  // 13000 is 13.0
};
Result<GpuIdentity> gpu_identity(int index);

}  // namespace ditfleet::region
