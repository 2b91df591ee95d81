// A size in a region's program: a number, or a sum of products of symbols ("text + image", "batch·frames").
// The form is canonical: equal sizes compare equal.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ditfleet::region {

// The symbols' values in one call.
using Sizes = std::map<std::string, std::int64_t>;

class Dim {
 public:
  Dim(std::int64_t value = 0);  // implicit, so that widths can be written as numbers
  static Dim symbol(const std::string& name);

  bool is_static() const;
  std::int64_t value() const;  // precondition: is_static()

  Dim operator+(const Dim& other) const;
  Dim operator-(const Dim& other) const;
  Dim operator*(const Dim& other) const;
  bool operator==(const Dim& other) const { return terms_ == other.terms_; }

  // Provably ≥ 0 if every symbol is: no term has a negative coefficient.
  bool never_negative() const;
  // Replaces the symbols in `sizes` by their numbers.
  Dim bind(const Sizes& sizes) const;
  // Precondition: every symbol is in `sizes` (else the result is -1).
  std::int64_t evaluate(const Sizes& sizes) const;
  void add_symbols_to(std::vector<std::string>& names) const;  // each once
  std::string text() const;                                    // "3072", "image + text", "2·batch·frames"

 private:
  std::map<std::vector<std::string>, std::int64_t> terms_;  // sorted factors → coefficient, never 0
};

using Shape = std::vector<Dim>;

Dim elements_of(const Shape& shape);
std::vector<std::int64_t> evaluate(const std::vector<Dim>& dims, const Sizes& sizes);
std::string text_of(const Shape& shape);  // "[batch, image, 192]"

}  // namespace ditfleet::region
