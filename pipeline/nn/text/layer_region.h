// A text encoder's layers as one compiled region: one program, and one pointer table per layer.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/device/device.h"
#include "pipeline/nn/block_weights.h"
#include "pipeline/nn/parameters.h"
#include "pipeline/nn/text/layer_programs.h"
#include "pipeline/region/run/region.h"

namespace ditfleet::pipeline {

// Returns the IR's operator for the activation `name`. Empty: the layers must run eagerly, because the host does not
// compile text encoders (compile.components), the IR has no such operator, or quantized weights compute in another type
// than the rest. The last two count as fallbacks, and with fullgraph they throw Failure (kInvalidArgument).
std::optional<region::OpCode> activation_op(const std::shared_ptr<region::RegionHost>& host, const std::string& block,
                                            const std::string& name, const Parameters& parameters);

class LayerRegion {
 public:
  // The program of a layer, such as clip_layer().
  using Make = Result<region::Program> (*)(const region::TextLayerShape& shape);
  // `layers`: the parameters of each layer by name. `shape` of any type. Compiles (unless the host's options have
  // dynamic off). Throws what Region::prepare throws.
  LayerRegion(const std::string& name, Make make, const region::TextLayerShape& shape,
              const std::vector<Weights>& layers, Placement placement, std::shared_ptr<region::RegionHost> host);

  // Replaces `hidden` by the layer's output. `mine`: no other code reads hidden's memory, so the output may overwrite
  // it. `bias`: the table position_bias; undefined if the layer has none. Thread-safe unless weights are
  // quantized.
  void run(std::size_t layer, at::Tensor& hidden, bool mine, const at::Tensor& bias) const;

 private:
  std::unique_ptr<region::Region> region_;
  BlockWeights weights_;
  std::size_t hidden_ = 0;
  std::optional<std::size_t> bias_;
};

}  // namespace ditfleet::pipeline
