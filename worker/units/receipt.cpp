#include "worker/units/receipt.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "shared/core/sha256.h"
#include "shared/job/spec_json.h"
#include "worker/models/model_set.h"
#include "worker/units/unit.h"

namespace ditfleet::worker {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kSample = 1 << 20;

void add_file(Sha256& hash, const std::string& name, const fs::path& path) {
  std::error_code ec;
  const auto size = static_cast<std::int64_t>(fs::file_size(path, ec));
  hash.update(name + "\n" + std::to_string(ec ? -1 : size) + "\n");
  std::ifstream file(path, std::ios::binary);
  std::string bytes;
  for (const std::int64_t at : {std::int64_t{0}, std::max(kSample, size - kSample)}) {
    if (at >= size) break;
    bytes.resize(static_cast<std::size_t>(std::min(kSample, size - at)));
    file.seekg(at);
    file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    hash.update(
        std::string_view(bytes).substr(0, static_cast<std::size_t>(std::max<std::streamsize>(0, file.gcount()))));
  }
}

std::string digest_of(const pipeline::ModelSource& source) {
  std::vector<std::pair<std::string, fs::path>> files;
  std::error_code ec;
  for (fs::recursive_directory_iterator at(source.dir, fs::directory_options::follow_directory_symlink, ec), end;
       !ec && at != end; at.increment(ec))
    if (at->is_regular_file(ec)) files.emplace_back(fs::relative(at->path(), source.dir, ec).string(), at->path());
  for (const auto& [component, file] : source.files) files.emplace_back(component + "=", file);
  std::ranges::sort(files);
  Sha256 hash;
  for (const auto& [name, path] : files) add_file(hash, name, path);
  return hash.hex();
}

bool ran_on_one(const Unit& unit) { return unit.request.alone.value_or(false); }

}  // namespace

std::string receipt_of_model(const ModelSet& set, const pipeline::ModelSource& source, const pipeline::ModelInfo& info,
                             const std::string& software) {
  json::object linears;
  for (const auto& [component, formats] : info.linears) {
    std::string text;
    for (const auto& [format, unused] : formats) text += (text.empty() ? "" : ", ") + format;
    linears[component] = text;
  }
  return json::serialize(json::object{{"model", json::object{{"name", source.name}, {"digest", digest_of(source)}}},
                                      {"precision", set.precision},
                                      {"linears", std::move(linears)},
                                      {"attention", source.attention.empty() ? "auto" : source.attention},
                                      {"blocks", set.engine ? set.engine->compile_backend() : "eager"},
                                      {"device", set.device_name},
                                      {"gpus", set.gpus},
                                      {"software", software}});
}

Receipt receipt_of(const std::string& of_model, const Unit& unit) {
  auto parsed = parse_json(of_model);
  json::object receipt = parsed && parsed->is_object() ? parsed->get_object() : json::object();
  if (ran_on_one(unit)) receipt["gpus"] = 1;
  receipt["seed"] = unit.request.seed;
  json::array adapters;
  for (const job::LoraUse& use : unit.spec.loras)
    adapters.push_back(json::object{{"sha256", use.sha256}, {"scale", use.scale}});
  receipt["adapters"] = std::move(adapters);
  receipt["plan"] = unit.model->memory().plan;
  if (!unit.begun_by.empty()) {
    const auto begun = parse_json(unit.begun_by);
    receipt["begun_by"] = json::object{{"steps", unit.went_on_from}, {"on", begun ? *begun : json::value(nullptr)}};
  }
  // On a GPU each worker measures which attention library is fastest.
  const auto is = [&](const char* name, const char* text) {
    const json::value* value = receipt.if_contains(name);
    return value && value->is_string() && value->get_string() == text;
  };
  const bool measured = is("blocks", "nvrtc") && is("attention", "auto");
  receipt["same_bytes"] = measured ? "on this worker until it restarts" : "on every worker with this receipt";
  job::JobSpec drawn = unit.spec;  // without what changes no pixel
  drawn.priority = 0;
  drawn.deadline_ms.reset();
  drawn.webhook = {};
  drawn.user.clear();
  drawn.remixed_from.clear();
  drawn.partial_images = 0;
  drawn.pause_after_steps.reset();
  receipt["spec"] = sha256_hex(job::to_json(drawn));
  std::string id = sha256_hex(json::serialize(receipt)).substr(0, 32);
  receipt["id"] = id;
  return {json::serialize(receipt), std::move(id)};
}

std::int64_t gpu_us_of(const Unit& unit) {
  std::int64_t sum = 0;
  for (const auto& [phase, us] : unit.prepared->phases_us()) sum += us;
  return sum * (ran_on_one(unit) ? 1 : std::max(1, unit.gpus));
}

}  // namespace ditfleet::worker
