#include "shared/safetensors/adapter_keys.h"

#include <algorithm>
#include <array>
#include <utility>

namespace ditfleet::safetensors {
namespace {

using Kind = AdapterKind;

bool cut_end(std::string_view& text, std::string_view end) {
  if (text.size() <= end.size() || text.substr(text.size() - end.size()) != end) return false;
  text.remove_suffix(end.size());
  return true;
}

struct Ending {
  std::string_view text;
  Kind kind;
  std::string_view part = {};
};

// Longer suffixes before their own suffixes.
constexpr std::array kEndings{Ending{".lora_A.weight", Kind::kDown},
                              Ending{".lora_B.weight", Kind::kUp},
                              Ending{".lora_linear_layer.down.weight", Kind::kDown},
                              Ending{".lora_linear_layer.up.weight", Kind::kUp},
                              Ending{".lora_down.weight", Kind::kDown},
                              Ending{".lora_up.weight", Kind::kUp},
                              Ending{".lora.down.weight", Kind::kDown},
                              Ending{".lora.up.weight", Kind::kUp},
                              Ending{".down.weight", Kind::kDown},
                              Ending{".up.weight", Kind::kUp},
                              Ending{".alpha", Kind::kAlpha},
                              Ending{".diff", Kind::kDiff},
                              Ending{".diff_b", Kind::kDiffBias},
                              Ending{".lora_B.bias", Kind::kBias},
                              Ending{".hada_w1_a", Kind::kHadamard, "w1_a"},
                              Ending{".hada_w1_b", Kind::kHadamard, "w1_b"},
                              Ending{".hada_w2_a", Kind::kHadamard, "w2_a"},
                              Ending{".hada_w2_b", Kind::kHadamard, "w2_b"},
                              Ending{".lokr_w1", Kind::kKronecker, "w1"},
                              Ending{".lokr_w1_a", Kind::kKronecker, "w1_a"},
                              Ending{".lokr_w1_b", Kind::kKronecker, "w1_b"},
                              Ending{".lokr_w2", Kind::kKronecker, "w2"},
                              Ending{".lokr_w2_a", Kind::kKronecker, "w2_a"},
                              Ending{".lokr_w2_b", Kind::kKronecker, "w2_b"},
                              Ending{".dora_scale", Kind::kRefused, "DoRA"},
                              Ending{".lora_magnitude_vector.weight", Kind::kRefused, "DoRA"},
                              Ending{".lora_magnitude_vector", Kind::kRefused, "DoRA"},
                              Ending{".hada_t1", Kind::kRefused, "LoHa of convolutions"},
                              Ending{".hada_t2", Kind::kRefused, "LoHa of convolutions"},
                              Ending{".lokr_t2", Kind::kRefused, "LoKr of convolutions"},
                              Ending{".lora_mid.weight", Kind::kRefused, "LoCon of convolutions"},
                              Ending{".oft_blocks", Kind::kRefused, "OFT"},
                              Ending{".oft_diag", Kind::kRefused, "OFT"},
                              Ending{".oft_R.weight", Kind::kRefused, "OFT"},
                              Ending{".a1.weight", Kind::kRefused, "GLoRA"},
                              Ending{".a2.weight", Kind::kRefused, "GLoRA"},
                              Ending{".b1.weight", Kind::kRefused, "GLoRA"},
                              Ending{".b2.weight", Kind::kRefused, "GLoRA"},
                              Ending{".on_input", Kind::kRefused, "IA³"},
                              Ending{".ia3_l", Kind::kRefused, "IA³"}};

// ".lora_A.NAME.weight": PEFT's format for named adapters.
constexpr std::array kNamed{Ending{".lora_A.", Kind::kDown}, Ending{".lora_B.", Kind::kUp},
                            Ending{".lora_magnitude_vector.", Kind::kRefused, "DoRA"}};

// Parts of names that only the adapters of one model have.
constexpr std::array<std::pair<std::string_view, std::string_view>, 7> kOthers{{
    {"input_blocks", "Stable Diffusion 1.5, 2 or XL"},
    {"down_blocks", "Stable Diffusion 1.5, 2 or XL"},
    {"joint_blocks", "Stable Diffusion 3"},
    {"individual_token_refiner", "HunyuanVideo"},
    {"distilled_guidance_layer", "Chroma"},
    {"adaln_single", "LTX-Video or PixArt"},
    {"double_stream_blocks", "HiDream"},
}};

}  // namespace

AdapterKey parse_adapter_key(std::string_view name) {
  for (const Ending& ending : kEndings)
    if (std::string_view module = name; cut_end(module, ending.text)) return {ending.kind, module, ending.part};
  if (std::string_view rest = name; cut_end(rest, ".weight"))
    for (const Ending& middle : kNamed) {
      const auto at = rest.rfind(middle.text);
      if (at != rest.npos && at > 0 && rest.size() > at + middle.text.size() &&
          rest.find('.', at + middle.text.size()) == rest.npos)
        return {middle.kind, rest.substr(0, at), middle.part};
    }
  if (std::string_view rest = name; cut_end(rest, ".bias"))
    if (const auto at = rest.rfind(".lora_B."); at != rest.npos && at > 0) return {Kind::kBias, rest.substr(0, at), {}};
  return {Kind::kUnknown, name, {}};
}

bool have_part(const std::vector<std::string>& names, std::span<const std::string_view> parts) {
  return std::any_of(names.begin(), names.end(), [&](std::string name) {
    std::replace(name.begin(), name.end(), '.', '_');
    return std::any_of(parts.begin(), parts.end(), [&](std::string_view part) { return name.find(part) != name.npos; });
  });
}

std::string_view other_model_of(const std::vector<std::string>& names) {
  for (std::string name : names) {
    std::replace(name.begin(), name.end(), '.', '_');
    for (const auto& [part, model] : kOthers)
      if (name.find(part) != name.npos) return model;
  }
  return {};
}

}  // namespace ditfleet::safetensors
