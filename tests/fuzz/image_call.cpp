// libFuzzer: a byte that is odd for an edit, a line with a Content-Type, and any body of a request to
// /v1/images/generations or /v1/images/edits. Its images are those that the job names, and small ones are decoded.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "coordinator/gateway/routes/openai_images.h"
#include "shared/core/bytes.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ditfleet;
  if (size == 0) return 0;
  std::string_view body(reinterpret_cast<const char*>(data) + 1, size - 1);
  const std::string_view type = body.substr(0, body.find('\n'));
  body.remove_prefix(std::min(type.size() + 1, body.size()));
  const bool edit = data[0] % 2 == 1;
  const auto said = [](const Error& error) {
    if (error.message.empty() || !is_valid_utf8(error.message) || !is_valid_utf8(error.param)) std::abort();
  };
  const auto call = gateway::parse_image_call(type, body, edit);
  if (!call) {
    said(call.error());
    return 0;
  }
  if (call->edit != edit || (edit && call->image_name.empty())) std::abort();
  std::size_t unknown = 0;
  for (const job::Field field : {job::Field("image"), job::Field("mask")})
    for (const std::string& sha256 : call->spec.fields.images(field))
      unknown += sha256 == gateway::kUnknownSha256 ? 1 : 0;
  std::size_t sent = 0;
  for (const gateway::SentImage& image : call->images) {
    if (image.form != gateway::SentImage::Form::kStored) ++sent;
    if (const auto file = gateway::read_image(image, 1024); !file) said(file.error());
  }
  if (sent > unknown) std::abort();
  return 0;
}
