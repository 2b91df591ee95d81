// A loaded FLUX folder behind the engine's Model: the three stages.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <string>

#include "pipeline/families/flux/folder.h"
#include "pipeline/families/flux/prepared.h"
#include "pipeline/families/flux/prompts.h"

namespace ditfleet::pipeline {

class FluxModel : public Model {
 public:
  FluxModel(ModelInfo info, Placement placement, FluxFolder folder, Prompts prompts, AdapterStore::Limits adapters);

  const ModelInfo& info() const override { return info_; }
  Result<std::unique_ptr<Prepared>> encode(const ImageRequest& request) override;
  Result<void> denoise(Prepared& prepared, const StepCallback& on_step) override;
  std::vector<Result<void>> denoise_batch(const std::vector<Prepared*>& batch,
                                          const std::vector<StepCallback>& on_step) override;
  Result<Image> decode(Prepared& prepared) override;
  Result<void> prefetch(const std::vector<LoraRequest>& loras, const AdapterDrops& drops) override;
  void pin_adapters(const std::set<std::string>& ids) override;
  void forget_adapter(const std::string& id) override;
  AdapterHoldings adapters() const override;

 private:
  void clear_if_asked();
  void check(const ImageRequest& request) const;  // throws Failure, kInvalidArgument with the field
  void condition(FluxPrepared& prepared) const;
  TextEmbedding embed(const std::string& prompt, int max_sequence_length, const AdaptedModels* adapted);

  const ModelInfo info_;
  const Placement placement_;
  const FluxFolder folder_;
  const Prompts prompts_;
  AdapterStore adapters_;
  std::mutex adapted_;                  // held while a request with adapters is denoised
  std::atomic<bool> clearing_ = false;  // what was beside the weights is to be overwritten as soon as none is

  // The last few prompts: the units of one job share theirs, and a negative prompt is often the same for years.
  struct CachedText {
    std::string prompt;
    int max_sequence_length;
    std::string adapters;  // AdaptedModels::text_key
    TextEmbedding text;
  };
  std::mutex cache_mutex_;
  std::list<CachedText> cache_;  // most recently used first
};

}  // namespace ditfleet::pipeline
