// LoRA adapters of requests, and their residency in a model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shared/job/fields.h"

namespace ditfleet::pipeline {

// A safetensors file in the names of PEFT, kohya, BFL or XLabs, and its strength.
struct LoraRequest {
  std::string path;
  double scale = 1.0;  // from -job::kMaxLoraScale to job::kMaxLoraScale
  // A digest of the content, if the caller has it. The adapter is then cached under this id and the file is read once.
  // If empty, the adapter is cached under the file's path, size, time and inode.
  std::string id = {};
  job::Expert expert = job::Expert::kBoth;  // kBoth in a model with one transformer
  std::string name = {};                    // in warnings; if empty, the file's name
};

// Adapters to evict first when space is needed, by LoraRequest::id and in this order. An adapter leaves its slot before
// it leaves host memory.
struct AdapterDrops {
  std::vector<std::string> from_host = {}, from_slots = {};
};

// Where a model's adapters are, by LoraRequest::id. Adapters without an id are not listed.
struct AdapterHoldings {
  int slots = 0;
  std::vector<std::string> in_slots;  // most recently used first
  std::vector<std::string> in_host;   // most recently used first; includes those in slots if host memory has them
  std::int64_t host_bytes = 0;        // capacity in host memory
  std::int64_t load_bytes_per_s = 0;  // measured, from file to host memory; 0: not measured yet
  std::int64_t swap_us = 0;           // measured, from host memory to a slot; 0: not measured yet
};

}  // namespace ditfleet::pipeline
