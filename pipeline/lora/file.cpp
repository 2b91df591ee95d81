#include "pipeline/lora/file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <tuple>

#include "pipeline/lora/block_diagonal.h"
#include "pipeline/lora/finite.h"
#include "pipeline/lora/keys.h"
#include "pipeline/lora/scaling.h"
#include "shared/core/excerpt.h"
#include "shared/safetensors/pickle.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::size_t kListed = 6, kLongestName = 120;

// A name as shown in messages. Even a name that matches the base may contain anything: .lora_A.NAME.weight of PEFT.
std::string shown(std::string_view name) { return excerpt(name, kLongestName); }

bool is_pickle(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return false;
  std::array<char, safetensors::kPickleBegin> head{};
  std::ifstream in(path, std::ios::binary);
  in.read(head.data(), head.size());
  return safetensors::is_pickle({head.data(), static_cast<std::size_t>(in.gcount())});
}

template <class Word>
Word word_at(const TensorView& view, std::size_t index) {
  Word word;
  std::memcpy(&word, view.bytes.data() + index * sizeof(Word), sizeof(Word));
  return word;
}

double half_to_double(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return bits & 0x8000 ? -size : size;
}

// The single, finite element of an alpha tensor.
std::optional<double> number_of(const TensorView& view) {
  if (view.bytes.size() * 8 != static_cast<std::size_t>(dtype_bits(view.dtype))) return {};
  if (view.dtype == DType::kI64) return static_cast<double>(word_at<std::int64_t>(view, 0));
  if (view.dtype == DType::kI32) return static_cast<double>(word_at<std::int32_t>(view, 0));
  if (!all_finite(view.dtype, view.bytes).value_or(false)) return {};
  switch (view.dtype) {
    case DType::kF32: return std::bit_cast<float>(word_at<std::uint32_t>(view, 0));
    case DType::kBF16: return std::bit_cast<float>(std::uint32_t{word_at<std::uint16_t>(view, 0)} << 16);
    case DType::kF16: return half_to_double(word_at<std::uint16_t>(view, 0));
    default: return std::bit_cast<double>(word_at<std::uint64_t>(view, 0));
  }
}

std::string shape_of(const TensorView& view) { return shape_text({view.shape.begin(), view.shape.end()}); }

// The tensors of one module in one file.
struct Module {
  std::string name;  // as in the file
  const TensorEntry* down = nullptr;
  const TensorEntry* up = nullptr;
  const TensorEntry* alpha = nullptr;
  const TensorEntry* diff = nullptr;
  const TensorEntry* bias = nullptr;

  bool has_pair() const { return down || up || alpha; }  // or a part of one
  const TensorEntry* any() const { return down ? down : up ? up : alpha ? alpha : diff ? diff : bias; }
};

Error unreadable(const Error& error) { return Error{error.code, "[lora] " + error.message, "loras"}; }

class Reader {
 public:
  Reader(const SafetensorsFile& file, const LoraNames& names, std::int64_t max_rank)
      : file_(file), names_(names), max_rank_(max_rank) {}

  // Fills everything but the file.
  Result<void> read(LoraFile& out) {
    if (auto sorted = sort_keys(); !sorted) return sorted.error();
    auto scaling = LoraScaling::parse(file_.metadata(), names_.base());
    if (!scaling) return wrong(scaling.error().message);
    if (auto told = every_alpha_or_none(); !told) return told.error();
    if (auto once = no_rows_twice(); !once) return once.error();
    for (const auto& [target, module] : modules_) {
      if (module.has_pair() || module.diff) {
        auto term = module.diff ? difference_of(*target, module) : term_of(*target, module, *scaling);
        if (!term) return term.error();
        out.terms.push_back(*term);
      }
      if (module.bias) {
        auto values = values_of(*module.bias, {target->out});
        if (!values) return values.error();
        out.biases.push_back({target, *values});
      }
    }
    out.unused = std::move(unused_);
    return {};
  }

 private:
  Error wrong(const std::string& what) const {
    return invalid_argument("[lora] " + file_.path() + ": " + what, "loras");
  }

  Result<void> sort_keys() {
    std::vector<std::string> unknown, lacking, dora;
    for (const TensorEntry& entry : file_.entries()) {
      const LoraKey key = parse_lora_key(entry.name);
      if (key.kind == LoraKeyKind::kDora) {
        dora.push_back(entry.name);
        continue;
      }
      const bool difference = key.kind == LoraKeyKind::kDiff || key.kind == LoraKeyKind::kBias;
      const bool known = difference ? names_.base().differences : key.kind != LoraKeyKind::kUnknown;
      const LoraTarget* target = known ? names_.find(key.module) : nullptr;
      if (known && difference && (!target || (key.kind == LoraKeyKind::kDiff && !target->takes_difference))) {
        unused_.push_back(entry.name);
        continue;
      }
      if (!target) {
        const bool elsewhere = known && names_.knows_elsewhere(key.module);
        (elsewhere ? lacking : unknown).push_back(entry.name);
        continue;
      }
      Module& module = modules_[target];
      module.name = key.module;
      const TensorEntry*& place = key.kind == LoraKeyKind::kDown   ? module.down
                                  : key.kind == LoraKeyKind::kUp   ? module.up
                                  : key.kind == LoraKeyKind::kDiff ? module.diff
                                  : key.kind == LoraKeyKind::kBias ? module.bias
                                                                   : module.alpha;
      if (place)
        return wrong(shown(place->name) + " and " + shown(entry.name) + " are the same weight; remove one of them");
      place = &entry;
    }
    if (!dora.empty()) return wrong("it is a DoRA adapter (" + list_text(dora) + "); only plain LoRA can be applied");
    if (!unknown.empty())
      return wrong("it has weights for modules that do not exist in a " + names_.base().family +
                   " model: " + list_text(unknown) + "; supported are the names of PEFT, kohya, BFL and XLabs");
    if (!lacking.empty())
      return wrong("it has weights for blocks or layers that this model lacks: " + list_text(lacking) +
                   "; is it for another base model?");
    for (auto at = modules_.begin(); at != modules_.end();) {
      const auto& [target, module] = *at;
      const bool lone = module.bias && !module.has_pair() && !module.diff;
      if (lone && !target->takes_lone_bias) unused_.push_back(module.bias->name);
      at = lone && !target->takes_lone_bias ? modules_.erase(at) : std::next(at);
    }
    std::sort(unused_.begin(), unused_.end());
    if (modules_.empty()) return wrong("it contains no LoRA weights");
    return {};
  }

  // If only some modules have an alpha tensor, programs disagree for PEFT's format: diffusers uses the first module's
  // alpha for the others, other programs a scale of 1. For kohya's format all of them use a scale of 1.
  Result<void> every_alpha_or_none() const {
    if (names_.base().differences) return {};
    std::vector<std::vector<std::string>> with(names_.base().components.size()), without = with;  // by component
    for (const auto& [target, module] : modules_) {
      if (!module.down || !module.up || module.down->name.ends_with(".lora_down.weight")) continue;
      (module.alpha ? with : without)[target->component].push_back(module.name);
    }
    for (std::size_t i = 0; i < with.size(); ++i) {
      if (with[i].empty() || without[i].empty()) continue;
      return wrong("it gives " + std::to_string(with[i].size()) + " modules an alpha (" + list_text(with[i]) +
                   ") and " + std::to_string(without[i].size()) + " none (" + list_text(without[i]) +
                   "), which programs interpret differently; give an alpha to every module or to none (alpha = rank "
                   "means a scale of 1)");
    }
    return {};
  }

  // A file may name a linear twice in different spellings, or a fused matrix as well as one of its linears.
  Result<void> no_rows_twice() const {
    struct Rows {
      std::size_t component, slot;
      std::int64_t first, end;
      const Module* module;
    };
    std::vector<Rows> all;
    for (const auto& [target, module] : modules_)
      for (const LoraPiece& piece : target->pieces)
        all.push_back({target->component, piece.slot, piece.first_row, piece.first_row + piece.rows, &module});
    std::sort(all.begin(), all.end(), [](const Rows& a, const Rows& b) {
      return std::tie(a.component, a.slot, a.first) < std::tie(b.component, b.slot, b.first);
    });
    for (std::size_t i = 1; i < all.size(); ++i) {
      const Rows &a = all[i - 1], &b = all[i];
      if (a.component != b.component || a.slot != b.slot || a.end <= b.first) continue;
      return wrong(shown(a.module->any()->name) + " and " + shown(b.module->any()->name) +
                   " change the same rows of one matrix; remove one of them");
    }
    return {};
  }

  // A tensor with this shape and finite values.
  Result<TensorView> values_of(const TensorEntry& entry, const std::vector<std::int64_t>& shape) const {
    auto view = file_.view(entry);
    if (!view) return unreadable(view.error());
    if (!std::equal(shape.begin(), shape.end(), view->shape.begin(), view->shape.end()))
      return wrong(shown(entry.name) + " is " + shape_of(*view) + ", in this model it must be " + shape_text(shape) +
                   "; the adapter is for another base model");
    if (auto finite = check_finite(*view); !finite) return finite.error();
    return view;
  }

  Result<void> check_finite(const TensorView& view) const {
    const auto finite = all_finite(view.dtype, view.bytes);
    if (!finite)
      return wrong(shown(view.name) + " is of type " + std::string(dtype_name(view.dtype)) +
                   "; adapters must be F32, BF16, F16 or F64");
    if (!*finite) return wrong(shown(view.name) + " contains NaN or infinity; every weight must be finite");
    return {};
  }

  Result<void> check_rank(const std::string& module, std::int64_t rank) const {
    if (rank >= 1 && rank <= max_rank_) return {};
    return wrong(module + " has rank " + std::to_string(rank) + "; it must be from 1 to " + std::to_string(max_rank_) +
                 " (worker.lora.max_rank)");
  }

  // The difference of a whole weight, as A with the identity as B.
  Result<LoraTerm> difference_of(const LoraTarget& target, const Module& module) const {
    if (module.has_pair())
      return wrong(shown(module.diff->name) + " and " + shown(module.any()->name) +
                   " change the same weight; remove one of them");
    auto values = values_of(*module.diff, {target.out, target.in});
    if (!values) return values.error();
    if (auto fits = check_rank(module.name, target.out); !fits) return fits.error();
    return LoraTerm{&target, std::move(*values), {}, target.out, 1, 1, /*identity=*/true};
  }

  Result<LoraTerm> term_of(const LoraTarget& target, const Module& module, const LoraScaling& scaling) const {
    if (!module.down || !module.up) {
      return wrong(shown(module.any()->name) + " has no counterpart; a module needs both A (down) and B (up)");
    }
    auto down = file_.view(*module.down), up = file_.view(*module.up);
    if (!down || !up) return unreadable(down ? up.error() : down.error());
    LoraTerm term{&target, std::move(*down), std::move(*up), 0, 1};
    for (const TensorView* view : {&term.down, &term.up})
      if (view->shape.size() != 2)
        return wrong(shown(view->name) + " is " + shape_of(*view) + "; A must be [rank, in] and B [out, rank]");
    term.rank = term.down.shape[0];
    if (term.up.shape[1] != term.rank)
      return wrong(shown(term.down.name) + " is " + shape_of(term.down) + " and " + shown(term.up.name) + " is " +
                   shape_of(term.up) + "; the rank must be the same: A is [rank, in] and B [out, rank]");
    if (term.down.shape[1] != target.in || term.up.shape[0] != target.out)
      return wrong(module.name + " is from " + std::to_string(term.down.shape[1]) + " to " +
                   std::to_string(term.up.shape[0]) + " values, in this model from " + std::to_string(target.in) +
                   " to " + std::to_string(target.out) + "; the adapter is for another base model");
    const std::int64_t whole_rank = term.rank;
    if (is_block_diagonal(term.up, target.linears)) {
      term.blocks = static_cast<std::int64_t>(target.linears.size());
      term.rank /= term.blocks;
    }
    if (auto fits = check_rank(module.name, term.rank); !fits) return fits.error();
    for (const TensorView* view : {&term.down, &term.up})
      if (auto finite = check_finite(*view); !finite) return finite.error();
    std::optional<double> alpha;
    if (module.alpha) {
      const auto value = file_.view(*module.alpha);
      if (!value) return unreadable(value.error());
      alpha = number_of(*value);
      if (!alpha) return wrong(shown(module.alpha->name) + " must be one finite number");
      if (scaling.gives_alpha(target.component))
        return wrong("both " + shown(module.alpha->name) +
                     " and lora_adapter_metadata both give an alpha; remove one of them");
    }
    const auto scale = scaling.scale(target.component, names_.split(module.name).rest, whole_rank, alpha);
    if (!scale) return wrong(scale.error().message);
    if (!std::isfinite(static_cast<float>(*scale)))
      return wrong("the alpha of " + shown(module.name) + " is so large that the scale (alpha / rank) overflows fp32");
    term.scale = *scale;
    return term;
  }

  const SafetensorsFile& file_;
  const LoraNames& names_;
  const std::int64_t max_rank_;
  struct ByName {
    bool operator()(const LoraTarget* a, const LoraTarget* b) const {
      return a->component != b->component ? a->component < b->component : a->name < b->name;
    }
  };
  std::map<const LoraTarget*, Module, ByName> modules_;
  std::vector<std::string> unused_;
};

}  // namespace

std::string list_text(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < kListed; ++i) text += (i == 0 ? "" : ", ") + shown(names[i]);
  return names.size() > kListed ? text + " and " + std::to_string(names.size() - kListed) + " more" : text;
}

Result<LoraFile> read_lora_file(const std::string& path, const LoraNames& names, std::int64_t max_rank) {
  if (is_pickle(path))
    return invalid_argument(
        "[lora] " + path +
            " is a pickle, which may run code when it is read; adapters must be safetensors (convert it first)",
        "loras");
  auto file = SafetensorsFile::open(path);
  if (!file) return unreadable(file.error());
  LoraFile out{std::move(*file), {}, {}, {}};
  if (auto read = Reader(out.file, names, max_rank).read(out); !read) return read.error();
  return out;
}

}  // namespace ditfleet::pipeline
