#include "shared/config/model_path.h"

#include <filesystem>
#include <set>

#include "shared/core/bytes.h"
#include "shared/core/environment.h"
#include "shared/core/text.h"

namespace ditfleet::config {
namespace {

namespace fs = std::filesystem;

fs::path cache() {
  const auto variable = [](const char* name) { return fs::path(environment_variable(name)); };
  if (const fs::path folder = variable("HF_HUB_CACHE"); !folder.empty()) return folder;
  if (const fs::path home = variable("HF_HOME"); !home.empty()) return home / "hub";
  const fs::path xdg = variable("XDG_CACHE_HOME");
  return (xdg.empty() ? variable("HOME") / ".cache" : xdg) / "huggingface" / "hub";
}

// Beside the programs of a package, or in the tree that they were built in.
fs::path known_models() {
  std::error_code ec;
  const fs::path program = fs::read_symlink("/proc/self/exe", ec);
  for (fs::path folder = program.parent_path(); folder.has_relative_path(); folder = folder.parent_path())
    for (const char* models : {"share/ditfleet/models", "deploy/known-models"})
      if (fs::is_directory(folder / models, ec)) return folder / models;
  return {};
}

Result<std::string> known_path(const std::string& name) {
  const fs::path models = known_models();
  std::error_code ec;
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(models, ec))
    if (fs::exists(entry.path() / "model_index.json", ec)) names.insert(entry.path().filename().string());
  if (names.contains(name)) return (models / name).string();
  std::string list;
  for (const std::string& one : names) list += (list.empty() ? "" : ", ") + one;
  return not_found("known:" + name + " is not a known model; there are " + (list.empty() ? "none on this host" : list));
}

// A name of the hub, or of a file: nothing that leads elsewhere.
bool is_plain(std::string_view name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-") == name.npos;
}

}  // namespace

Result<std::string> model_path(const std::string& text) {
  if (text.starts_with("known:")) return known_path(text.substr(6));
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
