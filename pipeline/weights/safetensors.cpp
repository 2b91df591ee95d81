#include "pipeline/weights/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "pipeline/weights/gguf.h"
#include "shared/core/unique_fd.h"
#include "shared/safetensors/pickle.h"

namespace ditfleet::pipeline {

static_assert(std::endian::native == std::endian::little, "safetensors bytes are used as they are");

struct SafetensorsFile::State {
  std::string path;
  UniqueFd file;
  SafetensorsHeader header;
};

namespace {

constexpr std::uint64_t kGgufBegin = 1 << 20;  // bytes of the header that are read first

Error failed(const std::string& path, int error) {
  const Code code = error == ENOENT || error == ENOTDIR ? Code::kNotFound : Code::kUnavailable;
  return Error{code, "[safetensors] cannot read " + path + ": " + std::strerror(error)};
}

Result<void> read_at(const UniqueFd& file, const std::string& path, std::uint64_t at, std::span<std::byte> into) {
  while (!into.empty()) {
    const ssize_t size = ::pread(file.get(), into.data(), into.size(), static_cast<off_t>(at));
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) return failed(path, errno);
    if (size == 0)
      return Error{Code::kDataCorrupt, "[safetensors] " + path +
                                           " is shorter than when it was opened; to replace weights, write a new file "
                                           "and rename it"};
    at += static_cast<std::uint64_t>(size);
    into = into.subspan(static_cast<std::size_t>(size));
  }
  return {};
}

}  // namespace

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  auto state = std::make_shared<State>();
  state->path = path;
  state->file.reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // do not block on a pipe
  struct stat info = {};
  if (!state->file.valid() || ::fstat(state->file.get(), &info) != 0) return failed(path, errno);
  if (!S_ISREG(info.st_mode)) return Error{Code::kDataCorrupt, "[safetensors] " + path + " is not a file"};
  const auto size = static_cast<std::uint64_t>(info.st_size);
  std::string head(std::min<std::uint64_t>(size, safetensors::kPickleBegin), '\0');
  const auto read_head = [&](std::size_t begin) {
    return read_at(state->file, path, begin, std::as_writable_bytes(std::span(head).subspan(begin)));
  };
  if (auto read = read_head(0); !read) return read.error();
  if (is_gguf(head)) {
    for (std::uint64_t bytes = kGgufBegin;; bytes *= 4) {
      const std::size_t before = head.size();
      head.resize(std::min(size, bytes));
      if (auto read = read_head(before); !read) return read.error();
      auto header = parse_gguf_header(head, size, path);
      if (!header) return header.error();
      if (*header) {
        state->header = std::move(**header);
        return SafetensorsFile(std::move(state));
      }
      if (bytes > safetensors::kMaxSafetensorsHeaderBytes)
        return Error{Code::kDataCorrupt, "[gguf] " + path + ": its header has more than 100 MB"};
    }
  }
  if (safetensors::is_pickle(head))
    return Error{Code::kDataCorrupt, "[safetensors] " + path +
                                         ": it is a pickle, which may run code when it is read; convert it to "
                                         "safetensors"};
  head.resize(std::min<std::size_t>(head.size(), 8));
  const auto end = safetensors::safetensors_header_end(head, path);
  if (!end) return end.error();
  head.resize(std::min(size, *end));
  if (auto read = read_head(std::min<std::size_t>(head.size(), 8)); !read) return read.error();
  Result<SafetensorsHeader> header = parse_safetensors_header(head, size, path);
  if (!header) return header.error();
  state->header = std::move(*header);
  return SafetensorsFile(std::move(state));
}

const std::string& SafetensorsFile::path() const { return state_->path; }
const std::vector<TensorEntry>& SafetensorsFile::entries() const { return state_->header.tensors; }
const std::map<std::string, std::string>& SafetensorsFile::metadata() const { return state_->header.metadata; }

const TensorEntry* SafetensorsFile::find(std::string_view name) const {
  const auto it = std::lower_bound(entries().begin(), entries().end(), name,
                                   [](const TensorEntry& entry, std::string_view key) { return entry.name < key; });
  return it != entries().end() && it->name == name ? &*it : nullptr;
}

Result<TensorView> SafetensorsFile::tensor(std::string_view name) const {
  const TensorEntry* entry = find(name);
  if (entry == nullptr) {
    return Error{Code::kNotFound, "[safetensors] " + path() + " has no tensor \"" + std::string(name) + "\""};
  }
  return view(*entry);
}

Result<TensorView> SafetensorsFile::view(const TensorEntry& entry) const {
  const std::size_t size = entry.end - entry.begin;
  const std::shared_ptr<std::byte[]> memory(new std::byte[size]);
  if (auto done = read(entry, 0, {memory.get(), size}); !done) return done.error();
  return TensorView{entry.name, entry.dtype, entry.shape, {memory.get(), size}, memory};
}

Result<void> SafetensorsFile::read(const TensorEntry& entry, std::uint64_t begin, std::span<std::byte> into) const {
  return read_at(state_->file, path(), entry.begin + begin, into);
}

std::string file_identity(const std::string& path) {
  struct stat s = {};
  if (::stat(path.c_str(), &s) != 0) return {};
  std::string identity = path;
  for (const auto part :
       {static_cast<std::int64_t>(s.st_dev), static_cast<std::int64_t>(s.st_ino), static_cast<std::int64_t>(s.st_size),
        static_cast<std::int64_t>(s.st_mtim.tv_sec), static_cast<std::int64_t>(s.st_mtim.tv_nsec)})
    identity += '\0' + std::to_string(part);
  return identity;
}

}  // namespace ditfleet::pipeline
