#include "shared/safetensors/peft_folder.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "shared/core/excerpt.h"
#include "shared/core/json.h"
#include "shared/safetensors/header.h"

namespace ditfleet::safetensors {
namespace {

namespace fs = std::filesystem;

// The first `size` bytes, or all if there are fewer.
std::string begin_of(const std::string& path, std::size_t size) {
  std::string bytes(size, '\0');
  std::ifstream in(path, std::ios::binary);
  in.read(bytes.data(), static_cast<std::streamsize>(size));
  bytes.resize(static_cast<std::size_t>(std::max<std::streamsize>(in.gcount(), 0)));
  return bytes;
}

std::string little_endian(std::uint64_t value) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(value >> (8 * i) & 0xff);
  return bytes;
}

}  // namespace

Result<std::string> peft_config(std::string_view text, const std::string& what) {
  if (text.size() > kMaxPeftConfigBytes) return invalid_argument(what + " has more than 1 MiB");
  const auto config = parse_json(text);
  if (!config) return invalid_argument(what + " is not JSON: " + config.error().message);
  const json::object* fields = config->if_object();
  if (!fields) return invalid_argument(what + " must be a JSON object");
  const json::value* kind = fields->if_contains("peft_type");
  if (kind && (!kind->is_string() || kind->get_string() != "LORA"))
    return invalid_argument(what + ": peft_type is " + excerpt(json::serialize(*kind), 60) +
                            "; only \"LORA\" can be applied");
  json::object kept;
  for (const char* key : {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"})
    if (const json::value* value = fields->if_contains(key)) kept[key] = *value;
  return json::serialize(kept);
}

Result<std::string> with_peft_config(std::string_view head, const std::string& config, const std::string& what) {
  auto parsed = parse_json(head.substr(std::min<std::size_t>(head.size(), 8)));
  if (!parsed) return invalid_argument(what + ": its header is not JSON: " + parsed.error().message);
  if (!parsed->is_object()) return invalid_argument(what + ": its header must be a JSON object");
  json::value& metadata = parsed->get_object()["__metadata__"];
  if (!metadata.is_object()) metadata = json::object();
  metadata.get_object()[kAdapterConfig] = config;
  std::string text = json::serialize(*parsed);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return little_endian(text.size()) + text;
}

Result<PeftFolder> open_peft_folder(const std::string& folder) {
  const std::string path = folder + "/" + kPeftFiles[0];
  PeftFolder out{.file = folder + "/" + kPeftFiles[1], .config = {}, .head = {}};
  std::error_code ec;
  for (const std::string& file : {path, out.file})
    if (!fs::is_regular_file(file, ec))
      return Error{Code::kNotFound, folder + " has no " + fs::path(file).filename().string() +
                                        "; an adapter is a safetensors file, or a folder of PEFT with "
                                        "adapter_config.json and adapter_model.safetensors"};
  auto config = peft_config(begin_of(path, kMaxPeftConfigBytes + 1), path);
  if (!config) return config.error();
  out.config = std::move(*config);

  const auto end = safetensors_header_end(begin_of(out.file, 8), out.file);
  if (!end) return invalid_argument(end.error().message);
  out.begins = *end;
  const std::string head = begin_of(out.file, static_cast<std::size_t>(*end));
  if (const auto header = parse_safetensors_header(head, fs::file_size(out.file, ec), out.file); !header)
    return invalid_argument(header.error().message);
  auto joined = with_peft_config(head, out.config, out.file);
  if (!joined) return joined.error();
  out.head = std::move(*joined);
  return out;
}

Result<PeftFolder> open_adapter(const std::string& path) {
  std::error_code ec;
  if (fs::is_directory(path, ec)) return open_peft_folder(path);
  return PeftFolder{.file = path, .config = {}, .head = {}};
}

}  // namespace ditfleet::safetensors
