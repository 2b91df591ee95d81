#include "pipeline/region/compile/nvrtc_library.h"
#include "pipeline/device/symbols.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <vector>

namespace ditfleet::region {
namespace {

using pipeline::bind;

namespace fs = std::filesystem;
constexpr const char* kName = "libnvrtc.so.13";

// Paths of loaded libraries whose file name begins with `name`.
std::vector<std::string> loaded_libraries(const char* name) {
  struct Search {
    const char* name;
    std::vector<std::string> found;
  } search{name, {}};
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        auto& s = *static_cast<Search*>(data);
        if (info->dlpi_name && fs::path(info->dlpi_name).filename().string().rfind(s.name, 0) == 0)
          s.found.push_back(info->dlpi_name);
        return 0;
      },
      &search);
  return search.found;
}

std::vector<std::string> candidates(const std::string& given) {
  std::vector<std::string> paths;
  if (!given.empty()) return {given};
  if (const char* named = std::getenv("DITFLEET_NVRTC"); named && *named) return {named};
  // Next to LibTorch: site-packages/torch/lib → site-packages/nvidia/cu13/lib.
  const auto beside = [&](const fs::path& torch_lib) {
    std::error_code failed;
    const fs::path real = fs::canonical(torch_lib, failed);
    if (!failed) paths.push_back((real.parent_path().parent_path() / "nvidia/cu13/lib" / kName).string());
  };
  for (const auto& library : loaded_libraries("libtorch_cpu.so")) beside(fs::path(library).parent_path());
#ifdef DITFLEET_LIBTORCH_FOLDER  // from the build, for programs without LibTorch
  beside(fs::path(DITFLEET_LIBTORCH_FOLDER) / "lib");
#endif
  paths.push_back(kName);
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"})
    if (const char* home = std::getenv(variable); home && *home)
      for (const char* lib : {"lib64", "lib"}) paths.push_back((fs::path(home) / lib / kName).string());
  for (const char* home : {"/usr/local/cuda-13.0", "/usr/local/cuda-13", "/usr/local/cuda"})
    for (const char* lib : {"lib64", "lib", "targets/x86_64-linux/lib"})
      paths.push_back((fs::path(home) / lib / kName).string());
  return paths;
}

// The GNU build id of the loaded file at `path`, in hexadecimal.
std::string build_id_of(const std::string& path) {
  struct Search {
    std::string path, id;
  } search{path, ""};
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        auto& s = *static_cast<Search*>(data);
        if (!info->dlpi_name || s.path != info->dlpi_name) return 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& segment = info->dlpi_phdr[i];
          if (segment.p_type != PT_NOTE) continue;
          const char* at = reinterpret_cast<const char*>(info->dlpi_addr + segment.p_vaddr);
          const char* end = at + segment.p_memsz;
          while (at + sizeof(ElfW(Nhdr)) <= end) {
            const auto* note = reinterpret_cast<const ElfW(Nhdr)*>(at);
            const char* name = at + sizeof *note;
            const char* value = name + (note->n_namesz + 3) / 4 * 4;
            if (note->n_type == NT_GNU_BUILD_ID && note->n_namesz == 4 && std::memcmp(name, "GNU", 4) == 0)
              for (unsigned b = 0; b < note->n_descsz; ++b) {
                constexpr char kDigits[] = "0123456789abcdef";
                const auto byte = static_cast<unsigned char>(value[b]);
                s.id += kDigits[byte >> 4];
                s.id += kDigits[byte & 15];
              }
            at = value + (note->n_descsz + 3) / 4 * 4;
          }
        }
        return 1;
      },
      &search);
  return search.id;
}

Result<NvrtcLibrary> open(const std::string& given) {
  std::string tried;
  for (const std::string& path : candidates(given)) {
    std::error_code ignored;
    if (path.find('/') != std::string::npos) {
      tried += (tried.empty() ? "" : ", ") + path;
      if (!fs::exists(path, ignored)) continue;
      // NVRTC opens its built-in declarations by file name.
      dlopen((fs::path(path).parent_path() / "libnvrtc-builtins.so.13.0").c_str(), RTLD_NOW | RTLD_GLOBAL);
    } else {
      tried += (tried.empty() ? "" : ", ") + std::string("the linker's folders");
    }
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) continue;
    NvrtcLibrary l{};
    if (!bind(handle, "nvrtcVersion", l.version) || !bind(handle, "nvrtcGetErrorString", l.error_text) ||
        !bind(handle, "nvrtcCreateProgram", l.create) || !bind(handle, "nvrtcDestroyProgram", l.destroy) ||
        !bind(handle, "nvrtcCompileProgram", l.compile) || !bind(handle, "nvrtcGetProgramLogSize", l.log_size) ||
        !bind(handle, "nvrtcGetProgramLog", l.log) || !bind(handle, "nvrtcGetCUBINSize", l.cubin_size) ||
        !bind(handle, "nvrtcGetCUBIN", l.cubin))
      return unavailable("[nvrtc] " + path + " is not NVRTC 13; install the wheel nvidia-cuda-nvrtc 13.0");
    Dl_info info{};
    if (dladdr(reinterpret_cast<void*>(l.version), &info) && info.dli_fname) l.path = info.dli_fname;
    l.build_id = build_id_of(l.path);
    return l;
  }
  return unavailable(
      "[nvrtc] libnvrtc.so.13 was not found (" + tried +
      "); deploy/setup.sh installs it next to LibTorch (the wheel nvidia-cuda-nvrtc 13.0), or set its path "
      "with compile.nvrtc or DITFLEET_NVRTC");
}

}  // namespace

Result<const NvrtcLibrary*> load_nvrtc(const std::string& given) {
  static std::mutex mutex;
  static const NvrtcLibrary* opened = nullptr;
  std::lock_guard lock(mutex);
  if (opened) return opened;
  auto library = open(given);
  if (!library) return library.error();
  opened = new NvrtcLibrary(std::move(library).value());  // lives as long as the process
  return opened;
}

}  // namespace ditfleet::region
