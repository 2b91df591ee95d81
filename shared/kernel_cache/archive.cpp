#include "shared/kernel_cache/archive.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "shared/core/fd_io.h"
#include "shared/core/ids.h"
#include "shared/core/little_endian.h"
#include "shared/kernel_cache/codec.h"

namespace ditfleet::kernel_cache {
namespace {

constexpr std::string_view kHead("DFARCHIV\1\0\0\0\0\0\0\0", 16);
constexpr std::size_t kDigestBytes = 32;

}  // namespace

ArchiveWriter::ArchiveWriter(const std::string& path)
    : path_(path),
      temporary_(path + ".tmp-" + new_nonce()),
      file_(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644)) {}

ArchiveWriter::~ArchiveWriter() {
  if (file_.valid()) ::unlink(temporary_.c_str());
}

Error ArchiveWriter::failed(const char* what) const {
  return unavailable(std::string("cannot ") + what + " '" + path_ + "': " + std::strerror(errno));
}

Result<void> ArchiveWriter::write(std::string_view part) {
  checksum_.update(part);
  bytes_ += part.size();
  return write_all(file_.get(), part) ? Result<void>() : failed("write");
}

Result<ArchiveWriter> ArchiveWriter::create(const std::string& path) {
  ArchiveWriter writer(path);
  if (!writer.file_.valid()) return writer.failed("create");
  if (auto written = writer.write(kHead); !written) return written.error();
  return writer;
}

Result<void> ArchiveWriter::add(std::string_view value) {
  if (auto written = write(little_endian(std::uint64_t{value.size()})); !written) return written;
  if (auto written = write(value); !written) return written;
  ++values_;
  return {};
}

Result<void> ArchiveWriter::finish() {
  if (auto written = write(little_endian(std::uint64_t{0}) + little_endian(values_)); !written) return written;
  const std::string digest = checksum_.digest();
  bytes_ += digest.size();
  if (!write_all(file_.get(), digest)) return failed("write");
  if (::fsync(file_.get()) != 0) return failed("sync");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) return failed("rename to");
  file_.reset();
  return {};
}

ArchiveReader::ArchiveReader(const std::string& path) : path_(path), file_(std::fopen(path.c_str(), "rbe")) {}

Error ArchiveReader::corrupt(const std::string& why) const { return data_corrupt("'" + path_ + "' " + why); }

// In steps: memory is allocated for bytes that are there, not for a size that the file claims.
bool ArchiveReader::read(std::string& out, std::size_t size) {
  out.clear();
  while (out.size() < size) {
    const std::size_t before = out.size(), step = std::min<std::size_t>(size - before, 1u << 20);
    out.resize(before + step);
    if (std::fread(out.data() + before, 1, step, file_.get()) != step) return false;
  }
  return true;
}

Result<ArchiveReader> ArchiveReader::open(const std::string& path) {
  ArchiveReader reader(path);
  if (!reader.file_) return cannot_read(path);
  std::string head;
  if (!reader.read(head, kHead.size()) || head != kHead)
    return reader.corrupt("is not an archive of compiled programs; `ditfleet cache export` writes one");
  reader.checksum_.update(head);
  return reader;
}

Result<std::optional<std::string>> ArchiveReader::next() {
  const auto ends_early = [this] {
    return corrupt("is incomplete: it ends after " + std::to_string(values_) + " programs");
  };
  std::string part;
  if (!read(part, 8)) return ends_early();
  const auto size = from_little_endian<std::uint64_t>(part);
  checksum_.update(part);
  if (size > kMaxValueBytes) return corrupt("has a program of " + std::to_string(size) + " bytes, which is too large");
  if (size > 0) {
    if (!read(part, size)) return ends_early();
    checksum_.update(part);
    ++values_;
    return std::optional<std::string>(std::move(part));
  }
  if (!read(part, 8)) return ends_early();
  checksum_.update(part);
  const bool counted = from_little_endian<std::uint64_t>(part) == values_;
  if (!read(part, kDigestBytes)) return ends_early();
  if (!counted || part != checksum_.digest()) return corrupt("does not match its checksum: it was changed or damaged");
  if (std::fgetc(file_.get()) != EOF) return corrupt("has bytes after its end");
  return std::optional<std::string>();
}

}  // namespace ditfleet::kernel_cache
