// Asks Sentinels for the address of a master.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>

#include "shared/core/result.h"
#include "shared/redis/endpoint.h"

namespace ditfleet::redis {

// Returns `endpoint` with the host and port of its service's master and without sentinels. Asks the sentinels in turn,
// beginning with number `first` modulo their count, until one replies with an address; each has a second to reply.
// The address may be outdated: the caller must check the server's role.
// kUnavailable: no sentinel named a master; the message says what each of them replied.
boost::asio::awaitable<Result<Endpoint>> find_master(boost::asio::any_io_executor executor, Endpoint endpoint,
                                                     std::size_t first);

}  // namespace ditfleet::redis
