// libFuzzer: any fields and values as an entry of the intake stream, as a plain XADD may add them. Each becomes a job
// to admit or a problem to reject it with, under an id that can be stored.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "shared/core/bytes.h"
#include "shared/core/ids.h"
#include "shared/job/validate.h"
#include "shared/queue/records.h"
#include "tests/fixtures/image_model.h"
#include "tests/fuzz/replies.h"

namespace {

using ditfleet::fuzz::array_reply, ditfleet::fuzz::text_reply;
using ditfleet::redis::Reply;

// The entry that Redis would answer XRANGE with: [id, [field, value, …]]. Fields and values are what the
// input holds between bytes 0xFE, which no valid UTF-8 has.
Reply entry_of(std::string_view input) {
  Reply fields = array_reply(input);
  if (fields.elements.size() % 2 != 0) fields.elements.push_back(text_reply(""));  // Redis' entries are pairs
  Reply entry;
  entry.type = Reply::Type::kArray;
  entry.elements = {text_reply("1700000000000-0"), fields};
  return entry;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ditfleet;
  static const job::Catalogue catalogue{{{"demo", job::image_model("demo")}}, "demo"};
  const auto entry = queue::parse_intake(entry_of({reinterpret_cast<const char*>(data), size}));
  if (entry.entry_id != "1700000000000-0" || !is_valid_id(entry.id)) std::abort();
  if (entry.raw && !is_valid_id(entry.tenant)) std::abort();
  Error error{Code::kInvalidArgument, entry.problem};
  if (entry.problem.empty()) {
    const auto spec = job::parse_spec(entry.spec);
    const auto complete = spec ? job::complete_spec(*spec, catalogue) : spec;
    if (complete) return 0;
    error = complete.error();
  }
  // The reason is stored with the rejected job as JSON and must be read back as it is.
  if (error.message.empty() || !is_valid_utf8(error.message)) std::abort();
  if (queue::parse_error(queue::error_json(error)).message != error.message) std::abort();
  return 0;
}
