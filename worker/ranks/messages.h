// Messages between rank 0 of a worker and the other ranks, over a socket pair. Both ends are the same program.
#pragma once

#include <string>
#include <vector>

#include "pipeline/engine.h"
#include "shared/core/json.h"
#include "shared/core/result.h"

namespace ditfleet::worker {

struct Message {
  json::object head;  // "id": repeated in the reply; "call" of a request
  std::string bytes;  // texts and images, which JSON cannot hold as they are
};

// Blocks. kUnavailable: the other end has closed the socket, or the process has ended.
Result<void> send_message(int socket, const Message& message);
Result<Message> receive_message(int socket);

// Numbers arrive with all their bits. The readers return kInvalidArgument for what the writers do not write.
Message message_of(const pipeline::GenerationRequest& request);
Result<pipeline::GenerationRequest> request_of(const Message& message);
Message message_of(const pipeline::ModelSource& source);
pipeline::ModelSource source_of(const Message& message);
Message message_of(const std::vector<pipeline::LoraRequest>& loras, const pipeline::AdapterDrops& drops);
std::vector<pipeline::LoraRequest> loras_of(const Message& message);
pipeline::AdapterDrops drops_of(const Message& message);

// The members "code", "message", "param" and "kind"; none of them for a success.
void put_result(json::object& head, const Result<void>& result);
Result<void> result_of(const json::object& head);

}  // namespace ditfleet::worker
