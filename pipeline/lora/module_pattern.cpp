#include "pipeline/lora/module_pattern.h"

#include <unicode/regex.h>

#include <algorithm>
#include <cctype>

#include "shared/core/excerpt.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::size_t kLongest = 4096;   // bytes; module names have fewer than 100
constexpr std::int32_t kTimeLimit = 50;  // in ICU's units, about a millisecond each
constexpr std::int32_t kStackBytes = 1 << 20;

// Dots count as plain: in an expression they match any character, but no two module names differ only there.
bool is_plain(std::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '.'; });
}

Error wrong(std::string_view text, const std::string& why) {
  return invalid_argument("\"" + excerpt(std::string(text), 60) + "\" " + why +
                          "; it must be a module's name, the end of a name, or a regular expression");
}

}  // namespace

struct ModulePattern::Expression {
  std::unique_ptr<const icu::RegexPattern> pattern;
};

Result<ModulePattern> ModulePattern::parse(std::string_view text) {
  if (text.size() > kLongest) return wrong(text, "is longer than " + std::to_string(kLongest) + " bytes");
  if (is_plain(text)) return ModulePattern(std::string(text), nullptr);
  UErrorCode status = U_ZERO_ERROR;
  UParseError where{};
  const icu::UnicodeString whole =
      "(.*\\.)?(" +
      icu::UnicodeString::fromUTF8(icu::StringPiece(text.data(), static_cast<std::int32_t>(text.size()))) + ")";
  auto expression = std::make_shared<Expression>();
  expression->pattern.reset(icu::RegexPattern::compile(whole, 0, where, status));
  if (U_FAILURE(status)) return wrong(text, std::string("is not a regular expression (") + u_errorName(status) + ")");
  return ModulePattern(std::string(text), std::move(expression));
}

Result<bool> ModulePattern::matches(std::string_view module) const {
  if (!expression_)
    return module == text_ || (module.ends_with(text_) && module[module.size() - text_.size() - 1] == '.');
  UErrorCode status = U_ZERO_ERROR;
  const auto name =
      icu::UnicodeString::fromUTF8(icu::StringPiece(module.data(), static_cast<std::int32_t>(module.size())));
  const std::unique_ptr<icu::RegexMatcher> matcher(expression_->pattern->matcher(name, status));
  if (U_FAILURE(status)) return wrong(text_, std::string("cannot be matched (") + u_errorName(status) + ")");
  matcher->setTimeLimit(kTimeLimit, status);
  matcher->setStackLimit(kStackBytes, status);
  const bool found = matcher->matches(status);
  if (U_FAILURE(status)) return wrong(text_, std::string("takes too long to match (") + u_errorName(status) + ")");
  return found;
}

}  // namespace ditfleet::pipeline
