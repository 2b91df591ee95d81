#include "pipeline/engine/quantize.h"

#include <algorithm>

#include "pipeline/device/failure.h"

namespace ditfleet::pipeline {
namespace {

std::string one_of(const std::vector<std::string>& all) {
  std::string text;
  for (std::size_t i = 0; i < all.size(); ++i) text += (i == 0 ? "" : i + 1 == all.size() ? " or " : ", ") + all[i];
  return text;
}

}  // namespace

void check_quantize(const ModelSource& source, const QuantizeFormats& formats) {
  for (const auto& [component, format] : source.quantize) {
    const auto known = std::find_if(formats.begin(), formats.end(),
                                    [&, &name = component](const auto& entry) { return entry.first == name; });
    if (known == formats.end()) {
      std::vector<std::string> right;
      for (const auto& [name, of] : formats) right.push_back(name + " (" + one_of(of) + ")");
      fail(Code::kInvalidArgument, "quantize has the component \"" + component + "\"; it must be " + one_of(right),
           "quantize");
    }
    if (std::find(known->second.begin(), known->second.end(), format) == known->second.end())
      fail(Code::kInvalidArgument,
           "quantize." + component + " is \"" + format + "\"; it must be " + one_of(known->second), "quantize");
  }
}

std::string quantize_of(const ModelSource& source, const std::string& component) {
  const auto format = source.quantize.find(component);
  return format == source.quantize.end() ? std::string() : format->second;
}

}  // namespace ditfleet::pipeline
