#include "shared/loras/content.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <system_error>
#include <vector>

#include "shared/core/excerpt.h"
#include "shared/core/fd_io.h"
#include "shared/core/sha256.h"
#include "shared/core/text.h"
#include "shared/core/unique_fd.h"
#include "shared/safetensors/adapter_keys.h"
#include "shared/safetensors/header.h"
#include "shared/safetensors/peft_folder.h"
#include "shared/safetensors/pickle.h"
#include "shared/safetensors/values.h"

namespace ditfleet::loras {
namespace {

namespace fs = std::filesystem;

using safetensors::AdapterKind;
using safetensors::DType;

// Of some tensors: "'a', 'b' and 7 more".
std::string first_of(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < 3; ++i) text += (i ? ", '" : "'") + excerpt(names[i], 100) + "'";
  return names.size() > 3 ? text + " and " + std::to_string(names.size() - 3) + " more" : text;
}

}  // namespace

bool is_inside(const fs::path& path, const fs::path& folder) {
  const auto [rest, unused] = std::mismatch(folder.begin(), folder.end(), path.begin(), path.end());
  return rest == folder.end() || (std::next(rest) == folder.end() && rest->empty());
}

std::vector<fs::path> folders_of(std::string_view list) {
  std::vector<fs::path> out;
  for (const std::string_view folder : split(list, ':')) {
    if (!folder.empty()) out.emplace_back(folder);
  }
  return out;
}

ContentCheck::ContentCheck(std::string what, std::optional<std::uint64_t> file_bytes)
    : what_(std::move(what)), file_bytes_(file_bytes) {}

Result<void> ContentCheck::begin() {
  if (safetensors::is_pickle(head_)) {
    return invalid_argument(what_ +
                            " is a pickle (.bin, .pt, .ckpt), which may execute code when loaded; convert it to "
                            "safetensors first");
  }
  const auto end = safetensors::safetensors_header_end(head_, what_);
  if (!end) return invalid_argument(end.error().message);
  if (*end > kMaxHeaderBytes) {
    return invalid_argument(what_ + " claims a header of " + std::to_string(*end) +
                            " bytes; the limit for adapters is " + std::to_string(kMaxHeaderBytes) +
                            " (is it a safetensors file?)");
  }
  if (file_bytes_ && *end > *file_bytes_) {
    return invalid_argument(what_ + " claims a header of " + std::to_string(*end) + " bytes, but has only " +
                            std::to_string(*file_bytes_) + " in total (is it truncated?)");
  }
  header_end_ = *end;
  return {};
}

Result<void> ContentCheck::inspect(std::uint64_t file_bytes) {
  const auto header = safetensors::parse_safetensors_header(head_, file_bytes, what_);
  if (!header) return invalid_argument(header.error().message);
  Content content;
  std::map<DType, std::int64_t> elements;
  std::vector<std::string> names;
  std::map<std::string_view, std::vector<std::string>> refused;  // by kind
  std::set<std::string_view> layers;
  for (const auto& tensor : header->tensors) {
    ++content.tensors;
    const auto count = static_cast<std::int64_t>((tensor.end - tensor.begin) * 8 /
                                                 static_cast<std::uint64_t>(safetensors::dtype_bits(tensor.dtype)));
    content.parameters += count;
    elements[tensor.dtype] += count;
    names.push_back(tensor.name);
    const auto key = safetensors::parse_adapter_key(tensor.name);
    if (key.kind == AdapterKind::kRefused) refused[key.part].push_back(tensor.name);
    if (key.kind == AdapterKind::kRefused || key.kind == AdapterKind::kUnknown || key.kind == AdapterKind::kAlpha)
      continue;
    if (!safetensors::all_finite(tensor.dtype, {}))
      return invalid_argument(what_ + ": '" + excerpt(tensor.name, 100) + "' is of type " +
                              std::string(safetensors::dtype_name(tensor.dtype)) +
                              "; adapters must be F32, BF16, F16, F64, F8_E4M3 or F8_E5M2");
    layers.insert(key.module);
    if (key.kind == AdapterKind::kDown && tensor.shape.size() >= 2)
      content.rank = std::max(content.rank, static_cast<int>(std::min<std::int64_t>(tensor.shape[0], 1 << 20)));
  }
  for (const auto& [kind, tensors] : refused)
    return invalid_argument(what_ + " is a " + std::string(kind) + " adapter (" + first_of(tensors) +
                            "); only LoRA, LoHa and LoKr can be applied");
  if (layers.empty())
    return invalid_argument(what_ + " contains no LoRA adapter: none of its " + std::to_string(names.size()) +
                            " tensors has a LoRA name such as …lora_A.weight or …lora_down.weight" +
                            (names.empty() ? std::string() : " (they are " + first_of(names) + ")"));
  const auto most = std::max_element(elements.begin(), elements.end(),
                                     [](const auto& a, const auto& b) { return a.second < b.second; });
  content.dtype = std::string(safetensors::dtype_name(most->first));
  content.layers = static_cast<int>(layers.size());
  content.names = std::move(names);
  content_ = content;
  head_ = {};
  return {};
}

Result<void> ContentCheck::feed(std::string_view bytes) {
  seen_ += bytes.size();
  if (content_) return {};
  const std::size_t wanted = header_end_ ? static_cast<std::size_t>(header_end_) : safetensors::kPickleBegin;
  const std::size_t take = std::min(bytes.size(), wanted - std::min(wanted, head_.size()));
  head_.append(bytes.substr(0, take));
  bytes.remove_prefix(take);
  if (header_end_ == 0) {
    if (head_.size() < safetensors::kPickleBegin) return {};
    if (auto good = begin(); !good) return good;
    const auto end = static_cast<std::size_t>(header_end_);  // may be less than the bytes read
    head_.append(bytes.substr(0, end - std::min(end, head_.size())));
  }
  if (head_.size() < header_end_ || !file_bytes_) return {};
  return inspect(*file_bytes_);
}

Result<Content> ContentCheck::finish() {
  if (seen_ == 0) return invalid_argument(what_ + " is empty; it must be an adapter's safetensors file");
  if (file_bytes_ && seen_ != *file_bytes_) {
    return invalid_argument(what_ + " has " + std::to_string(seen_) + " bytes instead of " +
                            std::to_string(*file_bytes_) + "; it may have been modified while it was read");
  }
  if (!content_) {
    if (header_end_ == 0)
      return invalid_argument(what_ + " has " + std::to_string(seen_) +
                              " bytes, which is too small for a safetensors file");
    if (auto good = inspect(seen_); !good) return good.error();
  }
  return *content_;
}

Result<InspectedFile> inspect_file(const std::string& path, std::int64_t most) {
  const std::string what = "the file '" + path + "'";
  const auto failed = [&](const std::string& why) { return unavailable(what + " cannot be read: " + why); };
  const auto whole = safetensors::open_adapter(path);
  if (!whole) return invalid_argument(whole.error().message, "path");
  const UniqueFd file(::open(whole->file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // a FIFO must not block
  if (!file.valid()) return failed(std::strerror(errno));
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) return failed(std::strerror(errno));
  if (!S_ISREG(info.st_mode)) return invalid_argument(what + " is not a regular file", "path");
  const std::int64_t bytes = whole->bytes(info.st_size);
  if (bytes > most) {
    return Error{Code::kPayloadTooLarge,
                 what + " has " + std::to_string(bytes) + " bytes; loras.max_upload_bytes is " + std::to_string(most),
                 "path"};
  }
  if (::lseek(file.get(), static_cast<off_t>(whole->begins), SEEK_SET) < 0) return failed(std::strerror(errno));
  InspectedFile out;
  Sha256 hash;
  ContentCheck check(what, static_cast<std::uint64_t>(bytes));
  for (std::optional<std::string> piece = whole->head;; piece.reset()) {
    if (!piece || piece->empty()) piece = read_up_to(file.get(), 1 << 20);
    if (!piece) return failed(std::strerror(errno));
    if (piece->empty()) break;
    if (auto good = check.feed(*piece); !good) return invalid_argument(good.error().message, "path");
    hash.update(*piece);
    out.bytes += static_cast<std::int64_t>(piece->size());
  }
  auto content = check.finish();
  if (!content) return invalid_argument(content.error().message, "path");
  out.sha256 = hash.hex();
  out.content = std::move(*content);
  return out;
}

Result<std::string> resolve_path(const std::string& path, const std::string& folders) {
  const auto wrong = [](const std::string& message) { return invalid_argument(message, "path"); };
  const std::string shown = excerpt(path, 300);
  const auto allowed = folders_of(folders);
  if (allowed.empty())
    return wrong("files cannot be registered by path because loras.folders is empty; upload the file instead");
  if (path.empty() || path.find('\0') != std::string::npos) return wrong("the path is empty or contains a NUL");
  std::error_code ec;
  std::vector<fs::path> roots;
  for (const fs::path& folder : allowed) {
    if (fs::path root = fs::canonical(folder, ec); !ec) roots.push_back(std::move(root));
  }
  const auto is_allowed = [](const fs::path& file, const std::vector<fs::path>& folders) {
    return std::any_of(folders.begin(), folders.end(),
                       [&](const fs::path& folder) { return is_inside(file, folder.lexically_normal()); });
  };
  const auto is_folder_of_peft = [&](const fs::path& folder) {
    return std::all_of(safetensors::kPeftFiles.begin(), safetensors::kPeftFiles.end(), [&](const char* name) {
      std::error_code missing;
      const fs::path file = fs::canonical(folder / name, missing);
      return !missing && is_allowed(file, roots);
    });
  };
  bool absent = false, left = false;
  for (const fs::path& root : roots) {
    ec.clear();
    const fs::path asked = root / path;  // an absolute path replaces the root
    // Never access a path outside the folders, not even to see whether it exists.
    const fs::path plain = asked.lexically_normal();
    const fs::path real =
        is_allowed(plain, roots) || is_allowed(plain, allowed) ? fs::canonical(asked, ec) : fs::path();
    if (real.empty() && !ec)
      left = true;
    else if (ec)
      absent = true;
    else if (!is_allowed(real, roots))
      left = true;
    else if (!fs::is_regular_file(real, ec) && !is_folder_of_peft(real))
      absent = true;
    else
      return real.string();
  }
  if (absent && !left) return wrong("no file '" + shown + "' in loras.folders");
  return wrong("'" + shown + "' is outside loras.folders");
}

}  // namespace ditfleet::loras
