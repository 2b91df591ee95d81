#include "pipeline/region/compile/scratch_folder.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

namespace ditfleet::region {

ScratchFolder::ScratchFolder() {
  const char* parent = std::getenv("TMPDIR");
  std::string path = std::string(parent && *parent ? parent : "/tmp") + "/ditfleet-region-XXXXXX";
  if (mkdtemp(path.data()))
    path_ = path;
  else
    why_ = "cannot create a folder in " + path.substr(0, path.rfind('/')) + ": " + std::strerror(errno);
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  if (ok()) std::filesystem::remove_all(path_, ignored);
}

}  // namespace ditfleet::region
