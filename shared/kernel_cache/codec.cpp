#include "shared/kernel_cache/codec.h"

#include <zstd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "shared/core/little_endian.h"
#include "shared/core/sha256.h"

namespace ditfleet::kernel_cache {
namespace {

constexpr std::string_view kMagic = "DFKERNEL";
constexpr std::uint32_t kVersion = 1;
// Magic, version, flags, total size, id of the secret, key.
constexpr std::size_t kHeaderBytes = 8 + 4 + 4 + 8 + 8 + 32;
constexpr std::size_t kDigestBytes = 32;  // SHA-256, and HMAC-SHA-256
constexpr std::size_t kTrailerBytes = 2 * kDigestBytes;
constexpr int kCompressionLevel = 3;

void append_text(std::string& out, std::string_view value) {
  append_little_endian(out, static_cast<std::uint32_t>(value.size()));
  out += value;
}

// Never reads past `bytes`. After the first failure every read returns an empty value.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : left_(bytes) {}
  template <class Int>
  Int integer() {
    return from_little_endian<Int>(take(sizeof(Int)));
  }
  std::string_view text() {
    const auto size = integer<std::uint32_t>();
    if (size > kMaxNameBytes) failed_ = true;
    return take(size);
  }
  std::string_view take(std::uint64_t size) {
    if (failed_ || size > left_.size()) {
      failed_ = true;
      return {};
    }
    const std::string_view out = left_.substr(0, size);
    left_.remove_prefix(size);
    return out;
  }
  bool failed() const { return failed_; }
  bool at_end() const { return left_.empty(); }

 private:
  std::string_view left_;
  bool failed_ = false;
};

std::string sha256(std::string_view bytes) {
  Sha256 hash;
  hash.update(bytes);
  return hash.digest();
}

Decoded refuse(Refusal why, std::string message) { return Refused{why, std::move(message)}; }

Result<void> check_limits(const Entry& entry) {
  const auto too_large = [](const std::string& what) { return invalid_argument("[kernel_cache] " + what); };
  if (entry.code.size() > kMaxCodeBytes)
    return too_large("the program has " + std::to_string(entry.code.size()) + " bytes; the limit is " +
                     std::to_string(kMaxCodeBytes));
  if (entry.kernels.size() > kMaxKernels)
    return too_large("the program has " + std::to_string(entry.kernels.size()) + " kernels; the limit is " +
                     std::to_string(kMaxKernels));
  if (entry.region.size() > kMaxNameBytes || entry.arch.size() > kMaxNameBytes)
    return too_large("a region's or architecture's name has more than " + std::to_string(kMaxNameBytes) + " bytes");
  for (const KernelInfo& kernel : entry.kernels) {
    if (kernel.name.size() > kMaxNameBytes || kernel.parameter_bytes.size() > kMaxParameters)
      return too_large("a kernel's name has more than " + std::to_string(kMaxNameBytes) +
                       " bytes or the kernel more than " + std::to_string(kMaxParameters) + " parameters");
  }
  return {};
}

// Parses the bytes between header and trailer, whose signature has been verified.
Result<Entry> parse_body(std::string_view body) {
  const auto malformed = [](const char* what) { return data_corrupt(std::string("malformed: ") + what); };
  Reader in(body);
  Entry entry;
  entry.arch = in.text();
  entry.region = in.text();
  const auto kind = in.integer<std::uint8_t>();
  if (kind < static_cast<std::uint8_t>(Kind::kCubin) || kind > static_cast<std::uint8_t>(Kind::kPlan))
    return malformed("unknown kind of code");
  entry.kind = static_cast<Kind>(kind);
  entry.source_bytes = in.integer<std::uint64_t>();
  const auto kernels = in.integer<std::uint32_t>();
  if (kernels > kMaxKernels) return malformed("too many kernels");
  for (std::uint32_t i = 0; i < kernels && !in.failed(); ++i) {
    KernelInfo kernel;
    kernel.name = in.text();
    kernel.shared_bytes = in.integer<std::uint32_t>();
    kernel.registers = in.integer<std::uint32_t>();
    kernel.spill_bytes = in.integer<std::uint32_t>();
    const auto parameters = in.integer<std::uint32_t>();
    if (parameters > kMaxParameters) return malformed("too many parameters");
    for (std::uint32_t p = 0; p < parameters && !in.failed(); ++p)
      kernel.parameter_bytes.push_back(in.integer<std::uint32_t>());
    entry.kernels.push_back(std::move(kernel));
  }
  const auto code_bytes = in.integer<std::uint64_t>();
  if (code_bytes > kMaxCodeBytes) return malformed("the code is too large");
  const std::string_view packed = in.take(in.integer<std::uint64_t>());
  if (in.failed() || !in.at_end()) return malformed("inconsistent lengths");
  if (ZSTD_getFrameContentSize(packed.data(), packed.size()) != code_bytes) return malformed("wrong code length");
  entry.code.resize(code_bytes);
  const std::size_t got = ZSTD_decompress(entry.code.data(), entry.code.size(), packed.data(), packed.size());
  if (ZSTD_isError(got) || got != code_bytes) return malformed("the code cannot be decompressed");
  return entry;
}

}  // namespace

std::string_view kind_name(Kind kind) {
  return kind == Kind::kCubin ? "cubin" : kind == Kind::kPlan ? "plan" : "shared_object";
}

std::string_view refusal_name(Refusal refusal) {
  static constexpr std::string_view kNames[] = {"corrupt",   "unsigned",   "foreign_secret", "wrong_signature",
                                                "wrong_key", "wrong_arch", "unusable"};
  return kNames[static_cast<std::size_t>(refusal)];
}

Result<std::string> encode(const Entry& entry, const Key& key, const Secret& secret) {
  if (auto fits = check_limits(entry); !fits) return fits.error();
  std::string packed(ZSTD_compressBound(entry.code.size()), '\0');
  const std::size_t size =
      ZSTD_compress(packed.data(), packed.size(), entry.code.data(), entry.code.size(), kCompressionLevel);
  if (ZSTD_isError(size)) return internal_error(std::string("[kernel_cache] zstd: ") + ZSTD_getErrorName(size));
  packed.resize(size);

  std::string out(kMagic);
  out.reserve(kHeaderBytes + packed.size() + kTrailerBytes + 4096);
  append_little_endian(out, kVersion);
  append_little_endian(out, std::uint32_t{0});  // flags
  append_little_endian(out, std::uint64_t{0});  // total, below
  append_little_endian(out, secret.id());
  out.append(reinterpret_cast<const char*>(key.bytes.data()), key.bytes.size());

  append_text(out, entry.arch);
  append_text(out, entry.region);
  append_little_endian(out, static_cast<std::uint8_t>(entry.kind));
  append_little_endian(out, entry.source_bytes);
  append_little_endian(out, static_cast<std::uint32_t>(entry.kernels.size()));
  for (const KernelInfo& kernel : entry.kernels) {
    append_text(out, kernel.name);
    append_little_endian(out, kernel.shared_bytes);
    append_little_endian(out, kernel.registers);
    append_little_endian(out, kernel.spill_bytes);
    append_little_endian(out, static_cast<std::uint32_t>(kernel.parameter_bytes.size()));
    for (const std::uint32_t bytes : kernel.parameter_bytes) append_little_endian(out, bytes);
  }
  append_little_endian(out, static_cast<std::uint64_t>(entry.code.size()));
  append_little_endian(out, static_cast<std::uint64_t>(packed.size()));
  out += packed;

  const std::string total = little_endian(static_cast<std::uint64_t>(out.size() + kTrailerBytes));
  out.replace(16, total.size(), total);
  out += sha256(out);
  const Secret::Signature signature = secret.sign(out);
  out.append(reinterpret_cast<const char*>(signature.data()), signature.size());
  return out;
}

Decoded decode(std::string_view bytes, const Key& key, std::string_view arch, const Secret& secret) {
  if (bytes.size() < kHeaderBytes + kTrailerBytes)
    return refuse(Refusal::kCorrupt, "truncated: " + std::to_string(bytes.size()) + " bytes");
  if (bytes.size() > kMaxValueBytes)
    return refuse(Refusal::kCorrupt, "too large: " + std::to_string(bytes.size()) + " bytes");
  Reader header(bytes);
  if (header.take(kMagic.size()) != kMagic) return refuse(Refusal::kCorrupt, "not a kernel cache entry");
  const auto version = header.integer<std::uint32_t>();
  if (version != kVersion)
    return refuse(Refusal::kCorrupt,
                  "format version " + std::to_string(version) + "; this program reads " + std::to_string(kVersion));
  const auto flags = header.integer<std::uint32_t>();
  const auto total = header.integer<std::uint64_t>();
  if (total != bytes.size())
    return refuse(Refusal::kCorrupt,
                  "truncated: " + std::to_string(bytes.size()) + " of " + std::to_string(total) + " bytes");
  const auto signer = header.integer<std::uint64_t>();

  const std::string_view is_signed = bytes.substr(0, bytes.size() - kDigestBytes);
  Secret::Signature signature;
  std::memcpy(signature.data(), bytes.data() + is_signed.size(), kDigestBytes);
  if (signer != secret.id() || !secret.verify(is_signed, signature)) {
    // The unsigned checksum only distinguishes damage from another signature.
    const std::string_view summed = bytes.substr(0, bytes.size() - kTrailerBytes);
    if (sha256(summed) != bytes.substr(summed.size(), kDigestBytes))
      return refuse(Refusal::kCorrupt, "its checksum does not match: it was changed or damaged");
    if (signer == 0) return refuse(Refusal::kUnsigned, "it is not signed");
    if (signer != secret.id())
      return refuse(Refusal::kForeignSecret,
                    "it was signed with another secret; is cache.secret the same on all nodes?");
    return refuse(Refusal::kWrongSignature, "it has the id of this cluster's secret, but its signature is invalid");
  }

  if (header.take(key.bytes.size()) !=
      std::string_view(reinterpret_cast<const char*>(key.bytes.data()), key.bytes.size()))
    return refuse(Refusal::kWrongKey, "it was signed for another key");
  if (flags != 0) return refuse(Refusal::kCorrupt, "unknown flags");
  auto entry = parse_body(bytes.substr(kHeaderBytes, bytes.size() - kHeaderBytes - kTrailerBytes));
  if (!entry) return refuse(Refusal::kCorrupt, entry.error().message);
  if (!arch.empty() && entry->arch != arch)
    return refuse(Refusal::kWrongArch, "it is for " + entry->arch + ", not for " + std::string(arch));
  return std::move(*entry);
}

}  // namespace ditfleet::kernel_cache
