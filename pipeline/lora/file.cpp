#include "pipeline/lora/file.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <tuple>

#include "pipeline/lora/block_diagonal.h"
#include "pipeline/lora/scaling.h"
#include "shared/core/excerpt.h"
#include "shared/safetensors/adapter_keys.h"
#include "shared/safetensors/peft_folder.h"
#include "shared/safetensors/pickle.h"
#include "shared/safetensors/values.h"

namespace ditfleet::pipeline {
namespace {

using Kind = safetensors::AdapterKind;

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

std::string shape_of(const TensorView& view) { return shape_text({view.shape.begin(), view.shape.end()}); }

// The tensors of one module in one file.
struct Module {
  std::string name;  // as in the file
  const TensorEntry* down = nullptr;
  const TensorEntry* up = nullptr;
  const TensorEntry* alpha = nullptr;
  const TensorEntry* diff = nullptr;
  const TensorEntry* bias = nullptr;                         // of either kind
  std::map<std::string_view, const TensorEntry*> factors{};  // of LoHa or LoKr, by AdapterKey::part
  Kind form = Kind::kUnknown;                                // of `factors`

  bool has_pair() const { return down || up; }  // or a part of one
  bool has_weight() const { return has_pair() || diff || !factors.empty(); }
  const TensorEntry* any() const {
    return down ? down : up ? up : !factors.empty() ? factors.begin()->second : alpha ? alpha : diff ? diff : bias;
  }
};

Error unreadable(const Error& error) { return Error{error.code, "[lora] " + error.message, "loras"}; }

class Reader {
 public:
  Reader(const SafetensorsFile& file, std::map<std::string, std::string> metadata, const LoraNames& names,
         std::int64_t max_rank)
      : file_(file), metadata_(std::move(metadata)), names_(names), max_rank_(max_rank) {}

  // Fills everything but the file.
  Result<void> read(LoraFile& out) {
    if (auto sorted = sort_keys(); !sorted) return sorted.error();
    auto scaling = LoraScaling::parse(metadata_, names_.base());
    if (!scaling) return wrong(scaling.error().message);
    if (auto once = no_rows_twice(); !once) return once.error();
    for (const auto& [target, module] : modules_) {
      double scale = 1;
      if (module.has_weight()) {
        auto term = !module.factors.empty() ? product_of(*target, module, *scaling)
                    : module.diff           ? difference_of(*target, module)
                                            : term_of(*target, module, *scaling);
        if (!term) return term.error();
        scale = term->scale;
        out.terms.push_back(std::move(*term));
      }
      if (module.bias) {
        auto values = values_of(*module.bias, {target->out});
        if (!values) return values.error();
        const bool scaled = safetensors::parse_adapter_key(module.bias->name).kind == Kind::kBias;
        out.biases.push_back({target, *values, scaled ? scale : 1});
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
    std::map<std::string_view, std::vector<std::string>> refused;  // by kind
    std::vector<const TensorEntry*> left;
    std::vector<std::string> foreign, lacking;  // weights that this base does not have
    bool of_transformer = false;                // some of these
    const auto has = [&](std::string_view prefix) {
      return std::any_of(file_.entries().begin(), file_.entries().end(),
                         [&](const TensorEntry& entry) { return entry.name.starts_with(prefix); });
    };
    const bool copied = has("transformer.") || has("lora_transformer_");  // then kohya's names are of another copy
    for (const TensorEntry& entry : file_.entries()) {
      const auto key = safetensors::parse_adapter_key(entry.name);
      if (key.kind == Kind::kRefused) {
        refused[key.part].push_back(entry.name);
        continue;
      }
      if (copied && entry.name.starts_with("lora_unet_")) {
        left.push_back(&entry);
        continue;
      }
      const bool known = key.kind != Kind::kUnknown && (key.kind != Kind::kDiffBias || names_.base().takes_diff_b);
      const LoraTarget* target = known ? names_.find(key.module) : nullptr;
      if (target && key.kind == Kind::kDiff && !target->takes_difference) target = nullptr;
      if (target && !target->in_kohya && entry.name.starts_with("lora_unet_")) target = nullptr;
      if (!target) {
        left.push_back(&entry);
        if (!is_weight(key.kind)) continue;
        (names_.knows_elsewhere(key.module) ? lacking : foreign).push_back(entry.name);
        of_transformer |= names_.split(key.module).component == 0;
        continue;
      }
      Module& module = modules_[target];
      module.name = key.module;
      const TensorEntry*& place = place_of(module, key);
      if (place)
        return wrong(shown(place->name) + " and " + shown(entry.name) + " are the same weight; remove one of them");
      place = &entry;
    }
    for (const auto& [kind, tensors] : refused)
      return wrong("it is a " + std::string(kind) + " adapter (" + list_text(tensors) +
                   "); only LoRA, LoHa and LoKr can be applied");
    for (auto at = modules_.begin(); at != modules_.end();) {
      const auto& [target, module] = *at;
      const bool lone = !module.has_weight() && !(module.bias && target->takes_lone_bias);  // a bias, an alpha
      for (const TensorEntry* entry : {module.bias, module.alpha})
        if (lone && entry) left.push_back(entry);
      at = lone ? modules_.erase(at) : std::next(at);
    }
    const bool adapts = std::any_of(modules_.begin(), modules_.end(), [](const auto& one) {
      return one.first->component == 0 && one.second.has_weight();
    });
    if (!adapts && (of_transformer || (modules_.empty() && !(foreign.empty() && lacking.empty()))))
      return nothing_fits(foreign, lacking);
    for (const TensorEntry* entry : left) {
      const auto view = file_.view(*entry);
      if (!view) return unreadable(view.error());
      if (!all_zero(view->bytes, std::max(1, dtype_bits(view->dtype) / 8))) unused_.push_back(entry->name);
    }
    std::sort(unused_.begin(), unused_.end());
    if (modules_.empty())
      return wrong(unused_.empty()
                       ? "it contains no LoRA weights"
                       : "it contains nothing for a " + names_.base().family + " model: " + list_text(unused_));
    return {};
  }

  static bool is_weight(Kind kind) {
    return kind == Kind::kDown || kind == Kind::kUp || kind == Kind::kHadamard || kind == Kind::kKronecker;
  }

  static const TensorEntry*& place_of(Module& module, const safetensors::AdapterKey& key) {
    switch (key.kind) {
      case Kind::kDown: return module.down;
      case Kind::kUp: return module.up;
      case Kind::kAlpha: return module.alpha;
      case Kind::kDiff: return module.diff;
      case Kind::kHadamard:
      case Kind::kKronecker: module.form = key.kind; return module.factors[key.part];
      default: return module.bias;
    }
  }

  Error nothing_fits(const std::vector<std::string>& foreign, const std::vector<std::string>& lacking) const {
    const std::string_view other = safetensors::other_model_of(foreign);
    if (!other.empty())
      return wrong("it is an adapter for " + std::string(other) + " (" + list_text(foreign) + "), not for a " +
                   names_.base().family + " model");
    if (!foreign.empty())
      return wrong("it has weights for modules that do not exist in a " + names_.base().family +
                   " model: " + list_text(foreign) + "; supported are the names of PEFT, kohya, BFL and XLabs");
    return wrong("it has weights for blocks or layers that this model lacks: " + list_text(lacking) +
                 "; is it for another base model?");
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
    const auto finite = safetensors::all_finite(view.dtype, view.bytes);
    if (!finite)
      return wrong(shown(view.name) + " is of type " + std::string(dtype_name(view.dtype)) +
                   "; adapters must be F32, BF16, F16, F64, F8_E4M3 or F8_E5M2");
    if (!*finite) return wrong(shown(view.name) + " contains NaN or infinity; every weight must be finite");
    return {};
  }

  Result<void> check_rank(const std::string& module, std::int64_t rank) const {
    if (rank >= 1 && rank <= max_rank_) return {};
    return wrong(shown(module) + " has rank " + std::to_string(rank) + "; it must be from 1 to " +
                 std::to_string(max_rank_) + " (worker.lora.max_rank)");
  }

  // The difference of a whole weight, as A with the identity as B.
  Result<LoraTerm> difference_of(const LoraTarget& target, const Module& module) const {
    if (module.has_pair())
      return wrong(shown(module.diff->name) + " and " + shown(module.any()->name) +
                   " change the same weight; remove one of them");
    auto values = values_of(*module.diff, {target.out, target.in});
    if (!values) return values.error();
    if (auto fits = check_rank(module.name, target.out); !fits) return fits.error();
    return LoraTerm{&target, std::move(*values), {}, target.out, 1, 1, LoraTerm::Form::kDifference};
  }

  // LoHa or LoKr, as a product of two matrices whose rank is that of the factors multiplied.
  Result<LoraTerm> product_of(const LoraTarget& target, const Module& module, const LoraScaling& scaling) const {
    const bool hadamard = module.form == Kind::kHadamard;
    const std::string kind = hadamard ? "LoHa" : "LoKr";
    if (module.has_pair() || module.diff)
      return wrong(shown(module.any()->name) + " and other weights of " + shown(module.name) +
                   " change the same matrix; remove one of them");
    LoraTerm term{&target, {}, {}, 1, 1};
    term.form = hadamard ? LoraTerm::Form::kHadamard : LoraTerm::Form::kKronecker;
    std::int64_t rows = 1, columns = 1;
    std::optional<std::int64_t> dim;  // what LyCORIS divides alpha by
    std::size_t used = 0;
    for (const auto& [name, up, down] :
         {std::tuple(std::string("w1"), &term.up, &term.down), {"w2", &term.up2, &term.down2}}) {
      const auto take = [&](const std::string& part, TensorView& into) -> Result<bool> {
        const auto at = module.factors.find(part);
        if (at == module.factors.end()) return false;
        auto view = file_.view(*at->second);
        if (!view) return unreadable(view.error());
        if (view->shape.size() != 2 || view->shape[0] < 1 || view->shape[1] < 1)
          return wrong(shown(view->name) + " is " + shape_of(*view) + "; a matrix of a " + kind +
                       " must have two sides");
        if (auto finite = check_finite(*view); !finite) return finite.error();
        into = std::move(*view);
        ++used;
        return true;
      };
      const auto whole = hadamard ? Result<bool>(false) : take(name, *up);
      if (!whole) return whole.error();
      if (*whole) {
        rows *= up->shape[0], columns *= up->shape[1];
        term.rank *= std::min(up->shape[0], up->shape[1]);
        continue;
      }
      const auto first = take(name + "_a", *up), second = take(name + "_b", *down);
      if (!first || !second) return first ? second.error() : first.error();
      if (!*first || !*second)
        return wrong("the " + kind + " of " + shown(module.name) + " lacks a part of " + name +
                     "; it needs both _a and _b");
      if (up->shape[1] != down->shape[0])
        return wrong(shown(up->name) + " is " + shape_of(*up) + " and " + shown(down->name) + " is " + shape_of(*down) +
                     "; the second side of _a must be the first side of _b");
      term.rank *= down->shape[0];
      if (!dim) dim = down->shape[0];
      if (hadamard) {
        if (up->shape[0] != target.out || down->shape[1] != target.in)
          return other_widths(target, module, down->shape[1], up->shape[0]);
      } else {
        rows *= up->shape[0], columns *= down->shape[1];
      }
    }
    if (used != module.factors.size())
      return wrong("the " + kind + " of " + shown(module.name) + " gives a factor both whole and as _a and _b");
    if (!hadamard && (rows != target.out || columns != target.in)) return other_widths(target, module, columns, rows);
    if (term.rank > max_rank_)
      return wrong("it is a " + kind + " adapter, and that of " + shown(module.name) + " has rank " +
                   std::to_string(term.rank) + "; at most " + std::to_string(max_rank_) +
                   " can be applied (worker.lora.max_rank)");
    // Without a product there is nothing that alpha could be divided by, and LyCORIS ignores it.
    auto scale = scale_of(target, module, scaling, dim.value_or(1), dim.has_value());
    if (!scale) return scale.error();
    term.scale = *scale;
    return term;
  }

  Error other_widths(const LoraTarget& target, const Module& module, std::int64_t in, std::int64_t out) const {
    const std::string widths = shown(module.name) + " is from " + std::to_string(in) + " to " + std::to_string(out) +
                               " values, in this model from " + std::to_string(target.in) + " to " +
                               std::to_string(target.out);
    if (const auto* latents = names_.find(names_.base().reads_latents);
        latents && latents->pieces.front().slot == target.pieces.front().slot && target.component == 0 &&
        in > target.in)
      return wrong("it is a control, fill or inpainting adapter, for a model that reads images beside latents: " +
                   widths);
    return wrong(widths + "; the adapter is for another base model");
  }

  // alpha / rank, by the module's alpha or the metadata.
  Result<double> scale_of(const LoraTarget& target, const Module& module, const LoraScaling& scaling, std::int64_t rank,
                          bool by_alpha = true) const {
    std::optional<double> alpha;
    if (module.alpha) {
      const auto value = file_.view(*module.alpha);
      if (!value) return unreadable(value.error());
      alpha = safetensors::number_of(value->dtype, value->bytes);
      if (!alpha) return wrong(shown(module.alpha->name) + " must be one finite number");
    }
    if (!by_alpha) return 1.0;
    const auto scale = scaling.scale(target.component, names_.split(module.name).rest, rank, alpha);
    if (!scale) return wrong(scale.error().message);
    if (!std::isfinite(static_cast<float>(*scale)))
      return wrong("the alpha of " + shown(module.name) + " is so large that the scale (alpha / rank) overflows fp32");
    return *scale;
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
      return other_widths(target, module, term.down.shape[1], term.up.shape[0]);
    const std::int64_t whole_rank = term.rank;
    if (is_block_diagonal(term.up, target.linears)) {
      term.blocks = static_cast<std::int64_t>(target.linears.size());
      term.rank /= term.blocks;
    }
    if (auto fits = check_rank(module.name, term.rank); !fits) return fits.error();
    for (const TensorView* view : {&term.down, &term.up})
      if (auto finite = check_finite(*view); !finite) return finite.error();
    const auto scale = scale_of(target, module, scaling, whole_rank);
    if (!scale) return scale.error();
    term.scale = *scale;
    return term;
  }

  const SafetensorsFile& file_;
  const std::map<std::string, std::string> metadata_;
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
  const auto whole = safetensors::open_adapter(path);
  if (!whole) return Error{whole.error().code, "[lora] " + whole.error().message, "loras"};
  auto file = SafetensorsFile::open(whole->file);
  if (!file) return unreadable(file.error());
  LoraFile out{std::move(*file), {}, {}, {}};
  auto metadata = out.file.metadata();
  if (!whole->config.empty()) metadata[safetensors::kAdapterConfig] = whole->config;
  if (auto read = Reader(out.file, std::move(metadata), names, max_rank).read(out); !read) return read.error();
  return out;
}

}  // namespace ditfleet::pipeline
