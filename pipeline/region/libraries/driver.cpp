#include "pipeline/region/libraries/driver.h"
#include "pipeline/device/symbols.h"

namespace ditfleet::region {
namespace {

using pipeline::bind;

constexpr int kMultiprocessors = 16;  // CUdevice_attribute

}  // namespace

std::string Driver::name_of(int error) const {
  const char* name = nullptr;
  return error_name(error, &name) == 0 && name ? name : "error " + std::to_string(error);
}

Result<const Driver*> driver() {
  static const Driver* const opened = pipeline::open_library<Driver>("libcuda.so.1", [](void* library, Driver& t) {
    // Names with a version suffix are those that the headers of CUDA 11 and later map the plain ones to.
    return bind(library, "cuInit", t.init) && bind(library, "cuDriverGetVersion", t.version) &&
           bind(library, "cuDeviceGet", t.device) && bind(library, "cuDeviceGetName", t.device_name) &&
           bind(library, "cuDeviceGetAttribute", t.attribute) && bind(library, "cuCtxGetCurrent", t.current) &&
           bind(library, "cuDevicePrimaryCtxRetain", t.retain) && bind(library, "cuCtxSetCurrent", t.set_current) &&
           bind(library, "cuModuleLoadData", t.load) && bind(library, "cuModuleUnload", t.unload) &&
           bind(library, "cuModuleGetFunction", t.function) && bind(library, "cuLaunchKernel", t.launch) &&
           bind(library, "cuEventCreate", t.event_create) && bind(library, "cuEventDestroy_v2", t.event_destroy) &&
           bind(library, "cuEventRecord", t.event_record) && bind(library, "cuEventSynchronize", t.event_synchronize) &&
           bind(library, "cuEventElapsedTime", t.event_elapsed) && bind(library, "cuStreamWaitEvent", t.stream_wait) &&
           bind(library, "cuMemGetInfo_v2", t.memory_info) &&
           bind(library, "cuStreamBeginCapture_v2", t.capture_begin) &&
           bind(library, "cuStreamEndCapture", t.capture_end) &&
           bind(library, "cuGraphInstantiateWithFlags", t.graph_instantiate) &&
           bind(library, "cuGraphLaunch", t.graph_launch) &&
           bind(library, "cuGraphExecDestroy", t.graph_executable_destroy) &&
           bind(library, "cuGraphDestroy", t.graph_destroy) && bind(library, "cuGetErrorName", t.error_name) &&
           t.init(0) == 0;
  });
  if (!opened)
    return unavailable(
        "[nvrtc] no NVIDIA driver was found (libcuda.so.1 cannot be loaded); use compile.backend eager, or cpu_jit on "
        "the CPU");
  return opened;
}

Result<void> enter_device(const Driver& cuda, int index) {
  void* context = nullptr;
  if (cuda.current(&context) == 0 && context) return {};
  int device = 0;
  int e = cuda.device(&device, index);
  if (e == 0) e = cuda.retain(&context, device);  // never released: it lives as long as the process
  if (e == 0) e = cuda.set_current(context);
  if (e != 0)
    return Error{Code::kDeviceFault, "[nvrtc] GPU " + std::to_string(index) + " cannot be used: " + cuda.name_of(e)};
  return {};
}

Result<GpuIdentity> gpu_identity(int index) {
  auto cuda = driver();
  if (!cuda) return cuda.error();
  int device = 0;
  if (int e = (*cuda)->device(&device, index); e != 0)
    return unavailable("[nvrtc] no such GPU: " + std::to_string(index) + ": " + (*cuda)->name_of(e));
  GpuIdentity id;
  char name[256] = "";
  (*cuda)->device_name(name, sizeof name, device);
  id.name = name;
  (*cuda)->attribute(&id.multiprocessors, kMultiprocessors, device);
  (*cuda)->version(&id.driver);
  return id;
}

}  // namespace ditfleet::region
