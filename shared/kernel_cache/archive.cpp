#include "shared/kernel_cache/archive.h"

#include <fcntl.h>
#include <sodium.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "shared/core/ids.h"
#include "shared/core/write_all.h"
#include "shared/kernel_cache/codec.h"
#include "shared/kernel_cache/little_endian.h"

namespace ditfleet::kernel_cache {
namespace {

constexpr std::string_view kHead("DFARCHIV\1\0\0\0\0\0\0\0", 16);

std::string eight(std::uint64_t value) {
  std::string out;
  append_little_endian(out, value);
  return out;
}

class Checksum {
 public:
  Checksum() { crypto_hash_sha256_init(&state_); }
  void add(std::string_view bytes) {
    crypto_hash_sha256_update(&state_, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
  }
  std::string finish() {
    std::string digest(crypto_hash_sha256_BYTES, '\0');
    crypto_hash_sha256_final(&state_, reinterpret_cast<unsigned char*>(digest.data()));
    return digest;
  }

 private:
  crypto_hash_sha256_state state_;
};

}  // namespace

struct ArchiveWriter::State {
  ~State() {
    if (fd < 0) return;
    ::close(fd);
    ::unlink(temporary.c_str());
  }
  Error failed(const char* what) const {
    return unavailable(std::string("cannot ") + what + " '" + path + "': " + std::strerror(errno));
  }
  Result<void> write(std::string_view part) {
    checksum.add(part);
    bytes += part.size();
    return write_all(fd, part) ? Result<void>() : failed("write");
  }
  std::string path, temporary;
  int fd = -1;
  std::uint64_t values = 0, bytes = 0;
  Checksum checksum;
};

ArchiveWriter::ArchiveWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}
ArchiveWriter::ArchiveWriter(ArchiveWriter&&) noexcept = default;
ArchiveWriter::~ArchiveWriter() = default;

Result<ArchiveWriter> ArchiveWriter::create(const std::string& path) {
  auto state = std::make_unique<State>();
  state->path = path;
  state->temporary = path + ".tmp-" + new_nonce();
  state->fd = ::open(state->temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (state->fd < 0) return state->failed("create");
  if (auto written = state->write(kHead); !written) return written.error();
  return ArchiveWriter(std::move(state));
}

Result<void> ArchiveWriter::add(std::string_view value) {
  if (auto written = state_->write(eight(value.size())); !written) return written;
  if (auto written = state_->write(value); !written) return written;
  ++state_->values;
  return {};
}

Result<void> ArchiveWriter::finish() {
  if (auto written = state_->write(eight(0) + eight(state_->values)); !written) return written;
  if (auto written = state_->write(state_->checksum.finish()); !written) return written;
  if (::fsync(state_->fd) != 0) return state_->failed("sync");
  if (::rename(state_->temporary.c_str(), state_->path.c_str()) != 0) return state_->failed("rename to");
  ::close(std::exchange(state_->fd, -1));
  return {};
}

std::uint64_t ArchiveWriter::values() const { return state_->values; }
std::uint64_t ArchiveWriter::bytes() const { return state_->bytes; }

struct ArchiveReader::State {
  ~State() {
    if (file) std::fclose(file);
  }
  Error corrupt(const std::string& why) const { return Error{Code::kDataCorrupt, "'" + path + "' " + why, {}}; }
  bool read(std::string& out, std::size_t size) {
    // In steps: a size that lies must not be believed before its bytes are there.
    out.clear();
    while (out.size() < size) {
      const std::size_t before = out.size(), step = std::min<std::size_t>(size - before, 1u << 20);
      out.resize(before + step);
      if (std::fread(out.data() + before, 1, step, file) != step) return false;
    }
    return true;
  }
  std::string path;
  std::FILE* file = nullptr;
  std::uint64_t values = 0;
  Checksum checksum;
};

ArchiveReader::ArchiveReader(std::unique_ptr<State> state) : state_(std::move(state)) {}
ArchiveReader::ArchiveReader(ArchiveReader&&) noexcept = default;
ArchiveReader::~ArchiveReader() = default;

Result<ArchiveReader> ArchiveReader::open(const std::string& path) {
  auto state = std::make_unique<State>();
  state->path = path;
  state->file = std::fopen(path.c_str(), "rbe");
  if (!state->file) {
    const int e = errno;
    return Error{
        e == ENOENT ? Code::kNotFound : Code::kUnavailable, "cannot read '" + path + "': " + std::strerror(e), {}};
  }
  std::string head;
  if (!state->read(head, kHead.size()) || head != kHead)
    return state->corrupt("is no archive of compiled programs, as `ditfleet cache export` writes");
  state->checksum.add(head);
  return ArchiveReader(std::move(state));
}

Result<std::optional<std::string>> ArchiveReader::next() {
  std::string part;
  const auto ends_early = [this] {
    return state_->corrupt("ends after " + std::to_string(state_->values) +
                           " programs, before its end: it is not whole");
  };
  if (!state_->read(part, 8)) return ends_early();
  const std::uint64_t size = from_little_endian<std::uint64_t>(part);
  state_->checksum.add(part);
  if (size > kMaxValueBytes)
    return state_->corrupt("has a program of " + std::to_string(size) + " bytes, more than any has");
  if (size > 0) {
    if (!state_->read(part, size)) return ends_early();
    state_->checksum.add(part);
    ++state_->values;
    return std::optional<std::string>(std::move(part));
  }
  if (!state_->read(part, 8)) return ends_early();
  state_->checksum.add(part);
  const bool counted = from_little_endian<std::uint64_t>(part) == state_->values;
  if (!state_->read(part, crypto_hash_sha256_BYTES)) return ends_early();
  if (!counted || part != state_->checksum.finish())
    return state_->corrupt("does not fit its checksum: it was changed or damaged");
  if (std::fgetc(state_->file) != EOF) return state_->corrupt("goes on after its end");
  return std::optional<std::string>();
}

}  // namespace ditfleet::kernel_cache
