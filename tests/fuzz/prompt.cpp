// libFuzzer: any prompt that a job may have, through the tokenizers of the demo model. Its time is limited: a prompt
// must not stop a worker (CMakeLists.txt sets the limit).
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "pipeline/tokenizers/tokenizer.h"
#include "shared/core/json.h"
#include "shared/job/spec_json.h"

namespace {

using ditfleet::pipeline::Tokenizer;

const Tokenizer& must(ditfleet::Result<Tokenizer>& loaded) {
  if (!loaded) std::abort();
  return *loaded;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ditfleet;
  static auto clip = Tokenizer::load_clip(DITFLEET_MODEL "/tokenizer");
  static auto t5 = Tokenizer::load_t5(DITFLEET_MODEL "/tokenizer_2");
  const std::string prompt(reinterpret_cast<const char*>(data), size);
  if (!job::parse_spec(json::serialize(json::object{{"prompt", prompt}}))) return 0;
  const std::pair<const Tokenizer&, int> encoders[] = {{must(clip), 77}, {must(t5), 512}};
  for (const auto& [tokenizer, length] : encoders) {
    const auto tokens = tokenizer.encode(prompt, length);
    if (!tokens) {
      if (tokens.error().message.empty()) std::abort();
      continue;
    }
    if (tokens->ids.size() > static_cast<std::size_t>(length)) std::abort();
  }
  return 0;
}
