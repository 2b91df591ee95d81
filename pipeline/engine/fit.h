// How a model is loaded into the memory that the device has: its formats, and where its weights go.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/engine/family.h"
#include "pipeline/memory/model_memory.h"

namespace ditfleet::pipeline {

using Formats = std::map<std::string, std::string>;  // component → format, as ModelSource::quantize

// The formats that fit() chooses among: what `source.quantize` sets. If that is auto, it is cleared, and the formats
// are, the most precise first: nothing quantized; the transformer in fp8 where the device multiplies in it; nf4. With
// fp8 and nf4 the text encoder is in nf4. `stored_quantized`: whether a source without `quantize` has weights that are
// stored quantized; only the first format is possible then.
std::vector<Formats> formats_to_try(ModelSource& source, const std::string& text_encoder, c10::Device device,
                                    bool (*stored_quantized)(const ModelSource&));

// A model's source with `quantize` resolved, and its needs.
template <class Needs>
struct Fit {
  ModelSource source;
  std::shared_ptr<Needs> needs;  // null if nothing limits the device's memory, unless `always`
};

// Chooses the first of `formats` with which no block has to leave the device for the first of `sizes`; if there is
// none, for the second one, and so on; else the first with which the last size fits at all. `Needs` is constructed from
// the context, and has MemoryNeeds of(const RequestSize&). Throws what the constructor of `Needs` throws.
template <class Needs>
Fit<Needs> fit(LoadContext context, bool always, const std::vector<Formats>& formats,
               const std::vector<std::function<RequestSize(const Needs&)>>& sizes) {
  Fit<Needs> fitted;
  fitted.source = context.source;
  fitted.source.quantize = formats.front();
  if (!context.memory->limited() && !always) return fitted;
  std::vector<std::shared_ptr<Needs>> needs(formats.size());
  const auto plan = [&](std::size_t i, const auto& size) {
    if (!needs[i]) {
      context.source.quantize = formats[i];
      needs[i] = std::make_shared<Needs>(context);
    }
    return context.memory->plan(needs[i]->of(size(*needs[i]))).choice.plan;
  };
  std::size_t chosen = formats.size();
  for (const auto& size : sizes) {
    for (std::size_t i = 0; chosen == formats.size() && i < formats.size(); ++i)
      if (const auto made = plan(i, size); made && made->name != "block") chosen = i;
  }
  for (std::size_t i = 0; chosen == formats.size() && i < formats.size(); ++i)
    if (plan(i, sizes.back())) chosen = i;
  chosen = std::min(chosen, formats.size() - 1);
  if (!needs[chosen]) plan(chosen, sizes.back());
  fitted.source.quantize = formats[chosen];
  fitted.needs = needs[chosen];
  return fitted;
}

// Where the weights are loaded to: host memory if a typical request does not leave them all on the device. `source`:
// with `quantize` resolved. Throws Failure (kOutOfMemory) if the smallest request does not fit.
Placement fitted_placement(const LoadContext& context, const ModelSource& source, std::string_view family,
                           const MemoryNeeds& smallest, const MemoryNeeds& typical);

// "transformer in fp8, text_encoder in nf4"
std::string formats_text(const Formats& quantize);

}  // namespace ditfleet::pipeline
