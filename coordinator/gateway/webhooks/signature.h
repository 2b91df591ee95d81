// Standard Webhooks (https://github.com/standard-webhooks/standard-webhooks, spec 1.0.0). Thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ditfleet::gateway {

// "whsec_" and 32 random bytes in base64.
std::string new_webhook_secret();

// The header webhook-signature: "v1," and the HMAC-SHA256 of "<id>.<seconds>.<body>" in base64, for each secret,
// separated by spaces.
std::string webhook_signature(const std::vector<std::string>& secrets, std::string_view id, std::int64_t seconds,
                              std::string_view body);

}  // namespace ditfleet::gateway
