// libFuzzer: any bytes in place of the arguments that the ranks of a worker send each other. Both ends are the same
// program; a message that is damaged must still be an error and not a crash. The first byte chooses the type.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "worker/ranks/messages.h"

namespace {

using namespace ditfleet;
using worker::packed, worker::unpack;

// What is accepted is written and read back unchanged, and not without its last byte.
template <class... T>
void round_trip(std::string_view input) {
  std::tuple<T...> read, again, cut;
  const auto unpacked = [](std::string_view bytes, auto& into) {
    return std::apply([&](auto&... values) { return unpack(bytes, values...); }, into);
  };
  const auto bytes_of = [](const auto& values) {
    return std::apply([](const auto&... each) { return packed(each...); }, values);
  };
  if (!unpacked(input, read)) return;
  const std::string bytes = bytes_of(read);
  if (!unpacked(bytes, again) || bytes_of(again) != bytes) std::abort();
  if (unpacked(std::string_view(bytes).substr(0, bytes.size() - 1), cut)) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view input(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0]) {
    case 'e': round_trip<pipeline::GenerationRequest>(input); break;
    case 'l': round_trip<pipeline::ModelSource>(input); break;
    case 'p': round_trip<std::vector<pipeline::LoraRequest>, pipeline::AdapterDrops>(input); break;
    case 'i': round_trip<std::set<std::string>>(input); break;
    case 'f': round_trip<std::string>(input); break;
    case 'r': round_trip<std::optional<Error>>(input); break;
    default: break;
  }
  return 0;
}
