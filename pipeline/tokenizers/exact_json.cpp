#include "pipeline/tokenizers/exact_json.h"

#include <boost/json/basic_parser_impl.hpp>
#include <charconv>
#include <string>

namespace ditfleet::pipeline {
namespace {

class ExactHandler {
 public:
  static constexpr std::size_t max_object_size = std::size_t(-1);
  static constexpr std::size_t max_array_size = std::size_t(-1);
  static constexpr std::size_t max_key_size = std::size_t(-1);
  static constexpr std::size_t max_string_size = std::size_t(-1);
  using error_code = boost::system::error_code;

  json::value_stack values;

  bool on_document_begin(error_code&) {
    values.reset();
    return true;
  }
  bool on_document_end(error_code&) { return true; }
  bool on_object_begin(error_code&) { return true; }
  bool on_object_end(std::size_t size, error_code&) {
    values.push_object(size);
    return true;
  }
  bool on_array_begin(error_code&) { return true; }
  bool on_array_end(std::size_t size, error_code&) {
    values.push_array(size);
    return true;
  }
  bool on_key_part(std::string_view part, std::size_t, error_code&) {
    values.push_chars(part);
    return true;
  }
  bool on_key(std::string_view part, std::size_t, error_code&) {
    values.push_key(part);
    return true;
  }
  bool on_string_part(std::string_view part, std::size_t, error_code&) {
    values.push_chars(part);
    return true;
  }
  bool on_string(std::string_view part, std::size_t, error_code&) {
    values.push_string(part);
    return true;
  }
  bool on_number_part(std::string_view part, error_code&) {
    number_.append(part);
    return true;
  }
  bool on_int64(std::int64_t value, std::string_view, error_code&) {
    number_.clear();
    values.push_int64(value);
    return true;
  }
  bool on_uint64(std::uint64_t value, std::string_view, error_code&) {
    number_.clear();
    values.push_uint64(value);
    return true;
  }
  bool on_double(double value, std::string_view part, error_code&) {
    number_.append(part);
    double exact = value;  // kept where from_chars reports a range error
    std::from_chars(number_.data(), number_.data() + number_.size(), exact);
    number_.clear();
    values.push_double(exact);
    return true;
  }
  bool on_bool(bool value, error_code&) {
    values.push_bool(value);
    return true;
  }
  bool on_null(error_code&) {
    values.push_null();
    return true;
  }
  bool on_comment_part(std::string_view, error_code&) { return true; }
  bool on_comment(std::string_view, error_code&) { return true; }

 private:
  std::string number_;
};

}  // namespace

Result<json::value> parse_exact_json(std::string_view text) {
  json::parse_options options;
  options.max_depth = 64;
  json::basic_parser<ExactHandler> parser(options);
  boost::system::error_code ec;
  const std::size_t read = parser.write_some(false, text.data(), text.size(), ec);
  if (!ec && text.find_first_not_of(" \t\r\n", read) != std::string_view::npos) ec = json::error::extra_data;
  if (ec) return invalid_argument("not valid JSON near byte " + std::to_string(read) + ": " + ec.message());
  return parser.handler().values.release();
}

}  // namespace ditfleet::pipeline
