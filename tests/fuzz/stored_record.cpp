// libFuzzer: any text in place of the records that the queue, the registry of adapters and the result store keep in
// Redis. Other clients of the same Redis can write them. The first byte chooses the parser.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "shared/loras/adapter.h"
#include "shared/queue/records.h"
#include "shared/results/store.h"
#include "tests/fuzz/replies.h"

namespace {

using namespace ditfleet;
using fuzz::array_reply, fuzz::text_reply;
using redis::Reply;

void mailbox(std::string_view input) {
  Reply entry;
  entry.type = Reply::Type::kArray;
  entry.elements = {text_reply("1700000000000-0"), array_reply(input)};
  std::vector<queue::MailboxEntry> messages;
  const auto read = queue::parse_mailbox(entry, messages);
  if (!read && read.error().message.empty()) std::abort();
}

// The reply of the Function `job`: five parts between bytes 0xFD, of which three are arrays of fields and values.
void stored_job(std::string_view input) {
  Reply reply;
  reply.type = Reply::Type::kArray;
  for (int i = 0; i < 5; ++i) {
    const auto end = std::min(input.find('\xFD'), input.size());
    const std::string_view part = input.substr(0, end);
    reply.elements.push_back(i == 1 || i == 4 ? text_reply(part) : array_reply(part));
    input.remove_prefix(std::min(end + 1, input.size()));
  }
  const auto stored = queue::parse_job("id", reply);
  if (stored.record.id != "id") std::abort();
}

void records(std::string_view input) {
  (void)queue::parse_packed_unit(input);
  (void)queue::parse_packed_job(input);
  (void)queue::parse_member(input);
  (void)queue::split_list(input);
  std::vector<queue::Event> events;
  if (auto event = queue::parse_feed_line("1700000000000-0", input)) queue::append_events(std::move(*event), events);
}

template <class T>
void round_trip(std::string_view input) {
  const auto record = T::parse(input);
  if (!record) {
    if (record.error().message.empty()) std::abort();
    return;
  }
  const auto again = T::parse(record->to_json());
  if (!again || again->to_json() != record->to_json()) std::abort();
}

void worker(std::string_view input) {
  const auto info = queue::parse_worker(input);
  if (!info) return;
  const auto again = queue::parse_worker(queue::worker_json(*info));
  if (!again || queue::worker_json(*again) != queue::worker_json(*info)) std::abort();
}

void forecast(std::string_view input) {
  const auto read = queue::parse_forecast(input);
  if (!read) return;
  const auto again = queue::parse_forecast(queue::forecast_json(*read));
  if (!again || queue::forecast_json(*again) != queue::forecast_json(*read)) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view input(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0]) {
    case 'm': mailbox(input); break;
    case 'j': stored_job(input); break;
    case 'r': records(input); break;
    case 'w': worker(input); break;
    case 'f': forecast(input); break;
    case 'M': round_trip<results::Manifest>(input); break;
    case 'A': round_trip<loras::Adapter>(input); break;
    default: break;
  }
  return 0;
}
