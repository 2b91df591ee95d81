#include "shared/safetensors/peft_folder.h"

#include <filesystem>
#include <fstream>

#include "shared/core/excerpt.h"
#include "shared/core/json.h"
#include "shared/safetensors/header.h"

namespace ditfleet::safetensors {
namespace {

namespace fs = std::filesystem;

constexpr std::uintmax_t kMaxConfigBytes = 1 << 20;

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

Result<PeftFolder> open_peft_folder(const std::string& folder) {
  const std::string path = folder + "/adapter_config.json";
  PeftFolder out{.file = folder + "/adapter_model.safetensors", .config = {}, .head = {}};
  std::error_code ec;
  for (const std::string& file : {path, out.file})
    if (!fs::is_regular_file(file, ec))
      return Error{Code::kNotFound, folder + " has no " + fs::path(file).filename().string() +
                                        "; an adapter is a safetensors file, or a folder of PEFT with "
                                        "adapter_config.json and adapter_model.safetensors"};
  if (fs::file_size(path, ec) > kMaxConfigBytes) return invalid_argument(path + " has more than 1 MiB");
  const auto config = parse_json(begin_of(path, kMaxConfigBytes));
  if (!config) return invalid_argument(path + " is not JSON: " + config.error().message);
  const json::object* fields = config->if_object();
  if (!fields) return invalid_argument(path + " must be a JSON object");
  const json::value* kind = fields->if_contains("peft_type");
  if (kind && (!kind->is_string() || kind->get_string() != "LORA"))
    return invalid_argument(path + ": peft_type is " + excerpt(json::serialize(*kind), 60) +
                            "; only \"LORA\" can be applied");
  json::object kept;
  for (const char* key : {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"})
    if (const json::value* value = fields->if_contains(key)) kept[key] = *value;
  out.config = json::serialize(kept);

  const auto end = safetensors_header_end(begin_of(out.file, 8), out.file);
  if (!end) return invalid_argument(end.error().message);
  out.begins = *end;
  const std::string head = begin_of(out.file, static_cast<std::size_t>(*end));
  if (const auto header = parse_safetensors_header(head, fs::file_size(out.file, ec), out.file); !header)
    return invalid_argument(header.error().message);
  auto parsed = parse_json(head.substr(8));
  if (!parsed) return invalid_argument(out.file + ": its header is not JSON: " + parsed.error().message);
  json::value& metadata = parsed->as_object()["__metadata__"];
  if (!metadata.is_object()) metadata = json::object();
  metadata.as_object()[kAdapterConfig] = out.config;
  std::string text = json::serialize(*parsed);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  out.head = little_endian(text.size()) + text;
  return out;
}

}  // namespace ditfleet::safetensors
