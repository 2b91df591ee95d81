// A folder below TMPDIR that is removed with its object.
#pragma once

#include <string>

namespace ditfleet::region {

class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  bool ok() const { return !path_.empty(); }
  const std::string& path() const { return path_; }
  const std::string& why() const { return why_; }  // why it could not be created, unless ok()

 private:
  std::string path_, why_;
};

}  // namespace ditfleet::region
