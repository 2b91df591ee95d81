// The models of a worker process, and their warm-up.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/engine.h"
#include "shared/core/result.h"
#include "shared/job/catalogue.h"
#include "shared/media/writer.h"

namespace ditfleet::worker {

// media::open_writer, or a fake in tests.
using WriterOpener = std::function<std::unique_ptr<media::MediaWriter>(job::OutputFormat, int quality)>;

// A shape class to warm up before the worker is ready.
struct WarmupClass {
  std::string model;  // empty: every model
  int width = 0, height = 0;
  std::optional<int> frames, max_sequence_length;  // nullopt: the model's default
  bool true_cfg = false;
  std::optional<int> gpus;  // of a worker with several: 1, or all of them; nullopt: what is faster
};

// The order of members matters: models must be destroyed before the engine.
struct ModelSet {
  std::unique_ptr<pipeline::Engine> engine;  // null in tests
  std::string device, device_name, precision;
  job::Catalogue catalogue;  // of the loaded models
  std::map<std::string, std::unique_ptr<pipeline::Model>> models;
  std::map<std::string, std::string> receipts;  // by model: receipt_of_model()
  std::vector<WarmupClass> warmup_classes;
  int gpus = 1;  // that can share a unit
};

// Generates and encodes the smallest image of each model in one step, then one image of each warm-up class in two
// steps, because some set-up happens on the second use. With several GPUs a class runs on one and on all of them, or as
// it says, in four steps: later units of the class use what was faster. So a model or class that does not work is
// detected before the first job. Logs
// the times and exports them as metrics (model_timings.h). Returns the shape classes that are warm. Errors:
// kInvalidArgument (a model does not support a class), those of the stages. Blocks; call it on the device thread.
Result<std::vector<std::string>> warm_up(const ModelSet& set, const WriterOpener& open_writer);

}  // namespace ditfleet::worker
