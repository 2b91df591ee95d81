#include "pipeline/region/ir/dim.h"

#include <algorithm>
#include <cassert>

namespace ditfleet::region {

Dim::Dim(std::int64_t value) {
  if (value != 0) terms_[{}] = value;
}

Dim Dim::symbol(const std::string& name) {
  Dim d;
  d.terms_[{name}] = 1;
  return d;
}

bool Dim::is_static() const { return terms_.empty() || (terms_.size() == 1 && terms_.begin()->first.empty()); }

std::int64_t Dim::value() const {
  assert(is_static());
  return terms_.empty() ? 0 : terms_.begin()->second;
}

Dim Dim::operator+(const Dim& other) const {
  Dim sum = *this;
  for (const auto& [factors, coefficient] : other.terms_)
    if ((sum.terms_[factors] += coefficient) == 0) sum.terms_.erase(factors);
  return sum;
}

Dim Dim::operator-(const Dim& other) const { return *this + other * Dim(-1); }

Dim Dim::operator*(const Dim& other) const {
  Dim product;
  for (const auto& [left, a] : terms_)
    for (const auto& [right, b] : other.terms_) {
      std::vector<std::string> factors = left;
      factors.insert(factors.end(), right.begin(), right.end());
      std::sort(factors.begin(), factors.end());
      if ((product.terms_[factors] += a * b) == 0) product.terms_.erase(factors);
    }
  return product;
}

bool Dim::never_negative() const {
  return std::all_of(terms_.begin(), terms_.end(), [](const auto& term) { return term.second >= 0; });
}

Dim Dim::bind(const Sizes& sizes) const {
  Dim bound;
  for (const auto& [factors, coefficient] : terms_) {
    Dim term(coefficient);
    for (const auto& name : factors) {
      const auto at = sizes.find(name);
      term = term * (at == sizes.end() ? symbol(name) : Dim(at->second));
    }
    bound = bound + term;
  }
  return bound;
}

std::int64_t Dim::evaluate(const Sizes& sizes) const {
  std::int64_t sum = 0;
  for (const auto& [factors, coefficient] : terms_) {
    std::int64_t term = coefficient;
    for (const auto& name : factors) {
      const auto at = sizes.find(name);
      if (at == sizes.end()) return -1;
      term *= at->second;
    }
    sum += term;
  }
  return sum;
}

void Dim::add_symbols_to(std::vector<std::string>& names) const {
  for (const auto& term : terms_)
    for (const auto& name : term.first)
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
}

std::string Dim::text() const {
  if (terms_.empty()) return "0";
  std::string out;
  for (const auto& [factors, coefficient] : terms_) {
    if (!out.empty())
      out += coefficient < 0 ? " - " : " + ";
    else if (coefficient < 0)
      out += "-";
    const std::int64_t size = coefficient < 0 ? -coefficient : coefficient;
    std::string term = size == 1 && !factors.empty() ? "" : std::to_string(size);
    for (const auto& name : factors) term += (term.empty() ? "" : "·") + name;
    out += term;
  }
  return out;
}

Dim elements_of(const Shape& shape) {
  Dim product = 1;
  for (const Dim& d : shape) product = product * d;
  return product;
}

std::vector<std::int64_t> evaluate(const std::vector<Dim>& dims, const Sizes& sizes) {
  std::vector<std::int64_t> numbers;
  for (const Dim& d : dims) numbers.push_back(d.evaluate(sizes));
  return numbers;
}

std::string text_of(const Shape& shape) {
  std::string out = "[";
  for (const Dim& d : shape) out += (out.size() == 1 ? "" : ", ") + d.text();
  return out + "]";
}

}  // namespace ditfleet::region
