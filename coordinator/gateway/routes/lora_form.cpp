#include "coordinator/gateway/routes/lora_form.h"

#include <algorithm>

#include "shared/loras/content.h"
#include "shared/safetensors/header.h"
#include "shared/safetensors/peft_folder.h"

namespace ditfleet::gateway {
namespace {

constexpr std::string_view kConfig = safetensors::kPeftFiles[0];
constexpr const char* kWhat = "the upload";
constexpr std::size_t kLength = 8;  // bytes of the header's length

}  // namespace

Result<void> LoraForm::begin(const FormReader::Part& part) {
  if (part.file_name == kConfig || part.name == "config" || part.name == kConfig) {
    if (begun_)
      return invalid_argument("the form has adapter_config.json after the adapter's file; send it before the file");
    if (config_) return invalid_argument("the form has two parts adapter_config.json");
    in_ = In::kConfig;
    config_.emplace();
    return {};
  }
  if (begun_)
    return invalid_argument("the form has two files; it must have one adapter, and may have adapter_config.json");
  in_ = In::kFile;
  begun_ = true;
  head_done_ = !config_;
  if (!config_) return {};
  auto kept = safetensors::peft_config(*config_, std::string(kConfig));
  if (!kept) return kept.error();
  config_ = std::move(*kept);
  return {};
}

Result<void> LoraForm::take(std::string_view contents, std::string& out) {
  if (in_ == In::kConfig) {
    *config_ += contents.substr(0, safetensors::kMaxPeftConfigBytes + 1 - config_->size());  // one more is too many
    return {};
  }
  while (!head_done_ && !contents.empty()) {
    std::size_t wanted = kLength;
    if (head_.size() >= kLength) {
      const auto end = safetensors::safetensors_header_end(head_, kWhat);
      if (!end) return invalid_argument(end.error().message);
      if (*end > loras::kMaxHeaderBytes)
        return invalid_argument(std::string(kWhat) + " claims a header of " + std::to_string(*end) +
                                " bytes; the limit for adapters is " + std::to_string(loras::kMaxHeaderBytes));
      wanted = static_cast<std::size_t>(*end);
    }
    const std::size_t more = std::min(contents.size(), wanted - head_.size());
    head_ += contents.substr(0, more);
    contents.remove_prefix(more);
    if (head_.size() < wanted || wanted == kLength) continue;
    auto joined = safetensors::with_peft_config(head_, *config_, kWhat);
    if (!joined) return joined.error();
    out += *joined;
    head_.clear();
    head_done_ = true;
  }
  out += contents;
  return {};
}

Result<std::string> LoraForm::feed(std::string_view bytes) {
  std::string out;
  auto fed = reader_.feed(
      bytes, [&](const FormReader::Part& part) { return begin(part); },
      [&](std::string_view contents) { return take(contents, out); });
  if (!fed) return fed.error();
  return out;
}

Result<void> LoraForm::finish() const {
  if (!reader_.is_complete())
    return invalid_argument("the form is incomplete: it must end with its boundary and two hyphens");
  if (!begun_) return invalid_argument("the form has no file of an adapter");
  if (!head_done_) return invalid_argument(std::string(kWhat) + " is too small for a safetensors file");
  return {};
}

}  // namespace ditfleet::gateway
