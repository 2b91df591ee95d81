#include "pipeline/region/compile/host_module.h"

#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "shared/core/fd_io.h"

namespace ditfleet::region {
namespace {

// Whether the file is as long as its header says. The loader maps what it finds, and a page that is not there ends the
// process.
bool is_whole(const std::string& code) {
  Elf64_Ehdr header{};
  if (code.size() < sizeof header) return false;
  std::memcpy(&header, code.data(), sizeof header);
  const std::uint64_t sections = std::uint64_t{header.e_shnum} * header.e_shentsize;
  return std::memcmp(header.e_ident, ELFMAG, SELFMAG) == 0 && header.e_shoff > 0 && header.e_shoff <= code.size() &&
         sections <= code.size() - header.e_shoff;
}

}  // namespace

Result<std::shared_ptr<const HostModule>> HostModule::load(const kernel_cache::Entry& entry) {
  const auto corrupt = [&](const std::string& why) {
    return Error{Code::kDataCorrupt, "[cpu_jit] the program of region " + entry.region + " cannot be loaded: " + why};
  };
  if (entry.kind != kernel_cache::Kind::kSharedObject) return corrupt("it is not a shared object");
  if (!is_whole(entry.code)) return corrupt("it is not a complete ELF file");
  std::shared_ptr<HostModule> module(new HostModule);
  module->file_ = memfd_create("ditfleet-region", MFD_CLOEXEC);
  if (module->file_ < 0)
    return unavailable("[cpu_jit] cannot create a memory file: " + std::string(std::strerror(errno)));
  if (!write_all(module->file_, entry.code))
    return Error{Code::kOutOfMemory, "[cpu_jit] no memory for the program of region " + entry.region};
  module->library_ = dlopen(("/proc/self/fd/" + std::to_string(module->file_)).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!module->library_) {
    const char* why = dlerror();
    return corrupt(why ? why : "dlopen reports no reason");
  }
  for (const auto& kernel : entry.kernels) {
    auto* found = reinterpret_cast<HostKernel>(dlsym(module->library_, kernel.name.c_str()));
    if (!found) return corrupt("kernel " + kernel.name + " is missing");
    module->kernels_.push_back(found);
  }
  return std::shared_ptr<const HostModule>(std::move(module));
}

HostModule::~HostModule() {
  if (library_) dlclose(library_);
  if (file_ >= 0) ::close(file_);
}

}  // namespace ditfleet::region
