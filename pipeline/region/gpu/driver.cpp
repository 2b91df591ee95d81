#include "pipeline/region/gpu/driver.h"

#include "pipeline/region/gpu/symbols.h"

namespace ditfleet::region {
namespace {

constexpr int kMultiprocessors = 16;  // CUdevice_attribute

}  // namespace

std::string Driver::name_of(int error) const {
  const char* name = nullptr;
  return error_name(error, &name) == 0 && name ? name : "error " + std::to_string(error);
}

Result<const Driver*> driver() {
  static const Driver* const opened = []() -> const Driver* {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return nullptr;
    auto* d = new Driver{};  // lives as long as the process
    // Names with a version suffix are those that the headers of CUDA 11 and later map the plain ones to.
    const bool whole = bind(library, "cuInit", d->init) && bind(library, "cuDriverGetVersion", d->version) && bind(library, "cuDeviceGet", d->device) &&
                       bind(library, "cuDeviceGetName", d->device_name) && bind(library, "cuDeviceGetAttribute", d->attribute) &&
                       bind(library, "cuCtxGetCurrent", d->current) && bind(library, "cuDevicePrimaryCtxRetain", d->retain) &&
                       bind(library, "cuCtxSetCurrent", d->set_current) && bind(library, "cuModuleLoadData", d->load) &&
                       bind(library, "cuModuleUnload", d->unload) && bind(library, "cuModuleGetFunction", d->function) &&
                       bind(library, "cuLaunchKernel", d->launch) && bind(library, "cuEventCreate", d->event_create) &&
                       bind(library, "cuEventDestroy_v2", d->event_destroy) && bind(library, "cuEventRecord", d->event_record) &&
                       bind(library, "cuEventSynchronize", d->event_synchronize) && bind(library, "cuEventElapsedTime", d->event_elapsed) &&
                       bind(library, "cuStreamWaitEvent", d->stream_wait) && bind(library, "cuMemGetInfo_v2", d->memory_info) &&
                       bind(library, "cuStreamBeginCapture_v2", d->capture_begin) &&
                       bind(library, "cuStreamEndCapture", d->capture_end) && bind(library, "cuGraphInstantiateWithFlags", d->graph_instantiate) &&
                       bind(library, "cuGraphLaunch", d->graph_launch) && bind(library, "cuGraphExecDestroy", d->graph_executable_destroy) &&
                       bind(library, "cuGraphDestroy", d->graph_destroy) && bind(library, "cuGetErrorName", d->error_name);
    return whole && d->init(0) == 0 ? d : nullptr;
  }();
  if (!opened) return unavailable("[nvrtc] there is no NVIDIA driver (libcuda.so.1 does not load or start); use the backend eager, or cpu_jit on the CPU");
  return opened;
}

Result<void> enter_device(const Driver& cuda, int index) {
  void* context = nullptr;
  if (cuda.current(&context) == 0 && context) return {};
  int device = 0;
  int e = cuda.device(&device, index);
  if (e == 0) e = cuda.retain(&context, device);  // never released: it lives as long as the process
  if (e == 0) e = cuda.set_current(context);
  if (e != 0) return Error{Code::kDeviceFault, "[nvrtc] GPU " + std::to_string(index) + " cannot be used: " + cuda.name_of(e)};
  return {};
}

Result<GpuIdentity> gpu_identity(int index) {
  auto cuda = driver();
  if (!cuda) return cuda.error();
  int device = 0;
  if (int e = (*cuda)->device(&device, index); e != 0) return unavailable("[nvrtc] there is no GPU " + std::to_string(index) + ": " + (*cuda)->name_of(e));
  GpuIdentity id;
  char name[256] = "";
  (*cuda)->device_name(name, sizeof name, device);
  id.name = name;
  (*cuda)->attribute(&id.multiprocessors, kMultiprocessors, device);
  (*cuda)->version(&id.driver);
  return id;
}

}  // namespace ditfleet::region
