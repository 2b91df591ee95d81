#include "shared/config/hub_cache.h"

#include <cstdlib>
#include <filesystem>

#include "shared/core/bytes.h"
#include "shared/core/text.h"

namespace ditfleet::config {
namespace {

namespace fs = std::filesystem;

fs::path cache() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return fs::path(value ? value : "");
  };
  if (const fs::path folder = variable("HF_HUB_CACHE"); !folder.empty()) return folder;
  if (const fs::path home = variable("HF_HOME"); !home.empty()) return home / "hub";
  const fs::path xdg = variable("XDG_CACHE_HOME");
  return (xdg.empty() ? variable("HOME") / ".cache" : xdg) / "huggingface" / "hub";
}

// A name of the hub, or of a file: nothing that leads elsewhere.
bool is_plain(std::string_view name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-") == name.npos;
}

}  // namespace

Result<std::string> hub_path(const std::string& text) {
  if (!text.starts_with("hf:")) return text;
  const auto at = text.find('@');
  const std::string revision = at == text.npos ? "main" : text.substr(at + 1);
  const std::string name = text.substr(3, at == text.npos ? at : at - 3);
  const auto parts = split(name, '/');
  bool plain = parts.size() >= 2 && is_plain(revision);
  for (const auto part : parts) plain = plain && is_plain(part);
  if (!plain) return invalid_argument("'" + text + "' must be hf:ORG/NAME, hf:ORG/NAME@REVISION or hf:ORG/NAME/FILE");

  const std::string repository = std::string(parts[0]) + "/" + std::string(parts[1]);
  const fs::path folder = cache() / ("models--" + std::string(parts[0]) + "--" + std::string(parts[1]));
  std::string commit = revision, file;
  if (const auto ref = read_file((folder / "refs" / revision).string()); ref && ref->size() < 100)
    commit = ref->substr(0, ref->find_first_of(" \r\n"));
  for (std::size_t i = 2; i < parts.size(); ++i) file += (file.empty() ? "" : "/") + std::string(parts[i]);
  fs::path found = folder / "snapshots" / commit;
  if (!file.empty()) found /= file;
  std::error_code ec;
  if (is_plain(commit) && fs::exists(found, ec)) return found.string();
  return Error{Code::kNotFound, "'" + text + "' is not in " + cache().string() + "; `hf download " + repository +
                                    (file.empty() ? "" : " " + file) +
                                    (at == text.npos ? "" : " --revision " + revision) + "` fetches it"};
}

}  // namespace ditfleet::config
