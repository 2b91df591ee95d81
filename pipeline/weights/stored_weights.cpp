#include "pipeline/weights/stored_weights.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <span>

#include "pipeline/weights/nf4.h"
#include "shared/core/excerpt.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kBlock = 64, kNestedBlock = 256;
constexpr const char* kInstead = "; use the unquantized weights, and `quantize` to quantize them while they are loaded";

// Formats that are recognized by the end of a tensor's name, and refused.
constexpr std::array<std::pair<std::string_view, const char*>, 6> kRefused = {
    {{".SCB", "bitsandbytes int8"},
     {".weight_scale_2", "NVFP4 (ModelOpt or ComfyUI)"},
     {".weight_code", "ComfyUI's NF4"},
     {".weight_scale_inv", "fp8 with a scale per block"},
     {".pre_quant_scale", "weights with scales of their inputs (AWQ)"},
     {"._weight_zero_point", "torchao's integer weights"}}};

// Ends find() and scales() with an error.
struct Refusal {
  Error error;
};

std::string strings(const json::object& object, std::string_view key, std::string fallback) {
  const json::value* value = object.if_contains(key);
  if (!value || value->is_null()) return fallback;
  return value->is_string() ? std::string(value->get_string()) : json::serialize(*value);
}

std::int64_t blocks_of(std::int64_t values, std::int64_t block) { return (values + block - 1) / block; }

}  // namespace

class StoredWeightsReader {
 public:
  explicit StoredWeightsReader(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  StoredWeights find(const json::object* config) {
    if (config) read_config(*config);
    const auto names = checkpoint_.names();
    read_comfy_formats(names);
    for (const std::string& name : names) read(name);
    for (const auto& [linear, format] : comfy_formats_)
      if (!found_.find(linear)) refuse(linear + " has the format " + format + " but no " + linear + ".weight_scale");
    if (!found_.has_scales_) read_plain_fp8(names);
    read_gguf(names);
    if (config && found_.empty())
      refuse("config.json has a quantization_config, but no linear is stored quantized; remove it if that is right");
    return std::move(found_);
  }

  std::vector<float> scales(const StoredWeight& weight) {
    std::vector<float> values;
    if (!weight.nested_map.empty()) {
      const auto codes = bytes(weight.scales);
      const auto map = floats(weight.nested_map), absmax = floats(weight.nested_absmax);
      check(weight.nested_absmax, absmax);
      values.reserve(codes.size());
      for (std::size_t i = 0; i < codes.size(); ++i) {
        const float product =
            map[std::to_integer<std::size_t>(codes[i])] * absmax[i / static_cast<std::size_t>(kNestedBlock)];
        values.push_back(product + weight.nested_offset);
      }
      if (!std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); }))
        refuse("tensor " + weight.nested_map + " or " + weight.scales + " contains NaN or infinity");
      return values;
    }
    values = floats(weight.scales);
    check(weight.scales, values);
    // One scale for all rows.
    if (!weight.nf4 && values.size() == 1) values.resize(static_cast<std::size_t>(weight.shape[0]), values[0]);
    return values;
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw Refusal{Error{Code::kDataCorrupt, "[weights] " + checkpoint_.dir() + ": " + what}};
  }
  [[noreturn]] void unsupported(const std::string& format) const {
    refuse("the weights are quantized as " + format + ", which is not supported" + kInstead);
  }

  StoredTensor tensor(const std::string& name) const {
    auto stored = checkpoint_.tensor(name);
    if (!stored) throw Refusal{stored.error()};
    return *stored;
  }
  std::vector<std::byte> bytes(const std::string& name) const {
    const StoredTensor stored = tensor(name);
    std::vector<std::byte> data(stored.entry->end - stored.entry->begin);
    if (auto done = stored.file.read(*stored.entry, 0, data); !done) throw Refusal{done.error()};
    return data;
  }
  std::vector<float> floats(const std::string& name) const {
    const auto data = bytes(name);
    std::vector<float> values(data.size() / sizeof(float));
    std::memcpy(values.data(), data.data(), values.size() * sizeof(float));
    return values;
  }
  json::object object(const std::string& text, const std::string& what) const {
    auto value = parse_json(text);
    if (!value || !value->is_object()) refuse(what + " must be a JSON object but is " + excerpt(text, 80));
    return value->get_object();
  }
  json::object object_in(const std::string& name) const {
    must_be(name, {DType::kU8});
    const auto data = bytes(name);
    return object({reinterpret_cast<const char*>(data.data()), data.size()}, "tensor " + name);
  }

  DType must_be(const std::string& name, std::initializer_list<DType> types) const {
    const DType type = tensor(name).entry->dtype;
    if (std::find(types.begin(), types.end(), type) != types.end()) return type;
    std::string right;
    for (const DType one : types) right += (right.empty() ? "" : " or ") + std::string(dtype_name(one));
    refuse("tensor " + name + " is of type " + std::string(dtype_name(type)) + "; it must be " + right);
  }
  void must_have(const std::string& name, const std::vector<std::vector<std::int64_t>>& shapes) const {
    const auto& shape = tensor(name).entry->shape;
    if (std::find(shapes.begin(), shapes.end(), shape) != shapes.end()) return;
    std::string right;
    for (const auto& one : shapes) right += (right.empty() ? "" : " or ") + shape_text(one);
    refuse("tensor " + name + " has shape " + shape_text(shape) + "; it must be " + right);
  }
  void check(const std::string& name, const std::vector<float>& scales) const {
    for (const float scale : scales)
      if (!std::isfinite(scale) || scale < 0)
        refuse("tensor " + name + " contains " + std::to_string(scale) + "; scales must be finite and not negative");
  }

  void read_config(const json::object& config) {
    const std::string method = strings(config, "quant_method", "");
    const auto flag = [&](const char* key) {
      const json::value* value = config.if_contains(key);
      return value && value->is_bool() && value->get_bool();
    };
    if (method == "bitsandbytes") {
      if (flag("load_in_8bit") || flag("_load_in_8bit")) unsupported("bitsandbytes int8");
      const std::string type = strings(config, "bnb_4bit_quant_type", "fp4");
      if (type != "nf4") unsupported("bitsandbytes " + type + " (bnb_4bit_quant_type)");
      const std::string storage = strings(config, "bnb_4bit_quant_storage", "uint8");
      if (storage != "uint8") unsupported("NF4 in elements of " + storage + " (bnb_4bit_quant_storage)");
      found_.nf4_compute_ = strings(config, "bnb_4bit_compute_dtype", "float32");
      if (found_.nf4_compute_ != "float32" && found_.nf4_compute_ != "bfloat16" && found_.nf4_compute_ != "float16")
        refuse("bnb_4bit_compute_dtype is " + found_.nf4_compute_ + "; it must be float32, bfloat16 or float16");
    } else if (method == "modelopt") {
      if (const std::string algorithm = strings(config, "quant_algo", strings(config, "quant_type", ""));
          algorithm != "FP8")
        unsupported("ModelOpt " + algorithm);
    } else if (method != "torchao" && method != "gguf") {
      unsupported("\"" + method + "\" (quant_method; bitsandbytes NF4, torchao float8 and ModelOpt FP8 are)");
    }
  }

  void read(const std::string& name) {
    const auto linear = [&](std::string_view end) {
      return name.ends_with(end) ? name.substr(0, name.size() - end.size()) : std::string();
    };
    for (const auto& [end, format] : kRefused)
      if (name.ends_with(end)) unsupported(std::string(format) + " (tensor " + name + ")");
    if (const auto at = name.find(".quant_state.bitsandbytes__"); at != std::string::npos) {
      const std::string kind = name.substr(at + 27), weight = name.substr(0, at);
      if (kind != "nf4") unsupported("bitsandbytes " + kind + " (tensor " + name + ")");
      if (!weight.ends_with(".weight")) refuse("tensor " + name + " belongs to no weight");
      read_nf4(weight.substr(0, weight.size() - 7), name);
    } else if (const auto ao = linear("._weight_qdata"); !ao.empty()) {
      read_torchao(ao);
    } else if (const auto old = linear(".scale_weight"); !old.empty()) {
      read_scaled(old, name);
    } else if (const auto scaled = linear(".weight_scale"); !scaled.empty()) {
      read_scaled(scaled, name);
    } else if (name == "scaled_fp8") {
      must_be(name, {DType::kF8E4M3, DType::kF8E5M2, DType::kF32});
      found_.has_scales_ = true;
    }
  }

  void read_nf4(const std::string& linear, const std::string& state_name) {
    StoredWeight w;
    w.nf4 = true;
    w.codes = linear + ".weight";
    w.scales = w.codes + ".absmax";
    const json::object state = object_in(state_name);
    const auto integer = [&](const char* key, std::int64_t right, const char* what) {
      const json::value* value = state.if_contains(key);
      if (!value || !value->is_int64() || value->get_int64() != right)
        refuse("tensor " + state_name + " has " + key + " " + (value ? json::serialize(*value) : "missing") +
               "; only " + std::to_string(right) + " is supported" + what);
    };
    if (const std::string type = strings(state, "quant_type", ""); type != "nf4")
      refuse("tensor " + state_name + " has quant_type \"" + type + "\"; it must be nf4");
    integer("blocksize", kBlock, kInstead);
    const json::value* shape = state.if_contains("shape");
    if (shape && shape->is_array())
      for (const json::value& extent : shape->get_array())
        if (extent.is_int64() && extent.get_int64() > 0 && extent.get_int64() < (std::int64_t{1} << 31))
          w.shape.push_back(extent.get_int64());
    if (w.shape.size() != 2 || shape->get_array().size() != 2)
      refuse("tensor " + state_name + " has shape " + (shape ? excerpt(json::serialize(*shape), 80) : "missing") +
             "; it must be [out, in]");
    const std::int64_t values = w.shape[0] * w.shape[1], blocks = blocks_of(values, kBlock);
    must_be(w.codes, {DType::kU8});
    must_have(w.codes, {{blocks_of(values, 2), 1}, {blocks_of(values, 2)}, {1, blocks_of(values, 2)}});
    const std::string map = w.codes + ".quant_map";
    must_be(map, {DType::kF32});
    must_have(map, {{16}});
    if (const auto book = floats(map); std::memcmp(book.data(), kNf4Book.data(), sizeof kNf4Book) != 0)
      refuse("tensor " + map + " is not the code book of NF4");
    const bool nested = must_be(w.scales, {DType::kF32, DType::kU8}) == DType::kU8;
    must_have(w.scales, {{blocks}});
    w.tensors = {w.codes, w.scales, map, state_name};
    if (nested) {
      w.nested_absmax = w.codes + ".nested_absmax";
      w.nested_map = w.codes + ".nested_quant_map";
      integer("nested_blocksize", kNestedBlock, "");
      if (const std::string type = strings(state, "nested_dtype", ""); type != "float32")
        refuse("tensor " + state_name + " has nested_dtype \"" + type + "\"; it must be float32");
      const json::value* offset = state.if_contains("nested_offset");
      if (!offset || !offset->is_number()) refuse("tensor " + state_name + " has no number nested_offset");
      w.nested_offset = static_cast<float>(offset->to_number<double>());
      for (const std::string& name : {w.nested_absmax, w.nested_map}) {
        must_be(name, {DType::kF32});
        w.tensors.push_back(name);
      }
      must_have(w.nested_absmax, {{blocks_of(blocks, kNestedBlock)}});
      must_have(w.nested_map, {{256}});
    }
    found_.weights_.emplace(linear, std::move(w));
  }

  // Checks codes [out, in] and the scale of each row or of all.
  void add_fp8(const std::string& linear, StoredWeight w) {
    const auto& shape = tensor(w.codes).entry->shape;
    if (shape.size() != 2)
      refuse("tensor " + w.codes + " has shape " + shape_text(shape) + "; a quantized weight must be [out, in]");
    w.shape = shape;
    must_be(w.codes, {DType::kF8E4M3, DType::kF8E5M2});
    w.tensors.push_back(w.codes);
    if (!w.scales.empty()) {
      must_be(w.scales, {DType::kF32});
      must_have(w.scales, {{shape[0], 1}, {shape[0]}, {1, 1}, {1}, {}});
      w.tensors.push_back(w.scales);
      found_.has_scales_ = true;
    }
    if (!found_.weights_.emplace(linear, std::move(w)).second)
      refuse(linear + ".weight has scales of several formats; it must have one");
  }

  void read_torchao(const std::string& linear) {
    StoredWeight w;
    w.codes = linear + "._weight_qdata";
    w.scales = linear + "._weight_scale";
    const std::string key = linear + ".weight", what = "the metadata of " + key;
    const auto text = checkpoint_.metadata().find(key);
    if (text == checkpoint_.metadata().end()) refuse("tensor " + w.codes + " has no metadata \"" + key + "\"");
    const json::object entry = object(text->second, what);
    if (const std::string type = strings(entry, "_type", ""); type != "Float8Tensor")
      unsupported("torchao's " + type + " (tensor " + w.codes + ")");
    const json::value* data = entry.if_contains("_data");
    if (!data || !data->is_object()) refuse(what + " has no _data");
    must_be(w.codes, {DType::kF8E4M3});
    add_fp8(linear, with_activations(std::move(w), data->get_object(), what));
  }

  // Sets `dynamic`.
  StoredWeight with_activations(StoredWeight w, const json::object& data, const std::string& what) const {
    const json::value* kwargs = data.if_contains("act_quant_kwargs");
    if (!kwargs) refuse(what + " has no act_quant_kwargs");
    if (kwargs->is_null()) return w;
    const json::value *inner = kwargs->is_object() ? kwargs->get_object().if_contains("_data") : nullptr,
                      *granularity =
                          inner && inner->is_object() ? inner->get_object().if_contains("granularity") : nullptr;
    const std::string by =
        granularity && granularity->is_object() ? strings(granularity->get_object(), "_type", "") : "";
    if (by != "PerRow")
      refuse(what + " quantizes activations by \"" + by +
             "\", which is not supported; use granularity=PerRow() or Float8WeightOnlyConfig");
    for (const char* bound : {"hp_value_lb", "hp_value_ub"})
      if (const json::value* value = inner->get_object().if_contains(bound); value && !value->is_null())
        refuse(what + " has " + bound + " " + json::serialize(*value) + ", which is not supported; it must be null");
    w.dynamic = true;
    return w;
  }

  void read_comfy_formats(const std::vector<std::string>& names) {
    if (const auto text = checkpoint_.metadata().find("_quantization_metadata"); text != checkpoint_.metadata().end()) {
      const json::object all = object(text->second, "the metadata _quantization_metadata");
      const json::value* layers = all.if_contains("layers");
      if (!layers || !layers->is_object()) refuse("the metadata _quantization_metadata has no object layers");
      for (const auto& [name, layer] : layers->get_object()) {
        const std::string linear = checkpoint_.without_prefix(std::string(name));
        if (!checkpoint_.contains(linear + ".weight")) continue;  // of another component
        if (!layer.is_object()) refuse("the metadata _quantization_metadata of " + linear + " is not an object");
        note_comfy_format(linear, layer.get_object());
      }
    }
    for (const std::string& name : names)
      if (name.ends_with(".comfy_quant")) note_comfy_format(name.substr(0, name.size() - 12), object_in(name));
  }
  void note_comfy_format(const std::string& linear, const json::object& layer) {
    const std::string format = strings(layer, "format", "");
    if (format != "float8_e4m3fn" && format != "float8_e5m2")
      unsupported("ComfyUI's \"" + format + "\" (" + linear + ".weight)");
    comfy_formats_[linear] = format;
    if (strings(layer, "full_precision_matrix_mult", "") == "true") precise_.insert(linear);
  }

  // Whether products are to quantize their inputs: the file has a scale for them, or a scale for each row, as LightX2V
  // writes it. By row is at least as fine as that scale, and nothing saturates.
  bool has_f8_inputs(const std::string& linear, const StoredWeight& w) const {
    bool scaled = false;
    for (const char* end : {".scale_input", ".input_scale"})
      if (const std::string name = linear + end; checkpoint_.contains(name)) {
        must_be(name, {DType::kF32});
        must_have(name, {{}, {1}});
        check(name, floats(name));
        scaled = scaled || floats(name)[0] != 1;  // 1 stands for none
      }
    const auto& shape = tensor(w.codes).entry->shape;
    if (shape.size() != 2 || shape[0] % 16 != 0 || shape[1] % 16 != 0 || precise_.contains(linear)) return false;
    if (tensor(w.codes).entry->dtype != DType::kF8E4M3 || marks_full_precision()) return false;
    const bool by_row = tensor(w.scales).entry->shape == std::vector<std::int64_t>{shape[0], 1};
    return scaled || (by_row && w.scales.ends_with(".weight_scale") && !comfy_formats_.contains(linear));
  }
  // ComfyUI's marker has two elements then.
  bool marks_full_precision() const {
    return checkpoint_.contains("scaled_fp8") && tensor("scaled_fp8").entry->shape == std::vector<std::int64_t>{2};
  }

  void read_scaled(const std::string& linear, const std::string& scale) {
    StoredWeight w;
    w.codes = linear + ".weight";
    w.scales = scale;
    if (!checkpoint_.contains(w.codes)) refuse("tensor " + scale + " has no weight " + w.codes);
    if (const DType type = tensor(w.codes).entry->dtype; type == DType::kI8 || type == DType::kU8)
      unsupported("integers with scales (tensor " + w.codes + " is " + std::string(dtype_name(type)) + ")");
    if (const auto format = comfy_formats_.find(linear); format != comfy_formats_.end()) {
      must_be(w.codes, {format->second == "float8_e5m2" ? DType::kF8E5M2 : DType::kF8E4M3});
      if (checkpoint_.contains(linear + ".comfy_quant")) w.tensors.push_back(linear + ".comfy_quant");
    }
    for (const char* input : {".scale_input", ".input_scale"})
      if (checkpoint_.contains(linear + input)) w.tensors.push_back(linear + input);
    w.dynamic = has_f8_inputs(linear, w);
    add_fp8(linear, std::move(w));
  }

  void read_plain_fp8(const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      if (!name.ends_with(".weight")) continue;
      const TensorEntry& entry = *tensor(name).entry;
      if (entry.shape.size() != 2 || (entry.dtype != DType::kF8E4M3 && entry.dtype != DType::kF8E5M2)) continue;
      StoredWeight w;
      w.codes = name;
      add_fp8(name.substr(0, name.size() - 7), std::move(w));
    }
  }

  void read_gguf(const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      const TensorEntry& entry = *tensor(name).entry;
      if (entry.blocks == 0 || entry.shape.size() != 2 || !name.ends_with(".weight")) continue;
      StoredWeight w;
      w.codes = name;
      w.shape = entry.shape;
      w.blocks = entry.blocks;
      w.tensors = {name};
      found_.weights_.emplace(name.substr(0, name.size() - 7), std::move(w));
    }
  }

  const Checkpoint& checkpoint_;
  StoredWeights found_;
  std::map<std::string, std::string> comfy_formats_;  // by the linear's name
  std::set<std::string> precise_;                     // linears whose products are not to be computed in fp8
};

Result<StoredWeights> StoredWeights::find(const Checkpoint& checkpoint, const json::object* config) {
  try {
    return StoredWeightsReader(checkpoint).find(config);
  } catch (const Refusal& refusal) {
    return refusal.error;
  }
}

const StoredWeight* StoredWeights::find(std::string_view linear) const {
  const auto at = weights_.find(linear);
  return at == weights_.end() ? nullptr : &at->second;
}

bool StoredWeights::all_gguf() const {
  return std::all_of(weights_.begin(), weights_.end(), [](const auto& one) { return one.second.blocks != 0; });
}

Result<std::vector<float>> StoredWeights::scales(const Checkpoint& checkpoint, const StoredWeight& weight) {
  try {
    return StoredWeightsReader(checkpoint).scales(weight);
  } catch (const Refusal& refusal) {
    return refusal.error;
  }
}

bool is_quantization_tensor(std::string_view name) {
  const std::string_view last = name.substr(name.rfind('.') + 1);  // the whole name without a dot
  if (last.starts_with("bitsandbytes__") || last == "SCB" || last == "weight_format") return true;
  for (const std::string_view word : {"scale_", "_scale", "absmax", "quant", "qdata", "zero_point", "scaled_fp8"})
    if (last.find(word) != std::string_view::npos) return true;
  return false;
}

}  // namespace ditfleet::pipeline
