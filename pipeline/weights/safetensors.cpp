#include "pipeline/weights/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

namespace ditfleet::pipeline {

static_assert(std::endian::native == std::endian::little, "safetensors bytes are used as they are");

struct SafetensorsFile::State {
  std::string path;
  const std::byte* data = nullptr;
  std::size_t size = 0;
  SafetensorsHeader header;

  State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    if (data != nullptr) ::munmap(const_cast<std::byte*>(data), size);
  }
};

namespace {

Error failed(const std::string& path, int error) {
  const Code code = error == ENOENT || error == ENOTDIR ? Code::kNotFound : Code::kUnavailable;
  return Error{code, "[safetensors] cannot read " + path + ": " + std::strerror(error)};
}

}  // namespace

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // do not block on a pipe
  if (fd < 0) return failed(path, errno);
  struct stat info = {};
  if (::fstat(fd, &info) != 0) {
    const int error = errno;
    ::close(fd);
    return failed(path, error);
  }
  if (!S_ISREG(info.st_mode)) {
    ::close(fd);
    return Error{Code::kDataCorrupt, "[safetensors] " + path + " is not a file"};
  }
  auto state = std::make_shared<State>();
  state->path = path;
  if (info.st_size > 0) {  // an empty file cannot be mapped; the header check refuses it below
    void* data = ::mmap(nullptr, static_cast<std::size_t>(info.st_size), PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) {
      const int error = errno;
      ::close(fd);
      return failed(path, error);
    }
    state->data = static_cast<const std::byte*>(data);
    state->size = static_cast<std::size_t>(info.st_size);
  }
  ::close(fd);
  const std::string_view bytes(reinterpret_cast<const char*>(state->data), state->size);
  Result<SafetensorsHeader> header = parse_safetensors_header(bytes, path);
  if (!header) return header.error();
  state->header = std::move(*header);
  return SafetensorsFile(std::move(state));
}

const std::string& SafetensorsFile::path() const { return state_->path; }
const std::vector<TensorEntry>& SafetensorsFile::entries() const { return state_->header.tensors; }
const std::map<std::string, std::string>& SafetensorsFile::metadata() const { return state_->header.metadata; }

namespace {

const TensorEntry* find_entry(const std::vector<TensorEntry>& entries, std::string_view name) {
  const auto it = std::lower_bound(entries.begin(), entries.end(), name,
                                   [](const TensorEntry& entry, std::string_view key) { return entry.name < key; });
  return it != entries.end() && it->name == name ? &*it : nullptr;
}

}  // namespace

bool SafetensorsFile::contains(std::string_view name) const { return find_entry(entries(), name) != nullptr; }

Result<TensorView> SafetensorsFile::tensor(std::string_view name) const {
  const TensorEntry* entry = find_entry(entries(), name);
  if (entry == nullptr) {
    return Error{Code::kNotFound, "[safetensors] " + path() + " has no tensor \"" + std::string(name) + "\""};
  }
  return view(*entry);
}

TensorView SafetensorsFile::view(const TensorEntry& entry) const {
  return TensorView{entry.name, entry.dtype, entry.shape, {state_->data + entry.begin, entry.end - entry.begin}};
}

}  // namespace ditfleet::pipeline
