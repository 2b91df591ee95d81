#include "pipeline/region/compile/gpu_module.h"

#include <algorithm>

#include "pipeline/region/compile/nvrtc.h"
#include "pipeline/region/libraries/driver.h"

namespace ditfleet::region {
namespace {

constexpr int kCapabilityMajor = 75, kCapabilityMinor = 76;  // CUdevice_attribute
constexpr int kOutOfMemory = 2, kFirstFault = 700,
              kLastFault = 799;  // CUresult; faults come from earlier kernels

}  // namespace

Result<std::string> gpu_architecture(int index) {
  auto cuda = driver();
  if (!cuda) return cuda.error();
  int device = 0, major = 0, minor = 0;
  if (int e = (*cuda)->device(&device, index); e != 0)
    return unavailable("[nvrtc] no GPU " + std::to_string(index) + ": " + (*cuda)->name_of(e));
  (*cuda)->attribute(&major, kCapabilityMajor, device);
  (*cuda)->attribute(&minor, kCapabilityMinor, device);
  const std::string plain = "sm_" + std::to_string(major) + std::to_string(minor);
  for (const auto& known : gpu_architectures())
    if (known == plain || known == plain + "a") return known;
  return unavailable("[nvrtc] regions are not built for this GPU's architecture, " + plain + "; use the backend eager");
}

Result<std::shared_ptr<const GpuModule>> GpuModule::load(const kernel_cache::Entry& entry, const Source& source,
                                                         int device) {
  auto cuda = driver();
  if (!cuda) return cuda.error();
  if (auto entered = enter_device(**cuda, device); !entered) return entered.error();
  const auto corrupt = [&](const std::string& why) {
    return Error{Code::kDataCorrupt, "[nvrtc] the program of region " + entry.region + " cannot be loaded: " + why};
  };
  if (entry.kind != kernel_cache::Kind::kCubin) return corrupt("it is not a cubin");
  std::shared_ptr<GpuModule> module(new GpuModule);
  module->device_ = device;
  if (int e = (*cuda)->load(&module->module_, entry.code.data()); e != 0) {
    module->module_ = nullptr;
    const bool memory = e == kOutOfMemory, fault = e >= kFirstFault && e <= kLastFault;
    if (memory || fault)  // not the program's fault
      return Error{memory ? Code::kOutOfMemory : Code::kDeviceFault,
                   "[nvrtc] the program of region " + entry.region + " cannot be loaded: " + (*cuda)->name_of(e)};
    return corrupt((*cuda)->name_of(e));
  }
  for (const KernelLaunch& launch : source.kernels) {
    for (const std::string& name : function_names(launch)) {
      void* function = nullptr;
      if ((*cuda)->function(&function, module->module_, name.c_str()) != 0)
        return corrupt("kernel " + name + " is missing");
      module->functions_.push_back(function);
    }
    if (!launch.variants)
      module->functions_.resize(module->functions_.size() + kVariants - 1, module->functions_.back());
    module->launches_.push_back(launch);
  }
  return std::shared_ptr<const GpuModule>(std::move(module));
}

GpuModule::~GpuModule() {
  // Fails harmlessly if the context was destroyed first.
  if (module_)
    if (auto cuda = driver()) (*cuda)->unload(module_);
}

Result<void> GpuModule::start(std::size_t kernel, Variant variant, std::int64_t blocks,
                              const std::vector<long long>& argument, void* stream) const {
  auto cuda = driver();
  if (!cuda) return cuda.error();
  if (auto entered = enter_device(**cuda, device_); !entered) return entered;
  void* parameters[] = {const_cast<long long*>(argument.data())};
  const int e = (*cuda)->launch(functions_[kernel * kVariants + variant], static_cast<unsigned>(blocks), 1, 1,
                                static_cast<unsigned>(launches_[kernel].threads), 1, 1, 0, stream, parameters, nullptr);
  if (e != 0)
    return Error{Code::kDeviceFault,
                 "[nvrtc] kernel " + launches_[kernel].name + " cannot be launched: " + (*cuda)->name_of(e)};
  return {};
}

}  // namespace ditfleet::region
