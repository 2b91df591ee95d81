#include "pipeline/tokenizers/charsmap.h"

#include "pipeline/tokenizers/unicode.h"
#include "shared/core/bytes.h"

namespace ditfleet::pipeline {
namespace {

// Units of Darts-clone (github.com/s-yata/darts-clone, "darts.h").
constexpr std::uint32_t kLeafFlag = 1u << 31;
bool has_leaf(std::uint32_t unit) { return (unit >> 8 & 1) != 0; }
std::uint32_t value(std::uint32_t unit) { return unit & ~kLeafFlag; }
std::uint32_t label(std::uint32_t unit) { return unit & (kLeafFlag | 0xFF); }
std::uint32_t offset(std::uint32_t unit) { return unit >> 10 << ((unit & 1u << 9) >> 6); }

std::uint32_t read_u32(std::string_view bytes, std::size_t at) {
  std::uint32_t number = 0;
  for (std::size_t i = 0; i < 4; ++i) number |= std::uint32_t{static_cast<unsigned char>(bytes[at + i])} << (8 * i);
  return number;
}

Error corrupt(const std::string& what) { return Error{Code::kDataCorrupt, "the precompiled charsmap " + what}; }

}  // namespace

Result<Charsmap> Charsmap::parse(std::string_view blob) {
  if (blob.size() < 4) return corrupt("is too short");
  const std::size_t trie_bytes = read_u32(blob, 0);
  if (trie_bytes == 0 || trie_bytes % 4 != 0 || trie_bytes > blob.size() - 4) {
    return corrupt("declares a trie of " + std::to_string(trie_bytes) + " bytes but has only " +
                   std::to_string(blob.size() - 4));
  }
  Charsmap map;
  map.units_.reserve(trie_bytes / 4);
  for (std::size_t at = 4; at < 4 + trie_bytes; at += 4) map.units_.push_back(read_u32(blob, at));
  map.replacements_ = blob.substr(4 + trie_bytes);
  if (!is_valid_utf8(map.replacements_)) return corrupt("has replacements that are not UTF-8");
  return map;
}

std::optional<std::string_view> Charsmap::replacement(std::string_view chunk) const {
  std::size_t node = offset(units_[0]);
  for (const char c : chunk) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte == 0) return std::nullopt;
    node ^= byte;
    if (node >= units_.size() || label(units_[node]) != byte) return std::nullopt;
    const std::uint32_t unit = units_[node];
    node ^= offset(unit);
    if (!has_leaf(unit)) continue;
    if (node >= units_.size()) return std::nullopt;
    const std::size_t begin = value(units_[node]);
    if (begin >= replacements_.size()) return std::string_view();
    const std::size_t end = replacements_.find('\0', begin);
    return std::string_view(replacements_).substr(begin, end == std::string::npos ? end : end - begin);
  }
  return std::nullopt;
}

std::string Charsmap::normalize(std::string_view text) const {
  // Clusters of fewer bytes are looked up as a whole. If only a prefix is in the map, its replacement replaces the
  // whole cluster: "ﬀ" + U+0324 becomes "ff". SentencePiece would keep the mark.
  constexpr std::size_t kWholeClusterLimit = 6;
  std::string normalized;
  normalized.reserve(text.size());
  unicode::for_each_cluster(text, [&](std::string_view cluster) {
    if (cluster.size() < kWholeClusterLimit) {
      if (const auto whole = replacement(cluster)) {
        normalized += *whole;
        return;
      }
    }
    for (std::size_t i = 0; i < cluster.size();) {
      const std::string_view character = cluster.substr(i, unicode::decode(cluster, i).bytes);
      normalized += replacement(character).value_or(character);
      i += character.size();
    }
  });
  return normalized;
}

}  // namespace ditfleet::pipeline
