#include "worker/models/request.h"

#include "shared/media/image_file.h"

namespace ditfleet::worker {

pipeline::GenerationRequest request_of(const job::JobSpec& spec, int unit) {
  pipeline::GenerationRequest request;
  request.prompt = spec.prompt;
  request.fields = spec.fields;
  request.number = unit;
  request.seed =
      static_cast<std::int64_t>(static_cast<std::uint64_t>(spec.seed.value()) + static_cast<std::uint64_t>(unit));
  return request;
}

Result<void> add_image(pipeline::GenerationRequest& request, const std::string& field, std::string_view file) {
  auto decoded = field == "mask" ? media::decode_mask(file) : media::decode(file);
  if (!decoded) return Error{decoded.error().code, decoded.error().message, field};
  auto image = std::make_shared<const pipeline::Media>(std::move(*decoded));
  if (field == "mask")
    request.mask = std::move(image);
  else
    request.images.push_back(std::move(image));
  return {};
}

std::vector<int> preview_steps(int total, int count) {
  std::vector<int> steps;
  for (int i = 1; i <= count; ++i) {
    const int step = static_cast<int>(static_cast<long>(total) * i / (count + 1));
    if (step >= 1 && step < total && (steps.empty() || step > steps.back())) steps.push_back(step);
  }
  return steps;
}

}  // namespace ditfleet::worker
